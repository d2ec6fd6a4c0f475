"""Where a token's past lives: in this call's batch from the chunk's start on, in the cache before it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dsv4.cache.batch import TokenBatch


def history_of(batch: TokenBatch, tokens: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where positions `wanted` [Q, N] of the requests of the batch rows `tokens` [Q] are read: the batch row [Q, N],
    the slot of the cache [Q, 1], and whether it is the batch [Q, N].

    Where `wanted` is negative, or the row is padding, both lead somewhere, and the caller masks what is read there.
    """
    age = batch.positions[tokens].unsqueeze(-1) - wanted  # a request's tokens stand side by side
    rows = (tokens.unsqueeze(-1) - age).clamp(0, batch.num_tokens - 1)
    is_fresh = wanted >= batch.chunk_starts[tokens].unsqueeze(-1)
    return rows, batch.slots[tokens].clamp_min(0).unsqueeze(-1), is_fresh


def request_tiles(batch: TokenBatch, size: int) -> Iterator[tuple[int, slice]]:
    """Slots and batch rows of the requests, at most `size` rows of one request at a time; no padding."""
    slots, start = batch.once("slots", batch.slots.tolist), 0
    while start < len(slots):
        end = start + 1
        while end < min(len(slots), start + size) and slots[end] == slots[start]:
            end += 1
        if slots[start] >= 0:
            yield slots[start], slice(start, end)
        start = end


def last_writers(batch: TokenBatch, ring_len: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Batch rows [W] whose row of a ring of `ring_len` is not overwritten by a later token of the same chunk; and where
    they write: slots and ring rows [W].
    """

    def find() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        keep = (batch.slots >= 0) & (batch.positions >= batch.chunk_ends - ring_len)
        writers = keep.nonzero().squeeze(-1)
        return writers, (batch.slots[writers], batch.positions[writers] % ring_len)

    return batch.once(("last writers", ring_len), find)
