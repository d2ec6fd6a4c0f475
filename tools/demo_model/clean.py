"""Raw package files -> plain prose. Pure functions of text; markup, tables and code listings are left out."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

_MIN_PROSE_LETTERS = 0.75  # of a paragraph's characters; tables and listings have fewer letters and spaces
_SPACES = re.compile(r"[ \t]+")


def normalise(text: str) -> str:
    """Unix line ends, straight quotes, no trailing blanks, at most one empty line in a row; ends in a newline."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "").replace("\t", "    ")
    text = text.translate(str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "\xa0": " "}))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def is_prose(paragraph: str, least_words: int = 8) -> bool:
    """Enough words, mostly letters and spaces."""
    letters = sum(character.isalpha() or character in " \n,.;:'\"-()" for character in paragraph)
    plain = sum(character.isalpha() for character in paragraph)
    enough = letters >= 0.93 * len(paragraph) and plain >= _MIN_PROSE_LETTERS * len(paragraph.replace(" ", ""))
    return enough and len(paragraph.split()) >= least_words


def _unwrap(paragraph: str) -> str:
    return _SPACES.sub(" ", paragraph.replace("\n", " ")).strip()


def clean_literature(text: str) -> str:
    """Plays and poems keep their line structure; indentation and notices of the digitiser go."""
    lines = (re.sub(r"^ {2,}", "  ", line) for line in normalise(text).split("\n"))
    kept = [part for part in paragraphs("\n".join(lines)) if not re.search(r"gutenberg|e-?text|ascii", part, re.I)]
    return normalise("\n\n".join(kept))


def clean_encyclopaedia(text: str) -> str:
    return "\n\n".join(_unwrap(part) for part in paragraphs(normalise(text)) if is_prose(part)) + "\n"


_VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)")


def join_verses(text: str) -> Iterator[tuple[str, str]]:
    """Lines `Ge1:1 In the beginning ...` -> one document per book, one paragraph per chapter."""
    books: dict[str, dict[int, list[str]]] = {}
    for line in normalise(text).split("\n"):
        verse = _VERSE.fullmatch(line)
        if verse:
            books.setdefault(verse[1], {}).setdefault(int(verse[2]), []).append(verse[4].strip())
    for book, chapters in books.items():
        yield book, "\n\n".join(" ".join(verses) for verses in chapters.values()) + "\n"


def clean_jargon(text: str, letters_per_document: int = 20_000) -> Iterator[tuple[str, str]]:
    """Entries of prose, gathered into documents of a few pages so that some can be held out."""
    batch: list[str] = []
    number = 0
    for part in paragraphs(normalise(text)):
        entry = _unwrap(part)
        if is_prose(part):
            batch.append(entry)
        if sum(map(len, batch)) > letters_per_document:
            yield f"entries {number}", "\n\n".join(batch) + "\n"
            batch, number = [], number + 1
    if batch:
        yield f"entries {number}", "\n\n".join(batch) + "\n"


_RST_ROLE = re.compile(r":[a-zA-Z:+-]+:`([^`]*)`")
_RST_LINK = re.compile(r"`([^`<]+)\s*<[^>]*>`_+")


def clean_rst(text: str) -> str:
    """Prose paragraphs of a reStructuredText page, roles and emphasis reduced to their words."""
    kept = []
    for part in paragraphs(normalise(text)):
        if part.lstrip().startswith((".. ", ":", "|", "+-", "==")) and "\n   " not in part:
            continue
        lines = [line for line in part.split("\n") if not re.match(r"\s*(\.\. |:[a-z-]+:|[=~^\"*#-]{3,}\s*$)", line)]
        plain = _RST_ROLE.sub(lambda m: m[1].lstrip("~!.").split(" <")[0], "\n".join(lines))
        plain = _RST_LINK.sub(r"\1", plain).replace("``", "").replace("**", "").replace("::", ":")
        plain = re.sub(r"`_?|\\ ?|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)", "", plain)
        if is_prose(plain):
            kept.append(_unwrap(plain))
    return "\n\n".join(kept) + "\n"


_POD_CODE = re.compile(r"[A-Z]<+\s?((?:[^<>]|<[^<>]*>)*?)\s?>+")


def clean_pod(text: str) -> str:
    """Prose paragraphs of a POD page: commands and verbatim paragraphs go, formatting codes lose their shell."""
    kept = []
    for part in paragraphs(normalise(text)):
        if part.startswith((" ", "=")):
            continue
        plain = part
        for _ in range(3):  # codes nest
            plain = _POD_CODE.sub(lambda m: m[1].split("|")[0], plain)
        if is_prose(plain):
            kept.append(_unwrap(plain))
    return "\n\n".join(kept) + "\n"


_HTML_PARAGRAPH = re.compile(r"<p\b[^>]*>(.*?)</p>", re.S | re.I)


def clean_html(text: str) -> str:
    """Prose of the <p> elements of a page."""
    kept = []
    for part in _HTML_PARAGRAPH.findall(text):
        plain = _unwrap(html.unescape(re.sub(r"<[^>]*>", "", part)))
        if is_prose(plain):
            kept.append(plain)
    return normalise("\n\n".join(kept))


def clean_text_manual(text: str, paragraphs_per_document: int = 60) -> Iterator[tuple[str, str]]:
    """A manual rendered as text: prose paragraphs, in documents of a few pages."""
    kept = [_unwrap(part) for part in paragraphs(normalise(text)) if is_prose(part)]
    for start in range(0, len(kept), paragraphs_per_document):
        yield (
            f"part {start // paragraphs_per_document}",
            "\n\n".join(kept[start : start + paragraphs_per_document]) + "\n",
        )
