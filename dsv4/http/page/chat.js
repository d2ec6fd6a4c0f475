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
  const buttons = [action("Copy", (button) => copyText(button, content)), action("Again", () => again(place))];
  if (view.message.cut && content && place === chat.messages.length - 1) buttons.push(action("Continue", () => goOn(place)));
  view.node.append(actions(...buttons));
}
function showChat() {
  const nodes = chat.messages.map((one, place) => one.role === "user" ? userNode(place) : answerNode(place));
  $("log").replaceChildren(...(nodes.length ? nodes : [introduction()]));
  $("log").scrollTop = $("log").scrollHeight;
}
const OPENINGS = ["SCENE I. A street in Verona.", "And it came to pass", "Once upon a time"];
function introduction() {
  if (!root.startsWith("flash-mini")) return make("p", "empty", "Ask something.");
  const node = make("div", "empty"), buttons = OPENINGS.map((text) => action(text, () => { setText(text); $("text").focus(); }));
  node.append(make("p", "", `${model} is a miniature of DeepSeek-V4 with 13 million parameters. It has read a few old books and answers nothing: what it writes sounds like them. Begin with`), actions(...buttons));
  return node;
}
// What went wrong, in view above the message until the next try.
function complain(text) { $("problem").textContent = text; $("problem").hidden = !text; }
function showState() {
  $("send").textContent = running ? "Stop" : "Send"; $("log").setAttribute("aria-busy", Boolean(running));
  document.body.classList.toggle("busy", Boolean(running));
  for (const id of ["new", "show-chats"]) $(id).disabled = Boolean(running);
}

// ---- asking: messages before, and one answer more. Where nothing comes, everything is as it was; false then. ----
async function ask(messages, begun = { role: "assistant", content: "" }) {
  if (running) return false;
  const before = chat.messages, message = { role: begun.role, content: begun.content };
  if (begun.reasoning_content) message.reasoning_content = begun.reasoning_content;
  complain("");
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
  const hasMore = message.content.length > begun.content.length || (message.reasoning_content || "") !== (begun.reasoning_content || "");
  const isAnswered = hasMore || !problem && message.note !== "stopped";
  running = null;
  if (isAnswered) finish(view, chat.messages.length - 1);
  else { chat.messages = before; showChat(); }
  complain(problem);
  if (!keepChat(chat)) complain("This conversation could not be kept: the browser's storage is full or switched off.");
  showState(); $("text").focus();
  return isAnswered;
}
async function send(text) {
  setText("");
  if (!await ask([...chat.messages, { role: "user", content: text }]) && !$("text").value) setText(text);
}
const again = (place) => ask(chat.messages.slice(0, place));
const goOn = (place) => ask(chat.messages.slice(0, place), chat.messages[place]);  // where it was cut
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
    ({ id: model, root } = body.data[0]); $("model").textContent = model;
    if (!chat.messages.length) showChat();
  } catch (error) { model = ""; $("model").textContent = error.message; }
}

// ---- kept conversations ----
function showChats() {
  const entries = savedChats().map((one) => {
    const entry = make("li"), title = one.messages[0].content.trim().slice(0, 80) || "…";
    const open = make("button", "open", title), give = make("button", "", "Export"), remove = make("button", "", "Delete");
    open.type = give.type = remove.type = "button"; give.setAttribute("aria-label", "Export: " + title); give.addEventListener("click", () => exportChat(one)); open.title = new Date(one.changed).toLocaleString(); remove.setAttribute("aria-label", "Delete: " + title);
    open.addEventListener("click", () => { openChat(one); $("chats").close(); });
    remove.addEventListener("click", () => { erase(CHAT + one.id); if (one.id === chat.id) openChat(newChat()); showChats(); });
    entry.append(open, give, remove);
    return entry;
  });
  $("chat-list").replaceChildren(...(entries.length ? entries : [make("li", "note", "None yet.")]));
}
// As a file: the messages as the server takes them, and what they were asked with.
function exportChat(one) {
  const messages = one.messages.map(({ role, content, reasoning_content }) => reasoning_content ? { role, content, reasoning_content } : { role, content });
  const file = new Blob([JSON.stringify({ model, settings: one.settings, messages }, null, 2)], { type: "application/json" }), link = make("a");
  link.href = URL.createObjectURL(file); link.download = `dsv4-${one.id}.json`; link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
function openChat(one) { if (running) return; chat = one; complain(""); useSettings({ ...savedSettings(), ...one.settings }, own); write("sessionStorage", "dsv4-open", chat.id); showChat(); }

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
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort(); });
$("text").addEventListener("input", () => setText($("text").value));
$("new").addEventListener("click", () => { openChat(newChat()); $("text").focus(); });
$("show-chats").addEventListener("click", () => { showChats(); $("chats").showModal(); });
$("forget").addEventListener("click", () => { for (const id of chatIds()) erase(CHAT + id); openChat(newChat()); showChats(); });
$("show-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => { keepSettings(); if (chat.messages.length) keepChat(chat); findModel(); });
const narrow = window.matchMedia("(max-width: 52rem)"), isLiveShown = () => narrow.matches ? $("live").classList.contains("open") : !document.body.classList.contains("alone");
function showPanel() { $("show-live").setAttribute("aria-expanded", isLiveShown()); }
$("show-live").addEventListener("click", () => {
  if (narrow.matches) $("live").classList.toggle("open"); else write("localStorage", "dsv4-live", document.body.classList.toggle("alone") ? "off" : "on");
  showPanel();
});
narrow.addEventListener("change", showPanel);
$("experts").addEventListener("pointermove", sayExpert);
$("experts").addEventListener("pointerleave", () => { $("expert").textContent = ""; });
window.addEventListener("pagehide", () => { const { content, reasoning_content: thought } = chat.messages.at(-1) || {}; if (running && (content || thought)) keepChat(chat); });
document.body.classList.toggle("alone", read("localStorage", "dsv4-live") === "off"); showPanel();
restoreSettings();
chat = readChat(read("sessionStorage", "dsv4-open") || "") || chat;
useSettings(chat.settings, own);
showChat(); showState(); findModel(); refresh(); $("text").focus();
