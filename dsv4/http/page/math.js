// ---- formulas: TeX to MathML by temml/temml.min.js; what it cannot read stays as it was written ----
const LONGEST_FORMULA = 4000, drawn = new Map();  // a stream draws its last blocks again and again

function mathNode(source, tex, isBlock) {
  const key = (isBlock ? "b" : "i") + tex;
  if (!drawn.has(key)) {
    if (drawn.size > 500) drawn.clear();
    const node = make("span", isBlock ? "formula" : "");
    try {
      if (tex.length > LONGEST_FORMULA) throw new Error("too long");
      temml.render(tex, node, { displayMode: isBlock, throwOnError: true, maxExpand: 200, maxSize: [50, 500] });
    } catch { node.replaceChildren(make("code", "", source)); }
    drawn.set(key, node);
  }
  return drawn.get(key).cloneNode(true);
}

// A formula in lines of its own, from $$ or \[ to its end; without one, as it was written, up to the blank line.
const FORMULA = /^ {0,3}(\$\$|\\\[)/, ENDS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };
function readFormula(lines, at) {
  const mark = FORMULA.exec(lines[at])[1], close = ENDS[mark];
  let end = at, found = -1;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    found = lines[end].indexOf(close, end === at ? lines[at].indexOf(mark) + 2 : 0);
    if (found >= 0) break;
  }
  if (found >= 0 && lines[end].slice(found + 2).trim()) return null;  // text goes on behind it
  const text = lines.slice(at, end + (found >= 0)).join("\n").trim();
  return { end: end + (found >= 0), node: () => {
    const node = make("p");
    if (found >= 0) node.append(mathNode(text, text.slice(2, -2), true)); else node.textContent = text;
    return node;
  } };
}

// The formula that begins at a place of a text: [length, node], or null. `next(mark, from)` finds where one ends.
const DOLLARS = /(?<!\w)\$(?![\s$])([^$\n]{1,1000})\$(?!\w)/y;  // no prices
function formulaAt(text, at, next) {
  const mark = text.slice(at, at + 2), close = ENDS[mark];
  if (close) {
    const end = next(close, at + 2);
    if (end < 0 || end === at + 2) return null;
    const source = text.slice(at, end + 2);
    return [source.length, mathNode(source, source.slice(2, -2), mark !== "\\(")];
  }
  DOLLARS.lastIndex = at;
  const taken = text[at] === "$" && DOLLARS.exec(text);
  return taken && !/[\s\\]$/.test(taken[1]) ? [taken[0].length, mathNode(taken[0], taken[1], false)] : null;
}
