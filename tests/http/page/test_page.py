"""The page without a browser: one document, nothing from outside, and headers that allow nothing else."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dsv4.http.page
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
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}, "names, not places"
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
    for tag, count in (("script", 2), ("style", 1)):
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", page_text(), re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(one.encode("utf-8")).digest()).decode("ascii") for one in contents]
        assert len(digests) == count
        hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
        assert f"{tag}-src {hashes};" in policy


def test_the_library_is_the_one_that_was_read():
    """Its page says where it came from; the file is that one, unchanged, with its licence beside it."""
    folder = Path(dsv4.http.page.__file__).parent / "temml"
    noted = re.search(r"SHA-256: `([0-9a-f]{64})`", (folder / "README.md").read_text(encoding="utf-8"))
    assert hashlib.sha256((folder / "temml.min.js").read_bytes()).hexdigest() == noted[1]
    assert "MIT License" in (folder / "LICENSE.txt").read_text(encoding="utf-8")
    assert len(page_text()) < 260_000, "what a browser loads"


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
