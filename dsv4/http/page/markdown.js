// ---- markdown as nodes: text goes in as text, never as markup; work is linear in the text's length ----
const DEEPEST = 8, MOST_OPEN = 64;
const make = (tag, kind, text) => { const node = document.createElement(tag); if (kind) node.className = kind; if (text) node.textContent = text; return node; };

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/, RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/, TABLE_LINE = /^[ \t|:-]+$/;
const isBlank = (line) => !line.trim();
const indentOf = (line) => line.length - line.trimStart().length;
const isTable = (lines, at) => at + 1 < lines.length && lines[at].includes("|") && /\|.*-|-.*\|/.test(lines[at + 1].slice(0, 200)) && TABLE_LINE.test(lines[at + 1]);
const startsBlock = (lines, at) => FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || QUOTE.test(lines[at]) || ITEM.test(lines[at]) || FORMULA.test(lines[at]) || isTable(lines, at);

// Where the block that begins at a line ends, and what makes its node. `depth` counts quotes and lists around it.
function readBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence(lines, at);
  if (HEADING.test(line)) return { end: at + 1, node: () => { const node = make("h" + Math.min(6, HEADING.exec(line)[1].length + 2)); inline(node, line.replace(HEADING, "").trimEnd().replace(/(^|[ \t])#+$/, "")); return node; } };
  if (RULE.test(line)) return { end: at + 1, node: () => make("hr") };
  if (depth < DEEPEST && QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return { end, node: () => { const node = make("blockquote"); node.append(...blockNodes(lines.slice(at, end).map((one) => one.replace(QUOTE, "")), depth + 1)); return node; } };
  }
  if (depth < DEEPEST && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  const formula = FORMULA.test(line) ? readFormula(lines, at) : null;
  if (formula) return formula;
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && (depth >= DEEPEST || !startsBlock(lines, end))) end += 1;
  return { end, node: () => { const node = make("p"); inline(node, lines.slice(at, end).map((one) => one.trim()).join("\n")); return node; } };
}

function readFence(lines, at) {
  const [, mark, info] = FENCE.exec(lines[at]), indent = indentOf(lines[at]), language = info.trim().split(/\s/, 1)[0];
  const closing = (line) => { const text = line.trim(); return text.length >= mark.length && indentOf(line) < 4 && text === mark[0].repeat(text.length); };
  let end = at + 1;
  while (end < lines.length && !closing(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((one) => one.slice(Math.min(indent, indentOf(one)))).join("\n");
  return { end: Math.min(end + 1, lines.length), node: () => codeNode(language, text) };
}

function codeNode(language, text) {
  const node = make("figure", "code"), head = make("figcaption"), body = make("pre");
  const copy = make("button", "copy", "Copy code"), code = make("code");
  copy.type = "button"; copy.addEventListener("click", () => copyText(copy, text));
  head.append(make("span", "", language || "text"), copy); body.tabIndex = 0; paint(code, language, text); body.append(code); node.append(head, body);
  return node;
}

function readList(lines, at, depth) {
  const [, first, sign] = ITEM.exec(lines[at]), base = first.length, ordered = /\d/.test(sign), items = [];
  let end = at, gap = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end], found = ITEM.exec(line);
    if (isBlank(line)) { gap = true; items.at(-1)?.push(""); continue; }
    if (found && found[1].length < base + 2 && !RULE.test(line)) {
      if (found[1].length + 2 <= base || /\d/.test(found[2]) !== ordered) break;
      items.push([line.slice(found[0].length)]);
    } else if (indentOf(line) >= base + 2) items.at(-1).push(line.slice(Math.min(indentOf(line), base + sign.length + 1)));
    else if (gap || startsBlock(lines, end)) break;
    else items.at(-1).push(line);
    gap = false;
  }
  return { end, node: () => {
    const node = make(ordered ? "ol" : "ul");
    if (ordered) node.start = parseInt(sign, 10);
    for (const item of items) {
      const entry = make("li"), parts = blockNodes(item, depth + 1);
      if (parts[0]?.tagName === "P") entry.append(...parts.shift().childNodes);  // no gap between the sign and its text
      entry.append(...parts); node.append(entry);
    }
    return node;
  } };
}

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end += 1;
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").replaceAll("\\|", "\u0001").split("|").map((one) => one.trim().replaceAll("\u0001", "|"));
  return { end, node: () => {
    const frame = make("div", "table"), table = make("table");
    lines.slice(at, end).forEach((line, place) => {
      if (place === 1) return;
      const row = make("tr");
      for (const cell of cells(line)) { const node = make(place ? "td" : "th"); inline(node, cell); row.append(node); }
      table.append(row);
    });
    frame.tabIndex = 0; frame.append(table);
    return frame;
  } };
}

// Blocks with the line each begins at.
function* blocks(lines, depth) {
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at += 1; continue; }
    const block = readBlock(lines, at, depth);
    yield { at, node: block.node };
    at = block.end;
  }
}
const blockNodes = (lines, depth) => [...blocks(lines, depth)].map((block) => block.node());

