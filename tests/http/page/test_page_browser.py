"""The page in a real browser. Marked `browser`: run with `make browser-test`, which also renews docs/page.png."""

import os
from pathlib import Path

import pytest
from browser import click, finished, send
from server_cases import TWO_LAYERS, let_it_say, make_llm, start_server

pytestmark = pytest.mark.browser

SCREENSHOT = Path(__file__).parents[3] / "docs" / "page.png"
THOUGHT = "The user asks how the cache works. Two kinds of compressed entries, one window; I will say that in short."
ANSWER = """Every layer keeps a window of the last **128 tokens** as they are. Beyond it:

- **CSA** layers keep one entry for every 4 tokens and read only those that their indexer picks;
- **HCA** layers keep one entry for every 128 tokens and read them all.

So a block of 128 tokens costs the same whatever the request, and the memory plan is exact:

```sh
dsv4 plan flash --context 131072
```"""

WIDE = "```\n" + "code " * 100 + "\n```\n|" + " cell |" * 40 + "\n|" + "---|" * 40 + "\n\n" + "x" * 500


@pytest.fixture
def served(two_layer_params):
    llm = make_llm(two_layer_params, TWO_LAYERS)
    with start_server(let_it_say(llm, f"{THOUGHT}</think>{ANSWER}"), default_thinking=True) as server:
        yield server


def test_an_answer_streams_with_its_thinking_folded(open_page):
    page = open_page()
    send(page, "How does the cache work?")
    page.wait("document.querySelector('.assistant details')")
    page.wait("document.getElementById('send').textContent === 'Stop'")
    finished(page)
    assert page.run("document.querySelector('.assistant details').open") is False
    assert page.run("document.querySelector('.assistant details > div').textContent") == THOUGHT
    assert page.run("chat.messages[1].content") == ANSWER
    assert page.run("document.querySelectorAll('.assistant > .text > ul > li > strong').length") == 2
    assert "tokens in" in page.run("document.querySelector('.assistant .note').textContent")
    assert page.run("document.getElementById('send').textContent") == "Send"
    assert page.run("chat.messages.length") == 2
    page.wait("Number(document.getElementById('rate').textContent) >= 0 && last?.output_tokens > 0")
    assert page.run("[...document.querySelectorAll('#cache .row span:first-child')].map((one) => one.textContent)") == [
        "CSA entries", "CSA index keys", "HCA entries", "Window rings", "Compressor state",
    ]  # fmt: skip
    assert page.run("[document.getElementById('experts').width, document.getElementById('experts').height]") == [4, 2]


def test_stop_ends_the_answer_and_frees_the_request(served, open_page):
    page = open_page()
    send(page, "Go on for long")
    page.wait("document.querySelector('.assistant details > div')?.textContent.length > 5")
    page.run("document.getElementById('form').requestSubmit()")
    page.wait("document.querySelector('.assistant .note')?.textContent === 'stopped'")
    served.wait_until_free()
    assert len(page.run("document.querySelector('.assistant details > div').textContent")) < len(THOUGHT)
    send(page, "Again")
    page.wait("document.querySelectorAll('.assistant details').length === 2")
    page.run("document.getElementById('form').requestSubmit()")
    page.wait("document.querySelectorAll('.assistant .note').length === 2")


def test_errors_are_shown(open_page):
    page = open_page()
    page.run("document.getElementById('max_tokens').value = 10 ** 7")
    send(page, "Too much")
    page.wait("!document.getElementById('problem').hidden")
    assert "max_tokens" in page.run("document.getElementById('problem').textContent")
    assert page.run("chat.messages.length") == 0
    assert page.run("document.getElementById('text').value") == "Too much", "what was typed is not lost"
    page.complaints.clear()  # the browser itself reports the 400


def test_what_comes_is_text_never_markup(open_page):
    page = open_page()
    send(page, "<img src=x onerror=alert(1)><b>bold</b>")
    page.wait("document.querySelector('.user')")
    assert page.run("document.querySelector('.user .text').textContent") == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.run("document.querySelector('.user .text').childElementCount") == 0
    finished(page)


def test_on_a_phone(open_page):
    page = open_page(width=360, height=740)
    assert page.run("document.documentElement.scrollWidth") <= 360, "nothing sticks out"
    assert page.run("getComputedStyle(document.getElementById('live')).display") == "none"
    page.run("document.getElementById('show-live').click()")
    assert page.run("getComputedStyle(document.getElementById('live')).display") == "block"
    page.run("document.getElementById('show-live').click()")
    send(page, "Hello")
    finished(page)
    wide = [{"role": "user", "content": "w" * 500}, {"role": "assistant", "content": WIDE}]
    page.run(f"chat.messages = {wide}; showChat()")
    assert page.run("document.getElementById('log').scrollWidth") <= 360, "wide code and tables scroll by themselves"
    click(page, ".user .act")
    assert page.run("document.getElementById('log').scrollWidth") <= 360
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert page.run("document.getElementById('send').getBoundingClientRect().right") <= 360


def test_settings_are_kept_and_used(open_page):
    page = open_page()
    page.run("document.getElementById('show-settings').click()")
    page.run("document.getElementById('thinking').value = 'disabled'")
    page.run("document.getElementById('theme').value = 'dark'")
    page.run("document.getElementById('system').value = 'Be brief.'")
    page.run("document.getElementById('settings').close()")
    page.wait("document.documentElement.dataset.theme === 'dark'")
    body = page.run("requestBody([])")
    assert body["thinking"] == {"type": "disabled"}
    assert body["messages"] == [{"role": "system", "content": "Be brief."}]
    page.call("Page.reload")
    page.wait("document.getElementById('model')?.textContent === 'tiny'")
    assert page.run("document.getElementById('system').value") == "Be brief."
    assert page.run("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable(open_page, dark):
    """Contrast of body, quiet, link and button text is at least 4.5 to 1 in both themes."""
    page = open_page(dark=dark)
    contrast = """(() => {
      const parts = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
        .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
      const light = (text) => { const [r, g, b] = parts(text); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const ground = light(getComputedStyle(document.body).backgroundColor);
      const shown = (name) => getComputedStyle(document.querySelector(name));
      const send = getComputedStyle(document.getElementById('send'));
      return [
        ratio(light(getComputedStyle(document.body).color), ground),
        ratio(light(getComputedStyle(document.getElementById('model')).color), ground),
        ratio(light(send.color), light(send.backgroundColor)),
        ...['.turn a', '.turn blockquote', '.act'].map((name) => ratio(light(shown(name).color), ground)),
        ratio(light(shown('.copy').color), light(shown('.code').backgroundColor)),
        ratio(light(shown('.user .act').color), light(shown('.user').backgroundColor)),
      ];
    })()"""
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "https://x.test\n> a\n```\nb\n```"}]
    page.run(f"chat.messages = {said}; showChat()")
    assert min(page.run(contrast)) >= 4.5
    assert page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(22, 24, 29)" if dark else "rgb(247, 247, 245)"
    )


def test_screenshot(open_page, tmp_path):
    """With DSV4_SCREENSHOT set, the picture of the documentation is renewed."""
    page = open_page()
    send(page, "How does the cache work?")
    finished(page)
    page.run("document.querySelector('.assistant details').open = true; $('log').scrollTop = 10 ** 6")
    file = SCREENSHOT if os.environ.get("DSV4_SCREENSHOT") else tmp_path / "page.png"
    page.screenshot(file)
    assert file.stat().st_size > 10_000
