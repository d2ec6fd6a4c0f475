"""`TokenBatch`: the new tokens of one forward call, addressed into the cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.transfer import to_device

PADDED_SLOT = -1
COLUMNS = ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")


class Chunk(NamedTuple):
    """New tokens of one request: its slot, the position of the first of them, and their ids."""

    slot: int
    start: int
    token_ids: Sequence[int]


def columns_of(chunks: Iterable[Chunk], pad_to: int = 0) -> list[list[int]]:
    """The numbers of a batch, [5][T] in the order of `COLUMNS`: the chunks side by side, then padding (slot -1, all
    else 0) up to `pad_to` tokens."""
    columns: list[list[int]] = [[] for _ in COLUMNS]
    token_ids, positions, slots, chunk_starts, chunk_ends = columns
    for chunk in chunks:
        length, end = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
        token_ids += chunk.token_ids
        positions += range(chunk.start, end)
        slots += [chunk.slot] * length
        chunk_starts += [chunk.start] * length
        chunk_ends += [end] * length
    num_padding = max(0, pad_to - len(token_ids))
    for column in columns:
        column += [PADDED_SLOT if column is slots else 0] * num_padding
    return columns


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of any number of requests. A request's tokens stand side by side in ascending position.

    token_ids     int64 [T]
    positions     int64 [T]  absolute, 0-based
    slots         int64 [T]  the request's slot in the cache; -1 marks a padded row, which must change nothing
    chunk_starts  int64 [T]  position of the first token of the same request in this call: what lies before it is in
                             the cache, what lies at or after it is in this batch
    chunk_ends    int64 [T]  position after the last token of the same request in this call
    block_table   int32 [slots, blocks]  physical block of each 128-token block of a request; -1 where there is none
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    chunk_starts: Tensor
    chunk_ends: Tensor
    block_table: Tensor

    @classmethod
    def over(cls, columns: Tensor, block_table: Tensor) -> TokenBatch:
        """A batch whose tensors are views of `columns`, int64 [5, T] in the order of `COLUMNS`."""
        token_ids, positions, slots, chunk_starts, chunk_ends = columns.unbind(0)
        return cls(token_ids, positions, slots, chunk_starts, chunk_ends, block_table)

    @classmethod
    def of(cls, chunks: Iterable[Chunk], block_table: Tensor) -> TokenBatch:
        """The chunks side by side, copied to the table's device at once."""
        columns = torch.tensor(columns_of(chunks), dtype=torch.int64)
        return cls.over(to_device(columns, block_table.device), block_table)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
