"""The window ring: one K=V row per token, normed, roped, quantised, written at position % ring_len."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.formats.row_store import RowStore, encode_rows
from dsv4.formats.rows import RowFormat
from dsv4.ops.history import last_writers
from dsv4.ops.norm import rms_norm_ref
from dsv4.ops.rope import rope_ref


def window_rows_ref(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat
) -> RowStore:
    """kv [T, d] (the raw projection) -> this batch's encoded rows [T]: RMSNorm, rope at each position, encode."""
    return encode_rows(rope_ref(rms_norm_ref(kv, norm_weight, eps), positions, freqs), row_format)


def append_swa_ref(rows: RowStore, window: WindowView, batch: TokenBatch) -> None:
    """Write the rows [T] into the ring, in place. Of tokens that share a ring row the latest wins.

    Padding writes nothing. Comes after attention: a chunk may be longer than the ring, and its first tokens still need
    the rows it replaces.
    """
    writers = last_writers(batch, window.ring_len)
    slots, positions = batch.slots[writers], batch.positions[writers]
    ring_rows = positions % window.ring_len
    window.rows[slots, ring_rows] = rows[(writers,)]
    window.positions[slots, ring_rows] = positions.to(torch.int32)
