"""A kernel against its oracle, and against itself on fewer rows: for any op, from its `OpCall` alone.

Results are compared as the values they stand for: codes and cached rows are decoded. Tolerances: testing/numeric.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.row_store import RowStore, decode_rows
from dsv4.formats.rows import RowKind
from dsv4.formats.tensors import QuantActivation
from dsv4.ops import Backend
from dsv4.testing.numeric import CHOICE_LIMITS, KERNEL_LIMITS, KERNEL_LIMITS_OF, bits_of, row_errors
from dsv4.testing.op_call import OpCall, rows_of

_ROW_FORMATS = {RowKind.ENTRY_FP8: "fp8", RowKind.INDEX_FP8: "fp8", RowKind.INDEX_FP4: "fp4"}
_PIECES = (1, 2, 5)  # rows of the first pieces of a batch; the rest is the last one


@dataclass(frozen=True)
class Measure:
    """One number of a comparison and what it may be at most. Not a number fails."""

    what: str
    value: float
    limit: float

    @property
    def is_ok(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class Leaf:
    """One tensor of a result, as values; `format` is how they were stored."""

    what: str
    format: str
    values: Tensor


def compare_with_oracle(call: OpCall, backend: Backend) -> list[Measure]:
    """The kernel first: a buffer that was freed could hold the oracle's answer."""
    kernel_call, oracle_call = call.fresh(), call.fresh()
    found = _leaves(call, kernel_call.run(call.kernel(backend)))
    expected = _leaves(call, oracle_call.run(call.oracle))
    if [leaf.what for leaf in found] != [leaf.what for leaf in expected]:
        return [Measure(f"results {[leaf.what for leaf in found]}", float("nan"), 0.0)]
    return list(_measures(call, found, expected))


def compare_with_pieces(call: OpCall, backend: Backend) -> list[Measure]:
    """The kernel on all rows against the kernel on pieces of them, the last piece first, over one state: elements that
    differ in a bit. Nothing where rows are one, or one another's past."""
    if call.num_rows < 2 or not call.has_independent_rows:
        return []
    kernel = call.kernel(backend)
    whole, state = call.fresh(), call.fresh()
    result, written = whole.run(kernel)
    result = defined_result(whole, result)
    measures = []
    for rows in reversed(pieces_of(call.num_rows)):
        part = state.of_rows(rows)
        piece = defined_result(part, part.run(kernel)[0])
        for what, found, expected in _pairs("result", piece, rows_of(result, rows)):
            measures.append(_bits(f"{what}, rows {rows.start} to {rows.stop - 1}", found, expected))
    for name, expected in written.items():
        for what, left, right in _pairs(name, state.arguments[name], expected):
            measures.append(_bits(what, left, right))
    return measures


def differing_rows(call: OpCall, backend: Backend, cuts: Sequence[slice]) -> list[str]:
    """A line for each cut whose rows, computed alone, are not the bits that they are among all. What is written in
    place is compared once the other rows have been computed as well."""
    kernel, lines = call.kernel(backend), list[str]()
    result, written = call.fresh().run(kernel)
    for cut in cuts:
        state = call.fresh()
        pairs = list(_pairs("result", state.of_rows(cut).run(kernel)[0], rows_of(result, cut)))
        for rest in (slice(0, cut.start), slice(cut.stop, call.num_rows)) if written else ():
            if rest.start < rest.stop:
                state.of_rows(rest).run(kernel)
        for name, expected in written.items():
            pairs += _pairs(name, state.arguments[name], expected)
        for what, found, expected in pairs:
            measure = _bits(what, found, expected)
            if not measure.is_ok:
                rows = f"rows {cut.start} to {cut.stop - 1} of {call.num_rows}"
                lines.append(f"{call.op}: {rows}: {measure.what}: {measure.value:g} of {expected.numel()}")
    return lines


def pieces_of(num_rows: int) -> list[slice]:
    """Rows cut into pieces of 1, 2, 5 and the rest."""
    cuts, start = [], 0
    for size in _PIECES:
        if start + size < num_rows:
            cuts.append(slice(start, start + size))
            start += size
    return [*cuts, slice(start, num_rows)]


# ---- results as values ----


def _leaves(call: OpCall, outcome: tuple[Any, dict[str, Any]]) -> list[Leaf]:
    result, written = outcome
    found = list(_walk("result", defined_result(call, result)))
    for name, value in written.items():
        found += _walk(name, value)
    return found


