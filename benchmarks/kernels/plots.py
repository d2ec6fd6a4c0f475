"""Pictures and tables of the documents, from the committed records. Needs no GPU and no plotting library.

    python -m benchmarks plots

* docs/images/roofline.svg        every measured case of an op
* docs/images/decode-layer.svg    the kernels of one decode layer, in the order of their launch
* docs/images/decode-timeline.svg  a decode step over both streams (of the benchmark `timeline`)
* docs/kernels/*.md               the rows of their tables of numbers
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.kernels.ops import CEILINGS
from benchmarks.records import H200, RESULTS, ROOT, Record, read_records
from dsv4.testing.bench import case_modules, load_cases

TIMELINE = RESULTS / "nvidia-h200-timeline.json"
IMAGES = ROOT / "docs" / "images"
PAGES = ROOT / "docs" / "kernels"
NUMBERS_HEAD = "| op | case | us | floor us | x floor | peer us |"
FAMILIES = {
    "moe": "#c0392b", "linear": "#2471a3", "attention": "#1e8449", "indexer": "#b7950b",
    "hyper": "#7d3c98", "others": "#7f8c8d",
}  # fmt: skip

STEP_FAMILIES = FAMILIES | {"compress": "#ca6f1e", "router": "#c2185b", "sampling": "#148f77"}
DRAWN_AS = {"select": "indexer"}  # the selection of a step is the indexer's


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

    def box(self, x: float, y: float, width: float, height: float, colour: str, name: str = "") -> None:
        rect = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"'
        self._parts.append(f"{rect}><title>{escape(name)}</title></rect>" if name else f"{rect}/>")

    def words(
        self, x: float, y: float, text: str, anchor: str = "start", colour: str = "#222", angle: int = 0
    ) -> None:  # fmt: skip
        turned = f' transform="rotate({angle} {x:.1f} {y:.1f})"' if angle else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{turned}>{escape(text)}</text>'
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


# ---- a step over both streams ----

Kernel = tuple[str, float, float, int]  # name, start and duration in microseconds, stream
STEP_LEFT, STEP_WIDTH, LANE, LABELS = 70, 1010, 22, 92
MAIN, BESIDE, COPIES = 0, 1, 2  # lanes
BRANCH = ("_compress_kernel", "_compress_pair_kernel")  # what model/branches.py puts beside the query path


def kernel_families() -> dict[str, str]:
    """The family of every kernel, by the folder of dsv4/ops that defines it."""
    found = {}
    ops = ROOT / "dsv4" / "ops"
    for file in sorted(ops.rglob("*.py")):
        names = re.findall(r"^def (\w+_kernel)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        family = file.relative_to(ops).parts[0]
        found |= {name: DRAWN_AS.get(family, family) for name in names}
    return found


def lanes_of(kernels: list[Kernel]) -> list[int]:
    """The busiest stream is the main one; copies of other streams have a lane of their own.

    A profiler may give all kernels of a graph one stream. Then those that the model puts beside others are drawn there.
    """
    is_split = any(stream != 0 and not name.startswith("Mem") for name, _, _, stream in kernels)

    def lane(name: str, stream: int) -> int:
        if name.startswith("Mem"):
            return MAIN if stream == 0 else COPIES
        return BESIDE if (stream != 0 if is_split else name in BRANCH) else MAIN

    return [lane(name, stream) for name, _, _, stream in kernels]


def one_layer(kernels: list[Kernel], layer: int) -> tuple[float, float] | None:
    """From where a layer begins to where the next one does: every layer ends with its second hyper-connection."""
    ends = [start + duration for name, start, duration, _ in kernels if name.startswith("hyper")]
    return (ends[2 * layer], ends[2 * layer + 2]) if len(ends) > 2 * layer + 2 else None


def timeline(record: Record) -> str:
    """For each batch: the whole step, then its first CSA layer with the names of all kernels."""
    families, steps = kernel_families(), record["steps"]
    whole, layer = 3 * LANE + 52, 3 * LANE + 52 + LABELS
    height = 54 + len(steps) * (whole + layer)
    picture = Picture(STEP_LEFT + STEP_WIDTH + 20, height, "A decode step over both streams")
    where = f"{record['model']} ({', '.join(record['schedule'])}), {record['gpu']}, commit {record['commit'][:7]}"
    picture.words(10, 20, f"Decode steps through the engine, in graphs: {where}")
    y: float = 34
    for step in steps:
        kernels = [tuple(kernel) for kernel in step["kernels"]]
        head = f"Batch {step['batch']}, {step['context']} tokens of context: "
        facts = (
            f"{step['length_us']:,.0f} us, GPU busy {step['busy_us']:,.0f} us, {len(kernels)} launches; "
            f"{step['wall_us']:,.0f} us without the profiler"
        )
        _panel(picture, y, 0, head + facts, kernels, (0.0, step["length_us"]), families)
        y += whole
        number = record["schedule"].index("csa")
        if (span := one_layer(kernels, number)) is not None:
            title = f"Batch {step['batch']}: layer {number} (CSA), {span[1] - span[0]:,.0f} us"
            _panel(picture, y, LABELS, title, kernels, span, families)
        y += layer
    for index, (family, colour) in enumerate(STEP_FAMILIES.items()):
        picture.box(STEP_LEFT + 105 * index, y, 10, 10, colour)
        picture.words(STEP_LEFT + 14 + 105 * index, y + 9, family)
    return picture.svg()


def _panel(
    picture: Picture, top: float, labels: int, title: str, kernels: list[Any], span: tuple[float, float],
    families: dict[str, str],
) -> None:  # fmt: skip
    """Three lanes under a title and `labels` of room for names, and an axis below them."""
    begin, end = span
    scale = STEP_WIDTH / (end - begin)
    lanes_top = top + 20 + labels
    picture.words(10, top + 12, title)
    for lane, name in ((MAIN, "main"), (BESIDE, "second"), (COPIES, "copies")):
        picture.box(STEP_LEFT, lanes_top + lane * LANE, STEP_WIDTH, LANE - 3, "#f2f3f4")
        picture.words(STEP_LEFT - 6, lanes_top + lane * LANE + 13, name, "end")
    last_label = float("-inf")
    for (name, start, duration, _), lane in zip(kernels, lanes_of(kernels), strict=True):
        if start >= end or start + duration <= begin:
            continue
        first, last = max(start, begin), min(start + duration, end)
        x, width = STEP_LEFT + (first - begin) * scale, max((last - first) * scale, 0.6)
        y, short = lanes_top + lane * LANE, name.strip("_").removesuffix("_kernel")
        family = families.get(name, "others")
        colour = STEP_FAMILIES.get(family, STEP_FAMILIES["others"])
        picture.box(x, y, max(width - 0.4, 0.4), LANE - 3, colour, f"{name}: {start:.1f} us, takes {duration:.1f}")
        if width > 6.2 * len(short):
            picture.words(x + width / 2, y + 13, short, "middle", "#fff")
        elif labels and lane == MAIN and x + width / 2 - last_label > 13:
            last_label = x + width / 2
            picture.words(last_label + 3, lanes_top - 4, short, angle=-50)
        elif labels and lane != MAIN and width > 2:
            picture.words(x + width + 3, y + 13, short)
    _axis(picture, lanes_top + 3 * LANE, end - begin, scale)


def _axis(picture: Picture, y: float, length: float, scale: float) -> None:
    """Microseconds from the left edge on."""
    tick = next(size for power in range(7) for size in (10**power, 2 * 10**power, 5 * 10**power) if length / size <= 12)
    picture.line([(STEP_LEFT, y), (STEP_LEFT + STEP_WIDTH, y)])
    for count in range(int(length / tick) + 1):
        x = STEP_LEFT + count * tick * scale
        picture.line([(x, y), (x, y + 4)])
        picture.words(x, y + 15, f"{count * tick}{' us' if count == 0 else ''}", "middle")


# ---- all of it ----


def documents() -> dict[Path, str]:
    """Every file this script writes, as it should be."""
    records = read_records(H200)
    cases = [(module.rsplit(".", 1)[-1], case) for module in case_modules() for case in load_cases([module])]
    family_of = {case.op: family for family, case in cases}
    shown = [records[case.key] for _, case in cases if case.key in records]
    written = {
        IMAGES / "roofline.svg": roofline(shown, family_of),
        IMAGES / "decode-layer.svg": decode_layer(_last_layer("csa", batch=1, context=2048)),
    }
    if TIMELINE.exists():
        written[IMAGES / "decode-timeline.svg"] = timeline(json.loads(TIMELINE.read_text(encoding="utf-8")))
    written |= {page: with_numbers(page.read_text(encoding="utf-8"), records) for page in sorted(PAGES.glob("*.md"))}
    return written


def _last_layer(attention: str, batch: int, context: int) -> Record:
    lines = (RESULTS / "nvidia-h200-model.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = {"kind": "layer", "attention": attention, "batch": batch, "context": context}
    return [r for r in map(json.loads, lines) if wanted.items() <= r.items()][-1]


def main(options: argparse.Namespace) -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
