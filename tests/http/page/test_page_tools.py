"""What the page offers beside an answer: errors in view, going on where an answer was cut, the panel, the experts' map,
settings of a conversation, its export, the introduction of the miniature. In Chromium; marked `browser`."""

from __future__ import annotations

import json

import pytest
from browser import click, finished, send
from server_cases import TWO_LAYERS, let_it_say, make_llm, start_server

pytestmark = pytest.mark.browser

ANSWER = "The sum is \\(\\sum_{i=1}^n i\\), and so on to its end."


@pytest.fixture(scope="module")
def served(two_layer_params):
    server = start_server(let_it_say(make_llm(two_layer_params, TWO_LAYERS), ANSWER, "No."))
    yield server
    server.wait_until_free()
    server.stop()


@pytest.fixture
def page(open_page):
    page = open_page()
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    use(page, seed="0")
    return page


def use(page, **settings):
    for name, value in settings.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(value)}")


def in_view(page, selector):
    return page.run(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect(); "
        "return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight; })()"
    )


def test_an_error_is_in_view_after_many_turns(page):
    turns = [{"role": role, "content": "long\n\n" * 30} for _ in range(4) for role in ("user", "assistant")]
    page.run(f"chat.messages = {json.dumps(turns)}; showChat(); document.getElementById('log').scrollTop = 0")
    use(page, max_tokens="10000000")
    send(page, "Too much")
    page.wait("!document.getElementById('problem').hidden")
    assert in_view(page, "#problem")
    assert "max_tokens" in page.run("document.getElementById('problem').textContent")
    page.run("document.getElementById('log').scrollTop = 0")
    assert in_view(page, "#problem")
    use(page, max_tokens="8")
    send(page, "Less")
    finished(page, answers=5)
    assert page.run("document.getElementById('problem').hidden")
    page.complaints.clear()  # the browser itself reports the 400


def test_an_answer_that_was_cut_goes_on(page):
    use(page, max_tokens="12")
    send(page, "Tell")
    finished(page)
    assert "cut at its limit" in page.run("document.querySelector('.assistant .note').textContent")
    cut = page.run("chat.messages[1].content")
    assert ANSWER.startswith(cut)
    use(page, max_tokens="200", seed="1")
    page.run("[...document.querySelectorAll('.assistant .act')].at(-1).click()")
    finished(page)
    assert page.run("chat.messages.map((one) => one.content)") == ["Tell", cut + "No."]
    acts = page.run("[...document.querySelectorAll('.assistant .act')].map((one) => one.textContent)")
    assert acts == ["Copy", "Again"], "it has ended"


def test_a_formula_is_drawn_in_an_answer(page):
    """Under the page's own policy: styles that the library writes are allowed."""
    send(page, "Tell")
    finished(page)
    assert page.run("document.querySelectorAll('.assistant math munderover, .assistant math msubsup').length") == 1
    assert page.run("document.querySelector('.assistant math').getBoundingClientRect().height") > 10


def test_the_panel_can_be_hidden(page):
    shown = "document.getElementById('live').getBoundingClientRect().width > 0"
    width = page.run("document.getElementById('log').getBoundingClientRect().width")
    assert page.run(shown)
    click(page, "#show-live")
    assert not page.run(shown)
    assert page.run("document.getElementById('log').getBoundingClientRect().width") > width + 200
    assert page.run("document.getElementById('show-live').getAttribute('aria-expanded')") == "false"
    page.call("Page.reload")
    page.wait(f"document.readyState === 'complete' && model === 'tiny' && !({shown})")
    click(page, "#show-live")
    assert page.run(shown)


def test_the_line_of_drafts_is_there_only_with_drafts(page):
    page.wait("last")
    assert page.run("document.getElementById('drafts').getBoundingClientRect().height") == 0
    page.run("showLive({ ...last, step_tokens: 1.5, accepted: [0.5] })")
    assert page.run("document.getElementById('drafts').getBoundingClientRect().height") > 0


def test_the_map_of_experts_names_what_is_under_the_pointer(page):
    page.wait("last")
    page.run("showLive({ ...last, experts: ['0090', '1234'] })")
    for row, column, said in ((0, 2, "Layer 0, expert 2: about 100 %"), (1, 3, "Layer 1, expert 3: about 40 %")):
        page.run("document.getElementById('experts').scrollIntoView()")
        box = page.run("document.getElementById('experts').getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + (column + 0.5) * box["width"] / 4, "y": box["y"] + (row + 0.5) * box["height"] / 2}
        page.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        page.wait(f"document.getElementById('expert').textContent.startsWith('{said}')")


def test_a_conversation_keeps_its_settings(page):
    use(page, system="Be brief.", temperature="0.5", max_tokens="60")
    page.run("document.getElementById('settings').dispatchEvent(new Event('close'))")
    send(page, "One")
    finished(page)
    first = page.run("chat.id")
    click(page, "#new")
    use(page, system="Be long.", temperature="1")
    page.run("document.getElementById('settings').dispatchEvent(new Event('close'))")
    send(page, "Two")
    finished(page)
    page.run(f"openChat(readChat('{first}'))")
    assert page.run("[$('system').value, $('temperature').value]") == ["Be brief.", "0.5"]
    body = page.run("requestBody(chat.messages)")
    assert (body["messages"][0], body["temperature"]) == ({"role": "system", "content": "Be brief."}, 0.5)
    click(page, "#new")
    assert page.run("$('system').value") == "Be long.", "a new one begins with what was changed last"


def test_a_conversation_is_exported(page):
    send(page, "One")
    finished(page)
    page.run("""window.given = null; URL.createObjectURL = (file) => { given = file; return 'data:,'; };
      HTMLAnchorElement.prototype.click = function () { window.named = this.download; }""")
    click(page, "#show-chats")
    page.run("document.querySelector('#chat-list button[aria-label^=\"Export\"]').click()")
    found = json.loads(page.run("given.text()"))
    assert [one["content"] for one in found["messages"]] == ["One", ANSWER]
    assert (found["model"], found["settings"]["seed"]) == ("tiny", "0")
    assert page.run("named").endswith(".json")
    click(page, "#chats .main")


def test_escape_stops_from_anywhere(page):
    page.run("""fetch = ((real) => (path, options) => path.startsWith('/v1/chat') ? new Promise((_, fail) =>
      options.signal.addEventListener('abort', () => fail(new DOMException('', 'AbortError')))) :
      real(path, options))(fetch); 0""")
    send(page, "Wait")
    page.wait("running")
    page.run("document.getElementById('log').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape")
    page.wait("!running")
    assert page.run("document.getElementById('text').value") == "Wait"


def test_the_miniature_introduces_itself(page):
    assert page.run("document.querySelector('.empty').textContent") == "Ask something."
    page.run("root = 'flash-mini'; showChat()")  # whatever the server calls it
    assert "13 million parameters" in page.run("document.querySelector('.empty').textContent")
    click(page, ".empty .act")
    assert page.run("document.getElementById('text').value") == "SCENE I. A street in Verona."
