"""Sparse attention: every query reads its window and some compressed entries through one shared K=V head, with a sink.

For query t: keys are the window positions max(0, t - window + 1) .. t and the picked entries (CSA) or all visible ones
(HCA), with no de-duplication. logit = q.k / sqrt(d); o = sum e^(l - M) v / (sum e^(l - M) + e^(sink - M)), M the
highest logit of a real key. With rope frequencies the last dims of the output are rotated back to position 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.config import BLOCK_TOKENS
from dsv4.formats.exact_sums import largest_of
from dsv4.formats.row_store import RowStore, decode_joined
from dsv4.ops.indexer import entry_rows, num_visible
from dsv4.ops.lib.invariant import MAX_KEYS, QUERY_TILE, exact_average, exact_dots, is_short, ordered_sum
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.rows import Turn, rotate
from dsv4.ops.rows.history import request_tiles


@waits_for_device
def sparse_attention_ref(
    q: Tensor,
    rows: RowStore,
    window: WindowView,
    entries: PagedView | None,
    picks: Tensor | None,
    sink: Tensor,
    batch: TokenBatch,
    *,
    window_len: int,
    freqs: Tensor | None = None,
) -> Tensor:
    """q [T, H, d], this batch's rows [T], the cache, picks [T, k] (-1: none) or None for all visible -> [T, H, d].

    `rows` are not in the ring yet (see append_swa). Probabilities are rounded to q's dtype before they meet the values,
    the denominator is not. A padded row, or one without keys, gives zeros. With `freqs` the result is
    rope_ref(result, batch.positions, freqs, inverse=True).
    """
    out = torch.zeros_like(q)
    for slot, tile in request_tiles(batch, QUERY_TILE):
        parts, times = _window_keys(rows, window, batch, slot, tile, window_len)
        if entries is not None:
            entry_ids, entry_times = _entries_read(picks, entries, batch, tile)
            parts.append(entry_rows(entries, batch, slot, entry_ids))
            times = torch.cat((times, entry_times), 1)
        out[tile] = attend_ref(q[tile], decode_joined(parts), times, sink)
    return out if freqs is None else rotate(out, Turn.of_batch(batch, freqs), inverse=True)


def attend_ref(q: Tensor, keys: Tensor, times: Tensor, sink: Tensor) -> Tensor:
    """q [Q, H, d], keys [N, d] (= values), how many times each query reads each key [Q, N], sink [H] -> [Q, H, d].

    A key that is not finite makes NaN of the queries that read it. Keys that a query does not read change nothing.
    """
    if keys.shape[0] == 0:
        return torch.zeros_like(q)
    assert keys.shape[0] <= MAX_KEYS or int(times.sum(-1).max()) <= MAX_KEYS, "a query reads too many keys"
    is_read, times = (times > 0).unsqueeze(1), times.to(torch.float64).unsqueeze(1)  # [Q, 1, N]
    wide = keys.double()
    largest = largest_of(wide)  # [N, 1]
    is_finite = largest < float("inf")
    has_others = not bool(is_finite.all())
    if has_others:
        wide, largest = wide.masked_fill(~is_finite, 0.0), largest.masked_fill(~is_finite, 0.0)
    logits = exact_dots(q, wide, largest) * q.shape[-1] ** -0.5  # [Q, H, N]
    if has_others:
        logits = logits.masked_fill(~is_finite.squeeze(-1), float("nan"))
    logits = logits.masked_fill(~is_read, float("-inf"))
    has_key = is_read.any(-1)  # [Q, 1]; not from the logits, or a NaN would pass for an absent key
    highest = logits.amax(-1).masked_fill(~has_key, 0.0)  # [Q, H]
    weights = torch.exp(logits - highest.unsqueeze(-1))
    total = ordered_sum(weights * times, -1) + torch.exp(sink.double() - highest)
    rounded = weights.to(q.dtype).double() * times
    # wider values have too many bits for sums without rounding
    summed = exact_average(rounded, wide, largest) if is_short(q.dtype) else rounded @ wide
    return (summed / total.unsqueeze(-1)).masked_fill(~has_key.unsqueeze(-1), 0.0).to(q.dtype)


class _Span(NamedTuple):
    """The keys in the windows of some rows of a request: ring rows and positions of those from before this call [P],
    the batch rows of the others, and which of them all each query may read [Q, P + F]."""

    ring_rows: Tensor
    past: Tensor
    fresh_rows: slice
    is_read: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, tile: slice, ring_len: int, window_len: int) -> _Span:
        positions = batch.positions[tile].unsqueeze(-1)
        ascending = positions.flatten().tolist()
        start, end = max(0, ascending[0] - window_len + 1), ascending[-1] + 1
        split = min(max(int(batch.chunk_starts[tile.start]), start), end)  # the ring before it, this batch from it on
        wanted = torch.arange(start, end, device=positions.device)
        past = wanted[: split - start]
        first_row = tile.start + split - ascending[0]
        is_read = (wanted <= positions) & (wanted > positions - window_len)
        return cls(past % ring_len, past, slice(first_row, first_row + end - split), is_read)


def _window_keys(
    fresh: RowStore, window: WindowView, batch: TokenBatch, slot: int, tile: slice, window_len: int
) -> tuple[list[RowStore], Tensor]:
    """Keys [N] of the windows of some rows of a request, oldest first, and which of them each query reads [Q, N]."""
    key = ("window", tile.start, tile.stop, window.ring_len, window_len)
    span = batch.once(key, lambda: _Span.of(batch, tile, window.ring_len, window_len))
    is_there = window.positions[slot, span.ring_rows] == span.past
    is_read = span.is_read.clone()
    is_read[:, : len(span.past)] &= is_there
    return [window.rows[slot, span.ring_rows], fresh[(span.fresh_rows,)]], is_read


def _entries_read(picks: Tensor | None, entries: PagedView, batch: TokenBatch, tile: slice) -> tuple[Tensor, Tensor]:
    """Entries [N] that some rows of a request read, ascending, and how many times each query does [Q, N]; never one
    that its position may not see."""
    limit = num_visible(batch.positions[tile], BLOCK_TOKENS // entries.entries_per_block).unsqueeze(-1)
    if picks is None:
        entry_ids = torch.arange(int(limit.max()), device=limit.device)
        return entry_ids, entry_ids < limit
    chosen = picks[tile].long()
    is_seen = (chosen >= 0) & (chosen < limit)
    entry_ids = chosen[is_seen].unique()
    times = torch.zeros(len(chosen), len(entry_ids) + 1, dtype=torch.int64, device=chosen.device)
    times.scatter_add_(1, torch.searchsorted(entry_ids, chosen), is_seen.long())
    return entry_ids, times[:, :-1]
