"""FP4 with searched scales: for every group the scale whose rounded values lie nearest, not the one that just reaches
the largest value.

A scale below that one cuts off the largest values and rounds all others more finely; one above it can put the group's
values closer to the eight magnitudes E2M1 has. Every candidate is tried, the least squared error wins, ties go to
the usual scale. Groups do not depend on one another, so the result does not depend on how a matrix is cut into pieces.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX, FP4_AMAX_FLOOR, ceil_e8m0, e8m0_to_float
from dsv4.formats.fp4 import e2m1_decode, e2m1_encode, pack_nibbles
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.formats.tensors import QuantFormat, QuantTensor

MXFP4_STEPS = (0, -1)  # exponents besides the usual one: half of it; a quarter never won on trained weights
NVFP4_STEPS = (0, 1, -1, 2, -2, 3, 4, 5, 6)  # E4M3 codes, eight to an octave; 5 puts the largest value at 4
_PIECE_VALUES = 2**22
_LARGEST_E4M3 = 0x7E


def quantize_mxfp4(weight: Tensor, steps: Sequence[int] = MXFP4_STEPS) -> QuantTensor:
    """fp32 [N, K] -> MXFP4. `steps` (0,) is the plain rule of `mxfp4_quantize`."""
    parts = [_mxfp4_rows(rows, steps) for rows in _row_pieces(weight)]
    data, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return QuantTensor(data, scale, QuantFormat.MXFP4)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor, steps: Sequence[int] = NVFP4_STEPS) -> QuantTensor:
    """fp32 [N, K] -> NVFP4 under the given scale of the whole matrix. `steps` (0,) is the rule of `nvfp4_quantize`."""
    parts = [_nvfp4_rows(rows, global_scale, steps) for rows in _row_pieces(weight)]
    data, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return QuantTensor(data, scale.view(torch.float8_e4m3fn), QuantFormat.NVFP4, global_scale)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """fp32 scale of a matrix, or of several that share one, from their largest magnitude."""
    return (amax.float() / (E2M1_MAX * E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)


def cast_to_nvfp4(weight: QuantTensor, top_exponent: int) -> QuantTensor | None:
    """MXFP4 as NVFP4 with the same codes and the same values to the bit; None if the scales span too much.

    `top_exponent`: the largest E8M0 code of this matrix and of those it shares its whole scale with. The whole scale is
    2^(top - 8), so the group scales are powers of two from 2^-9 (E4M3's smallest) to 2^8.
    """
    exponents = weight.scale.to(torch.int32) - top_exponent + 8
    is_used = (weight.data.contiguous().view(torch.int64) & 0x7777777777777777 != 0).unflatten(1, (-1, 2)).any(-1)
    if bool((is_used & (exponents < -9)).any()) or not 127 - 118 <= top_exponent <= 254:
        return None
    scale = torch.exp2(exponents.clamp(-9, 8).float()).repeat_interleave(MXFP4_GROUP // NVFP4_GROUP, 1)
    whole = torch.exp2(torch.tensor(float(top_exponent - 127 - 8)))
    return QuantTensor(weight.data, scale.to(torch.float8_e4m3fn), QuantFormat.NVFP4, whole.to(weight.device))


def _row_pieces(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, _PIECE_VALUES // weight.shape[1]))


def _mxfp4_rows(rows: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    groups = rows.unflatten(-1, (-1, MXFP4_GROUP))
    usual = ceil_e8m0(groups.abs().amax(-1).clamp_min(FP4_AMAX_FLOOR), E2M1_MAX).to(torch.int32)
    codes = [(usual + step).clamp(0, 254).to(torch.uint8) for step in steps]
    return _best(groups, codes, [e8m0_to_float(code) for code in codes])


def _nvfp4_rows(rows: Tensor, global_scale: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    groups = rows.unflatten(-1, (-1, NVFP4_GROUP))
    reach = (groups.abs().amax(-1) / (E2M1_MAX * global_scale)).clamp(max=E4M3_MAX)
    usual = reach.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    codes = [(usual + step).clamp(0, _LARGEST_E4M3).to(torch.uint8) for step in steps]
    return _best(groups, codes, [code.view(torch.float8_e4m3fn).float() * global_scale for code in codes])


def _best(groups: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """groups [N, G, g], candidates [N, G] each -> packed nibbles and the chosen scale codes."""
    least: Tensor | None = None
    for code, scale in zip(codes, scales, strict=True):
        factor = scale.unsqueeze(-1)
        scaled = torch.where(factor > 0, groups / factor, torch.zeros_like(groups)).clamp(-E2M1_MAX, E2M1_MAX)
        nibbles = e2m1_encode(scaled)
        error = (e2m1_decode(nibbles) * factor - groups).square().sum(-1, dtype=torch.float64)
        if least is None:
            least, best_nibbles, best_code = error, nibbles, code
            continue
        is_better = error < least
        least = torch.where(is_better, error, least)
        best_nibbles = torch.where(is_better.unsqueeze(-1), nibbles, best_nibbles)
        best_code = torch.where(is_better, code, best_code)
    return pack_nibbles(best_nibbles.flatten(-2)), best_code
