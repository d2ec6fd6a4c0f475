"""Straight-through fake quantisation at the published points: forward rounds as `dsv4.formats` does, backward passes.

Written with operations that torch.compile fuses; the tests compare every function bit for bit with `dsv4.formats`.
`on` is a 0-dim bool tensor everywhere, so that switching it on in the middle of training compiles nothing anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0
FP8_AMAX_FLOOR, FP4_AMAX_FLOOR = 1e-4, 6.0 * 2.0**-126


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounded: Tensor, on: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.where(on, rounded, x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return gradient, None, None


def straight_through(x: Tensor, rounded: Tensor, on: Tensor) -> Tensor:
    """`rounded` where `on`, else x; the gradient is x's own in both cases."""
    return _StraightThrough.apply(x, rounded.to(x.dtype), on)  # type: ignore[no-any-return]


def power_of_two_scale(amax: Tensor, max_code: float) -> Tensor:
    """Smallest power of two s with amax / max_code <= s, from the fp32 bits."""
    bits = (amax / max_code).view(torch.int32)
    code = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (code << 23).view(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """fp32 in [-6, 6] -> nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code."""
    size = x.abs()
    coarse = torch.where(size < 4, torch.round(size), torch.round(size * 0.5) * 2)
    rounded = torch.where(size < 2, torch.round(size * 2) * 0.5, coarse)
    return torch.copysign(rounded, x)


@torch.no_grad()
def fp8_rows(x: Tensor, group: int) -> Tensor:
    """x [..., K] rounded to E4M3 with one scale per row and `group` columns; fp32."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = power_of_two_scale(groups.abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_FLOOR), E4M3_MAX)
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


@torch.no_grad()
def fp8_blocks(weight: Tensor, block: int = 128) -> Tensor:
    """weight [N, K] rounded to E4M3 with one scale per 128 x 128 block; fp32."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % block, 0, -rows % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scale = power_of_two_scale(tiles.abs().amax((1, 3), keepdim=True).clamp_min(FP8_AMAX_FLOOR), E4M3_MAX)
    codes = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(2).flatten(0, 1)[:rows, :cols]


@torch.no_grad()
def fp4_rows(x: Tensor, group: int = 32) -> Tensor:
    """x [..., K] rounded to MXFP4; fp32."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = power_of_two_scale(groups.abs().amax(-1, keepdim=True).clamp_min(FP4_AMAX_FLOOR), E2M1_MAX)
    return (round_e2m1((groups / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2)


def entry_rows(x: Tensor, rope_dim: int, on: Tensor) -> Tensor:
    """Cache rows: FP8 in groups of 64 on everything but the rope dims."""
    nope = x[..., :-rope_dim]
    return torch.cat((straight_through(nope, fp8_rows(nope, 64), on), x[..., -rope_dim:]), -1)
