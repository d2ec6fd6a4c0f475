"""`KVCacheManager`: a cache: its ledger (ledger.py), and the tensors that follow them.

It owns the paged cache, the state cache, the snapshots and the block table. Blocks are allocated between forward calls
from the positions alone, never inside one. It does no maths: the ops write rows through `handle(layer_idx)`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsv4.cache.batch import Chunk, TokenBatch
from dsv4.cache.errors import CacheError, require_integrity
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.ledger import CacheLedger
from dsv4.cache.pool import Pool, PoolSet, layer_handle
from dsv4.cache.prefix.snapshots import SnapshotStore
from dsv4.cache.prefix.tree import ChainKeys, PrefixTree
from dsv4.cache.prefix.watch import PrefixWatch
from dsv4.cache.schema import build_cache_schema
from dsv4.cache.state import NO_POSITION, StateCache
from dsv4.cache.tiers.disk import DiskTier
from dsv4.cache.tiers.host import HostTier
from dsv4.cache.tiers.payload import Part, Payload
from dsv4.cache.tiers.segments import SegmentTree
from dsv4.cache.tiers.tiers import Tiers
from dsv4.cache.transfer import to_device
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import LayerSpec

NO_BLOCK = -1


class KVCacheManager(CacheLedger):
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
        self.device = torch.device(device)
        schema = build_cache_schema(config, schedule, engine, plain_itemsize=itemsize)
        self._paged = PoolSet(schema.paged_pools, self.device, plain_dtype)
        self._state = StateCache(schema, device=self.device, plain_dtype=plain_dtype)
        ahead = [layer.layer_idx for layer in self.schedule if layer.is_mtp]
        self._snapshots = SnapshotStore(schema, self._state, ahead_layers=ahead)
        self.tiers = self._make_tiers(engine, fingerprint) if schema.num_snapshots else None
        super().__init__(schema, engine, self._snapshots, self.tiers, fingerprint)
        num_slots, width = schema.num_slots, schema.max_blocks_per_request
        self._table = torch.full((num_slots, width), NO_BLOCK, dtype=torch.int32, device=self.device)
        pools = {**self._paged.pools, **self._state.pools}
        self._handles = tuple(layer_handle(layer, pools) for layer in schema.layers)
        assert self.memory_bytes() == schema.total_bytes, (self.memory_bytes(), schema.total_bytes)

    def _make_tiers(self, engine: EngineConfig, fingerprint: str) -> Tiers | None:
        if engine.cache_host_bytes == 0:
            return None
        disk = None
        if engine.cache_dir is not None:
            if not fingerprint:
                raise CacheError("cache_dir keeps rows for later processes, which needs the model's fingerprint")
            disk = DiskTier(Path(engine.cache_dir), engine.cache_disk_bytes, fingerprint)
        host = HostTier(engine.cache_host_bytes, self.device)
        return Tiers(Payload(self._paged, self._snapshots), host, disk)

    def watch_prefixes(self) -> PrefixWatch:
        """What requests could start from, now and as it changes; on all tiers."""
        trees: list[PrefixTree | SegmentTree] = [] if self.prefix is None else [self.prefix.tree]
        if self.tiers is not None:
            trees += [tier.tree for tier in (self.tiers.host, self.tiers.disk) if tier is not None]
        return PrefixWatch(trees)

    def close(self) -> None:
        """Finish writing files. The cache is of no use for the prefix cache afterwards."""
        if self.tiers is not None:
            self.tiers.close()

    def drop_rows(self) -> None:
        """Give the memory of all rows back, until `restore_rows`. No slot may be taken, and no prefix kept."""
        assert self.num_free_slots == self.schema.num_slots
        for pool in self._pools():
            pool.drop()

    def restore_rows(self) -> None:
        """As they were when the cache was made."""
        for pool in self._pools():
            pool.restore()
        self._state.reset()

    def _pools(self) -> list[Pool]:
        return [pool for part in (self._paged, self._state, self._snapshots) for pool in part.pools.values()]

    # ---- what ops and the engine read ----

    @property
    def block_table(self) -> Tensor:
        """int32 [slots, blocks], updated in place: the same tensor for the manager's whole life."""
        return self._table

    def handle(self, layer_idx: int) -> LayerCacheHandle:
        """The views of one layer, made once: asking for them allocates nothing."""
        if not 0 <= layer_idx < len(self._handles):
            raise CacheError(f"layer {layer_idx} is not one of 0 .. {len(self._handles) - 1}")
        return self._handles[layer_idx]

    def memory_bytes(self) -> int:
        """Bytes really held on the device; equal to `schema.total_bytes`."""
        tensors = self._paged.memory_bytes() + self._state.memory_bytes() + self._snapshots.memory_bytes()
        return tensors + self._table.untyped_storage().nbytes()

    # ---- what the ledger's changes do to tensors ----

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

    def reset(self, slots: Sequence[int]) -> None:
        self._state.reset_slots(slots)

    def _write_row(self, slot: int) -> None:
        blocks = self._blocks[slot]
        self._table[slot, : len(blocks)].copy_(to_device(torch.tensor(blocks, dtype=torch.int32), self.device))

    def _give_blocks(self, given: Sequence[tuple[int, int, list[int]]]) -> None:
        width = self._table.shape[1]
        cells = [slot * width + first + place for slot, first, blocks in given for place in range(len(blocks))]
        update = to_device(torch.tensor([cells, [block for _, _, blocks in given for block in blocks]]), self.device)
        self._table.view(-1).index_copy_(0, update[0], update[1].to(torch.int32))

    def _clear_row(self, slot: int, first: int, count: int) -> None:
        self._table[slot, first : first + count] = NO_BLOCK

    # ---- what the prefix cache holds ----

    def prefix_stats(self) -> dict[str, int]:
        """Also what lies below the device."""
        numbers, tiers = super().prefix_stats(), self.tiers
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
        if nodes is None or spare is None:
            return None
        if nodes[-1].snapshot is None:  # it was the one to make room
            self.prefix.tree.give_back(spare)
            return None
        self._snapshots.save(slot, int(self._positions[slot]), spare)
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
        """Also the table against the host, rings, lower tiers and bytes."""
        super().check_integrity()
        if self.tiers is not None:
            self.tiers.check_integrity()
        width = self.schema.max_blocks_per_request
        mirror = [blocks + [NO_BLOCK] * (width - len(blocks)) for blocks in self._blocks]
        require_integrity(self._table.tolist() == mirror, "the block table differs from the host's copy")
        self._check_ring_positions()
        require_integrity(self.memory_bytes() == self.schema.total_bytes, "the bytes held differ from the schema")

    def _check_ring_positions(self) -> None:
        """A ring row holds no position, or one that belongs in that row and was written: before the highest one.

        A draft block runs ahead of the main layers by the tokens it drafts.
        """
        ring_len = self.schema.layers[0].ring_len
        slack = ring_len - self.config.sliding_window
        limits = torch.from_numpy(self._highest)[:, None]
        held = torch.from_numpy(self._max_tokens > 0)
        for layer in self.schedule:
            ahead = slack if layer.is_mtp else 0
            positions = self.handle(layer.layer_idx).window.positions.cpu()[held]
            valid = (positions % ring_len == torch.arange(ring_len)) & (positions < limits[held] + ahead)
            require_integrity(
                bool(((positions == NO_POSITION) | valid).all()), f"layer {layer.layer_idx} has a ring row out of place"
            )
