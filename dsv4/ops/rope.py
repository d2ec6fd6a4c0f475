"""Rotary embedding on the last dims of a head: interleaved pairs, fp32 angles, plain or YaRN frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.config import RopeScaling
from dsv4.ops.invariant import accumulator
from dsv4.ops.norm import rms_norm_ref


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
