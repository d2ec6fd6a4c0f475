"""The compressor: one cache entry per 4 tokens (CSA, overlapping) or per 128 (HCA), pooled by a learned softmax.

Token t brings kv c_t and score z_t = gate + ape[t mod m]. CSA columns [0, Dc) of both belong to the *following* block's
entry, columns [Dc, 2 Dc) to the token's *own* block; HCA has the own half only. When token t = m (i + 1) - 1 arrives,
entry i = sum over slots of softmax_slot(z) * c, channel by channel, over the own halves of block i and, for CSA, the
following halves of block i - 1 (absent for i = 0). Then norm, rope at position m i, encode, write through the block
table.

The sums have one order everywhere: the 8 slots of a CSA entry one after the other, the 128 of an HCA entry in eight
runs of 16, each first to last, then the runs in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView
from dsv4.config import HCA_RATIO
from dsv4.formats.row_store import encode_rows
from dsv4.formats.rows import RowKind
from dsv4.ops.compress.kernel_compress import POOL_RUNS
from dsv4.ops.lib.hadamard import hadamard_ref
from dsv4.ops.lib.invariant import exp, ordered_sum
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.norm import rms_norm_ref
from dsv4.ops.rows import rope_ref
from dsv4.ops.rows.history import history_of, last_writers


@dataclass(frozen=True)
class CompressorSpec:
    """What is fixed for one compressor: tokens per entry, the entry's weights and the dtype it is rounded to."""

    ratio: int
    ape: Tensor
    norm_weight: Tensor
    freqs: Tensor
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Compression:
    """One call of `compress` without the batch: the projections [T, w], and what they are made into and kept in."""

    kv: Tensor
    gate: Tensor
    spec: CompressorSpec
    state: CompressorView
    pages: PagedView


@waits_for_device
def compress_ref(
    kv: Tensor, gate: Tensor, spec: CompressorSpec, state: CompressorView, pages: PagedView, batch: TokenBatch
) -> None:
    """kv, gate [T, w] in at least fp32: writes every entry that closes in this batch, then the tails. In place.

    Entries are written before anything attends, so a token sees the entry it closes. Padding writes nothing. Index keys
    (any quantised key format) are rotated by the Hadamard matrix before they are encoded.
    """
    phases, tokens = batch.once(("compress", spec.ratio), lambda: _phases(batch, spec.ratio))
    score = gate + spec.ape.to(gate.dtype)[phases]
    width = state.own.kv.shape[-1]
    if tokens.numel():
        pooled = _pool(kv, score, spec.ratio, state, batch, tokens).to(spec.dtype)
        entry_ids = batch.positions[tokens] // spec.ratio
        normed = rms_norm_ref(pooled, spec.norm_weight, spec.eps)
        values = rope_ref(normed, entry_ids * spec.ratio, spec.freqs)
        if pages.rows.format.kind in (RowKind.INDEX_FP4, RowKind.INDEX_FP8):
            values = hadamard_ref(values)
        blocks = batch.block_table[batch.slots[tokens], entry_ids // pages.entries_per_block].long()
        pages.rows[blocks, entry_ids % pages.entries_per_block] = encode_rows(values, pages.rows.format)
    if state.following is not None:
        _write_tail(state.following, kv[:, :width], score[:, :width], batch)
    _write_tail(state.own, kv[:, -width:], score[:, -width:], batch)


@waits_for_device
def compress_pair_ref(attention: Compression, index: Compression, batch: TokenBatch) -> None:
    """`compress` of both compressors of a CSA layer. They share nothing, so the order does not matter."""
    for job in (attention, index):
        compress_ref(job.kv, job.gate, job.spec, job.state, job.pages, batch)


def _phases(batch: TokenBatch, ratio: int) -> tuple[Tensor, Tensor]:
    """Where in its entry each token stands [T], and the batch rows that close one [C]."""
    phases = batch.positions % ratio
    return phases, ((phases == ratio - 1) & (batch.slots >= 0)).nonzero().squeeze(-1)


def _pool(kv: Tensor, score: Tensor, ratio: int, state: CompressorView, batch: TokenBatch, tokens: Tensor) -> Tensor:
    """Entries [C, Dc] closed by the batch rows `tokens` [C]."""
    width = state.own.kv.shape[-1]
    ages = torch.arange(ratio - 1, -1, -1, device=kv.device)
    own = batch.positions[tokens].unsqueeze(-1) - ages  # [C, ratio], oldest first
    parts = [_tail_rows(kv[:, -width:], score[:, -width:], state.own, batch, tokens, own)]
    if state.following is not None:
        previous = _tail_rows(kv[:, :width], score[:, :width], state.following, batch, tokens, own - ratio)
        parts.insert(0, previous)
    slots_kv = torch.cat([part[0] for part in parts], 1)  # [C, slots, Dc]
    slots_score = torch.cat([part[1] for part in parts], 1)
    weight = exp(slots_score - slots_score.amax(1, keepdim=True))
    return _sum_of_slots(weight * slots_kv) / _sum_of_slots(weight)


def _sum_of_slots(x: Tensor) -> Tensor:
    """x [C, slots, Dc] -> [C, Dc] in the order of the module's docstring."""
    runs = POOL_RUNS if x.shape[1] == HCA_RATIO else 1
    total = ordered_sum(x.unflatten(1, (runs, -1)), 2)  # [C, runs, Dc]
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total.squeeze(1)


def _tail_rows(
    kv: Tensor, score: Tensor, tail: TailView, batch: TokenBatch, tokens: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """kv and score [C, N, Dc] at positions `wanted`; absent rows (before the request) weigh nothing."""

    rows, slots, is_fresh = history_of(batch, tokens, wanted)
    is_fresh, absent = is_fresh.unsqueeze(-1), (wanted < 0).unsqueeze(-1)
    ring_rows = wanted % tail.ring_len

    def read(fresh: Tensor, ring: Tensor) -> Tensor:
        return torch.where(is_fresh, fresh[rows], ring[slots, ring_rows])

    return (
        read(kv, tail.kv).masked_fill(absent, 0.0),
        read(score, tail.score).masked_fill(absent, float("-inf")),
    )


def _write_tail(tail: TailView, kv: Tensor, score: Tensor, batch: TokenBatch) -> None:
    writers, where = last_writers(batch, tail.ring_len)
    tail.kv.index_put_(where, kv[writers].to(tail.kv.dtype))
    tail.score.index_put_(where, score[writers].to(tail.score.dtype))
