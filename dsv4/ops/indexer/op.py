"""The lightning indexer of CSA layers: scores every visible entry with small heads and picks the best.

I[t, s] = sum_h scale w[t, h] relu(q[t, h] . k[s]); visible are the entries s < floor((t + 1) / 4). A head weight may be
negative, so a score may be too. Ties go to the lower entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView
from dsv4.formats.exact_sums import largest_of
from dsv4.formats.row_store import RowStore, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.lib.hadamard import hadamard_ref
from dsv4.ops.lib.invariant import QUERY_TILE, accumulator, exact_dots, ordered_sum
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.rows import Turn, rotate
from dsv4.ops.rows.history import request_tiles
from dsv4.ops.select import topk_select_ref


def turned_queries(q: Tensor, turn: Turn, key_format: RowFormat) -> Tensor:
    """q [T, Hi, Di] -> roped, and where keys are quantised rotated and quantised by the same rule as they are."""
    q = rotate(q, turn)
    if key_format.kind is RowKind.PLAIN:
        return q
    return decode_rows(encode_rows(hadamard_ref(q), key_format)).to(q.dtype)


def num_visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries a token at each position may see: the one it closes itself included."""
    return (positions + 1) // ratio


def entry_rows(pages: PagedView, batch: TokenBatch, slot: int, entry_ids: Tensor) -> RowStore:
    """Entries [N] of the request in a slot, as they are stored."""
    blocks = batch.block_table[slot, entry_ids // pages.entries_per_block].long().clamp_min(0)
    return pages.rows[blocks, entry_ids % pages.entries_per_block]


@waits_for_device
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
    for slot, tile in request_tiles(batch, QUERY_TILE):
        limit = num_visible(batch.positions[tile], ratio)
        num_entries = int(batch.chunk_ends[tile.start] // ratio if is_plain else limit.max())
        if num_entries == 0:
            continue
        entry_ids = torch.arange(num_entries, device=q.device)
        scores = entry_scores(q[tile], weights[tile], decode_rows(entry_rows(keys, batch, slot, entry_ids)))
        scores = scores.masked_fill(entry_ids >= limit.unsqueeze(-1), float("-inf"))
        best = _published_topk(scores, top_k) if is_plain else topk_select_ref(scores, top_k)
        best = best.masked_fill(best >= limit.unsqueeze(-1), num_entries).sort(-1).values
        picks[tile, : best.shape[-1]] = best.masked_fill(best == num_entries, -1)
    return picks


def _published_topk(scores: Tensor, k: int) -> Tensor:
    """torch.topk as the published CPU run did it: a GPU's would break ties its own way."""
    return scores.cpu().topk(min(k, scores.shape[-1]), -1).indices.to(scores.device)


def entry_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [Q, Hi, Di], weights [Q, Hi] in at least fp32, keys [N, Di] -> scores [Q, N] in the weights' dtype."""
    wide = keys.double()
    dots = exact_dots(q, wide, largest_of(wide)).to(weights.dtype)  # [Q, Hi, N]
    return ordered_sum(weights.unsqueeze(-1) * dots.relu(), 1)
