// ---- what this browser keeps: settings and conversations; the key and the open conversation in this tab ----
// A storage may be full, switched off, or hold what another program wrote: nothing here may throw.
const $ = (id) => document.getElementById(id);
const CHAT = "dsv4-chat-";  // one entry a conversation, so that two tabs do not overwrite each other's
const kept = ["thinking", "temperature", "top_p", "max_tokens", "seed", "theme", "system"];
const own = kept.filter((id) => id !== "theme");  // a conversation's own; a new one begins with those changed last

function read(storage, name) {
  try { return window[storage].getItem(name); } catch { return null; }
}
function write(storage, name, value) {
  try { window[storage].setItem(name, value); return true; } catch { return false; }
}
function erase(name) {
  try { localStorage.removeItem(name); } catch { /* switched off: nothing is kept */ }
}
function parse(text) {
  try { const value = JSON.parse(text); return value && typeof value === "object" ? value : null; } catch { return null; }
}

function useSettings(saved, ids) {
  for (const id of ids) {
    if (typeof saved[id] !== "string") continue;
    const before = $(id).value;
    $(id).value = saved[id];
    if ($(id).value !== saved[id]) $(id).value = before;  // not one of a menu's choices, not a number
  }
}
const savedSettings = () => parse(read("localStorage", "dsv4")) || {};
const settingsNow = (ids) => Object.fromEntries(ids.map((id) => [id, $(id).value]));
function restoreSettings() {
  useSettings(savedSettings(), kept);
  $("key").value = read("sessionStorage", "dsv4-key") || "";
  applyTheme();
}
function keepSettings() {
  write("localStorage", "dsv4", JSON.stringify(settingsNow(kept)));
  write("sessionStorage", "dsv4-key", $("key").value);
  applyTheme();
}
function applyTheme() { document.documentElement.dataset.theme = $("theme").value; }

// ---- conversations: { id, changed, settings, messages: [{ role, content, reasoning_content?, note?, failed?, cut? }] } ----
const newChat = () => ({ id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`, changed: 0, settings: {}, messages: [] });

function readChat(id) {
  const saved = parse(read("localStorage", CHAT + id));
  if (!saved || !Array.isArray(saved.messages) || !saved.messages.length) return null;
  const isText = (value) => value === undefined || typeof value === "string";
  const isSound = (one) => one && ["user", "assistant"].includes(one.role) && typeof one.content === "string" && isText(one.reasoning_content) && isText(one.note);
  return saved.messages.every(isSound) ? { id, changed: Number(saved.changed) || 0, settings: parse(JSON.stringify(saved.settings ?? {})) || {}, messages: saved.messages } : null;
}
function chatIds() {
  try { return Object.keys(localStorage).filter((name) => name.startsWith(CHAT)).map((name) => name.slice(CHAT.length)); } catch { return []; }
}
const savedChats = () => chatIds().map(readChat).filter(Boolean).sort((a, b) => b.changed - a.changed);

// When the storage is full the oldest conversations make room. False if this one could not be kept.
function keepChat(chat) {
  write("sessionStorage", "dsv4-open", chat.id);
  if (!chat.messages.length) { erase(CHAT + chat.id); return true; }
  chat.changed = Date.now();
  chat.settings = settingsNow(own);
  const text = JSON.stringify({ changed: chat.changed, settings: chat.settings, messages: chat.messages });
  if (write("localStorage", CHAT + chat.id, text)) return true;
  for (const old of savedChats().reverse()) {
    if (old.id === chat.id) continue;
    erase(CHAT + old.id);
    if (write("localStorage", CHAT + chat.id, text)) return true;
  }
  return false;
}
