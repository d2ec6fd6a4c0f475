"""The page's markdown in Chromium: right, the same while it streams, never markup, linear. Marked `browser`."""

import json
import random
import time
from pathlib import Path

import pytest
from browser import Browser

import dsv4.http.page

pytestmark = pytest.mark.browser

FOLDER = Path(dsv4.http.page.__file__).parent
SCRIPT = "\n".join(
    (FOLDER / name).read_text(encoding="utf-8") for name in ("temml/temml.min.js", "math.js", "code.js", "markdown.js")
)
CASES = {
    "Hello": "<p>Hello</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A\n### B #": "<h3>A</h3><h5>B</h5>",
    "#no heading": "<p>#no heading</p>",
    "a **b** *c* ***d*** ~~e~~ _f_ __g__": "<p>a <strong>b</strong> <em>c</em> <strong><em>d</em></strong> "
    "<del>e</del> <em>f</em> <strong>g</strong></p>",
    "**a *b***": "<p><strong>a <em>b</em></strong></p>",
    "2 * 3 * 4, a_b_c, **open": "<p>2 * 3 * 4, a_b_c, **open</p>",
    r"\*a\* \`b\`": "<p>*a* `b`</p>",
    "`x < y` ``a`b`` `open": "<p><code>x &lt; y</code> <code>a`b</code> `open</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b\n\nend": '<ol start="3"><li>a</li><li>b</li></ol><p>end</p>',
    "text\n- a": "<p>text</p><ul><li>a</li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "---": "<hr>",
    "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |": '<div class="table" tabindex="0"><table><tr><th>a</th><th>b</th></tr>'
    "<tr><td>1</td><td><code>x|y</code></td></tr></table></div>",
    "[a](https://x.test/b_(c)) (https://y.test/p).": '<p><a href="https://x.test/b_(c)" target="_blank" '
    'rel="noopener noreferrer">a</a> (<a href="https://y.test/p" target="_blank" rel="noopener noreferrer">'
    "https://y.test/p</a>).</p>",
}
CODE = "if a < b:\n\n    print('*no* <b>markup</b> `` ')"
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "[x](JaVaScRiPt:a)",
    "[x](data:text/html,<script>alert(1)</script>)", "![x](https://x.test/a.png)", "[x](vbscript:a)", "`<b>`",
    "```<b>\n<i>\n```", "| <b> | [x](javascript:a) |\n|--|--|", "# <iframe src=//x.test>", "&lt;b&gt;",
    "[x]( javascript:alert(1))",
]  # fmt: skip
LONG = [
    "*a " * 50_000, "**a *b " * 20_000, "*" * 100_000, "_a" * 50_000, "`" * 100_000, "[" * 100_000, "[a](" * 30_000,
    "".join("`" * (n % 300) + " " for n in range(700)), "![a" * 30_000, "http://" + ")" * 100_000, "\\" * 100_000,
    "https://x" * 12_000, "~" * 100_000 + "`", "> " * 50_000, "- " * 50_000, "-" * 100_000 + "x", "|" * 100_000,
    "* " * 50_000 + "x", "|a\n|-\n" * 15_000, "# " * 50_000 + "a", "#" * 100_000, "- a\n" * 20_000, "a\n\n" * 20_000,
    "".join(" " * (n % 40) + "- a\n" for n in range(5_000)), " " * 100_000 + "a",
    "x|" + "-" * 100_000 + "\n" + "-" * 100_000, "\\(" * 50_000, "\\(" * 50_000 + "\\)", "$a" * 50_000,
    "\\[\n" * 30_000, "$$" * 50_000, "\\(a\\)" * 20_000, "```js\n" + "/* " * 15_000, "```py\n" + '"' * 45_000,
]  # fmt: skip


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile", width=800, height=600)
    browser.open("data:text/html,<!doctype html><title>a page</title>")  # formulas are drawn by today's rules only
    browser.wait("document.title === 'a page'")
    browser.run(SCRIPT + ";0")
    yield browser
    assert browser.complaints == []
    assert not [url for url in browser.requests if not url.startswith(("about:", "data:text/html,<!doctype"))]
    browser.close()


def html(browser, text):
    return browser.run(f"(() => {{ const view = new MarkdownView(); view.show({json.dumps(text)}); "
                       "return view.node.innerHTML; })()")  # fmt: skip


# a text: what is left of it beside formulas, and their TeX with whether they stand alone
FORMULAS = {
    r"so \(a*b*c\) is": ("so  is", [("a*b*c", False)]),
    r"\[ x_1 \]": ("", [("x_1", True)]),
    "\\[\nx_1 \\\\\n- y\n\\]\nend": ("end", [("x_1 \\\\\n- y", True)]),
    "$$\\frac{a}{b}$$": ("", [("\\frac{a}{b}", True)]),
    "cost $x^2$, or $$y$$ inline": ("cost , or  inline", [("x^2", False), ("y", True)]),
    "- a \\(b\\)": ("a ", [("b", False)]),
    "$5 and $6, $ 7 $, a$b$1": ("$5 and $6, $ 7 $, a$b$1", []),
    r"\[not closed, \(nor this": (r"\[not closed, \(nor this", []),
    r"\$5$ and `$a$`": ("$5$ and $a$", []),
}


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_drawn(blank, text):
    rest, formulas = FORMULAS[text]
    blank.run(f"var view = new MarkdownView(); view.show({json.dumps(text)}); document.body.replaceChildren(view.node)")
    maths = "[...view.node.querySelectorAll('math')]"
    blank.run(f"var seen = {maths}.map((one) => [one.textContent.trim(), Boolean(one.closest('.formula'))])")
    assert [is_block for _, is_block in blank.run("seen")] == [is_block for _, is_block in formulas]
    assert all(drawn for drawn, _ in blank.run("seen")), "each has signs"
    expected = [f"{tex}" for tex, _ in formulas]
    asked = "[...drawn.keys()].map((one) => one.slice(1).trim())"
    assert set(expected) <= set(blank.run(asked))
    blank.run(f"for (const one of {maths}) one.remove()")
    assert blank.run("view.node.textContent").strip() == rest.strip()


