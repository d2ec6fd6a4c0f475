"""What a reader does with answers, in Chromium: copy, again, edit, stop, come back, wait, fail. Marked `browser`."""

import json
import threading
import time

import pytest
from browser import click, finished, send
from server_cases import let_it_say, make_llm, start_server

pytestmark = pytest.mark.browser

CODE = "print('<b>1</b>')"
FIRST, SECOND, LONG = f"Use *this*:\n\n```python\n{CODE}\n```", "Or **that**.", "on and " * 40
FILL = """{ let held = ""; for (let more = 2 ** 23; more >= 1; more /= 2)
  try { localStorage.setItem("x", held + "x".repeat(more)); held += "x".repeat(more); } catch {} }"""
TEXTS = "[...document.querySelectorAll('.turn > .text')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def served(served_params):
    with start_server(let_it_say(make_llm(served_params, max_concurrent_requests=1), FIRST, SECOND, LONG)) as server:
        yield server


@pytest.fixture
def page(open_page):
    page = open_page()
    page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    page.run("document.getElementById('seed').value = '0'")
    return page


def use_seed(page, seed):
    page.run(f"document.getElementById('seed').value = '{seed}'")


def reload(page):
    page.run("var isOld = true")
    page.call("Page.reload")
    page.wait("typeof isOld === 'undefined' && document.readyState === 'complete' && model === 'tiny'")


