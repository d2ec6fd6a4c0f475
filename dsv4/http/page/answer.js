// ---- one answer: its stream, and what is shown while it comes ----
let running = null, model = "", root = "";  // root: the checkpoint, whatever the server calls it
const headers = () => $("key").value ? { Authorization: "Bearer " + $("key").value } : {};

class KeyNeeded extends Error {}

function requestBody(messages, begun) {
  const said = messages.map(({ role, content, reasoning_content }) => reasoning_content ? { role, content, reasoning_content } : { role, content });
  if ($("system").value.trim()) said.unshift({ role: "system", content: $("system").value });
  const body = { model, messages: said, stream: true, stream_options: { include_usage: true } };
  for (const id of ["temperature", "top_p", "max_tokens", "seed"]) if ($(id).value !== "") body[id] = Number($(id).value);
  if ($("thinking").value) body.thinking = { type: $("thinking").value };
  if (begun) body.continue_final_message = true;
  return body;
}

// The answer, or an error with a sentence for the reader.
async function reach(address, options) {
  let response;
  try { response = await fetch(address, options); } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not this server's: a proxy's page */ }
  throw response.status === 401 ? new KeyNeeded(message) : new Error(message);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try { part = await reader.read(); } catch (error) {
      throw error.name === "AbortError" ? error : new Error("the connection broke before the answer's end");
    }
    if (part.done) throw new Error("the connection broke before the answer's end");
    const parts = (held + part.value).split("\n\n");
    held = parts.pop();
    for (const one of parts) {
      if (one === "data: [DONE]") return;
      if (one.startsWith("data: ")) yield JSON.parse(one.slice(6));
    }
  }
}

// Shows a message as it grows; a frame of the screen is the most often it is drawn.
class AnswerView {
  constructor(message) {
    this.message = message; this.fold = null; this.body = null; this.drawing = false;
    this.node = make("div", "turn assistant");
  }
  changed() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => { this.drawing = false; this.draw(); });
  }
  draw() {
    const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60, { content, reasoning_content: thought } = this.message;
    if (thought && !this.fold) { this.fold = make("details"); this.fold.append(make("summary"), make("div")); this.node.prepend(this.fold); }
    if (thought) { this.fold.firstChild.textContent = running && !content ? "Thinking…" : "Thoughts"; this.fold.lastChild.textContent = thought; }
    if (content && !this.body) { this.body = new MarkdownView(); if (this.fold) this.fold.after(this.body.node); else this.node.prepend(this.body.node); }
    if (content) this.body.show(content);
    if (follows) log.scrollTop = log.scrollHeight;
  }
}

// Says what happens before the first token: sending, a place in the batch, or the prompt.
class WaitView {
  constructor(node) {
    this.node = make("div", "note wait"); this.started = performance.now(); this.isAccepted = false; this.before = last;
    node.append(this.node); this.timer = setInterval(() => this.draw(), 250); this.draw();
  }
  accepted() { this.isAccepted = true; look(); this.draw(); }
  draw() {
    const seconds = ((performance.now() - this.started) / 1000).toFixed(1);
    const queue = last !== this.before && last.waiting ? `Waiting for a place: ${last.running} of ${last.slots} run, ${last.waiting} wait` : "Reading the prompt";
    this.node.textContent = `${this.isAccepted ? queue : "Sending"} · ${seconds} s`;
  }
  end() { clearInterval(this.timer); this.node.remove(); }
}

function describe(usage, reason, times) {
  const parts = [];
  if (usage) {
    const count = usage.completion_tokens, cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${count} tokens in ${((times.end - times.start) / 1000).toFixed(1)} s`);
    if (count > 1 && times.end > times.first) parts.push(`${((count - 1) * 1000 / (times.end - times.first)).toFixed(1)} tokens/s`);
    if (times.first) parts.push(`first after ${((times.first - times.start) / 1000).toFixed(2)} s`);
    parts.push(`prompt ${usage.prompt_tokens}` + (typeof cached === "number" ? `, ${cached} cached` : ""));
  }
  if (reason === "length") parts.push("cut at its limit");
  return parts.join(" · ");
}

// Fills `message` from the server; returns when the answer ends. Throws before anything came, or when it breaks off.
async function answer(messages, message, view) {
  const isBegun = Boolean(message.content), asked = isBegun ? [...messages, { ...message }] : messages;
  const times = { start: performance.now(), first: 0, end: 0 }, wait = new WaitView(view.node);
  let usage = null, reason = "";
  try {
    const response = await reach("/v1/chat/completions", {
      method: "POST", signal: running.signal, body: JSON.stringify(requestBody(asked, isBegun)),
      headers: { "Content-Type": "application/json", ...headers() },
    });
    wait.accepted();
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
      if (thought) message.reasoning_content = (message.reasoning_content || "") + thought;
      if (content) message.content += content;
      for (const call of calls || []) message.content += (call.function.name ? `\n[calls ${call.function.name}] ` : "") + (call.function.arguments || "");
      reason = choice.finish_reason || reason;
      if (content || thought || calls) { times.end = performance.now(); if (!times.first) { times.first = times.end; wait.end(); } view.changed(); }
    }
    times.end ||= performance.now();
    message.note = describe(usage, reason, times);
    message.cut = reason === "length";
  } finally { wait.end(); }
}
