"""A server with a key, in Chromium: the page asks for it when it is refused, and then goes on. Marked `browser`."""

import pytest
from browser import click, finished, send
from server_cases import let_it_say, make_llm, start_server

pytestmark = pytest.mark.browser


@pytest.fixture
def served(served_params):
    with start_server(let_it_say(make_llm(served_params), "Yes."), api_key="secret") as server:
        yield server


def give(page, key):
    page.wait("document.getElementById('ask-key').open")
    page.run(f"document.getElementById('new-key').value = '{key}'")
    click(page, "#key-form button")


def test_the_key_is_asked_for(open_page):
    page = open_page(until="document.getElementById('ask-key').open")
    give(page, "wrong")
    give(page, "secret")
    page.wait("model === 'tiny' && !document.getElementById('ask-key').open")
    page.run("document.getElementById('key').value = 'expired'")
    send(page, "Still there?")
    give(page, "")
    page.wait("!running && document.getElementById('text').value === 'Still there?'")
    assert "API key" in page.run("document.querySelector('#problem').textContent")
    send(page, "Still there?")
    give(page, "secret")
    finished(page)
    assert [one["content"] for one in page.run("chat.messages")] == ["Still there?", "Yes."]
    assert page.run("JSON.stringify(localStorage).includes('secret')") is False, "the key stays in this tab"
    page.complaints.clear()  # the browser itself reports each 401
