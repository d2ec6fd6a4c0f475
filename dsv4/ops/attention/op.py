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
from dsv4.ops.indexer import gather_entries, num_visible
from dsv4.ops.lib.invariant import KEY_TILE, QUERY_TILE, accumulator, exp
from dsv4.ops.rows import rope_ref
from dsv4.ops.rows.history import gather_history


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
    for tokens in torch.arange(batch.num_tokens, device=q.device).split(QUERY_TILE):
        values, valid = _window_keys(fresh, window, batch, tokens, window_len)
        if entries is not None:
            entry_ids = _visible_picks(picks, entries, batch, tokens)
            values = torch.cat((values, gather_entries(entries, batch, tokens, entry_ids)), 1)
            valid = torch.cat((valid, entry_ids >= 0), 1)
        valid = valid & (batch.slots[tokens] >= 0).unsqueeze(-1)
        out[tokens] = attend_ref(q[tokens], values, valid, sink)
    return out if freqs is None else rope_ref(out, batch.positions, freqs, inverse=True)


def attend_ref(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """q [Q, H, d], keys [Q, N, d] (= values; finite where invalid too), valid [Q, N], sink [H] -> [Q, H, d].

    Keys are taken KEY_TILE at a time, so that more (masked) keys in the batch change nothing for a query.
    """
    acc = accumulator(q)
    padding = -keys.shape[1] % KEY_TILE
    tiles = torch.nn.functional.pad(keys.to(acc), (0, 0, 0, padding)).split(KEY_TILE, 1)
    masks = torch.nn.functional.pad(valid, (0, padding)).split(KEY_TILE, 1)
    scale = q.shape[-1] ** -0.5
    logits = [
        (torch.bmm(q.to(acc), tile.transpose(1, 2).contiguous()) * scale).masked_fill(~mask.unsqueeze(1), float("-inf"))
        for tile, mask in zip(tiles, masks, strict=True)
    ]
    highest = torch.stack([tile.amax(-1) for tile in logits]).amax(0)  # [Q, H]
    has_key = valid.any(-1, keepdim=True)  # [Q, 1]; not from the logits, or a NaN would pass for an absent key
    highest = torch.where(has_key, highest, torch.zeros_like(highest))
    total = torch.zeros_like(highest)
    out = torch.zeros(q.shape, dtype=acc, device=q.device)
    for tile, logit in zip(tiles, logits, strict=True):
        weight = exp(logit - highest.unsqueeze(-1))
        total = total + weight.sum(-1)
        out = out + torch.bmm(weight.to(q.dtype).to(acc), tile.contiguous())
    total = total + exp(sink.to(acc) - highest)
    out = torch.where(has_key.unsqueeze(-1), out / total.unsqueeze(-1), torch.zeros_like(out))
    return out.to(q.dtype)


def _window_keys(
    fresh: Tensor, window: WindowView, batch: TokenBatch, tokens: Tensor, window_len: int
) -> tuple[Tensor, Tensor]:
    """Keys [Q, window_len padded to KEY_TILE, d], oldest first, and which of them exist."""
    padded_len = -(-window_len // KEY_TILE) * KEY_TILE
    ages = torch.arange(padded_len - 1, -1, -1, device=fresh.device)
    wanted = batch.positions[tokens].unsqueeze(-1) - ages  # [Q, padded_len]

    def cached_row(slots: Tensor, at: Tensor) -> Tensor:
        return window.rows.gather(slots, at % window.ring_len)

    def cached_position(slots: Tensor, at: Tensor) -> Tensor:
        return window.positions[slots, at % window.ring_len].long()

    holds = gather_history(batch, tokens, wanted, lambda rows: batch.positions[rows], cached_position)
    valid = (wanted >= 0) & (ages < window_len) & (holds == wanted)
    keys = gather_history(batch, tokens, wanted, lambda rows: fresh[rows], cached_row)
    return keys.masked_fill(~valid.unsqueeze(-1), 0.0), valid


def _visible_picks(picks: Tensor | None, entries: PagedView, batch: TokenBatch, tokens: Tensor) -> Tensor:
    """Entry ids [Q, N] each query reads, -1 = none; never one that its position may not see."""
    limit = num_visible(batch.positions[tokens], BLOCK_TOKENS // entries.entries_per_block).unsqueeze(-1)
    if picks is None:
        entry_ids = torch.arange(int(limit.max()), device=limit.device).expand(len(tokens), -1)
    else:
        entry_ids = picks[tokens].long()
    return entry_ids.masked_fill(entry_ids >= limit, -1)
