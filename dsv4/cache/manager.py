"""`KVCacheManager`: which request holds which slot and which blocks, and where each request stands.

It owns the allocator, the paged cache, the state cache and the block table. Blocks are allocated between forward calls
from the positions alone, never inside one; every call that can fail checks everything first and changes nothing when it
raises. It does no maths: the ops write rows through `handle(layer_idx)`.

A request is a slot from `admit` to `release`. Its position is the number of tokens it has processed; `prepare_forward`
moves it forward, `rewind` moves it back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.batch import Chunk, TokenBatch
from dsv4.cache.errors import (
    BlockTableOverflow,
    CacheError,
    DuplicateSlot,
    NoFreeSlot,
    PositionMismatch,
    RequestNeverFits,
    RequestTooLong,
    RewindTooFar,
    UnknownSlot,
    require_integrity,
)
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.paged import PagedCache
from dsv4.cache.schema import CacheSchema, blocks_at_position, build_cache_schema
from dsv4.cache.state import NO_POSITION, StateCache
from dsv4.cache.transfer import to_device
from dsv4.config import EngineConfig, ModelConfig
from dsv4.schedule import LayerSpec

NO_BLOCK = -1


class KVCacheManager:
    """`plain_dtype` None keeps the model's quantised rows (`official` numerics), otherwise plain rows of that dtype."""

    def __init__(
        self,
        config: ModelConfig,
        schedule: Sequence[LayerSpec],
        engine: EngineConfig,
        *,
        device: torch.device | str,
        plain_dtype: torch.dtype | None,
    ) -> None:
        if plain_dtype is not None and not plain_dtype.is_floating_point:
            raise CacheError(f"plain_dtype must be a floating-point dtype or None, found {plain_dtype}")
        itemsize = None if plain_dtype is None else plain_dtype.itemsize
        self.config = config
        self.schedule = tuple(schedule)
        self.limits = engine
        self.schema: CacheSchema = build_cache_schema(config, schedule, engine, plain_itemsize=itemsize)
        self.device = torch.device(device)
        self._allocator = BlockAllocator(self.schema.num_blocks)
        self._paged = PagedCache(self.schema, device=self.device, plain_dtype=plain_dtype)
        self._state = StateCache(self.schema, device=self.device, plain_dtype=plain_dtype)
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

    # ---- what ops and the engine read ----

    @property
    def block_table(self) -> Tensor:
        """int32 [slots, blocks], updated in place: the same tensor for the manager's whole life."""
        return self._table

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free

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
        return self._paged.memory_bytes() + self._state.memory_bytes() + self._table.untyped_storage().nbytes()

    # ---- the life of a request ----

    def admit(self, max_tokens: int) -> int:
        """Give a request of at most `max_tokens` tokens the lowest free slot, reset. No block is set aside for it.

        Refuses what could never finish even alone: `RequestTooLong`, `RequestNeverFits`. `NoFreeSlot` may pass.
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
        return slot

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
        fresh = self._allocator.acquire(sum(num_new_blocks))

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
        all that a continuation reads is still there; the rows taken back are rewritten before they are read. Repeated
        rewinds do not add up: the distance counts from the highest position written, not from the current one.
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
        # the tails need nothing: their readers go by the request's position and rewrite these rows first
        self._state.forget_positions(slot, position)

    def release(self, slot: int) -> None:
        """The request is over: its blocks and its slot are free again."""
        self._check_admitted(slot)
        blocks = self._blocks[slot]
        if blocks:
            self._allocator.release(blocks)
            self._table[slot, : len(blocks)] = NO_BLOCK
        self._blocks[slot] = []
        self._positions[slot] = self._highest[slot] = self._max_tokens[slot] = 0
        heapq.heappush(self._free_slots, slot)

    # ---- checks ----

    def check_integrity(self) -> None:
        """Recompute the truth: owners of every block, the table against the host, free slots, positions, bytes."""
        self._allocator.check_integrity()
        owners = Counter(block_id for blocks in self._blocks for block_id in blocks)
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
        """A ring row holds no position, or one that belongs in that row and lies before the request's position.

        An MTP block runs ahead of the main layers by the tokens it drafts.
        """
        ring_len = self.schema.layers[0].ring_len
        limits = torch.tensor(self._positions)[:, None]
        held = torch.tensor([max_tokens > 0 for max_tokens in self._max_tokens])
        for layer in self.schedule:
            ahead = self.schema.max_draft_tokens if layer.is_mtp else 0
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
