"""Straight-through fake quantisation at the published points: forward rounds as `dsv4.formats` does, backward passes.

`on` is a 0-dim bool tensor everywhere, so that switching it on in the middle of training compiles nothing anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.fp4 import mxfp4_fake_quantize
from dsv4.formats.fp8 import fp8_block_dequantize, fp8_block_quantize, fp8_fake_quantize

BLOCK = (128, 128)


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


@torch.no_grad()
def fp8_rows(x: Tensor, group: int) -> Tensor:
    """x [..., K] rounded to E4M3 with one scale per row and `group` columns; fp32."""
    return fp8_fake_quantize(x.float(), group)


@torch.no_grad()
def fp8_blocks(weight: Tensor) -> Tensor:
    """weight [N, K] rounded to E4M3 with one scale per 128 x 128 block; fp32."""
    return fp8_block_dequantize(*fp8_block_quantize(weight.float(), BLOCK), BLOCK)


@torch.no_grad()
def fp4_rows(x: Tensor) -> Tensor:
    """x [..., K] rounded to MXFP4; fp32."""
    return mxfp4_fake_quantize(x.float())


def entry_rows(x: Tensor, rope_dim: int, on: Tensor) -> Tensor:
    """Cache rows: FP8 in groups of 64 on everything but the rope dims."""
    nope = x[..., :-rope_dim]
    return torch.cat((straight_through(nope, fp8_rows(nope, 64), on), x[..., -rope_dim:]), -1)
