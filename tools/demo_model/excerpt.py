"""Writes the held-out excerpt that ships with the package: the text `dsv4 eval` reads unless told otherwise.

    python tools/demo_model/excerpt.py            # writes dsv4/demo/heldout.txt from data/

Only sections in the public domain, Shakespeare and the King James Bible in turn, a stretch of each, so that a few
thousand tokens see both. None of it was trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import tokenizers

HERE = Path(__file__).parent
SOURCES = ("shakespeare", "bible")
SECTION_CHARACTERS = 4000
LEAST_CHARACTERS = 5000  # shorter sections are left out: they hold no whole stretch


def heldout_sections(data: Path) -> dict[str, list[str]]:
    """Source name -> its held-out sections, decoded from heldout.bin (0, tokens, 1 each)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))
    ids = np.fromfile(data / "heldout.bin", dtype=np.uint16)
    texts = [tokenizer.decode(part[1:-1].tolist()) for part in np.split(ids, np.flatnonzero(ids == 0)[1:])]
    sections = {}
    for source in json.loads((data / "meta.json").read_text(encoding="utf-8"))["sources"]:
        sections[source["name"]] = texts[: source["held_out"]]
        texts = texts[source["held_out"] :]
    if texts:
        raise ValueError(f"heldout.bin holds {len(texts)} sections that meta.json does not name")
    return sections


def stretch(text: str, characters: int = SECTION_CHARACTERS) -> str:
    """The first `characters` of a section at most, up to the end of a line or a sentence."""
    cut = text[:characters]
    return cut[: max(cut.rfind("\n"), cut.rfind(". ") + 1)].strip() + "\n"


def excerpt(sections: dict[str, list[str]]) -> str:
    """One stretch of each long section, the sources in turn."""
    chosen = [[stretch(text) for text in sections[source] if len(text) >= LEAST_CHARACTERS] for source in SOURCES]
    return "\n".join(text for pair in zip(*chosen, strict=False) for text in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the held-out excerpt that ships with the package.")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "dsv4" / "demo" / "heldout.txt")
    options = parser.parse_args()
    text = excerpt(heldout_sections(options.data))
    options.out.write_text(text, encoding="utf-8")
    print(f"{len(text):,} characters in {options.out}")


if __name__ == "__main__":
    main()
