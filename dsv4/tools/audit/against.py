"""One checkpoint against another: a quantisation and its source, or a copy and its original, weight by weight.

Between two formats every stored code is held against the nearest code of the source's value under the stored scale. A
quantiser that rounds to nearest leaves none elsewhere; a handful elsewhere is damage, many are another way of rounding.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX
from dsv4.formats.fp4 import e2m1_decode, e2m1_encode
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight
from dsv4.tools.audit.report import Comparison, Finding, fault, note
from dsv4.tools.audit.tensors import digests, take_rows

# relative error (Frobenius) of a weight rounded to a format: Gaussian weights give 0.12, 0.095, 0.027 and 0.0017
MOST_ERROR = {QuantFormat.MXFP4: 0.25, QuantFormat.NVFP4: 0.2, QuantFormat.FP8_BLOCK: 0.08, None: 0.01}
_COARSENESS = {None: 0, QuantFormat.FP8_BLOCK: 1, QuantFormat.NVFP4: 2, QuantFormat.MXFP4: 3}
MOST_DAMAGED = 0.001  # share of codes: beyond it, the quantiser rounds in another way
TIE = 1e-3  # of a step: two codes are equally near
_PIECE_VALUES = 2**22


def compare(name: str, weight: Weight, other: Weight) -> tuple[Comparison, list[Finding]]:
    """`weight` of the audited checkpoint, `other` of the one it is held against."""
    if tuple(weight.shape) != tuple(other.shape):
        text = f"is {list(weight.shape)}, in the other checkpoint {list(other.shape)}"
        return Comparison(name, math.inf), [fault("differs", name, text)]
    is_same_kind = _format(weight) == _format(other) and _dtypes(weight) == _dtypes(other)
    if is_same_kind and digests(weight) == digests(other):
        return Comparison(name, 0.0), []
    error, moved, place = _measure(weight, other)
    if is_same_kind:
        where = "" if place is None else f", first at {place}"
        return Comparison(name, error, moved), [
            fault("differs", name, f"the same format, other bytes{where}; relative error {error:.2g}")
        ]
    findings = []
    coarse = max(_format(weight), _format(other), key=_COARSENESS.__getitem__)
    if not error <= MOST_ERROR[coarse]:
        text = f"relative error {error:.3g}; rounding to {coarse or 'bf16'} makes less than {MOST_ERROR[coarse]}"
        findings.append(fault("far from the other", name, text))
    elif moved and moved <= max(4, MOST_DAMAGED * math.prod(weight.shape)):
        text = f"{moved} codes are not the nearest to the other checkpoint's values, first at {place}"
        findings.append(fault("codes moved", name, text))
    elif moved:
        text = f"{100 * moved / math.prod(weight.shape):.1f} % of the codes are not the nearest: another rounding rule"
        findings.append(note("rounding", name, text))
    return Comparison(name, error, moved), findings


def compare_digests(units: Mapping[str, str], before: Mapping[str, str]) -> list[Finding]:
    """Against an earlier audit's records: which weights have other bytes now."""
    findings = [
        fault("missing", name, "the earlier audit has it, this checkpoint does not")
        for name in before
        if name not in units
    ]
    for name, digest in units.items():
        if name not in before:
            findings.append(fault("unexpected", name, "the earlier audit does not have it"))
        elif before[name] != digest:
            findings.append(fault("differs", name, "other bytes than at the earlier audit"))
    return findings


def _format(weight: Weight) -> QuantFormat | None:
    return weight.format if isinstance(weight, QuantTensor) else None


def _dtypes(weight: Weight) -> tuple[torch.dtype, ...]:
    return (weight.data.dtype, weight.scale.dtype) if isinstance(weight, QuantTensor) else (weight.dtype,)


def _measure(weight: Weight, other: Weight) -> tuple[float, int, list[int] | None]:
    """Relative error, codes that are not nearest (or, in one format, values that differ), and the first such place."""
    coarse_is_weight = _COARSENESS[_format(weight)] >= _COARSENESS[_format(other)]
    coarse, fine = (weight, other) if coarse_is_weight else (other, weight)
    is_same = _format(weight) == _format(other)
    has_source = isinstance(coarse, QuantTensor) and _format(fine) in (None, QuantFormat.FP8_BLOCK)
    wrong = total = 0.0
    moved, place = 0, None
    num_rows = weight.shape[0] if len(weight.shape) > 1 else 1
    step = max(1, _PIECE_VALUES // max(1, math.prod(weight.shape) // num_rows))
    for start in range(0, num_rows, step):
        rows = torch.arange(start, min(start + step, num_rows))
        ours, theirs = _values(coarse, rows), _values(fine, rows)
        wrong += float((ours - theirs).square().sum(dtype=torch.float64))
        total += float(theirs.square().sum(dtype=torch.float64))
        if is_same:
            is_moved = ours != theirs
        elif has_source:
            assert isinstance(coarse, QuantTensor)
            is_moved = _is_moved(coarse, rows, theirs)
        else:  # two 4-bit formats: neither was rounded from the other
            continue
        moved += int(is_moved.sum())
        if place is None and bool(is_moved.any()):
            place = is_moved.nonzero()[0].tolist()
            place[0] += start
    return math.sqrt(wrong / total) if total else (0.0 if not wrong else math.inf), moved, place


def _values(weight: Weight, rows: Tensor) -> Tensor:
    if isinstance(weight, QuantTensor):
        return take_rows(weight, rows).dequantize()
    return weight.float().reshape(1, -1) if weight.ndim < 2 else weight[rows].float()


def _is_moved(weight: QuantTensor, rows: Tensor, values: Tensor) -> Tensor:
    """bool [rows, K]: under the stored scale, another code is clearly nearer to `values` than the stored one."""
    part = take_rows(weight, rows)
    stored = part.dequantize()
    unit = QuantTensor(_ones_like(part), part.scale, part.format, part.global_scale, part.block).dequantize()
    scaled = values / unit
    if part.format is QuantFormat.FP8_BLOCK:
        nearest = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    else:
        nearest = e2m1_decode(e2m1_encode(scaled.clamp(-E2M1_MAX, E2M1_MAX)))
    found = stored / unit
    return (found - scaled).abs() > (nearest - scaled).abs() * (1 + TIE) + TIE * found.abs().clamp_min(2**-6)


def _ones_like(weight: QuantTensor) -> Tensor:
    """Codes of 1.0 everywhere."""
    if weight.format is QuantFormat.FP8_BLOCK:
        return torch.ones(weight.data.shape).to(torch.float8_e4m3fn)
    return torch.full_like(weight.data, 0x22)  # E2M1 code 2 is 1.0
