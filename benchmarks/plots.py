"""Pictures and tables of the documents, from the committed records. Needs no GPU and no plotting library.

    python benchmarks/plots.py

* docs/images/roofline.svg        every measured case of an op
* docs/images/decode-layer.svg    the kernels of one decode layer, in the order of their launch
* docs/kernels/*.md               the rows of their tables of numbers
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsv4.testing.bench import CEILINGS, case_modules, load_cases, read_records  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGES = ROOT / "docs" / "kernels"
NUMBERS_HEAD = "| op | case | us | floor us | x floor | peer us |"
FAMILIES = {
    "moe": "#c0392b", "linear": "#2471a3", "attention": "#1e8449", "indexer": "#b7950b",
    "hyper": "#7d3c98", "others": "#7f8c8d",
}  # fmt: skip

Record = dict[str, Any]


# ---- tables ----


def with_numbers(page: str, records: dict[str, Record]) -> str:
    """The page with the rows of its tables of numbers renewed. Which cases and peers they show is the page's to say."""
    lines, is_inside = [], False
    for line in page.splitlines():
        if line == NUMBERS_HEAD:
            is_inside = True
        elif is_inside and not line.startswith("|"):
            is_inside = False
        elif is_inside and not line.startswith("|---"):
            op, case, *_, peer = (cell.strip() for cell in line.strip("|").split("|"))
            line = _number_row(records[f"{op}/{case}"], peer)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _number_row(record: Record, peer: str) -> str:
    floor, times = record["floor_us"], record["times_floor"]
    shown = "" if floor < record["launch_us"] / 10 else f"{times:.3g}"  # beside a launch such a floor says nothing
    return f"| {record['op']} | {record['case']} | {record['median_us']:.1f} | {_plain(floor)} | {shown} | {peer} |"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# ---- pictures ----


