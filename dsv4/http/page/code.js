// ---- code in colours: comments, strings, numbers, and the words that languages have in common ----
const HASH = "python py sh bash shell zsh ruby rb yaml yml toml r perl make makefile dockerfile", DASHES = "sql lua haskell hs";
const SLASHES = "javascript js jsx typescript ts tsx java c h cpp c++ cc cs csharp go rust rs swift kotlin kt scala php json css cuda";
const COMMENTS = Object.fromEntries([[HASH, "#[^\\n]*"], [DASHES, "--[^\\n]*"], [SLASHES, "\\/\\/[^\\n]*|\\/\\*(?:[^*]|\\*(?!\\/))*(?:\\*\\/)?"]].flatMap(([names, form]) => names.split(" ").map((name) => [name, form])));
const WORDS = "and as assert async await bool break case catch char class const continue def default del do double elif else elseif end enum except export extends false False final finally float fn for from func function global if impl implements import in instanceof int interface is lambda let local long loop match mod mut namespace new nil None not null or package pass private pub public raise return self static string struct super switch then this throw true True try type typeof undefined union unsafe unsigned use using var void while with yield SELECT FROM WHERE JOIN ON GROUP BY ORDER INSERT INTO UPDATE DELETE CREATE TABLE VALUES SET AND OR NOT NULL AS LIMIT select where join group order insert into update delete create table values set limit fi done esac echo";
const STRINGS = `"""(?:[^"]|"(?!""))*(?:""")?|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?|\`(?:[^\`\\\\]|\\\\[^])*\`?`;
const readers = new Map();

function paint(node, language, text) {
  const comment = COMMENTS[language.toLowerCase()];
  if (!comment || text.length > 50000) { node.textContent = text; return; }
  if (!readers.has(comment)) readers.set(comment, new RegExp(`(${comment})|(${STRINGS})|(?<![\\w.])(\\d[\\w.]*)|(?<![\\w.])(${WORDS.replaceAll(" ", "|")})(?!\\w)`, "g"));
  let at = 0;
  for (const found of text.matchAll(readers.get(comment))) {
    node.append(text.slice(at, found.index), make("span", ["comment", "string", "number", "word"][found.slice(1).findIndex((one) => one !== undefined)], found[0]));
    at = found.index + found[0].length;
  }
  node.append(text.slice(at));
}
