"""Checks of one weight: numbers that cannot be, scales that were never set, rows that do nothing.

Every stored byte is read once, in pieces; statistics of quantised weights come from evenly spaced rows. Thresholds lie
far outside what sound checkpoints show: a fault is meant to be one.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.e8m0 import e8m0_to_float
from dsv4.formats.fp4 import unpack_nibbles
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight
from dsv4.loader.names import LogicalTensor, Role
from dsv4.loader.resolve import Source
from dsv4.tools.audit.report import FAULT, Finding, TensorRecord, fault, note

PIECE_BYTES = 32 * 2**20
SAMPLED_ROWS = 256
MAX_MAGNITUDE = 1e3  # of any parameter
MAX_CREST = 1e3  # largest over root mean square of one plain tensor
TOP_GAP, BOTTOM_GAP = 4.0, 10.0  # log2 between neighbouring scales of one matrix
SPARSE_TOP_GAP = 8.0  # the same where a matrix has few blocks
# the same, of scales less what is usual in their row and column, from a distance on; a smaller gap is worth a note
PLACE_GAP, ODD_PLACE_GAP, PLACE_DISTANCE = 2.5, 1.5, 2.5
MIN_PLACES = 4  # rows and columns of scales
RARE = 0.01  # at most this share of a matrix's scales lies beyond such a gap
# share of codes at the largest magnitude: the largest of a group is often there, of a block of 16,384 it is one
MAX_SATURATED = {QuantFormat.FP8_BLOCK: 0.02, QuantFormat.MXFP4: 0.2, QuantFormat.NVFP4: 0.35}
RANDOM_CODES = 0.006  # all 16 nibbles this close to 1 / 16


@dataclass(frozen=True)
class Look:
    """What `look_at` saw of one weight."""

    record: TensorRecord
    findings: list[Finding]
    log_scales: Tensor | None  # fp32, of groups that are not all zero


def look_at(source: Source, weight: Weight, token_ids: frozenset[int] = frozenset()) -> Look:
    """All checks of one weight by itself. `token_ids`: tokens that must have rows of embedding and head."""
    findings: list[Finding] = []
    if isinstance(weight, QuantTensor):
        log_scales = _check_quantised(source, weight, findings)
        sample = sample_rows(weight)
        _check_codes(source, weight, findings)
    else:
        log_scales, sample = None, weight
        _check_plain(source, weight, token_ids, findings)
    rms, largest, is_constant = _measure(sample)
    if math.isfinite(largest) and _is_sound(findings) and source.tensor.role is not Role.TABLE:
        _check_size(source, rms, largest, is_plain=log_scales is None, findings=findings)
    scales = None
    if log_scales is not None and len(log_scales):
        scales = (float(log_scales.min()), float(log_scales.median()), float(log_scales.max()))
    whole, codes = digests(weight)
    record = TensorRecord(
        source.tensor.name, str(source.format.quant or source.format.dtype.lower()), source.tensor.shape, source.nbytes,
        whole, rms, largest, is_constant, _is_sound(findings), scales, codes,
    )  # fmt: skip
    return Look(record, findings, log_scales)


def _is_sound(findings: list[Finding]) -> bool:
    return all(finding.severity != FAULT for finding in findings)


def sample_rows(weight: QuantTensor) -> Tensor:
    """fp32 values of evenly spaced rows, all rows of a small weight."""
    rows = weight.data.shape[0]
    return take_rows(weight, torch.arange(0, rows, max(1, rows // SAMPLED_ROWS))).dequantize()


def take_rows(weight: QuantTensor, rows: Tensor) -> QuantTensor:
    """Some rows of a weight, as a weight; FP8 blocks become one row high."""
    is_block = weight.format is QuantFormat.FP8_BLOCK
    scale_rows = rows // weight.block[0] if is_block else rows
    block = (1, weight.block[1]) if is_block else weight.block
    return QuantTensor(
        _gather(weight.data, rows), _gather(weight.scale, scale_rows), weight.format, weight.global_scale, block
    )


def _gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """float8 has no indexing on every build: take the bytes."""
    is_byte = tensor.element_size() == 1
    return tensor.view(torch.uint8)[rows].view(tensor.dtype) if is_byte else tensor[rows]


def digests(weight: Weight) -> tuple[str, str]:
    """Of all its bytes, and of the data alone: a copy may have other scales. The second is empty for plain weights."""
    state, codes = hashlib.sha256(), ""
    for part in (weight,) if isinstance(weight, Tensor) else weight.parts:
        state.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
        codes = codes or state.copy().hexdigest()
    return state.hexdigest(), codes if isinstance(weight, QuantTensor) else ""


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Rows in pieces of about `PIECE_BYTES`."""
    if tensor.ndim == 0:
        yield tensor.reshape(1)
        return
    row_bytes = max(1, tensor[:1].numel() * tensor.element_size())
    yield from tensor.split(max(1, PIECE_BYTES // row_bytes))


def _measure(values: Tensor) -> tuple[float, float, bool]:
    """Root mean square, largest magnitude, and whether all values are one."""
    total, largest, is_constant = 0.0, 0.0, True
    first = values.flatten()[0]
    for piece in pieces(values):
        wide = piece.float()
        total += float(wide.square().sum(dtype=torch.float64))
        largest = max(largest, float(wide.abs().max())) if not math.isnan(largest) else largest
        is_constant = is_constant and bool((piece == first).all())
    return math.sqrt(total / values.numel()), largest, is_constant


# ---- plain tensors ----


def _check_plain(source: Source, values: Tensor, token_ids: frozenset[int], findings: list[Finding]) -> None:
    name = source.data
    if source.tensor.role is Role.TABLE:
        return
    num_nan = num_inf = start = 0
    dead: list[int] = []
    for piece in pieces(values):
        wide = piece.float()
        num_nan += int(wide.isnan().sum())
        num_inf += int(wide.isinf().sum())
        if values.ndim > 1:
            dead += (start + (piece == 0).flatten(1).all(1).nonzero().flatten()).tolist()
        start += len(piece)
    if num_nan:
        findings.append(fault("not a number", name, f"{num_nan} of {values.numel()} values are NaN"))
    if num_inf:
        findings.append(fault("infinite", name, f"{num_inf} of {values.numel()} values are infinite"))
    if dead and source.tensor.name in ("embed.weight", "head.weight") and len(dead) < len(values):
        _report_dead_tokens(name, dead, token_ids, findings)
    elif dead:
        _report_dead(source.tensor, name, len(dead), values.shape[0], findings)
    elif values.ndim == 1 and len(values) > 1 and not values.any() and _must_act(source.tensor):
        findings.append(fault("all zero", name, f"all {len(values)} values are zero"))


def _report_dead_tokens(name: str, dead: list[int], token_ids: frozenset[int], findings: list[Finding]) -> None:
    """A vocabulary may be padded; a token that the tokenizer writes needs a row."""
    written = [token for token in dead if token in token_ids]
    if written:
        listed = ", ".join(map(str, written[:5])) + (", ..." if len(written) > 5 else "")
        findings.append(fault("dead rows", name, f"tokens {listed} of the tokenizer have a row of zeros"))
    if len(dead) > len(written):
        findings.append(
            note("dead rows", name, f"{len(dead) - len(written)} tokens that the tokenizer does not write are zero")
        )


def _must_act(tensor: LogicalTensor) -> bool:
    """Vectors that multiply; sinks, biases and bases may well be zero."""
    return tensor.role is Role.PLAIN or tensor.name.endswith("_scale")


def _report_dead(tensor: LogicalTensor, name: str, dead: int, rows: int, findings: list[Finding]) -> None:
    if tensor.name.endswith(".ape"):  # added to, not multiplied
        return
    if dead == rows:
        findings.append(fault("all zero", name, f"all {rows} rows are zero"))
    else:
        findings.append(fault("dead rows", name, f"{dead} of {rows} rows are zero"))


def _check_size(source: Source, rms: float, largest: float, is_plain: bool, findings: list[Finding]) -> None:
    if largest > MAX_MAGNITUDE:
        findings.append(fault("absurd values", source.data, f"the largest magnitude is {largest:.3g}"))
    elif is_plain and len(source.tensor.shape) > 1 and largest > MAX_CREST * rms:
        text = f"one value of {largest:.3g} among values of root mean square {rms:.3g}"
        findings.append(fault("absurd values", source.data, text))


# ---- quantised weights ----


def _check_quantised(source: Source, weight: QuantTensor, findings: list[Finding]) -> Tensor:
    """Scales and dead rows -> log2 of the scales of groups that are not all zero, the whole matrix's scale included."""
    assert source.scale is not None
    is_used = _used_groups(weight)
    if weight.format is QuantFormat.FP8_BLOCK:
        dead = sum(int(((piece & 0x7F).amax(1) == 0).sum()) for piece in pieces(weight.data.view(torch.uint8)))
    else:
        dead = int((~is_used.any(1)).sum())
    if dead:
        _report_dead(source.tensor, source.data, dead, weight.shape[0], findings)
    scale = weight.scale
    values = e8m0_to_float(scale) if scale.dtype == torch.uint8 else scale.float()
    log_whole = 0.0
    if weight.global_scale is not None:
        whole = float(weight.global_scale)
        if not math.isfinite(whole) or whole <= 0:
            assert source.global_scale is not None
            findings.append(fault("bad global scale", source.global_scale, f"the scale of the whole matrix is {whole}"))
            return torch.empty(0)
        log_whole = math.log2(whole)
    bad = ~values.isfinite()
    if bool(bad.any()):
        findings.append(fault("scale not finite", source.scale, f"{_where(bad)} NaN or infinite"))
    unset = (scale == 0 if scale.dtype == torch.uint8 else values <= 0) & is_used
    if bool(unset.any()):
        kind = "unset scale" if scale.dtype == torch.uint8 else "zero scale"
        findings.append(fault(kind, source.scale, f"{_where(unset)} zero or unset, but the codes are not"))
    good = is_used & ~bad & (values > 0)
    if scale.dtype == torch.uint8:
        good &= scale > 0
    log_scales = values[good].log2() + log_whole
    if not _check_gaps(source.scale, log_scales, findings):
        _check_places(source.scale, values.log2().masked_fill(~good, math.nan), findings)
    return log_scales


def _where(mask: Tensor) -> str:
    found = mask.nonzero()
    places = ", ".join(str(place.tolist()) for place in found[:3])
    verb = "is" if len(found) == 1 else "are"
    return f"{len(found)} of {mask.numel()} scales ({places}{', ...' if len(found) > 3 else ''}) {verb}"


def _used_groups(weight: QuantTensor) -> Tensor:
    """bool, shaped like the scales: some code of the group is not zero."""
    data = weight.data.view(torch.uint8)
    rows, width = data.shape
    if weight.format is QuantFormat.FP8_BLOCK:
        block_rows, block_cols = weight.block
        padded = torch.nn.functional.pad(data & 0x7F, (0, -width % block_cols, 0, -rows % block_rows))
        return padded.unflatten(0, (-1, block_rows)).unflatten(2, (-1, block_cols)).amax((1, 3)) != 0
    group_bytes = width // weight.scale.shape[1]  # 8 (NVFP4) or 16 (MXFP4)
    words = data.contiguous().view(torch.int64) & 0x7777777777777777
    return (words != 0).view(rows, -1, group_bytes // 8).any(-1)


def _check_gaps(name: str, log_scales: Tensor, findings: list[Finding]) -> bool:
    """A few scales far from all others of their matrix: damaged or never set. Whether there are any."""
    count = len(log_scales)
    levels, counts = log_scales.unique(return_counts=True)  # ascending
    if len(levels) < 2:
        return False
    gaps = levels[1:] - levels[:-1]
    few = max(1, int(RARE * count))
    above = counts.flip(0).cumsum(0).flip(0)[1:]  # how many lie above each gap
    top = (gaps >= (TOP_GAP if count >= 8 else SPARSE_TOP_GAP)) & (above <= few) & (above * 2 <= count)
    below = counts.cumsum(0)[:-1]
    bottom = (gaps >= BOTTOM_GAP) & (below <= few) & (below * 2 <= count)
    for kind, mask, number in (("far above", top, above), ("far below", bottom, below)):
        if bool(mask.any()):
            place = int(mask.nonzero()[0])
            text = f"{int(number[place])} of {count} scales lie {kind} the others, by 2^{float(gaps[place]):.1f}"
            findings.append(fault("scale outlier", name, text))
    return bool((top | bottom).any())


def _check_places(name: str, log_scales: Tensor, findings: list[Finding]) -> None:
    """Few scales [rows, groups] far above what is usual in their row and column, though not above the whole matrix."""
    if log_scales.ndim != 2 or min(log_scales.shape) < MIN_PLACES:
        return
    rest = log_scales - log_scales.nanmedian(1, keepdim=True).values
    rest = (rest - rest.nanmedian(0, keepdim=True).values).nan_to_num(0.0)
    levels, counts = rest.flatten().unique(return_counts=True)
    gaps, above = levels[1:] - levels[:-1], counts.flip(0).cumsum(0).flip(0)[1:]
    is_far = (gaps >= ODD_PLACE_GAP) & (levels[1:] >= PLACE_DISTANCE) & (above <= max(1, int(RARE * rest.numel())))
    if not bool(is_far.any()):
        return
    gap = int(is_far.nonzero()[0])
    places = (rest >= levels[gap + 1]).nonzero()
    report = fault if float(gaps[gap]) >= PLACE_GAP else note
    listed = ", ".join(str(place.tolist()) for place in places[:3])
    text = f"{len(places)} of {rest.numel()} scales ({listed}) are 2^{float(levels[gap + 1]):.1f} above row and column"
    findings.append(report("scale outlier", name, text))


def _check_codes(source: Source, weight: QuantTensor, findings: list[Finding]) -> None:
    data = weight.data.view(torch.uint8)
    if weight.format is QuantFormat.FP8_BLOCK:
        num_nan = sum(int(((piece & 0x7F) == 0x7F).sum()) for piece in pieces(data))
        if num_nan:
            findings.append(fault("not a number", source.data, f"{num_nan} of {data.numel()} codes are NaN"))
        saturated = sum(int(((piece & 0x7F) == 0x7E).sum()) for piece in pieces(data)) / data.numel()
    else:
        rows = data[:: max(1, data.shape[0] // SAMPLED_ROWS)]
        shares = torch.bincount(unpack_nibbles(rows).flatten(), minlength=16) / (2 * rows.numel())
        if float((shares - 1 / 16).abs().max()) < RANDOM_CODES:
            findings.append(fault("random codes", source.data, "all sixteen codes are equally frequent"))
            return
        saturated = float(shares[7] + shares[15])
    if saturated > MAX_SATURATED[weight.format]:
        text = f"{100 * saturated:.1f} % of the codes are at the largest magnitude: scales too small"
        findings.append(fault("saturated", source.data, text))
