"""In which order a compiled kernel adds up, read off its TTGIR: for comparing two forms of one op without a GPU.

`tl.sum` leaves its order to the compiler: first the values a thread holds, in the order of its registers, then those
of lanes, then of warps. So the order follows from the register layout of the operand, and a layout follows from the
tile, the number of warps and whatever else the compiler shares it with. Here a layout becomes the tree of additions
along the reduced axis, whose digest two forms must have in common. A sum of two numbers has no order, and zeros at the
end of a tile change nothing but the tree.

Products name the instruction, and how many neighbouring columns a thread takes of either operand: in products of
mma.sync that decides which sixteen columns are added at once (ops/lib/maths.py).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dsv4.errors import Dsv4Error

PACKAGE = Path(__file__).parents[2] / "dsv4"


class LayoutError(Dsv4Error, ValueError):
    """A layout that this module cannot read."""


class Order(NamedTuple):
    """One sum or product: the function of the package it stands in, what kind of it, and in which order it adds."""

    where: str
    kind: str
    order: str


class Bases(NamedTuple):
    """A linear layout: where each bit of a register's, a lane's and a warp's number leads, as one vector of indices."""

    register: list[tuple[int, ...]]
    lane: list[tuple[int, ...]]
    warp: list[tuple[int, ...]]

    def without(self, dim: int) -> Bases:
        """Of the tensor that lacks a dimension. Registers that then hold the same value are one."""

        def cut(bases: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
            return [basis[:dim] + basis[dim + 1 :] for basis in bases]

        return Bases([basis for basis in cut(self.register) if any(basis)], cut(self.lane), cut(self.warp))


def orders_of(ttgir: str) -> list[Order]:
    """Floating sums and products of a kernel, as they stand in its text."""
    module = _Module(ttgir)
    return [*module.sums(), *module.products()]


class _Module:
    def __init__(self, text: str) -> None:
        self.text = text
        self.layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", text, re.MULTILINE))
        self.places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def sums(self) -> Iterator[Order]:
        # "tt.reduce"(%x) <{axis = 1 : i32}> ({ ... arith.addf ... }) : (tensor<8x512xf32, #blocked>) -> ... loc(#loc7)
        pattern = re.compile(
            r'"tt\.reduce"\([^)]*\) <\{axis = (\d+).*?\}> \(\{(.*?)\}\) : '
            r"\(tensor<((?:\d+x)+)(\w+), (#[^\n]*)>\) -> [^\n]*? loc\(([^\n]*)\)$",
            re.DOTALL | re.MULTILINE,
        )
        for match in pattern.finditer(self.text):
            axis, body, lengths, dtype, layout, place = match.groups()
            if "arith.addf" in body:
                shape = tuple(map(int, lengths.rstrip("x").split("x")))
                yield Order(self._where(place), f"sum of {dtype}", tree_of(self._spelled_out(layout), shape, int(axis)))

    def products(self) -> Iterator[Order]:
        pattern = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot) .*? : (.*) -> (tensor<.*>) loc\((.*)\)$", re.MULTILINE)
        for match in pattern.finditer(self.text):
            operands, result, place = match.groups()
            mma = re.search(r"versionMajor = (\d)", self._spelled_out(result))
            widths = re.findall(r"kWidth = (\d+)", self._spelled_out(operands))
            dtype = re.findall(r"x([a-z]\w*),", operands)
            version, of = mma[1] if mma else "?", dtype[0] if dtype else "?"
            order = f"mma v{version} of {of}, columns {'/'.join(widths) or 'shared'}"
            yield Order(self._where(place), "product", order)

    def _spelled_out(self, layout: str) -> str:
        return re.sub(r"#\w+", lambda name: self.layouts.get(name[0], name[0]), layout)

    def _where(self, place: str) -> str:
        """The innermost function of this package, by the chain of calls that a location is."""
        place = self.places.get(place, place)
        if match := re.fullmatch(r'"([^"]+)":(\d+):\d+', place):
            path = Path(match[1])
            return _function_at(path, int(match[2])) if path.is_relative_to(PACKAGE) else ""
        if match := re.fullmatch(r"callsite\((#loc\d*|.*?) at (.*)\)", place):
            return self._where(match[1]) or self._where(match[2])
        if match := re.fullmatch(r'"[^"]*"\((.*)\)', place):
            return self._where(match[1])
        return ""


@cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [(node.lineno, node.end_lineno or node.lineno, node.name) for node in found]


def _function_at(path: Path, line: int) -> str:
    inside = [(first, name) for first, last, name in _functions(path) if first <= line <= last]
    return f"{path.stem}.{max(inside)[1]}" if inside else f"{path.stem}:{line}"


# ---- layouts ----


