"""Rotary embedding on the last dims of a head, and the window ring.

Rotary embedding: interleaved pairs, fp32 angles, plain or YaRN frequencies. The ring holds one K=V row per token,
normed, roped, quantised, written at position % ring_len.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.config import RopeScaling
from dsv4.formats.row_store import RowStore, encode_rows
from dsv4.formats.rows import RowFormat
from dsv4.ops.lib.invariant import accumulator
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.norm import rms_norm_ref
from dsv4.ops.rows.history import last_writers


def rope_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """fp32 [rope_dim / 2]. YaRN blends f and f / factor over the dims between two rotation counts; no mscale."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    freqs = 1.0 / (theta ** exponents.double()).float()  # an fp32 power depends on the machine
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
    angles = (positions.float().unsqueeze(-1) * freqs).double()
    return angles.cos().float(), angles.sin().float()


class Turn(NamedTuple):
    """What rope multiplies pairs of dims with at some positions: cos [T, 1, rope_dim / 2, 1]; (-sin, sin) [..., 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, freqs: Tensor) -> Turn:
        cos, sin = rope_tables(positions, freqs)
        return cls(cos[:, None, :, None], torch.stack((-sin, sin), -1).unsqueeze(1))

    @classmethod
    def of_batch(cls, batch: TokenBatch, freqs: Tensor) -> Turn:
        """That of the batch's positions, which all its layers share."""
        made: tuple[Turn, Tensor] = batch.once(("turn", id(freqs)), lambda: (cls.of(batch.positions, freqs), freqs))
        return made[0]


def rope_ref(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2 * len(freqs) dims of x [T, ..., K] at positions [T]; `inverse` rotates back. x's dtype."""
    return rotate(x, Turn.of(positions, freqs), inverse)


def rotate(x: Tensor, turn: Turn, inverse: bool = False) -> Tensor:
    """`rope_ref` with what its positions and frequencies come to."""
    rope_dim, sin = 2 * turn.cos.shape[-2], -turn.sin if inverse else turn.sin
    plain, turned = x.split_with_sizes((x.shape[-1] - rope_dim, rope_dim), -1)
    pairs = turned.to(accumulator(x)).reshape(x.shape[0], math.prod(x.shape[1:-1]), rope_dim // 2, 2)
    # even * cos - odd * sin, odd * cos + even * sin
    rotated = pairs * turn.cos + pairs.flip(-1) * sin
    return torch.cat((plain, rotated.view(turned.shape).to(x.dtype)), -1)


def window_rows_ref(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat
) -> RowStore:
    """kv [T, d] (the raw projection) -> this batch's encoded rows [T]: RMSNorm, rope at each position, encode."""
    return encode_rows(rope_ref(rms_norm_ref(kv, norm_weight, eps), positions, freqs), row_format)


@waits_for_device
def append_swa_ref(rows: RowStore, window: WindowView, batch: TokenBatch) -> None:
    """Write the rows [T] into the ring, in place. Of tokens that share a ring row the latest wins.

    Padding writes nothing. Comes after attention: a chunk may be longer than the ring, and its first tokens still need
    the rows it replaces.
    """
    writers, where = last_writers(batch, window.ring_len)
    window.rows[where] = rows[(writers,)]
    window.positions.index_put_(where, batch.positions[writers].to(torch.int32))