// ---- inside a block: code, links, emphasis ----
const LINK = /!?\[([^[\]\n]{1,1000})\]\(((?:[^\s()<>]|\([^\s()<>]*\)){1,2000})(?:[ \t]+"[^"\n]{0,500}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`|]{1,2000}/y, MARK = /\*{1,3}|_{1,3}|~~/y, TAGS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };
const isWord = (sign) => /[\p{L}\p{N}]/u.test(sign), isSpace = (sign) => !sign.trim();

function linkNode(text, address) {
  if (!/^(?:https?:|mailto:)/i.test(address)) return null;
  const node = make("a", "", text);
  node.href = address; node.target = "_blank"; node.rel = "noopener noreferrer";
  return node;
}

// Pieces of a text: strings, nodes, and marks of emphasis ({ mark, closes } pairs after matching).
function pieces(text) {
  const found = [], open = [], ticks = new Map();
  for (const run of text.matchAll(/`+/g)) { const key = run[0].length; if (!ticks.has(key)) ticks.set(key, []); ticks.get(key).push(run.index); }
  for (const places of ticks.values()) places.reverse();
  const match = (pattern, at) => { pattern.lastIndex = at; return pattern.exec(text); };
  const ends = new Map();  // of formulas: where the next one is, so that no end is looked for twice
  const next = (mark, from) => { if (ends.get(mark) !== -1 && (ends.get(mark) ?? -2) < from) ends.set(mark, text.indexOf(mark, from)); return ends.get(mark); };
  let held = "", at = 0;
  const put = (piece) => { if (held) found.push(held); held = ""; found.push(piece); };
  while (at < text.length) {
    const sign = text[at];
    let taken = null;
    if ((sign === "$" || sign === "\\" && "([".includes(text[at + 1] || "x")) && (taken = formulaAt(text, at, next))) { put(taken[1]); at += taken[0]; continue; }
    if (sign === "\\" && "()[]".includes(text[at + 1] || "x")) { held += text.slice(at, at + 2); at += 2; continue; }
    if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] || "")) { held += text[at + 1]; at += 2; continue; }
    if (sign === "`") {
      let end = at; while (text[end] === "`") end += 1;
      const places = ticks.get(end - at) || [];  // the run may have lost its first sign to a backslash
      while (places.length && places.at(-1) < end) places.pop();
      if (places.length) { put(make("code", "", text.slice(end, places.at(-1)).replace(/^ (.+) $/s, "$1"))); at = places.at(-1) + end - at; }
      else { held += text.slice(at, end); at = end; }
      continue;
    }
    if ((sign === "[" || sign === "!") && (taken = match(LINK, at))) {
      const node = linkNode(taken[1], taken[2]);
      if (node) { put(node); at += taken[0].length; continue; }
    }
    if (sign === "h" && !isWord(text[at - 1] || " ") && (taken = match(ADDRESS, at))) {
      let end = taken[0].length;
      while (".,;:!?)]*_~".includes(taken[0][end - 1])) end -= 1;
      const address = taken[0].slice(0, end);
      put(linkNode(address, address)); at += address.length; continue;
    }
    if ("*_~".includes(sign) && (taken = match(MARK, at))) {
      const top = open.at(-1)?.mark, before = text[at - 1] || " ";
      // `**a *b***`: a long mark also closes what was opened last
      const mark = !isSpace(before) && top && taken[0].startsWith(top) && !open.some((one) => one.mark === taken[0]) ? top : taken[0];
      const after = text[at + mark.length] || " ";
      const inWord = sign === "_" && isWord(before) && isWord(after);
      const from = isSpace(before) || inWord ? -1 : open.findLastIndex((one) => one.mark === mark);
      const piece = { mark, opens: false, closes: false };
      if (from >= 0) { open[from].opens = true; piece.closes = true; open.length = from; }
      else if (!isSpace(after) && !inWord && open.length < MOST_OPEN) open.push(piece);
      put(piece); at += mark.length; continue;
    }
    held += sign; at += 1;
  }
  if (held) found.push(held);
  return found;
}

function inline(node, text) {
  const around = [node];
  for (const piece of pieces(text)) {
    if (piece.opens) {
      let inner = around.at(-1);
      for (const tag of piece.mark === "~~" ? ["del"] : TAGS[piece.mark.length]) { const next = make(tag); inner.append(next); inner = next; }
      around.push(inner);
    } else if (piece.closes) around.pop();
    else around.at(-1).append(piece.mark ?? piece);
  }
}

// A text that grows: what cannot change any more is left alone, the last two blocks are made anew.
class MarkdownView {
  constructor() { this.node = make("div", "text"); this.start = 0; this.fixed = 0; }
  show(text) {
    const lines = text.slice(this.start).split("\n"), found = [...blocks(lines, 0)];
    while (this.node.childElementCount > this.fixed) this.node.lastChild.remove();
    this.node.append(...found.map((block) => block.node()));
    if (found.length > 2) {
      this.fixed += found.length - 2;
      for (let line = 0; line < found.at(-2).at; line += 1) this.start += lines[line].length + 1;
    }
  }
}

// ---- the clipboard, also where the browser gives it to secure pages only ----
async function copyText(button, text) {
  const name = button.textContent;
  let done = true;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = make("textarea"); area.value = text;
    button.after(area); area.select(); done = document.execCommand("copy"); area.remove();
  }
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = name; }, 1500);
}
