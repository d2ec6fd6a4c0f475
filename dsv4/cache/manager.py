"""`KVCacheManager`: which request holds which slot and which blocks, and where each request stands.

It owns the allocator, the paged cache, the state cache and the block table. Blocks are allocated between forward calls
from the positions alone, never inside one; every call that can fail checks everything first and changes nothing when it
raises. It does no maths: the ops write rows through `handle(layer_idx)`.

A request is a slot from `admit` to `release`. Its position is the number of tokens it has processed; `prepare_forward`
moves it forward, `rewind` moves it back. A request admitted with its `chain` may start beyond 0, with blocks and state
of a prefix that was here before (prefix.py), and leaves its own for others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.batch import Chunk, TokenBatch
from dsv4.cache.disk import DiskTier
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
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.host import HostTier
from dsv4.cache.paged import PagedCache
from dsv4.cache.payload import Part, Payload
from dsv4.cache.prefix import NO_STOP, Match, PrefixCache
from dsv4.cache.prefix_tree import ChainKeys
from dsv4.cache.schema import CacheSchema, blocks_at_position, build_cache_schema
from dsv4.cache.snapshots import SnapshotStore
from dsv4.cache.state import NO_POSITION, StateCache
from dsv4.cache.tiers import Tiers
from dsv4.cache.transfer import to_device
from dsv4.config import BLOCK_TOKENS, EngineConfig, ModelConfig
from dsv4.schedule import LayerSpec

NO_BLOCK = -1


class KVCacheManager:
    """`plain_dtype` None keeps the model's quantised rows (`official` numerics), otherwise plain rows of that dtype.

    `fingerprint` names everything that decides the bits of a row; `engine.cache_dir` needs one.
    """

    def __init__(
        self,
        config: ModelConfig,
        schedule: Sequence[LayerSpec],
        engine: EngineConfig,
        *,
        device: torch.device | str,
        plain_dtype: torch.dtype | None,
        fingerprint: str = "",
    ) -> None:
        if plain_dtype is not None and not plain_dtype.is_floating_point:
            raise CacheError(f"plain_dtype must be a floating-point dtype or None, found {plain_dtype}")
        itemsize = None if plain_dtype is None else plain_dtype.itemsize
        self.config = config
        self.schedule = tuple(schedule)
        self.limits = engine
        self.schema: CacheSchema = build_cache_schema(config, schedule, engine, plain_itemsize=itemsize)
        self.device = torch.device(device)
        self.fingerprint = fingerprint
        self._allocator = BlockAllocator(self.schema.num_blocks)
        self._paged = PagedCache(self.schema, device=self.device, plain_dtype=plain_dtype)
        self._state = StateCache(self.schema, device=self.device, plain_dtype=plain_dtype)
        ahead = [layer.layer_idx for layer in self.schedule if layer.is_mtp]
        self._snapshots = SnapshotStore(self.schema, self._state, ahead_layers=ahead)
        self.prefix: PrefixCache | None = None
        self.tiers = None
        if self.schema.num_snapshots:
            self.tiers = self._make_tiers(fingerprint)
            self.prefix = PrefixCache(
                self._allocator, self._snapshots, self.tiers, num_snapshots=self.schema.num_snapshots,
                interval=engine.snapshot_interval_tokens, slack=engine.max_draft_tokens,
                verify_share=engine.verify_hits,
            )  # fmt: skip
        num_slots, width = self.schema.num_slots, self.schema.max_blocks_per_request
        self._table = torch.full((num_slots, width), NO_BLOCK, dtype=torch.int32, device=self.device)
        self._handles = tuple(self._make_handle(layer.layer_idx) for layer in self.schema.layers)
        # the host's copy of the truth: row s of the table is _blocks[s], then -1
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._positions = [0] * num_slots
        self._highest = [0] * num_slots  # position after the last token ever written: what the rings have overwritten
        self._max_tokens = [0] * num_slots  # 0 marks a free slot
        self._free_slots = list(range(num_slots))  # a heap
        assert self.memory_bytes() == self.schema.total_bytes, (self.memory_bytes(), self.schema.total_bytes)

    def _make_tiers(self, fingerprint: str) -> Tiers | None:
        engine = self.limits
        if engine.cache_host_bytes == 0:
            return None
        disk = None
        if engine.cache_dir is not None:
            if not fingerprint:
                raise CacheError("cache_dir keeps rows for later processes, which needs the model's fingerprint")
            disk = DiskTier(Path(engine.cache_dir), engine.cache_disk_bytes, fingerprint)
        host = HostTier(engine.cache_host_bytes, self.device)
        return Tiers(Payload(self._paged, self._snapshots), host, disk)

    def close(self) -> None:
        """Finish writing files. The cache is of no use for the prefix cache afterwards."""
        if self.tiers is not None:
            self.tiers.close()

    # ---- what ops and the engine read ----

    @property
    def block_table(self) -> Tensor:
        """int32 [slots, blocks], updated in place: the same tensor for the manager's whole life."""
        return self._table

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: those without owners, and those kept for prefixes that nobody uses."""
        return self._allocator.num_free + (0 if self.prefix is None else self.prefix.tree.num_idle_blocks)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def handle(self, layer_idx: int) -> LayerCacheHandle:
        """The views of one layer, made once: asking for them allocates nothing."""
        if not 0 <= layer_idx < len(self._handles):
            raise CacheError(f"layer {layer_idx} is not one of 0 .. {len(self._handles) - 1}")
        return self._handles[layer_idx]

    def position(self, slot: int) -> int:
        """Tokens the request has processed; its next token has this position."""
        self._check_admitted(slot)
        return self._positions[slot]

    def memory_bytes(self) -> int:
        """Bytes really held on the device; equal to `schema.total_bytes`."""
        tensors = self._paged.memory_bytes() + self._state.memory_bytes() + self._snapshots.memory_bytes()
        return tensors + self._table.untyped_storage().nbytes()

    # ---- the life of a request ----

    def chain(self, token_ids: Sequence[int], salt: str | None) -> ChainKeys | None:
        """What the prefix cache knows the request's tokens by; None where it is off. `token_ids` may grow."""
        return None if self.prefix is None else ChainKeys(token_ids, salt, self.fingerprint)

    def match(self, chain: ChainKeys | None) -> Match:
        """What a request admitted now would start from. Changes nothing."""
        return Match() if self.prefix is None or chain is None else self.prefix.match(chain, self._positions)

    def admit(self, max_tokens: int, chain: ChainKeys | None = None) -> int:
        """Give a request of at most `max_tokens` tokens the lowest free slot, reset. No block is set aside for it.

        With a `chain` it takes over the longest prefix there is: see its `position`. Refuses what could never finish
        even alone: `RequestTooLong`, `RequestNeverFits`. `NoFreeSlot` may pass.
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
        self._state.reset_slot(slot)
        if self.prefix is not None and chain is not None:
            self._start_from(slot, self.prefix.begin(slot, chain))
        return slot

    def _start_from(self, slot: int, blocks: list[int]) -> None:
        """The request owns these blocks, together with the prefix they belong to."""
        if blocks:
            self._blocks[slot] = blocks
            self._positions[slot] = self._highest[slot] = len(blocks) * BLOCK_TOKENS
            self._write_table(slot)

    def _write_table(self, slot: int) -> None:
        blocks = self._blocks[slot]
        self._table[slot, : len(blocks)].copy_(to_device(torch.tensor(blocks, dtype=torch.int32), self.device))

    def prepare_forward(
        self, slots: Sequence[int], positions_before: Sequence[int], num_new_tokens: Sequence[int]
    ) -> None:
        """Move each request `num_new_tokens` on from `positions_before` and give it the blocks the call writes into.

        All of the requests or none: `OutOfBlocks` (and every named error for what does not continue exactly) leaves
        positions, blocks and table as they were.
        """
        if not len(slots) == len(positions_before) == len(num_new_tokens):
            raise CacheError(
                f"{len(slots)} slots, {len(positions_before)} positions and {len(num_new_tokens)} token counts differ"
            )
        if len(set(slots)) != len(slots):
            twice = [slot for slot, count in Counter(slots).items() if count > 1]
            raise DuplicateSlot(f"slots {twice} appear more than once in one forward call")
        num_new_blocks = []  # per request
        for slot, before, num_new in zip(slots, positions_before, num_new_tokens, strict=True):
            self._check_continues(slot, before, num_new)
            num_new_blocks.append(blocks_at_position(before + num_new) - len(self._blocks[slot]))
        fresh = self._acquire(sum(num_new_blocks))

        cells: list[int] = []  # of the flattened table
        taken, width = 0, self._table.shape[1]
        for slot, num_new, num_blocks in zip(slots, num_new_tokens, num_new_blocks, strict=True):
            position = self._positions[slot] + num_new
            self._positions[slot] = position
            if position > self._highest[slot]:
                self._highest[slot] = position
            if num_blocks:
                first_cell = slot * width + len(self._blocks[slot])
                cells += range(first_cell, first_cell + num_blocks)
                self._blocks[slot] += fresh[taken : taken + num_blocks]
                taken += num_blocks
        if cells:
            update = to_device(torch.tensor([cells, fresh]), self.device)
            self._table.view(-1).index_copy_(0, update[0], update[1].to(torch.int32))

    def _acquire(self, num_blocks: int) -> list[int]:
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(num_blocks, self.num_free_blocks, self.schema.num_blocks)
        if self.prefix is not None:
            self.prefix.tree.make_room(num_blocks)
        return self._allocator.acquire(num_blocks)

    def next_stop(self, slot: int) -> int:
        """Where the request's next piece must end at the latest: a snapshot is wanted there."""
        return NO_STOP if self.prefix is None else self.prefix.next_stop(slot, self._positions[slot])

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
            self.prefix.launched(slot, self._positions[slot], self._blocks[slot])
            if self._blocks[slot] != before:  # a prefix that was known already: the same rows, kept once
                self._write_table(slot)

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

    def make_batch(self, slots: Sequence[int], token_ids_per_request: Sequence[Sequence[int]]) -> TokenBatch:
        """`prepare_forward` from where each request stands, and the tensors of the call, copied to the device at once.

        `token_ids_per_request[i]` are the next tokens of the request in `slots[i]`.
        """
        if len(slots) != len(token_ids_per_request):
            raise CacheError(f"{len(slots)} slots, but tokens of {len(token_ids_per_request)} requests")
        vocab_size = self.config.vocab_size
        for slot, token_ids in zip(slots, token_ids_per_request, strict=True):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                outside = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
                raise CacheError(f"token id {outside} of slot {slot} is outside the vocabulary of {vocab_size}")
        starts = [self.position(slot) for slot in slots]
        lengths = [len(token_ids) for token_ids in token_ids_per_request]
        self.prepare_forward(slots, starts, lengths)
        chunks = map(Chunk, slots, starts, token_ids_per_request)
        return TokenBatch.of(chunks, self._table)

    def rewind(self, slot: int, position: int) -> None:
        """Take back the tokens from `position` on, as if they had never been processed.

        Exact up to `max_draft_tokens` behind the last token ever written to the slot. Position p of a ring of length n
        is overwritten by p + n, and each ring is `max_draft_tokens` longer than what a token reads behind itself, so
        all that a continuation reads is still there; the rows taken back are rewritten before they are read. So nothing
        happens on the device, unless a block is given back. Repeated rewinds do not add up: the distance counts from
        the highest position written, not from the current one.
        """
        self._check_admitted(slot)
        current, slack = self._positions[slot], self.schema.max_draft_tokens
        if not 0 <= position <= current:
            raise RewindTooFar(f"slot {slot} is at position {current}; it cannot be rewound to {position}")
        if position == current:
            return
        distance = self._highest[slot] - position
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
            self._table[slot, keep : keep + len(dropped)] = NO_BLOCK
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
            self._table[slot, : len(blocks)] = NO_BLOCK
        self._blocks[slot] = []
        self._positions[slot] = self._highest[slot] = self._max_tokens[slot] = 0
        heapq.heappush(self._free_slots, slot)

    # ---- what the prefix cache holds ----

    def prefix_stats(self) -> dict[str, int]:
        """Numbers of the prefix cache, by the names of `EngineStats`. Empty where it is off."""
        prefix, tiers = self.prefix, self.tiers
        if prefix is None:
            return {}
        stats = prefix.stats
        numbers = {
            "num_prefix_hits": stats.num_hits, "num_prefix_host_hits": stats.num_host_hits,
            "num_prefix_disk_hits": stats.num_disk_hits, "num_prefix_misses": stats.num_misses,
            "num_cached_tokens": stats.num_cached_tokens, "num_prefix_evictions": prefix.tree.num_evictions,
            "num_snapshot_bytes": prefix.tree.num_snapshots * self.schema.bytes_per_snapshot,
            "num_idle_blocks": prefix.tree.num_idle_blocks,
        }  # fmt: skip
        if tiers is not None:
            numbers["num_prefix_host_bytes"] = tiers.host.tree.num_bytes
            if tiers.disk is not None:
                numbers["num_prefix_disk_bytes"] = tiers.disk.tree.num_bytes
                numbers["num_prefix_bad_files"] = tiers.disk.num_bad
        return numbers

    def differences(self, slot: int, chain: ChainKeys) -> list[str] | None:
        """Where the state of a request that stands at the end of `chain` differs from what the prefix cache would give
        it, by pool; None if it would give nothing. Waits for the device."""
        assert self.prefix is not None and self._positions[slot] == len(chain.token_ids)
        nodes = self.prefix.path_to(chain)
        spare = None if nodes is None else self.prefix.tree.take_snapshot()
        if nodes is None or spare is None or nodes[-1].snapshot is None:
            return None
        self._snapshots.save(slot, self._positions[slot], spare)
        blocks = [node.block for node in nodes if node.block is not None]
        payload = Payload(self._paged, self._snapshots)
        kept = payload.views(payload.gather(blocks, nodes[-1].snapshot), len(blocks))
        cold = payload.views(payload.gather(self._blocks[slot], spare), len(blocks))
        self.prefix.tree.give_back(spare)
        return [
            part.name
            for part in payload.parts
            if not torch.equal(self._deciding(part, kept), self._deciding(part, cold))
        ]

    def _deciding(self, part: Part, views: Mapping[str, Tensor]) -> Tensor:
        """The part's rows that decide a token: those of a drafter do not."""
        layers = [row for row, idx in enumerate(part.pool.schema.layer_ids) if not self.schedule[idx].is_mtp]
        return views[part.name][layers]

    def forget(self, chain: ChainKeys) -> None:
        """The prefix cache never gives this prefix again."""
        if self.prefix is not None:
            self.prefix.forget(chain)

    # ---- checks ----

    def check_integrity(self) -> None:
        """Recompute the truth: owners of every block, the table against the host, free slots, positions, bytes."""
        self._allocator.check_integrity()
        owners = Counter(block_id for blocks in self._blocks for block_id in blocks)
        if self.prefix is not None:
            self.prefix.check_integrity(self._blocks)
            if self.tiers is not None:
                self.tiers.check_integrity()
            owners.update(self.prefix.tree.block_ids)
        for block_id in range(self._allocator.num_blocks):
            held, counted = owners[block_id], self._allocator.num_owners(block_id)
            require_integrity(held == counted, f"block {block_id} is held {held} times, the allocator says {counted}")
        width = self.schema.max_blocks_per_request
        mirror = [blocks + [NO_BLOCK] * (width - len(blocks)) for blocks in self._blocks]
        require_integrity(self._table.tolist() == mirror, "the block table differs from the host's copy")
        free = sorted(self._free_slots)
        expected_free = [slot for slot, max_tokens in enumerate(self._max_tokens) if max_tokens == 0]
        require_integrity(free == expected_free, f"free slots are {free}, expected {expected_free}")
        for slot, position in enumerate(self._positions):
            highest, max_tokens = self._highest[slot], self._max_tokens[slot]
            require_integrity(0 <= position <= highest <= max_tokens, f"slot {slot} stands at {position} of {highest}")
            require_integrity(
                highest - position <= self.schema.max_draft_tokens, f"slot {slot} was rewound beyond its rings"
            )
            num_blocks, expected = len(self._blocks[slot]), blocks_at_position(position)
            require_integrity(num_blocks == expected, f"slot {slot} owns {num_blocks} blocks, expected {expected}")
        self._check_ring_positions()
        require_integrity(self.memory_bytes() == self.schema.total_bytes, "the bytes held differ from the schema")

    def _check_ring_positions(self) -> None:
        """A ring row holds no position, or one that belongs in that row and was written: before the highest one.

        A draft block runs ahead of the main layers by the tokens it drafts.
        """
        ring_len = self.schema.layers[0].ring_len
        slack = ring_len - self.config.sliding_window
        limits = torch.tensor(self._highest)[:, None]
        held = torch.tensor([max_tokens > 0 for max_tokens in self._max_tokens])
        for layer in self.schedule:
            ahead = slack if layer.is_mtp else 0
            positions = self.handle(layer.layer_idx).window.positions.cpu()[held]
            valid = (positions % ring_len == torch.arange(ring_len)) & (positions < limits[held] + ahead)
            require_integrity(
                bool(((positions == NO_POSITION) | valid).all()), f"layer {layer.layer_idx} has a ring row out of place"
            )

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

    def _make_handle(self, layer_idx: int) -> LayerCacheHandle:
        return LayerCacheHandle(
            window=self._state.window(layer_idx),
            entries=self._paged.entries(layer_idx),
            compressor=self._state.compressor(layer_idx),
            index_keys=self._paged.index_keys(layer_idx),
            index_compressor=self._state.index_compressor(layer_idx),
        )
