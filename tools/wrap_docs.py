"""Wraps the prose of the documents at column 109. Tables, code, headings and pictures stay as they are.

    python tools/wrap_docs.py [FILE ...]      default: README, CHANGELOG, CONTRIBUTING and all of docs

Only paragraphs with a longer line are touched, so that a change stays small.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 109
_ITEM = re.compile(r"\s*([*-]|\d+\.)\s+")
_FIXED = re.compile(r"\s*(\||#|<|!\[|```)")


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def wrapped(text: str) -> str:
    """The text with its long paragraphs and list items filled again."""
    lines = [line for part, is_prose in _parts(text.splitlines()) for line in (_filled(part) if is_prose else part)]
    return "\n".join(lines) + "\n"


def _parts(lines: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Runs of lines that belong together, and whether they are prose."""
    part: list[str] = []
    is_code = False
    for line in lines:
        is_fence = line.lstrip().startswith("```")
        stands_alone = is_code or is_fence or not line.strip() or _FIXED.match(line)
        if part and (stands_alone or _ITEM.match(line)):
            yield part, True
            part = []
        if stands_alone:
            yield [line], False
        else:
            part.append(line)
        is_code ^= is_fence
    if part:
        yield part, True


def _filled(part: list[str]) -> list[str]:
    if max(map(len, part)) <= WIDTH:
        return part
    item = _ITEM.match(part[0])
    first = item[0] if item else re.match(r"\s*", part[0])[0]  # type: ignore[index]
    body = " ".join([part[0][len(first) :], *(line.strip() for line in part[1:])])
    return textwrap.wrap(
        body, WIDTH, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def main(paths: list[str]) -> None:
    for path in [Path(name) for name in paths] or documents():
        text = path.read_text(encoding="utf-8")
        if wrapped(text) != text:
            path.write_text(wrapped(text), encoding="utf-8")
            print(f"wrapped {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
