"""`SnapshotStore`: states of requests at multiples of 128 tokens, in one allocation made at the start.

A snapshot holds, for every layer, the window's rows, and on CSA layers the `following` rows of the last four tokens.
Nothing else is needed there: own tails are empty at a multiple of both ratios, positions follow from the number of
tokens. Rows lie in ascending position, whatever the ring's length was. Every copy is a slice between device tensors:
ordered by the stream, and nothing waits for it. One launch moves a component of all layers (two where its ring wraps
around), so a save is six launches and a restore seven, however many layers there are.
"""

from collections.abc import Iterable

import torch

from dsv4.cache.pool import Pool, PoolSet
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import NO_POSITION, StateCache

PREFIX = "snapshot."


class SnapshotStore(PoolSet):
    """`save` and `restore` between the slots of `state` and the snapshots of the schema.

    `ahead_layers`: layers whose row of a token is made with the next token (MTP): the last one of a snapshot could
    belong to another continuation, so it is left out.
    """

    def __init__(self, schema: CacheSchema, state: StateCache, *, ahead_layers: Iterable[int]) -> None:
        rows, positions = state.pools["window.data"].all_layers, state.pools["window.positions"]
        super().__init__(schema.snapshot_pools, rows.device, rows.dtype if rows.dtype.is_floating_point else None)
        self._state = state
        self._positions = positions.all_layers  # [layers, slots, ring_len]
        self._ahead_rows = [positions.schema.layer_ids.index(layer_idx) for layer_idx in ahead_layers]
        self._window = schema.window_len
        self._offsets = torch.arange(self._window, dtype=torch.int32, device=rows.device)

    def save(self, slot: int, position: int, snapshot: int) -> None:
        """The state of a request at `position`; it may have gone on by as many tokens as its rings hold beyond that."""
        targets, sources = [], []
        for name, pool in self.pools.items():
            for rows, ring in _pairs(pool, self._ring(name), position):
                targets.append(pool.words[:, snapshot, rows])
                sources.append(self._ring(name).words[:, slot, ring])
        torch._foreach_copy_(targets, sources)

    def restore(self, slot: int, position: int, snapshot: int) -> None:
        """A fresh slot becomes that of a request at `position`."""
        targets, sources = [], []
        for name, pool in self.pools.items():
            for rows, ring in _pairs(pool, self._ring(name), position):
                targets.append(self._ring(name).words[:, slot, ring])
                sources.append(pool.words[:, snapshot, rows])
        torch._foreach_copy_(targets, sources)
        first = max(0, position - self._window)  # a short prompt has not filled its window
        held = self._offsets[: position - first].expand(len(self._positions), -1)
        for rows, ring in _runs(position - first, self._positions.shape[2], first):
            torch.add(held[:, rows], first, out=self._positions[:, slot, ring])
        for row in self._ahead_rows:
            self._positions[row, slot, (position - 1) % self._positions.shape[2]] = NO_POSITION

    def _ring(self, name: str) -> Pool:
        return self._state.pools[name.removeprefix(PREFIX)]


def _pairs(stored: Pool, ring: Pool, position: int) -> list[tuple[slice, slice]]:
    num_rows = stored.schema.shape[1]
    return _runs(num_rows, ring.schema.shape[1], position - num_rows)


def _runs(num_rows: int, ring_len: int, first: int) -> list[tuple[slice, slice]]:
    """Rows of positions from `first` on, and where a ring has them: one run, or two where it wraps around."""
    start = first % ring_len
    head = min(num_rows, ring_len - start)
    runs = [(slice(0, head), slice(start, start + head))]
    return runs if head == num_rows else [*runs, (slice(head, num_rows), slice(0, num_rows - head))]