def test_a_formula_that_cannot_be_read_stays_as_it_was_written(blank):
    for text in (r"\(\frac{a\)", r"\(\nosuch{}\)", r"\[\href{javascript:alert(1)}{x}\]", "$$" + "x" * 5000 + "$$"):
        blank.run(f"var view = new MarkdownView(); view.show({json.dumps(text)})")
        assert blank.run("view.node.textContent") == text, text[:30]
        assert blank.run("view.node.querySelectorAll('a, img').length") == 0


def test_code_is_coloured_where_its_language_is_known(blank):
    kinds = "[...view.node.querySelectorAll('pre span')].map((one) => `${one.className} ${one.textContent}`)"
    texts = {
        "```js\nconst a = 1.5; // no 'string'\n/* 2 */ f(`x${3}`)\n```":
            ["word const", "number 1.5", "comment // no 'string'", "comment /* 2 */", "string `x${3}`"],
        "```sql\nSELECT a1 -- 3\n```": ["word SELECT", "comment -- 3"],
        "```python\ndef f():\n  \"\"\"a\n'b\"\"\"\n```": ["word def", "string \"\"\"a\n'b\"\"\""],
        "```\nif 1\n```": [], "```text\nif 1\n```": [],
    }  # fmt: skip
    for text, expected in texts.items():
        blank.run(f"var view = new MarkdownView(); view.show({json.dumps(text)})")
        assert blank.run(kinds) == expected
        assert blank.run("view.node.querySelector('code').textContent") == "\n".join(text.split("\n")[1:-1])


@pytest.mark.parametrize("text", CASES)
def test_it_is_read_as_people_write_it(blank, text):
    assert html(blank, text) == CASES[text]


def test_code_keeps_its_text(blank):
    for text in (
        f"```python\n{CODE}\n```",
        f"~~~~ python x\n{CODE}\n~~~~~",
        f"```python\n{CODE}",
        f"- a\n```python\n{CODE}",
    ):
        indented = text.replace("\n", "\n  ") if text.startswith("- ") else text
        blank.run(f"var view = new MarkdownView(); view.show({json.dumps(indented)})")
        assert blank.run("view.node.querySelector('.code pre code').textContent") == CODE, text
        assert blank.run("view.node.querySelector('.code figcaption span').textContent") == "python"
        kinds = "[...view.node.querySelectorAll('pre span')].map((one) => `${one.className} ${one.textContent}`)"
        assert blank.run(kinds) == ["word if", "string '*no* <b>markup</b> `` '"]


def test_what_comes_is_never_markup(blank):
    allowed = {
        "P",
        "H3",
        "CODE",
        "FIGURE",
        "FIGCAPTION",
        "SPAN",
        "BUTTON",
        "PRE",
        "DIV",
        "TABLE",
        "TR",
        "TH",
        "TD",
        "A",
    }
    for text in HOSTILE:
        blank.run(
            f"var view = new MarkdownView(); view.show({json.dumps(text)}); document.body.replaceChildren(view.node)"
        )
        assert set(blank.run("[...view.node.querySelectorAll('*')].map((one) => one.tagName)")) <= allowed, text
        for address in blank.run("[...view.node.querySelectorAll('a')].map((one) => one.getAttribute('href'))"):
            assert address.startswith("https://"), text


def test_a_growing_text_ends_as_the_whole_one(blank):
    """Pieces of random documents, cut anywhere: only the last blocks are made anew, and nothing differs."""
    draw = random.Random(5)
    parts = [
        *CASES,
        *HOSTILE,
        f"```py\n{CODE}\n```",
        "- a\n\n  b\n\n- c",
        "    indented",
        "1. x\n\n\ny",
        "a | b\n-|-\nc | d",
        *FORMULAS,
    ]
    texts = [draw.choice(["\n", "\n\n", "\n"]).join(draw.choices(parts, k=9)) for _ in range(60)]
    cuts = [sorted(draw.choices(range(len(text)), k=40)) for text in texts]
    wrong = blank.run(f"""(() => {json.dumps([texts, cuts])})().reduce((texts, cuts) => texts.filter((text, place) => {{
      const grown = new MarkdownView(), whole = new MarkdownView();
      for (const cut of cuts[place]) grown.show(text.slice(0, cut));
      grown.show(text); whole.show(text);
      return grown.node.innerHTML !== whole.node.innerHTML;
    }}))""")
    assert wrong == []
    blank.run("var view = new MarkdownView(); view.show('a\\n\\nb\\n\\nc'); var first = view.node.firstChild")
    blank.run("view.show('a\\n\\nb\\n\\nc\\n\\nd')")
    assert blank.run("view.node.firstChild === first && view.node.childElementCount === 4"), "done blocks stay"


@pytest.mark.parametrize("place", range(len(LONG)))
def test_no_text_takes_long(blank, place):
    started = time.monotonic()
    blank.run(f"var view = new MarkdownView(); view.show({json.dumps(LONG[place])}); 0")
    assert time.monotonic() - started < 2.0, LONG[place][:20]
