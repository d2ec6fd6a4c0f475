"""Rotary embedding on the last dims of a head: interleaved pairs, fp32 angles, plain or YaRN frequencies.

Kernel: one program per token and HEADS heads. The whole head is read once for its norm (or to be copied), its last
dims are read again from cache as pairs; a token's 32 cosines and sines are computed once per program.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.config import RopeScaling
from dsv4.ops.invariant import accumulator
from dsv4.ops.norm import KERNEL_DTYPES, ROW_CONFIGS, inverse_rms, rms_norm_ref
from dsv4.ops.tl_utils import (
    KernelInputError,
    check_launch,
    cos_sin,
    jit,
    next_power_of_2,
    pdl_trigger,
    pick_config,
    tl,
)


def rope_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """fp32 [rope_dim / 2]. YaRN blends f and f / factor over the dims between two rotation counts; no mscale."""
    freqs = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if scaling is None:
        return freqs

    def dim_of(num_rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return rope_dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rope_dim - 1)
    span = max(high - low, 0.001)  # low == high would divide by zero
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return freqs / scaling.factor * ramp + freqs * (1 - ramp)


def rope_tables(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [T, rope_dim / 2]. The angle is an fp32 product, as published; its cosine is exact to fp32."""
    angles = (positions.to(torch.float32)[:, None] * freqs).double()
    return angles.cos().float(), angles.sin().float()


def rope_ref(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * len(freqs) dims of x [T, ..., K] at positions [T]; `inverse` rotates back. x's dtype."""
    rope_dim = 2 * freqs.shape[0]
    cos, sin = (table.to(accumulator(x)) for table in rope_tables(positions, freqs))
    if inverse:
        sin = -sin
    shape = (x.shape[0], *(1,) * (x.dim() - 2), rope_dim // 2)
    cos, sin = cos.view(shape), sin.view(shape)
    pairs = x[..., -rope_dim:].to(cos.dtype).unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), -1)


def head_norm_rope_ref(q: Tensor, positions: Tensor, freqs: Tensor, eps: float) -> Tensor:
    """Query heads [T, H, d]: RMSNorm of each head without weight, then rope."""
    return rope_ref(rms_norm_ref(q, None, eps), positions, freqs)


@jit
def rotate_pairs(x, cos, sin):
    """fp32 [R, 2 P] of interleaved pairs, cos and sin [P] -> rotated [R, 2 P]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    # stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    rotated_even = even * cos[None, :] - odd * sin[None, :]
    rotated_odd = even * sin[None, :] + odd * cos[None, :]
    return tl.reshape(tl.join(rotated_even, rotated_odd), [x.shape[0], x.shape[1]])


@jit
def rope_cos_sin(position, freqs_ptr, PAIRS: tl.constexpr):
    """A token's cos and sin [PAIRS], exact to fp32; the angle is an fp32 product."""
    return cos_sin(position.to(tl.float32) * tl.load(freqs_ptr + tl.arange(0, PAIRS)))


@jit(do_not_specialize=("num_heads",))
def _rope_kernel(
    x_ptr, out_ptr, positions_ptr, freqs_ptr, num_heads, stride_xt, stride_xh, stride_xk, eps,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    pdl_trigger()
    rope_heads(
        x_ptr, out_ptr, positions_ptr, freqs_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS, num_heads,
        stride_xt, stride_xh, stride_xk, eps, HEAD_DIM, ROPE_DIM, BLOCK, HEADS, HAS_NORM, INVERSE,
    )  # fmt: skip


@jit
def rope_heads(
    x_ptr, out_ptr, positions_ptr, freqs_ptr, token, first_head, num_heads, stride_xt, stride_xh, stride_xk, eps,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token from `first_head` on, normed or not, and roped."""
    heads = first_head + tl.arange(0, HEADS)
    head_mask = (heads < num_heads)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    x_rows = x_ptr + token * stride_xt + heads[:, None] * stride_xh
    out_rows = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM
    x = tl.load(x_rows + cols * stride_xk, mask=head_mask & (cols < HEAD_DIM), other=0.0)
    NOPE_DIM: tl.constexpr = HEAD_DIM - ROPE_DIM
    rope_cols = NOPE_DIM + tl.arange(0, ROPE_DIM)[None, :]
    pairs = tl.load(x_rows + rope_cols * stride_xk, mask=head_mask, other=0.0)

    cos, sin = rope_cos_sin(tl.load(positions_ptr + token), freqs_ptr, ROPE_DIM // 2)
    if INVERSE:
        sin = sin * -1.0  # `-sin` is 0 - sin in Triton, which loses the sign of a zero
    if HAS_NORM:
        # rope_ref(rms_norm_ref(q, None, eps), positions, freqs): the norm is rounded before it is rotated
        scale = inverse_rms(x.to(tl.float32), HEAD_DIM, eps)[:, None]
        x = (x.to(tl.float32) * scale).to(x.dtype)
        pairs = (pairs.to(tl.float32) * scale).to(x.dtype)
    tl.store(out_rows + cols, x, mask=head_mask & (cols < NOPE_DIM))
    rotated = rotate_pairs(pairs.to(tl.float32), cos, sin)
    tl.store(out_rows + rope_cols, rotated.to(x.dtype), mask=head_mask)


def rope(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """See `rope_ref`. bf16, fp16 or fp32, any strides; the result is contiguous and never x itself."""
    return _launch(x, positions, freqs, None, inverse)


def head_norm_rope(q: Tensor, positions: Tensor, freqs: Tensor, eps: float) -> Tensor:
    """See `head_norm_rope_ref`. bf16, fp16 or fp32, any strides; the result is contiguous."""
    return _launch(q, positions, freqs, eps, False)


def _launch(x: Tensor, positions: Tensor, freqs: Tensor, eps: float | None, inverse: bool) -> Tensor:
    """x [T, ..., K]; with `eps` the heads are normalised first."""
    check_launch(x, positions, freqs)
    num_tokens, head_dim, rope_dim = x.shape[0], x.shape[-1], 2 * freqs.shape[0]
    if x.dtype not in KERNEL_DTYPES or freqs.dtype != torch.float32:
        raise KernelInputError(
            f"expected one of {KERNEL_DTYPES} and fp32 frequencies, found {x.dtype} and {freqs.dtype}"
        )
    if x.dim() < 2 or positions.shape != (num_tokens,):
        raise KernelInputError(
            f"expected x [T, ..., K] and positions [T], found {tuple(x.shape)} and {tuple(positions.shape)}"
        )
    if rope_dim > head_dim or rope_dim < 2 or rope_dim != next_power_of_2(rope_dim):
        raise KernelInputError(f"expected a rope dim that is a power of two up to {head_dim}, found {rope_dim}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    heads = x.reshape(num_tokens, -1, head_dim)  # [T, H, K]
    num_heads = heads.shape[1]
    block, config = pick_config(ROW_CONFIGS, head_dim, "the head dim")
    _rope_kernel[(num_tokens, -(-num_heads // config.rows))](
        heads, out, positions.contiguous(), freqs.contiguous(), num_heads, *heads.stride(), eps or 0.0,
        HEAD_DIM=head_dim, ROPE_DIM=rope_dim, BLOCK=block, HEADS=config.rows,
        HAS_NORM=eps is not None, INVERSE=inverse, **config.options,
    )  # fmt: skip
    return out
