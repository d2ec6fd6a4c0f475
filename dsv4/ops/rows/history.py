"""Where a token's past lives: in this call's batch from the chunk's start on, in the cache before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch


def gather_history(
    batch: TokenBatch, tokens: Tensor, wanted: Tensor, fresh: Callable[[Tensor], Tensor],
    cached: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Values [Q, N, ...] at positions `wanted` [Q, N] of the requests that the batch rows `tokens` [Q] belong to.

    `fresh(rows)` reads batch rows, `cached(slots, positions)` the cache. Where `wanted` is negative, or the row is
    padding, the result is meaningless and the caller masks it.
    """
    age = batch.positions[tokens].unsqueeze(-1) - wanted  # a request's tokens stand side by side
    is_fresh = wanted >= batch.chunk_starts[tokens].unsqueeze(-1)
    rows = (tokens.unsqueeze(-1) - age).clamp(0, batch.num_tokens - 1)
    slots = batch.slots[tokens].clamp_min(0).unsqueeze(-1).expand_as(wanted)
    new, old = fresh(rows), cached(slots, wanted.clamp_min(0))
    return torch.where(is_fresh.reshape(*is_fresh.shape, *(1,) * (new.dim() - 2)), new, old)


def request_tiles(batch: TokenBatch, size: int) -> Iterator[tuple[int, slice]]:
    """Slots and batch rows of the requests, at most `size` rows of one request at a time; no padding."""
    slots, start = batch.slots.tolist(), 0
    while start < len(slots):
        end = start + 1
        while end < min(len(slots), start + size) and slots[end] == slots[start]:
            end += 1
        if slots[start] >= 0:
            yield slots[start], slice(start, end)
        start = end


def last_writers(batch: TokenBatch, ring_len: int) -> Tensor:
    """Batch rows [W] whose row of a ring of `ring_len` is not overwritten by a later token of the same chunk."""
    keep = (batch.slots >= 0) & (batch.positions >= batch.chunk_ends - ring_len)
    return keep.nonzero().squeeze(-1)
