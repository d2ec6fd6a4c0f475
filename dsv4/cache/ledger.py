"""`CacheLedger`: which request holds which slot and which blocks, and where each request stands. No torch.

A request is a slot from `admit` to `release`. Its position is the number of tokens it has processed; `prepare_forward`
moves it forward, `rewind` moves it back. A request admitted with its `chain` may start beyond 0, with blocks and state
of a prefix that was here before (prefix.py), and leaves its own for others.

Every call that can fail checks everything first and changes nothing when it raises. What a call means for tensors is
left to methods that do nothing here: `KVCacheManager` (manager.py) has the tensors.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.errors import (
    BlockTableOverflow,
    CacheError,
    DuplicateSlot,
    NoFreeSlot,
    OutOfBlocks,
    PositionMismatch,
    RequestNeverFits,
    RequestTooLong,
    RewindTooFar,
    UnknownSlot,
    require_integrity,
)
from dsv4.cache.prefix.cache import NO_STOP, Match, PrefixCache
from dsv4.cache.prefix.tree import ChainKeys
from dsv4.cache.schema import CacheSchema, blocks_at_position
from dsv4.config import BLOCK_TOKENS, EngineConfig

if TYPE_CHECKING:  # they need torch
    from dsv4.cache.prefix.snapshots import SnapshotStore
    from dsv4.cache.tiers.tiers import Tiers

Numbers = NDArray[np.int64]


class CacheLedger:
    """Of one cache. `copies` and `tiers`: where the prefix cache's state goes and comes from."""

    def __init__(
        self, schema: CacheSchema, engine: EngineConfig, copies: SnapshotStore, tiers: Tiers | None = None,
        fingerprint: str = "",
    ) -> None:  # fmt: skip
        self.schema = schema
        self.limits = engine
        self.fingerprint = fingerprint
        self._allocator = BlockAllocator(schema.num_blocks)
        self.prefix: PrefixCache | None = None
        if schema.num_snapshots:
            self.prefix = PrefixCache(
                self._allocator, copies, tiers, num_snapshots=schema.num_snapshots,
                interval=engine.snapshot_interval_tokens, slack=engine.max_draft_tokens,
                verify_share=engine.verify_hits,
            )  # fmt: skip
        num_slots = schema.num_slots
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._positions = np.zeros(num_slots, dtype=np.int64)
        self._highest = np.zeros(num_slots, dtype=np.int64)  # after the last token ever written: overwritten in rings
        self._max_tokens = np.zeros(num_slots, dtype=np.int64)  # 0 marks a free slot
        self._marks = np.zeros(num_slots, dtype=np.int64)  # of one check
        self._free_slots = list(range(num_slots))  # a heap

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: those without owners, and those kept for prefixes not in use."""
        return self._allocator.num_free + (0 if self.prefix is None else self.prefix.tree.num_idle_blocks)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def position(self, slot: int) -> int:
        """Tokens the request has processed; its next token has this position."""
        self._check_admitted(slot)
        return int(self._positions[slot])

    # ---- the life of a request ----

    def chain(self, token_ids: Sequence[int], salt: str | None) -> ChainKeys | None:
        """What the prefix cache knows the request's tokens by; None where it is off. `token_ids` may grow."""
        return None if self.prefix is None else ChainKeys(token_ids, salt, self.fingerprint)

    def match(self, chain: ChainKeys | None, num_below: int | None = None) -> Match:
        """What a request admitted now would start from. Changes nothing. `num_below`: see `PrefixCache.match`."""
        if self.prefix is None or chain is None:
            return Match()
        return self.prefix.match(chain, self._positions, num_below)

    def start_anew(self, fingerprint: str) -> None:
        """What is cached was made by other weights: prefixes go by another name from now on. The device forgets them;
        lower tiers find those of this name again. What running requests hold stays theirs alone."""
        self.fingerprint = fingerprint
        if self.prefix is not None:
            self.prefix.clear()

    def wait_for_files(self, seconds: float) -> None:
        """Wait until the files that `match` counts on have been read, at most `seconds`."""
        if self.prefix is not None and self.prefix.tiers is not None:
            self.prefix.tiers.wait(seconds)

    def admit(
        self, max_tokens: int, chain: ChainKeys | None = None, match: Match | None = None, *, resets: bool = True
    ) -> int:  # fmt: skip
        """Give a request of at most `max_tokens` tokens the lowest free slot, reset. No block is set aside for it.

        With a `chain` it takes over the longest prefix there is: see its `position`; what `match` said of it, if that
        was a moment ago. Refuses what could never finish even alone: `RequestTooLong`, `RequestNeverFits`.
        `NoFreeSlot` may pass. Without `resets`, `reset` must follow for a request that starts at 0.
        """
        if max_tokens < 1:
            raise CacheError(f"a request needs at least one token, found max_tokens {max_tokens}")
        if max_tokens > self.limits.max_context_tokens:
            raise RequestTooLong(
                f"the request may reach {max_tokens} tokens, max_context_tokens is {self.limits.max_context_tokens}"
            )
        needed = blocks_at_position(max_tokens)
        if needed > self.schema.num_blocks:
            raise RequestNeverFits(
                f"a request of {max_tokens} tokens needs {needed} blocks, the whole cache has {self.schema.num_blocks}"
            )
        if not self._free_slots:
            raise NoFreeSlot(f"all {self.schema.num_slots} slots (max_concurrent_requests) are taken")
        slot = heapq.heappop(self._free_slots)
        self._max_tokens[slot] = max_tokens
        match = self.match(chain) if match is None else match
        if resets or match.position:  # a state is put there
            self.reset([slot])
        if self.prefix is not None and chain is not None:
            self._start_from(slot, self.prefix.begin(slot, chain, match))
        return slot

    def _start_from(self, slot: int, blocks: list[int]) -> None:
        """The request owns these blocks, together with the prefix they belong to."""
        if blocks:
            self._blocks[slot] = blocks
            self._positions[slot] = self._highest[slot] = len(blocks) * BLOCK_TOKENS
            self._write_row(slot)

    def prepare_forward(self, slots: ArrayLike, positions_before: ArrayLike, num_new_tokens: ArrayLike) -> None:
        """Move each request `num_new_tokens` on from `positions_before` and give it the blocks the call writes into.

        All of the requests or none: `OutOfBlocks` (and every named error for what does not continue exactly) leaves
        positions, blocks and table as they were.
        """
        given = (slots, positions_before, num_new_tokens)
        slots, before, num_new = (np.asarray(values, dtype=np.int64) for values in given)
        ends = before + num_new
        self._check_call(slots, before, num_new, ends)
        num_blocks = blocks_at_position(ends) - blocks_at_position(before)
        num_needed = int(num_blocks.sum())
        fresh = self._acquire(num_needed) if num_needed else []
        self._positions[slots] = ends
        self._highest[slots] = np.maximum(self._highest[slots], ends)
        if not fresh:
            return
        taken = 0
        gained: list[tuple[int, int, list[int]]] = []  # slot, place of the first new block, new blocks
        for place in np.flatnonzero(num_blocks).tolist():
            slot, count = int(slots[place]), int(num_blocks[place])
            blocks = fresh[taken : taken + count]
            gained.append((slot, len(self._blocks[slot]), blocks))
            self._blocks[slot] += blocks
            taken += count
        self._give_blocks(gained)

    def _check_call(self, slots: Numbers, before: Numbers, num_new: Numbers, ends: Numbers) -> None:
        """A named error unless every request continues where it stands, within what it was admitted for."""
        if not len(slots) == len(before) == len(num_new):
            raise CacheError(f"{len(slots)} slots, {len(before)} positions and {len(num_new)} token counts differ")
        if (slots.view(np.uint64) < len(self._marks)).all():  # negative ones are large there
            self._marks[slots] = places = np.arange(len(slots))  # the last of equal slots leaves its mark
            is_right = (self._marks[slots] == places) & (before == self._positions[slots])
            # a free slot's limit is 0
            if (is_right & (num_new >= 1) & (ends <= self._max_tokens[slots])).all():
                return
        twice = [slot for slot, count in Counter(slots.tolist()).items() if count > 1]
        if twice:
            raise DuplicateSlot(f"slots {twice} appear more than once in one forward call")
        for slot, start, count in zip(slots.tolist(), before.tolist(), num_new.tolist(), strict=True):
            self._check_continues(slot, start, count)
        raise AssertionError("a call that is wrong as a whole has a request that is wrong")

    def _acquire(self, num_blocks: int) -> list[int]:
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(num_blocks, self.num_free_blocks, self.schema.num_blocks)
        if self.prefix is not None:
            self.prefix.tree.make_room(num_blocks)
        return self._allocator.acquire(num_blocks)

    def next_stop(self, slot: int) -> int:
        """Where the request's next piece must end at the latest: a snapshot is wanted there."""
        return NO_STOP if self.prefix is None else self.prefix.next_stop(slot, int(self._positions[slot]))

    def stop_at(self, slot: int, position: int) -> None:
        """Make a stop of a running request, for one that waits for this prefix."""
        assert self.prefix is not None, "only a match of the prefix cache names a leader"
        self.prefix.stop_at(slot, position)

    def launched(self, slot: int) -> None:
        """The forward call up to the request's position was launched: snapshots are taken in the order of the stream.

        To be called at least when the position has passed a multiple of 128.
        """
        if self.prefix is not None:
            before = list(self._blocks[slot])
            self.prefix.launched(slot, int(self._positions[slot]), self._blocks[slot])
            if self._blocks[slot] != before:  # a prefix that was known already: the same rows, kept once
                self._write_row(slot)

    def blocks_freed_by(self, slots: Sequence[int]) -> int:
        """Blocks that can be had once all of these requests are released. What others share with them stays theirs."""
        gone = Counter(block_id for slot in slots for block_id in self._blocks[slot])
        tree, alone = None if self.prefix is None else self.prefix.tree, set(slots)
        return sum(
            tree.freed_without(alone, block_id)
            if tree is not None and tree.owns(block_id)
            else self._allocator.num_owners(block_id) == count
            for block_id, count in gone.items()
        )

    def rewind(self, slot: int, position: int) -> None:
        """Take back the tokens from `position` on, as if they had never been processed.

        Exact up to `max_draft_tokens` behind the last token ever written to the slot. Position p of a ring of length n
        is overwritten by p + n, and each ring is `max_draft_tokens` longer than what a token reads behind itself, so
        all that a continuation reads is still there; the rows taken back are rewritten before they are read. So nothing
        happens on the device, unless a block is given back. Repeated rewinds do not add up: the distance counts from
        the highest position written, not from the current one.
        """
        self._check_admitted(slot)
        current, slack = int(self._positions[slot]), self.schema.max_draft_tokens
        if not 0 <= position <= current:
            raise RewindTooFar(f"slot {slot} is at position {current}; it cannot be rewound to {position}")
        if position == current:
            return
        distance = int(self._highest[slot]) - position
        if distance > slack:
            raise RewindTooFar(
                f"slot {slot} has written up to position {self._highest[slot]}; rewinding to {position} is "
                f"{distance} tokens back, the rings hold {slack} (max_draft_tokens)"
            )
        keep = blocks_at_position(position)
        dropped = self._blocks[slot][keep:]
        if dropped:
            self._allocator.release(dropped)
            del self._blocks[slot][keep:]
            self._clear_row(slot, keep, len(dropped))
        self._positions[slot] = position
        if self.prefix is not None:
            self.prefix.rewind(slot, position)

    def release(self, slot: int, *, keep: bool = True) -> None:
        """The request is over: its blocks and its slot are free again. `keep` leaves its prefix to the prefix cache;
        not after a failure, when it may be wrong."""
        self._check_admitted(slot)
        blocks = self._blocks[slot]
        if self.prefix is not None:
            self.prefix.end(slot, blocks, keep=keep)
        if blocks:
            self._allocator.release(blocks)
            self._clear_row(slot, 0, len(blocks))
        self._blocks[slot] = []
        self._positions[slot] = self._highest[slot] = self._max_tokens[slot] = 0
        heapq.heappush(self._free_slots, slot)

    # ---- for managers with tensors ----

    def reset(self, slots: Sequence[int]) -> None:
        """Requests begin there: nothing of the last ones may be read."""

    def _write_row(self, slot: int) -> None:
        """The request's blocks are others than before."""

    def _give_blocks(self, given: Sequence[tuple[int, int, list[int]]]) -> None:
        """Slot, place of the first new block, new blocks."""

    def _clear_row(self, slot: int, first: int, count: int) -> None:
        """The request's blocks from place `first` on are no more."""

    # ---- numbers and checks ----

    def prefix_stats(self) -> dict[str, int]:
        """Numbers of the prefix cache, by the names of `EngineStats`. Empty where it is off."""
        prefix = self.prefix
        if prefix is None:
            return {}
        stats = prefix.stats
        return {
            "num_prefix_hits": stats.num_hits, "num_prefix_host_hits": stats.num_host_hits,
            "num_prefix_disk_hits": stats.num_disk_hits, "num_prefix_misses": stats.num_misses,
            "num_cached_tokens": stats.num_cached_tokens, "num_prefix_evictions": prefix.tree.num_evictions,
            "num_snapshot_bytes": prefix.tree.num_snapshots * self.schema.bytes_per_snapshot,
            "num_idle_blocks": prefix.tree.num_idle_blocks,
        }  # fmt: skip

    def check_integrity(self) -> None:
        """Recompute the truth: owners of every block, free slots, positions."""
        self._allocator.check_integrity()
        owners = Counter(block_id for blocks in self._blocks for block_id in blocks)
        if self.prefix is not None:
            self.prefix.check_integrity(self._blocks)
            owners.update(self.prefix.tree.block_ids)
        for block_id in range(self._allocator.num_blocks):
            held, counted = owners[block_id], self._allocator.num_owners(block_id)
            require_integrity(held == counted, f"block {block_id} is held {held} times, the allocator says {counted}")
        free = sorted(self._free_slots)
        expected_free = [slot for slot, max_tokens in enumerate(self._max_tokens) if max_tokens == 0]
        require_integrity(free == expected_free, f"free slots are {free}, expected {expected_free}")
        standing = zip(self._positions.tolist(), self._highest.tolist(), self._max_tokens.tolist(), strict=True)
        for slot, (position, highest, max_tokens) in enumerate(standing):
            require_integrity(0 <= position <= highest <= max_tokens, f"slot {slot} stands at {position} of {highest}")
            require_integrity(
                highest - position <= self.schema.max_draft_tokens, f"slot {slot} was rewound beyond its rings"
            )
            num_blocks, expected = len(self._blocks[slot]), blocks_at_position(position)
            require_integrity(num_blocks == expected, f"slot {slot} owns {num_blocks} blocks, expected {expected}")

    def _check_admitted(self, slot: int) -> None:
        if not 0 <= slot < len(self._max_tokens):
            raise UnknownSlot(f"slot {slot} is not one of 0 .. {len(self._max_tokens) - 1}")
        if self._max_tokens[slot] == 0:
            raise UnknownSlot(f"slot {slot} is free: no request holds it")

    def _check_continues(self, slot: int, before: int, num_new: int) -> None:
        self._check_admitted(slot)
        if before != self._positions[slot]:
            hint = "rewind first" if before < self._positions[slot] else "positions may not be skipped"
            raise PositionMismatch(
                f"slot {slot} continues at position {self._positions[slot]}, the new tokens start at {before}; {hint}"
            )
        if num_new < 1:
            raise PositionMismatch(f"slot {slot} is given {num_new} new tokens; expected at least one")
        if before + num_new > self._max_tokens[slot]:
            raise BlockTableOverflow(
                f"{num_new} new tokens take slot {slot} to {before + num_new}, "
                f"it was admitted for {self._max_tokens[slot]}"
            )
