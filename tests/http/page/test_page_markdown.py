"""The page's markdown in Chromium: right, the same while it streams, never markup, linear. Marked `browser`."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from browser import Browser

import dsv4.http.page

pytestmark = pytest.mark.browser

SCRIPT = Path(dsv4.http.page.__file__).with_name("markdown.js").read_text(encoding="utf-8")
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
    "x|" + "-" * 100_000 + "\n" + "-" * 100_000,
]  # fmt: skip


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile", width=800, height=600)
    browser.run(SCRIPT + ";0")
    yield browser
    assert browser.complaints == []
    assert not [url for url in browser.requests if not url.startswith("about:")]
    browser.close()


def html(browser, text):
    return browser.run(f"(() => {{ const view = new MarkdownView(); view.show({json.dumps(text)}); "
                       "return view.node.innerHTML; })()")  # fmt: skip


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
        assert blank.run("view.node.querySelector('pre').querySelectorAll('*').length") == 1


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
