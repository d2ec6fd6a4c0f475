"""`TokenBatch`: the new tokens of one forward call, addressed into the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dsv4.cache.transfer import to_device

Made = TypeVar("Made")
PADDED_SLOT = -1
COLUMNS = ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")
ALIGNED = 2  # numbers: each column begins at a multiple of 16 bytes, since kernels are compiled apart for others


def aligned(count: int) -> int:
    """The next multiple of `ALIGNED`."""
    return count + -count % ALIGNED


class Chunk(NamedTuple):
    """New tokens of one request: its slot, the position of the first of them, and their ids."""

    slot: int
    start: int
    token_ids: Sequence[int]


def columns_of(
    slots: ArrayLike, starts: ArrayLike, lengths: ArrayLike, token_ids: ArrayLike, pad_to: int = 0
) -> NDArray[np.int64]:
    """The numbers of a batch, [5, W] in the order of `COLUMNS`: chunks of `lengths` tokens side by side, then padding
    (slot -1, all else 0) up to `pad_to` tokens and a multiple of `ALIGNED`. `token_ids` are those of all chunks, or one
    for all."""
    slots, starts, lengths = (np.asarray(values, dtype=np.int64) for values in (slots, starts, lengths))
    num_tokens = int(lengths.sum())
    width = aligned(max(num_tokens, pad_to))
    columns = np.empty((len(COLUMNS), width), dtype=np.int64)
    if num_tokens < width:
        columns[:, num_tokens:] = 0
        columns[COLUMNS.index("slots"), num_tokens:] = PADDED_SLOT
    columns[0, :num_tokens] = token_ids
    if (lengths == 1).all():
        columns[1, :num_tokens], columns[2, :num_tokens], columns[3, :num_tokens] = starts, slots, starts
        np.add(starts, 1, out=columns[4, :num_tokens])
        return columns
    columns[1, :num_tokens] = np.arange(num_tokens) + np.repeat(starts + lengths - np.cumsum(lengths), lengths)
    columns[2, :num_tokens] = np.repeat(slots, lengths)
    columns[3, :num_tokens] = np.repeat(starts, lengths)
    columns[4, :num_tokens] = np.repeat(starts + lengths, lengths)
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

    The columns must not change while ops take them from one batch: see `once`. A copy (`replace`) starts anew.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    chunk_starts: Tensor
    chunk_ends: Tensor
    block_table: Tensor

    @classmethod
    def over(cls, columns: Tensor, block_table: Tensor, num_tokens: int) -> TokenBatch:
        """A batch whose tensors are views of the first `num_tokens` of `columns`, int64 [5, W] as of `columns_of`."""
        token_ids, positions, slots, chunk_starts, chunk_ends = columns[:, :num_tokens].unbind(0)
        return cls(token_ids, positions, slots, chunk_starts, chunk_ends, block_table)

    @classmethod
    def of(cls, chunks: Iterable[Chunk], block_table: Tensor) -> TokenBatch:
        """The chunks side by side, copied to the table's device at once."""
        chunks = list(chunks)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        columns = columns_of(
            [chunk.slot for chunk in chunks], [chunk.start for chunk in chunks],
            [len(chunk.token_ids) for chunk in chunks], token_ids,
        )  # fmt: skip
        return cls.over(to_device(torch.from_numpy(columns), block_table.device), block_table, len(token_ids))

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What every layer's oracles derive from the columns alone, made by the first that asks."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made