def press(page, selector):
    """A real click, which the browser takes for the reader's."""
    page.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
    box = page.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
    place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, **place)


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_code_is_shown_and_copied(page, has_clipboard):
    if has_clipboard:
        page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    else:  # as on a page that is not served from this machine and not over TLS
        page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined }); 0")
        page.run("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
    send(page, "How?")
    finished(page)
    assert page.run("document.querySelector('.assistant em').textContent") == "this"
    assert page.run("document.querySelector('.assistant pre code').textContent") == CODE
    press(page, ".code .copy")
    page.wait("document.querySelector('.code .copy').textContent === 'Copied'")
    assert page.run("navigator.clipboard.readText()" if has_clipboard else "copied") == CODE


def test_an_answer_tells_its_speed(page):
    send(page, "How?")
    finished(page)
    note = page.run("document.querySelector('.assistant .note').textContent")
    for part in (" tokens in ", " tokens/s", "first after ", "prompt "):
        assert part in note
    usage = {"completion_tokens": 11, "prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}}
    times = {"start": 1000, "first": 2000, "end": 4000}
    said = page.run(f"describe({json.dumps(usage)}, 'length', {json.dumps(times)})")
    assert said == "11 tokens in 3.0 s · 5.0 tokens/s · first after 1.00 s · prompt 100, 64 cached · cut at its limit"
    del usage["prompt_tokens_details"]
    assert "cached" not in page.run(f"describe({json.dumps(usage)}, 'stop', {json.dumps(times)})")


def test_again_edit_and_what_they_leave_when_they_fail(page):
    send(page, "One")
    finished(page)
    use_seed(page, 1)
    send(page, "Two")
    finished(page, 2)
    before = page.run("chat.messages")
    page.run("window.kept = window.fetch; window.fetch = () => Promise.reject(new TypeError('no')); 0")
    click(page, ".assistant .act:last-child")
    page.wait("document.querySelector('#problem')?.textContent === 'the server does not answer'")
    assert page.run("chat.messages") == before, "a failed second try takes nothing away"
    click(page, ".user .act")
    page.run("document.querySelector('.editing textarea').value = 'One, but better'")
    click(page, ".editing .act")
    page.wait("!running && document.querySelector('.editing textarea')?.value === 'One, but better'")
    assert page.run("chat.messages") == before
    page.run("window.fetch = window.kept; 0")
    click(page, ".editing .act")
    finished(page)
    assert page.run(TEXTS) == ["One, but better", "Or that."]
    assert [one["content"] for one in page.run("chat.messages")] == ["One, but better", SECOND]
    use_seed(page, 0)
    click(page, ".assistant .act:last-child")
    page.wait(f"!running && chat.messages[1].content === {json.dumps(FIRST)}")
    assert page.run("chat.messages.length") == 2


def test_what_was_typed_is_not_lost(page):
    page.run("window.kept = window.fetch; window.fetch = () => Promise.reject(new TypeError('no')); 0")
    send(page, "Precious")
    page.wait("!document.querySelector('#problem').hidden")
    assert page.run("[document.getElementById('text').value, chat.messages.length]") == ["Precious", 0]
    part = 'data: {"choices": [{"delta": {"content": "Half an"}}]}\n\n'
    page.run(f"window.fetch = async () => new Response({json.dumps(part)}); 0")
    send(page, "Precious")
    finished(page)
    assert "broke before" in page.run("document.querySelector('.assistant .error').textContent")
    assert [one["content"] for one in page.run("chat.messages")] == ["Precious", "Half an"]
    page.run("window.fetch = async () => new Response('<h1>Bad gateway', { status: 502 }); 0")
    send(page, "More")
    page.wait("document.querySelector('#problem')?.textContent === 'the server answered 502'")
    assert page.run("document.getElementById('text').value") == "More"


def test_conversations_are_kept(page):
    send(page, "One")
    finished(page)
    before = page.run("chat.messages")
    reload(page)
    assert page.run("chat.messages") == before
    assert page.run(TEXTS)[0] == "One"
    click(page, "#new")
    assert page.run(TEXTS) == []
    use_seed(page, 1)
    send(page, "Two")
    finished(page)
    click(page, "#show-chats")
    assert page.run("[...document.querySelectorAll('#chat-list .open')].map((one) => one.textContent)") == [
        "Two",
        "One",
    ]
    click(page, "#chat-list li:last-child .open")
    assert page.run("chat.messages") == before
    click(page, "#show-chats")
    click(page, "#chat-list li:last-child button:last-child")
    assert page.run(f"[savedChats().length, chat.messages.length, ...{TEXTS}]") == [1, 0]
    click(page, "#forget")
    reload(page)
    assert page.run("[chatIds().length, chat.messages.length]") == [0, 0]


def test_storage_may_hold_anything_or_be_full(page):
    for name, value in {
        "dsv4": "{", "dsv4-chat-a": "[1", "dsv4-chat-b": "null", "dsv4-chat-c": '{"messages": [null]}',
        "dsv4-chat-d": '{"messages": [{"role": "user", "content": 5}]}', "dsv4-chat-e": '{"messages": {"length": 1}}',
        "dsv4-chat-f": '{"messages": [{"role": "system", "content": ""}], "changed": {}}',
    }.items():  # fmt: skip
        page.run(f"localStorage.setItem({json.dumps(name)}, {json.dumps(value)})")
        page.run(f"sessionStorage.setItem('dsv4-open', {json.dumps(name.removeprefix('dsv4-chat-'))})")
        reload(page)
        assert page.run("[chat.messages.length, savedChats().length]") == [0, 0]
    page.run("localStorage.setItem('dsv4', JSON.stringify({ theme: 'pink', seed: {}, max_tokens: 'x', system: 'S' }))")
    reload(page)
    fields = "['theme', 'seed', 'max_tokens', 'system'].map((id) => document.getElementById(id).value)"
    assert page.run(fields) == ["", "", "1024", "S"]
    old = {"changed": 1, "messages": [{"role": "user", "content": "y" * 1700}]}
    page.run(f"localStorage.clear(); localStorage.setItem(CHAT + 'old', {json.dumps(json.dumps(old))}); {FILL}; 0")
    assert page.run("savedChats().length") == 1
    use_seed(page, 1)
    send(page, "Room?")
    finished(page)
    assert page.run("savedChats().map((one) => one.messages[0].content)") == ["Room?"], "the oldest made room"
    page.run(f"localStorage.clear(); {FILL}; 0")
    send(page, "And now?")
    finished(page, 2)
    assert "could not be kept" in page.run("document.querySelector('#problem').textContent")


def test_waiting_is_seen_and_can_be_stopped(served, page):
    use_seed(page, 2)
    other = threading.Thread(target=served.chat, args=("long",), kwargs={"seed": 2, "max_tokens": 1000})
    other.start()
    while not served.engine.num_open:
        time.sleep(0.01)
    send(page, "Me too")
    page.wait("document.querySelector('.wait')?.textContent.startsWith('Waiting for a place: 1 of 1 run, 1 wait')")
    page.run("document.getElementById('form').requestSubmit()")
    page.wait("!running && document.getElementById('text').value === 'Me too'")
    other.join()
    served.wait_until_free()
    send(page, "Alone")
    page.wait("document.querySelector('.assistant .text')")
    assert page.run("document.querySelector('.wait')") is None
    page.run("document.getElementById('form').requestSubmit()")
    page.wait("document.querySelector('.assistant .note')?.textContent === 'stopped'")
    assert 0 < page.run("chat.messages[1].content.length") < len(LONG)
