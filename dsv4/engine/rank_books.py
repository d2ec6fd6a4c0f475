"""`RankBooks`: what rank 0 knows of another rank's cache, without having it. No torch.

A cache's slots and blocks follow from what is done to it: the lowest free slot is given out, blocks follow from
positions. So rank 0 does the arithmetic, writes down what it did, and the rank repeats it (engine/rank_worker.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dsv4.cache.errors import NoFreeSlot, UnknownSlot
from dsv4.cache.prefix import NO_STOP, Match
from dsv4.cache.prefix_tree import ChainKeys
from dsv4.cache.schema import blocks_at_position


class CacheChange(NamedTuple):
    """A slot given to a request of at most `max_tokens`, or, with 0, taken back."""

    slot: int
    max_tokens: int


class RankBooks:
    """`CacheBooks` (engine/scheduler.py) of one rank, for its scheduler."""

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self._free_slots = list(range(num_slots))  # a heap, as the cache's
        self._positions: dict[int, int] = {}
        self._changes: list[CacheChange] = []

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - sum(map(blocks_at_position, self._positions.values()))

    def chain(self, token_ids: Sequence[int], salt: str | None) -> None:
        """Nothing: caches of several ranks keep no prefixes."""

    def match(self, chain: ChainKeys | None) -> Match:
        return Match()

    def next_stop(self, slot: int) -> int:
        return NO_STOP

    def stop_at(self, slot: int, position: int) -> None:
        raise AssertionError("nobody leads where nothing is matched")

    def launched(self, slot: int) -> None:
        pass

    def rewind(self, slot: int, position: int) -> None:
        raise AssertionError("ranks do not draft")

    def blocks_freed_by(self, slots: Sequence[int]) -> int:
        return sum(blocks_at_position(self._positions[slot]) for slot in slots)

    def admit(self, max_tokens: int, chain: ChainKeys | None = None) -> int:
        if not self._free_slots:
            raise NoFreeSlot(f"all {self.num_slots} slots of the rank are taken")
        slot = heapq.heappop(self._free_slots)
        self._positions[slot] = 0
        self._changes.append(CacheChange(slot, max_tokens))
        return slot

    def release(self, slot: int, *, keep: bool = True) -> None:
        self.position(slot)
        del self._positions[slot]
        heapq.heappush(self._free_slots, slot)
        self._changes.append(CacheChange(slot, 0))

    def position(self, slot: int) -> int:
        if slot not in self._positions:
            raise UnknownSlot(f"slot {slot} is free: no request holds it")
        return self._positions[slot]

    def advance(self, slot: int, num_tokens: int) -> None:
        """The rank is about to process so many tokens of the request."""
        self._positions[slot] = self.position(slot) + num_tokens

    def take_changes(self) -> list[CacheChange]:
        """What was done since this was last asked, for the rank to repeat."""
        changes, self._changes = self._changes, []
        return changes