def bases_of(layout: str, shape: tuple[int, ...]) -> Bases:
    """A layout, its aliases spelled out, as bases for a tensor of this shape."""
    if match := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout):
        dim = int(match[1])
        return bases_of(match[2], (*shape[:dim], 1, *shape[dim:])).without(dim)
    if layout.startswith("#ttg.blocked"):
        return _of_blocked(layout, shape)
    if layout.startswith("#ttg.linear"):
        parts = (_numbers(layout, name) for name in ("register", "lane", "warp"))
        return Bases(*([_inside(tuple(basis), shape) for basis in part] for part in parts))
    if layout.startswith("#ttg.nvidia_mma"):
        return _of_mma(layout, shape)
    raise LayoutError(f"expected a blocked, linear, sliced or mma layout, found {layout}")


def _numbers(layout: str, name: str) -> list[list[int]]:
    match = re.search(rf"\b{name} = (\[.*?\])(?:, [a-z]|\}})", layout)
    if match is None:
        raise LayoutError(f"expected {name} in {layout}")
    return json.loads(match[1])


def _inside(basis: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """What does not fit the tensor is a copy of what does."""
    return tuple(value if value < length else 0 for value, length in zip(basis, shape, strict=True))


class _Builder:
    """Bases from the fastest on, as each dimension is filled."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.reached = shape, [1] * len(shape)
        self.bases = Bases([], [], [])

    def add(self, to: list[tuple[int, ...]], dim: int, count: int) -> None:
        while count > 1:
            basis = tuple(self.reached[dim] * (other == dim) for other in range(len(self.shape)))
            to.append(_inside(basis, self.shape))
            self.reached[dim] *= 2
            count //= 2

    def finish(self, order: list[int]) -> Bases:
        """A tensor larger than the layout repeats it in more registers."""
        for dim in order:
            self.add(self.bases.register, dim, max(self.shape[dim] // self.reached[dim], 1))
        kept = [basis for basis in self.bases.register if any(basis)]
        return self.bases._replace(register=kept)


def _of_blocked(layout: str, shape: tuple[int, ...]) -> Bases:
    def numbers(name: str) -> list[int]:
        return _numbers(layout, name)  # type: ignore[return-value]

    order, builder = numbers("order"), _Builder(shape)
    parts = (
        ("sizePerThread", builder.bases.register), ("threadsPerWarp", builder.bases.lane),
        ("warpsPerCTA", builder.bases.warp),
    )  # fmt: skip
    for name, to in parts:
        counts = numbers(name)
        for dim in order:
            builder.add(to, dim, counts[dim])
    return builder.finish(order)


def _of_mma(layout: str, shape: tuple[int, ...]) -> Bases:
    """The accumulator of mma.sync (16 x 8) or of a warp group (four times 16 rows)."""
    instruction, warps = _numbers(layout, "instrShape"), _numbers(layout, "warpsPerCTA")
    major = re.search(r"versionMajor = (\d)", layout)
    columns: int = instruction[1] if major is not None and major[1] == "3" else 8  # type: ignore[assignment]
    rows, cols = len(shape) - 2, len(shape) - 1
    builder = _Builder(shape)
    register, lane, warp = builder.bases
    builder.add(register, cols, 2)
    builder.add(lane, cols, 4)
    builder.add(lane, rows, 8)
    builder.add(register, rows, 2)
    builder.add(register, cols, columns // 8)
    for dim in (rows, cols):
        builder.add(warp, dim, warps[dim])  # type: ignore[arg-type]
    return builder.finish([cols, rows])


# ---- trees ----


def tree_of(layout: str, shape: tuple[int, ...], axis: int) -> str:
    """A name for the tree of additions of a sum along `axis`: the number of values, and a digest of their order."""
    bases = bases_of(layout, shape)
    offsets = [0]
    for basis in bases.register:
        offsets += [offset + _along(basis, axis) for offset in offsets] if _is_along(basis, axis) else []
    values = [_sum(offsets, base) for base in _combinations(_bits(bases.lane, axis) + _bits(bases.warp, axis))]
    # lanes that are far apart first, then warps
    num_lanes = 1 << len(_bits(bases.lane, axis))
    rows = [values[start : start + num_lanes] for start in range(0, len(values), num_lanes)]
    total = _butterfly([_butterfly(row) for row in rows])
    return f"{shape[axis]}:{total & 0xFFFFFFFFFFFF:012x}"


def _is_along(basis: tuple[int, ...], axis: int) -> bool:
    return any(basis) and not any(value for dim, value in enumerate(basis) if dim != axis)


def _along(basis: tuple[int, ...], axis: int) -> int:
    return basis[axis]


def _bits(bases: list[tuple[int, ...]], axis: int) -> list[int]:
    return [_along(basis, axis) for basis in bases if _is_along(basis, axis)]


def _combinations(bits: list[int]) -> list[int]:
    found = [0]
    for bit in bits:
        found += [one + bit for one in found]
    return found


def _sum(offsets: list[int], base: int) -> int:
    total = hash((base + offsets[0],))
    for offset in offsets[1:]:
        total = _pair(total, hash((base + offset,)))
    return total


def _butterfly(values: list[int]) -> int:
    while len(values) > 1:
        half = len(values) // 2
        values = [_pair(left, right) for left, right in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _pair(left: int, right: int) -> int:
    """Of two numbers the order does not matter."""
    return hash((min(left, right), max(left, right)))
