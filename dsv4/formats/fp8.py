"""E4M3 with a scale per group: activations (1 x N columns) and weights (128 x 128 blocks)."""

import torch
from torch import Tensor

from dsv4.formats.e8m0 import E4M3_MAX, FP8_AMAX_FLOOR, ceil_e8m0, ceil_scale, e8m0_to_float


def fp8_quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [..., K] -> E4M3 codes [..., K] and E8M0 scale codes uint8 [..., K / group], both per row.

    s = 2^ceil(log2(amax / 448)), amax floored at 1e-4; code = round-to-nearest-even(x / s), at most 448.
    """
    codes, scale, _ = fp8_groups(x, group)
    return codes.flatten(-2), scale.view(torch.uint8).squeeze(-1)


def fp8_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """`fp8_quantize` in groups: codes [..., K / group, group], and the scales as E8M0 and fp32 [..., K / group, 1]."""
    if x.shape[-1] % group:
        raise ValueError(f"the last dimension {x.shape[-1]} is not a multiple of the group {group}")
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // group, group)
    scale = ceil_scale(groups.abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_FLOOR), E4M3_MAX)
    factor = scale.float()
    return (groups / factor).to(torch.float8_e4m3fn), scale, factor


def fp8_dequantize(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Inverse of `fp8_quantize` up to rounding, in fp32 (exact: a power of two times three bits)."""
    groups = codes.float().view(*codes.shape[:-1], codes.shape[-1] // group, group)
    return (groups * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def fp8_fake_quantize(x: Tensor, group: int) -> Tensor:
    """Quantise and come back, in the dtype of `x`."""
    return fp8_dequantize(*fp8_quantize(x, group), group).to(x.dtype)


def fp8_block_dequantize(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Weight codes [..., N, K] with a scale per block [..., ceil(N / bn), ceil(K / bk)] -> fp32 [..., N, K].

    The scale is E8M0 (uint8 or torch.float8_e8m0fnu) or FP32, by its dtype.
    """
    factor = scale if scale.dtype == torch.float32 else e8m0_to_float(scale)
    rows, cols = codes.shape[-2:]
    factor = factor.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :cols]
    return codes.float() * factor


def fp8_block_quantize(weight: Tensor, block: tuple[int, int], fp32_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Weight [N, K] -> E4M3 codes and one scale per block: E8M0 codes (uint8), or FP32 amax / 448."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))  # [N/bn, bn, K/bk, bk]
    amax = tiles.abs().amax((1, 3)).clamp_min(FP8_AMAX_FLOOR)
    scale = amax / E4M3_MAX if fp32_scale else ceil_e8m0(amax, E4M3_MAX)
    factor = scale if fp32_scale else e8m0_to_float(scale)
    codes = (tiles / factor[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    # float8 has no strided copy on every build: rearrange the bytes
    codes = codes.view(torch.uint8).flatten(2).flatten(0, 1)[:rows, :cols].contiguous().view(torch.float8_e4m3fn)
    return codes, scale