def defined_result(call: OpCall, result: Any) -> Any:
    """The result without what an op leaves unwritten: parts of experts that are elsewhere."""
    if call.op != "moe_parts":
        return result
    return result.masked_fill((call.arguments["experts"] < 0).unsqueeze(-1), 0.0)


def _walk(what: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, Tensor):
        yield Leaf(what, _format(value), value)
    elif isinstance(value, RowStore):
        yield Leaf(what, _ROW_FORMATS.get(value.format.kind, "bf16"), decode_rows(value))
    elif isinstance(value, QuantActivation):
        yield Leaf(what, "fp8", value.dequantize())
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _walk(f"{what}[{index}]", part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(f"{what}.{field.name}", getattr(value, field.name))


def _format(values: Tensor) -> str:
    if not values.dtype.is_floating_point:
        return "integers"
    return "bf16" if values.dtype == torch.bfloat16 else "fp32"


def _measures(call: OpCall, found: list[Leaf], expected: list[Leaf]) -> Iterator[Measure]:
    agreeing = None  # rows whose choices are the oracle's
    for one, other in zip(found, expected, strict=True):
        if one.values.shape != other.values.shape or one.values.dtype != other.values.dtype:
            yield Measure(f"{one.what}: {one.values.dtype} {tuple(one.values.shape)}", float("nan"), 0.0)
        elif one.format == "integers":
            share, is_same = _different_choices(one.values, other.values)
            yield Measure(f"{one.what}: share of other choices", share, CHOICE_LIMITS.get(call.op, 0.0))
            if call.op in CHOICE_LIMITS and one.values.shape[:1] == (call.num_rows,):
                agreeing = is_same if agreeing is None else agreeing & is_same
    for one, other in zip(found, expected, strict=True):
        if one.format == "integers" or one.values.shape != other.values.shape or not one.values.numel():
            continue
        values, wanted = one.values, other.values
        if agreeing is not None and values.shape[0] == len(agreeing):
            values, wanted = values[agreeing], wanted[agreeing]
        limits = KERNEL_LIMITS_OF.get(call.op, KERNEL_LIMITS[one.format])
        whole, row = _distance(values, wanted)
        yield Measure(f"{one.what}: relative error", whole, limits.whole)
        yield Measure(f"{one.what}: largest error of a row", row, limits.row)


def _different_choices(found: Tensor, expected: Tensor) -> tuple[float, Tensor]:
    """Share of elements that are not among the same row's expected ones, in place or anywhere; rows that are equal."""
    if not found.numel():
        return 0.0, torch.ones(found.shape[:1], dtype=torch.bool, device=found.device)
    rows, wanted = found.reshape(found.shape[0], -1), expected.reshape(found.shape[0], -1)
    is_same = (rows == wanted).all(-1)
    missing = sum(
        int((~torch.isin(rows[index], wanted[index])).sum()) or 1 for index in (~is_same).nonzero().flatten().tolist()
    )
    return missing / rows.numel(), is_same


def _distance(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative L2, and the largest error of a row; infinite where what is no number differs."""
    if not found.numel():
        return 0.0, 0.0
    left, right = found.double(), expected.double()
    is_number = right.isfinite()
    if not torch.equal(left.isfinite(), is_number) or not _same_bits(left[~is_number], right[~is_number]):
        return float("inf"), float("inf")
    left, right = left.masked_fill(~is_number, 0.0), right.masked_fill(~is_number, 0.0)
    scale = right.norm().item()
    whole = (left - right).norm().item() / (scale if scale else 1.0)
    if left.dim() < 2:  # a number a row: no row has a largest value of its own
        left, right = left.reshape(1, -1), right.reshape(1, -1)
    return whole, row_errors(left, right).max().item()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits_of(left), bits_of(right))


# ---- the same bits ----


def _pairs(what: str, found: Any, expected: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors of two equal structures."""
    if isinstance(found, Tensor):
        yield what, found, expected
    elif isinstance(found, tuple):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _pairs(f"{what}[{index}]", one, other)
    elif is_dataclass(found):
        for field in fields(found):
            yield from _pairs(f"{what}.{field.name}", getattr(found, field.name), getattr(expected, field.name))


def _bits(what: str, found: Tensor, expected: Tensor) -> Measure:
    """Elements of which a bit differs."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return Measure(f"{what}: {found.dtype} {tuple(found.shape)}", float("nan"), 0.0)
    return Measure(f"{what}: elements that differ", float((bits_of(found) != bits_of(expected)).sum()), 0.0)


Comparison = Callable[[OpCall, Backend], list[Measure]]
