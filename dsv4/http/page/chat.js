// ---- the conversation on the screen ----
let chat = newChat();

function action(name, run) {
  const button = make("button", "act", name);
  button.type = "button"; button.addEventListener("click", () => run(button));
  return button;
}
function actions(...buttons) { const node = make("div", "acts"); node.append(...buttons); return node; }

function userNode(place) {
  const text = chat.messages[place].content, node = make("div", "turn user");
  node.append(make("div", "text", text), actions(action("Edit", () => edit(place, text)), action("Copy", (button) => copyText(button, text))));
  return node;
}
function answerNode(place) {
  const message = chat.messages[place], view = new AnswerView(message);
  view.draw(); finish(view, place);
  return view.node;
}
function finish(view, place) {
  const { note, failed, content } = view.message;
  view.draw();
  if (note) view.node.append(make("div", failed ? "note error" : "note", note));
  view.node.append(actions(action("Copy", (button) => copyText(button, content)), action("Again", () => again(place))));
}
function showChat() {
  const nodes = chat.messages.map((one, place) => one.role === "user" ? userNode(place) : answerNode(place));
  $("log").replaceChildren(...(nodes.length ? nodes : [make("p", "empty", "Ask something.")]));
  $("log").scrollTop = $("log").scrollHeight;
}
function complain(text) {
  const node = make("div", "note error", text);
  node.setAttribute("role", "alert"); $("log").append(node); node.scrollIntoView({ block: "nearest" });
}
function showState() {
  $("send").textContent = running ? "Stop" : "Send"; $("log").setAttribute("aria-busy", Boolean(running));
  document.body.classList.toggle("busy", Boolean(running));
  for (const id of ["new", "show-chats"]) $(id).disabled = Boolean(running);
}

// ---- asking: messages before, and one answer more. Where nothing comes, everything is as it was; false then. ----
async function ask(messages) {
  if (running) return false;
  const before = chat.messages, message = { role: "assistant", content: "" };
  running = new AbortController();
  chat.messages = messages; showChat(); showState(); keepChat(chat);
  const view = new AnswerView(message);
  $("log").append(view.node); $("log").scrollTop = $("log").scrollHeight;
  let problem = "";
  chat.messages = [...messages, message];  // a page closed now keeps what has come
  try { await withKey(() => answer(messages, message, view)); } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else { problem = error.message; message.note = error.message; message.failed = true; }
  }
  const isAnswered = Boolean(message.content || message.reasoning_content) || !problem && message.note !== "stopped";
  running = null;
  if (isAnswered) finish(view, chat.messages.length - 1);
  else { chat.messages = before; showChat(); if (problem) complain(problem); }
  if (!keepChat(chat)) complain("This conversation could not be kept: the browser's storage is full or switched off.");
  showState(); $("text").focus();
  return isAnswered;
}
async function send(text) {
  setText("");
  if (!await ask([...chat.messages, { role: "user", content: text }]) && !$("text").value) setText(text);
}
const again = (place) => ask(chat.messages.slice(0, place));
function edit(place, text) {
  if (running) return;
  const node = $("log").children[place], box = make("textarea");
  box.value = text; box.setAttribute("aria-label", "Edit the message");
  const done = async () => {
    const changed = box.value.trim();
    if (changed && !await ask([...chat.messages.slice(0, place), { role: "user", content: changed }])) edit(place, changed);
  };
  node.replaceChildren(box, actions(action("Send", done), action("Cancel", () => node.replaceWith(userNode(place)))));
  node.classList.add("editing"); box.rows = Math.min(12, text.split("\n").length + 1); box.focus();
}
function setText(text) { $("text").value = text; $("text").style.height = ""; if (text) $("text").style.height = $("text").scrollHeight + "px"; }

// ---- the key: asked for when the server refuses; what was to be done is done again ----
let asking = null;
function askKey() {
  asking ||= new Promise((settle) => {
    $("new-key").value = ""; $("ask-key").returnValue = ""; $("ask-key").showModal();
    $("ask-key").addEventListener("close", () => {
      const given = $("new-key").value.trim(); asking = null;
      if (given) { $("key").value = given; keepSettings(); }
      settle(Boolean(given));
    }, { once: true });
  });
  return asking;
}
async function withKey(run) {
  for (;;) {
    try { return await run(); } catch (error) { if (!(error instanceof KeyNeeded) || !await askKey()) throw error; }
  }
}
async function findModel() {
  try {
    const body = await withKey(async () => (await reach("/v1/models", { headers: headers() })).json());
    model = body.data[0].id; $("model").textContent = model;
  } catch (error) { model = ""; $("model").textContent = error.message; }
}

// ---- kept conversations ----
function showChats() {
  const entries = savedChats().map((one) => {
    const entry = make("li"), title = one.messages[0].content.trim().slice(0, 80) || "…";
    const open = make("button", "open", title), remove = make("button", "", "Delete");
    open.type = remove.type = "button"; open.title = new Date(one.changed).toLocaleString(); remove.setAttribute("aria-label", "Delete: " + title);
    open.addEventListener("click", () => { openChat(one); $("chats").close(); });
    remove.addEventListener("click", () => { erase(CHAT + one.id); if (one.id === chat.id) openChat(newChat()); showChats(); });
    entry.append(open, remove);
    return entry;
  });
  $("chat-list").replaceChildren(...(entries.length ? entries : [make("li", "note", "None yet.")]));
}
function openChat(one) { if (running) return; chat = one; write("sessionStorage", "dsv4-open", chat.id); showChat(); }

// ---- wiring ----
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("text").value.trim();
  if (!text) return;
  if (!model) await findModel();
  if (model) send(text); else complain($("model").textContent);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) $("form").requestSubmit(); }
  if (event.key === "Escape" && running) running.abort();
});
$("text").addEventListener("input", () => setText($("text").value));
$("new").addEventListener("click", () => { openChat(newChat()); $("text").focus(); });
$("show-chats").addEventListener("click", () => { showChats(); $("chats").showModal(); });
$("forget").addEventListener("click", () => { for (const id of chatIds()) erase(CHAT + id); openChat(newChat()); showChats(); });
$("show-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => { keepSettings(); findModel(); });
$("show-live").addEventListener("click", () => { const open = $("live").classList.toggle("open"); $("show-live").setAttribute("aria-expanded", open); });
window.addEventListener("pagehide", () => { const { content, reasoning_content: thought } = chat.messages.at(-1) || {}; if (running && (content || thought)) keepChat(chat); });
restoreSettings();
chat = readChat(read("sessionStorage", "dsv4-open") || "") || chat;
showChat(); showState(); findModel(); refresh(); $("text").focus();
