"""`Payload`: the bytes of a segment: blocks of the paged cache and a snapshot, gathered and scattered on the device.

Parts are ordered by the width of the words they are copied in, so that each is aligned where the last one ends; a file
has the same bytes in the same order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.pool import Pool, PoolSet
from dsv4.cache.transfer import to_device


@dataclass(frozen=True)
class Part:
    """One pool's share of a segment. A paged one has the segment's blocks as its second dimension."""

    name: str
    pool: Pool
    is_paged: bool

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        num_layers, rows = len(self.pool.schema.layer_ids), self.pool.schema.shape[1:]
        return (num_layers, num_blocks, *rows) if self.is_paged else (num_layers, *rows)

    def num_bytes(self, num_blocks: int) -> int:
        return math.prod(self.shape(num_blocks)) * self.pool.schema.itemsize


class Payload:
    """How segments of one cache lie in memory."""

    def __init__(self, paged: PoolSet, snapshots: PoolSet) -> None:
        parts = [Part(name, pool, True) for name, pool in paged.pools.items()]
        parts += [Part(name, pool, False) for name, pool in snapshots.pools.items()]
        self.parts = sorted(parts, key=lambda part: (-part.pool.words.itemsize, part.name))
        self.device = parts[-1].pool.storage.device

    def num_bytes(self, num_blocks: int) -> int:
        return sum(part.num_bytes(num_blocks) for part in self.parts)

    def views(self, flat: Tensor, num_blocks: int) -> dict[str, Tensor]:
        """The parts of a segment's bytes uint8 [n], in words: [layers, blocks, rows, words], or without blocks."""
        views, start = {}, 0
        for part in self.parts:
            end, words = start + part.num_bytes(num_blocks), part.pool.words
            shape = (*part.shape(num_blocks)[:-1], words.shape[-1])
            views[part.name] = flat[start:end].view(words.dtype).view(shape)
            start = end
        return views

    def gather(self, blocks: Sequence[int], snapshot: int) -> Tensor:
        """uint8 [n] on the device: a segment of these blocks and that snapshot."""
        flat = torch.empty(self.num_bytes(len(blocks)), dtype=torch.uint8, device=self.device)
        views, ids = self.views(flat, len(blocks)), self._ids(blocks)
        for part in self.parts:
            if part.is_paged:
                torch.index_select(part.pool.words, 1, ids, out=views[part.name])
            else:
                views[part.name].copy_(part.pool.words[:, snapshot])
        return flat

    def scatter(self, flat: Tensor, num_blocks: int, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """The segment's blocks `rows` into the cache's `blocks`."""
        if not blocks:
            return
        views, source, target = self.views(flat, num_blocks), self._ids(rows), self._ids(blocks)
        for part in self.parts:
            if part.is_paged:
                part.pool.words.index_copy_(1, target, views[part.name].index_select(1, source))

    def put_snapshot(self, flat: Tensor, num_blocks: int, snapshot: int) -> None:
        """The segment's snapshot into one of the device's."""
        views = self.views(flat, num_blocks)
        for part in self.parts:
            if not part.is_paged:
                part.pool.words[:, snapshot].copy_(views[part.name])

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)
