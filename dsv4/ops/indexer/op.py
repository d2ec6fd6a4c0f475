"""The lightning indexer of CSA layers: scores every visible entry with small heads and picks the best.

I[t, s] = sum_h scale w[t, h] relu(q[t, h] . k[s]); visible are the entries s < floor((t + 1) / 4). A head weight may be
negative, so a score may be too. Ties go to the lower entry.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.lib.hadamard import hadamard_ref
from dsv4.ops.lib.invariant import KEY_TILE, QUERY_TILE, accumulator, ordered_sum
from dsv4.ops.rows import rope_ref
from dsv4.ops.select import topk_select_ref


def index_queries_ref(q: Tensor, positions: Tensor, freqs: Tensor, key_format: RowFormat) -> Tensor:
    """q [T, Hi, Di] -> roped, and where keys are quantised rotated and quantised by the same rule as they are."""
    q = rope_ref(q, positions, freqs)
    if key_format.kind is RowKind.PLAIN:
        return q
    return decode_rows(encode_rows(hadamard_ref(q), key_format)).to(q.dtype)


def num_visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries a token at each position may see: the one it closes itself included."""
    return (positions + 1) // ratio


def gather_entries(pages: PagedView, batch: TokenBatch, tokens: Tensor, entry_ids: Tensor) -> Tensor:
    """Values [Q, N, dim] of entries [Q, N] of the requests of batch rows `tokens` [Q]; 0 where negative."""
    valid = (entry_ids >= 0) & (batch.slots[tokens] >= 0).unsqueeze(-1)
    safe = entry_ids.clamp_min(0)
    slots = batch.slots[tokens].clamp_min(0).unsqueeze(-1)
    blocks = batch.block_table[slots, safe // pages.entries_per_block].long().clamp_min(0)
    values = pages.rows.gather(blocks, safe % pages.entries_per_block)
    return values.masked_fill(~valid.unsqueeze(-1), 0.0)


def index_topk_ref(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, *, ratio: int, top_k: int, scale: float = 1.0
) -> Tensor:
    """q [T, Hi, Di], weights [T, Hi] -> entries int64 [T, top_k], ascending, -1 where there are fewer.

    A weight times `scale` is rounded once, to at least fp32.

    Equal scores: with quantised keys the lower entry wins, so that chunking cannot matter. Plain keys (`exact`
    numerics) are picked by torch.topk over every entry the request has at the end of the call, because that is what the
    published code does, and which of two equal scores it takes depends on that length.
    """
    weights = weights.to(accumulator(weights)) * scale
    is_plain = keys.rows.format.kind is RowKind.PLAIN
    picks = torch.full((batch.num_tokens, top_k), -1, dtype=torch.int64, device=q.device)
    limits = num_visible(batch.positions, ratio).masked_fill(batch.slots < 0, 0)
    widths = (batch.chunk_ends // ratio).masked_fill(batch.slots < 0, 0)
    for tokens in _query_groups(widths if is_plain else torch.zeros_like(widths)):
        limit = limits[tokens]
        num_entries = int((widths[tokens] if is_plain else limit).max())
        if num_entries == 0:
            continue
        scores = torch.cat([
            _score_tile(q[tokens], weights[tokens], keys, batch, tokens, limit, start)
            for start in range(0, num_entries, KEY_TILE)
        ], -1)[:, :num_entries]  # fmt: skip
        hidden = torch.arange(num_entries, device=q.device) >= limit.unsqueeze(-1)
        scores = scores.masked_fill(hidden, float("-inf"))
        best = _published_topk(scores, top_k) if is_plain else topk_select_ref(scores, top_k)
        best = best.masked_fill(best >= limit.unsqueeze(-1), num_entries).sort(-1).values
        picks[tokens, : best.shape[-1]] = best.masked_fill(best == num_entries, -1)
    return picks


def _published_topk(scores: Tensor, k: int) -> Tensor:
    """torch.topk as the published CPU run did it: a GPU's would break ties its own way."""
    return scores.cpu().topk(min(k, scores.shape[-1]), -1).indices.to(scores.device)


def _query_groups(keys: Tensor) -> Iterator[Tensor]:
    """Batch rows in groups of at most QUERY_TILE that share the same key."""
    for key in keys.unique():
        yield from (keys == key).nonzero().squeeze(-1).split(QUERY_TILE)


def _score_tile(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, tokens: Tensor, limit: Tensor, start: int
) -> Tensor:
    """Scores [Q, KEY_TILE] of entries start .. start + KEY_TILE - 1; meaningless beyond a query's limit."""
    acc = accumulator(q)
    entry_ids = torch.arange(start, start + KEY_TILE, device=q.device).expand(len(tokens), -1)
    entry_ids = entry_ids.masked_fill(entry_ids >= limit.unsqueeze(-1), -1)
    tile = gather_entries(keys, batch, tokens, entry_ids).to(acc)  # [Q, KEY_TILE, Di]
    dots = torch.bmm(q.to(acc), tile.transpose(1, 2).contiguous())  # [Q, Hi, KEY_TILE]
    return ordered_sum(weights.to(acc).unsqueeze(-1) * dots.relu(), 1)
