"""Sparse attention: every query reads its window and some compressed entries through one shared K=V head, with a sink.

For query t: keys are the window positions max(0, t - window + 1) .. t and the picked entries (CSA) or all visible ones
(HCA), with no de-duplication. logit = q.k / sqrt(d); o = sum e^(l - M) v / (sum e^(l - M) + e^(sink - M)), M the
highest logit of a real key. With rope frequencies the last dims of the output are rotated back to position 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.config import BLOCK_TOKENS
from dsv4.formats.row_store import RowStore, decode_rows
from dsv4.ops.indexer import num_visible, read_entries
from dsv4.ops.lib.invariant import MAX_KEYS, QUERY_TILE, exact_average, exact_dots, is_short, ordered_sum
from dsv4.ops.rows import rope_ref
from dsv4.ops.rows.history import request_tiles


def sparse_attention_ref(
    q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None, sink: Tensor,
    batch: TokenBatch, *, window_len: int, freqs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, H, d], this batch's rows [T], the cache, picks [T, k] (-1: none) or None for all visible -> [T, H, d].

    `rows` are not in the ring yet (see append_swa). Probabilities are rounded to q's dtype before they meet the values,
    the denominator is not. A padded row, or one without keys, gives zeros. With `freqs` the result is
    rope_ref(result, batch.positions, freqs, inverse=True).
    """
    out = torch.zeros_like(q)
    fresh = decode_rows(rows)  # [T, d]
    for slot, tile in request_tiles(batch, QUERY_TILE):
        keys, times = _window_keys(fresh, window, batch, slot, tile, window_len)
        if entries is not None:
            entry_ids, entry_times = _entries_read(picks, entries, batch, tile)
            keys = torch.cat((keys, read_entries(entries, batch, slot, entry_ids)))
            times = torch.cat((times, entry_times), 1)
        out[tile] = attend_ref(q[tile], keys, times, sink)
    return out if freqs is None else rope_ref(out, batch.positions, freqs, inverse=True)


def attend_ref(q: Tensor, keys: Tensor, times: Tensor, sink: Tensor) -> Tensor:
    """q [Q, H, d], keys [N, d] (= values), how many times each query reads each key [Q, N], sink [H] -> [Q, H, d].

    A key that is not finite makes NaN of the queries that read it. Keys that a query does not read change nothing.
    """
    if keys.shape[0] == 0:
        return torch.zeros_like(q)
    assert keys.shape[0] <= MAX_KEYS or int(times.sum(-1).max()) <= MAX_KEYS, "a query reads too many keys"
    is_read, times = (times > 0).unsqueeze(1), times.to(torch.float64).unsqueeze(1)  # [Q, 1, N]
    is_finite = keys.isfinite().all(-1)  # [N]
    wide = keys.double().masked_fill(~is_finite.unsqueeze(-1), 0.0)
    logits = exact_dots(q, wide) * q.shape[-1] ** -0.5  # [Q, H, N]
    logits = logits.masked_fill(~is_finite, float("nan")).masked_fill(~is_read, float("-inf"))
    has_key = is_read.any(-1)  # [Q, 1]; not from the logits, or a NaN would pass for an absent key
    highest = logits.amax(-1).masked_fill(~has_key, 0.0)  # [Q, H]
    weights = torch.exp(logits - highest.unsqueeze(-1))
    total = ordered_sum(weights * times, -1) + torch.exp(sink.double() - highest)
    average = exact_average if is_short(q.dtype) else torch.matmul  # wider values have too many bits
    out = average(weights.to(q.dtype).double() * times, wide) / total.unsqueeze(-1)
    return out.masked_fill(~has_key.unsqueeze(-1), 0.0).to(q.dtype)


def _window_keys(
    fresh: Tensor, window: WindowView, batch: TokenBatch, slot: int, tile: slice, window_len: int
) -> tuple[Tensor, Tensor]:
    """Keys [N, d] of the windows of some rows of a request, oldest first, and which of them each query reads [Q, N]."""
    positions = batch.positions[tile].unsqueeze(-1)
    ascending = positions.flatten().tolist()
    start, end = max(0, ascending[0] - window_len + 1), ascending[-1] + 1
    split = min(max(int(batch.chunk_starts[tile.start]), start), end)  # the ring before it, this batch from it on
    wanted = torch.arange(start, end, device=fresh.device)
    past = wanted[: split - start]
    ring_rows = past % window.ring_len
    is_there = window.positions[slot, ring_rows] == past
    cached = window.rows.gather(slot, ring_rows).masked_fill(~is_there.unsqueeze(-1), 0.0)
    first_row = tile.start + split - ascending[0]
    is_read = (wanted <= positions) & (wanted > positions - window_len)
    is_read[:, : split - start] &= is_there
    return torch.cat((cached, fresh[first_row : first_row + end - split])), is_read


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