class Picture:
    """An SVG of lines, dots and words."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            f'font-size="11"><title>{escape(title)}</title><rect width="{width}" height="{height}" fill="#fff"/>'
        ]

    def line(self, points: Iterable[tuple[float, float]], colour: str = "#999", width: float = 1) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def dot(self, x: float, y: float, colour: str, name: str) -> None:
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75">'
            f"<title>{escape(name)}</title></circle>"
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def words(self, x: float, y: float, text: str, anchor: str = "start", colour: str = "#222") -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


Axis = tuple[int, int]  # from and to, as powers of ten
LEFT, RIGHT, TOP, BOTTOM = 60, 440, 40, 340


def _frame(picture: Picture, offset: float, x: Axis, y: Axis, titles: tuple[str, str, str]) -> Callable:
    """A log-log frame; returns what takes values to its points."""

    def at(value_x: float, value_y: float) -> tuple[float, float]:
        across = (math.log10(value_x) - x[0]) / (x[1] - x[0])
        up = (math.log10(value_y) - y[0]) / (y[1] - y[0])
        return offset + LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    for power in range(x[0], x[1] + 1):
        picture.line([at(10.0**power, 10.0 ** y[0]), at(10.0**power, 10.0 ** y[1])], "#eee")
        picture.words(at(10.0**power, 1)[0], BOTTOM + 15, f"{10.0**power:g}", "middle")
    for power in range(y[0], y[1] + 1):
        picture.line([at(10.0 ** x[0], 10.0**power), at(10.0 ** x[1], 10.0**power)], "#eee")
        picture.words(offset + LEFT - 5, at(1, 10.0**power)[1] + 4, f"{10.0**power:g}", "end")
    title, below, beside = titles
    picture.words(offset + LEFT, 18, title)
    picture.words(offset + (LEFT + RIGHT) / 2, BOTTOM + 32, below, "middle")
    picture.words(offset + LEFT, TOP - 8, beside)
    return at


def roofline(records: Iterable[Record], family_of: dict[str, str]) -> str:
    """Left: operations a second by operations a byte. Right: bytes a second by bytes."""
    ceiling = CEILINGS["H200"]
    picture = Picture(920, 400, "Roofline of the measured kernels on one H200")
    ops = _frame(
        picture, 0, (-1, 5), (-3, 4), ("One H200: cases with products", "operations a byte", "TFLOP/s")
    )  # fmt: skip
    for name, peak in ceiling.flops.items():
        knee = peak / ceiling.read
        picture.line([ops(0.1, 0.1 * ceiling.read / 1e12), ops(knee, peak / 1e12), ops(1e5, peak / 1e12)], "#333", 1.2)
        picture.words(RIGHT, ops(1, peak / 1e12)[1] + (-4 if name == "fp8" else 12), name, "end")
    moved = _frame(
        picture, 450, (-3, 4), (-4, 1), ("One H200: all cases", "MB that must move", "TB/s")
    )  # fmt: skip
    peak_read = ceiling.read / 1e12
    picture.line([moved(1e-3, peak_read), moved(1e4, peak_read)], "#333", 1.2)
    picture.words(450 + RIGHT, moved(1, peak_read)[1] - 4, f"{peak_read} TB/s read", "end")
    for record in records:
        family = family_of.get(record["op"], "others")
        colour = FAMILIES.get(family, FAMILIES["others"])
        num_bytes, seconds = record["bytes_read"] + record["bytes_written"], record["median_us"] / 1e6
        name = f"{record['op']}/{record['case']}"
        if record["flops"]:
            rate = record["flops"] / seconds / 1e12
            picture.dot(*ops(record["flops"] / num_bytes, rate), colour, name)
        picture.dot(*moved(max(num_bytes / 1e6, 1e-3), max(num_bytes / seconds / 1e12, 1e-4)), colour, name)
    for index, (family, colour) in enumerate(FAMILIES.items()):
        picture.dot(LEFT + 100 * index, 388, colour, family)
        picture.words(LEFT + 8 + 100 * index, 392, family)
    return picture.svg()


def decode_layer(record: Record) -> str:
    """A bar for each launch of a layer. When they begin is not recorded, and some run beside others."""
    kernels: list[tuple[str, float]] = record["kernels"]
    title = (
        f"{record['attention'].upper()} layer of Flash, decode, batch {record['batch']}, context {record['context']}: "
        f"{record['ms'] * 1000:.0f} us, {record['launches']} launches, commit {record['commit'][:7]}"
    )
    picture = Picture(720, 50 + 18 * len(kernels), title)
    picture.words(10, 20, title)
    scale = 400 / max(time for _, time in kernels)
    for index, (name, time) in enumerate(kernels):
        y = 34 + 18 * index
        picture.words(200, y + 11, name, "end")
        picture.box(208, y, time * scale, 13, FAMILIES["linear"])
        picture.words(214 + time * scale, y + 11, f"{time:.1f} us")
    return picture.svg()


# ---- all of it ----


def documents() -> dict[Path, str]:
    """Every file this script writes, as it should be."""
    records = read_records(RESULTS / "nvidia-h200.jsonl")
    cases = [(module.rsplit(".", 1)[-1], case) for module in case_modules() for case in load_cases([module])]
    family_of = {case.op: family for family, case in cases}
    shown = [records[case.key] for _, case in cases if case.key in records]
    written = {
        IMAGES / "roofline.svg": roofline(shown, family_of),
        IMAGES / "decode-layer.svg": decode_layer(_last_layer("csa", batch=1, context=2048)),
    }
    written |= {page: with_numbers(page.read_text(encoding="utf-8"), records) for page in sorted(PAGES.glob("*.md"))}
    return written


def _last_layer(attention: str, batch: int, context: int) -> Record:
    lines = (RESULTS / "nvidia-h200-model.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = {"kind": "layer", "attention": attention, "batch": batch, "context": context}
    return [r for r in map(json.loads, lines) if wanted.items() <= r.items()][-1]


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
