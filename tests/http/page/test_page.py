"""The page without a browser: one document, nothing from outside, and headers that allow nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from dsv4.http.page import page_headers, page_text

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Reader(HTMLParser):
    """Collects elements; refuses tags that do not nest."""

    def __init__(self):
        super().__init__()
        self.elements, self.open, self.labelled = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if "label" in self.open and tag in ("input", "select", "textarea"):
            self.labelled.add(dict(attributes).get("id"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page():
    reader = Reader()
    reader.feed(page_text())
    assert reader.open == []
    return reader


def test_nothing_comes_from_outside(page):
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), (tag, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes), "the policy would refuse it"
    text = page_text()
    addresses = set(re.findall(r"https?://[^\s'\"]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


def test_text_is_never_put_in_as_markup():
    script = page_text().partition("<script>")[2]
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert name not in script


def test_the_policy_allows_exactly_this_page():
    policy = page_headers()["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page_text(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_it_can_be_used_without_seeing_it(page):
    assert ("html", {"lang": "en"}) in page.elements
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in page.elements:
        if tag in ("input", "select", "textarea"):
            assert "aria-label" in attributes or attributes["id"] in page.labelled, attributes
        if tag in ("canvas", "meter", "aside", "dialog"):
            assert "aria-label" in attributes, tag
        if attributes.get("role") == "log":
            assert attributes["tabindex"] == "0"


def test_every_element_the_script_names_is_there(page):
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    named = set(re.findall(r'\$\("([\w-]+)"\)', page_text()))
    assert len(named) > 15
    assert named <= ids
    kept = re.search(r"const kept = \[(.*?)\]", page_text())[1]
    assert set(re.findall(r'"(\w+)"', kept)) <= ids


def test_it_is_served(live):
    response = live.get("/")
    assert response.status_code == 200
    assert response.text == page_text()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    for name, value in page_headers().items():
        assert response.headers[name] == value
