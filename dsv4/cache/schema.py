"""What the cache of a model holds, byte for byte, before anything is allocated. Arithmetic only, no torch.

One block is 128 tokens of every layer at once: 32 entries and 32 indexer keys on a CSA layer, 1 entry on an HCA layer,
nothing on an SWA layer. One slot is the fixed part of one request: in every layer the window ring with its positions,
and on CSA and HCA layers the compressor tails. One snapshot is what a request needs of its slot to go on from a
multiple of 128 tokens. `PagedCache`, `StateCache` and `SnapshotStore` allocate exactly the pools listed here.

A pool is one component of several layers in one allocation. Each layer's share starts on an `ALIGNMENT` boundary, so
that a kernel sees the same pointer alignment on every layer; the bytes this costs are `padding_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.layer_schema import (
    CSA_ENTRIES_PER_BLOCK,
    POSITION_BYTES,
    CompressorSchema,
    LayerCacheSchema,
    TailSchema,
    _ring_slack,
    layer_schema,
)
from dsv4.config import BLOCK_TOKENS, CSA_RATIO, ConfigError, EngineConfig, ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, validate_schedule
from dsv4.formats.rows import RowFormat, RowKind

ALIGNMENT = 256


def blocks_for_tokens(num_tokens: int) -> int:
    """Whole blocks to set aside for `num_tokens`; a started block counts."""
    return -(-num_tokens // BLOCK_TOKENS)


_Positions = TypeVar("_Positions", int, NDArray[np.int64])


def blocks_at_position(position: _Positions) -> _Positions:
    """Blocks a request owns once its first `position` tokens are processed; for an array, of each.

    A block is needed as soon as its first entry closes, which is the CSA entry of its fourth token; its HCA entry
    closes together with its last CSA entry. So a request at 131 owns one block, at 132 two.
    """
    return -(-(position // CSA_RATIO) // CSA_ENTRIES_PER_BLOCK)


@dataclass(frozen=True)
class PoolSchema:
    """One component of the layers `layer_ids`: per layer a tensor of `shape`, `itemsize` bytes an element."""

    name: str
    layer_ids: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int

    @property
    def layer_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer's share to the next."""
        return -(-self.layer_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def total_bytes(self) -> int:
        return len(self.layer_ids) * self.layer_stride

    @property
    def padding_bytes(self) -> int:
        return self.total_bytes - len(self.layer_ids) * self.layer_bytes


@dataclass(frozen=True)
class CacheSchema:
    """All layers, the limits, and every byte of the allocation.

    The per-token and per-request figures are what the data itself takes; `paged_bytes` and `state_cache_bytes` are
    what is allocated for `num_blocks` and `num_slots`, alignment included, `snapshot_cache_bytes` the same for
    `num_snapshots`, and `total_bytes` adds the block table.
    """

    layers: tuple[LayerCacheSchema, ...]
    num_slots: int
    num_blocks: int
    max_blocks_per_request: int
    max_draft_tokens: int
    window_len: int
    num_snapshots: int
    paged_pools: tuple[PoolSchema, ...]
    state_pools: tuple[PoolSchema, ...]
    snapshot_pools: tuple[PoolSchema, ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(layer.bytes_per_block for layer in self.layers)

    @property
    def bytes_per_token(self) -> Fraction:
        """The growing part, exact: a block's bytes over its 128 tokens."""
        return Fraction(self.bytes_per_block, BLOCK_TOKENS)

    @property
    def window_bytes_per_request(self) -> int:
        return sum(layer.window_bytes_per_slot for layer in self.layers)

    @property
    def position_bytes_per_request(self) -> int:
        return sum(layer.position_bytes_per_slot for layer in self.layers)

    @property
    def state_bytes_per_request(self) -> int:
        return sum(layer.state_bytes_per_slot for layer in self.layers)

    def request_bytes(self, position: int) -> int:
        """What one request holds once it has processed `position` tokens: its blocks, window and compressor state."""
        fixed = self.window_bytes_per_request + self.position_bytes_per_request + self.state_bytes_per_request
        return fixed + blocks_at_position(position) * self.bytes_per_block

    @property
    def paged_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.paged_pools)

    @property
    def state_cache_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.state_pools)

    @property
    def bytes_per_snapshot(self) -> int:
        """The windows of all layers, and the last four tokens of the CSA compressors' `following` tails."""
        return _bytes_per_snapshot(self.state_pools, self.window_len)

    @property
    def snapshot_cache_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.snapshot_pools)

    @property
    def table_bytes(self) -> int:
        return self.num_slots * self.max_blocks_per_request * POSITION_BYTES

    @property
    def padding_bytes(self) -> int:
        return sum(pool.padding_bytes for pool in (*self.paged_pools, *self.state_pools, *self.snapshot_pools))

    @property
    def total_bytes(self) -> int:
        return self.paged_bytes + self.state_cache_bytes + self.snapshot_cache_bytes + self.table_bytes


def build_cache_schema(
    config: ModelConfig, schedule: Sequence[LayerSpec], engine: EngineConfig, *, plain_itemsize: int | None
) -> CacheSchema:
    """The cache of `schedule` under the limits of `engine`.

    `plain_itemsize` None stores the model's own quantised rows (584-byte entries, FP4 or FP8 index keys); otherwise
    every row is plain values of that many bytes. Tails are FP32, and FP64 where the rows are.
    """
    validate_schedule(schedule)
    if plain_itemsize not in (None, 2, 4, 8):
        raise ConfigError(f"plain_itemsize must be None, 2, 4 or 8 bytes, found {plain_itemsize!r}")
    num_blocks = engine.num_blocks
    budget = compute_block_budget(config, schedule, engine.max_context_tokens, engine.max_concurrent_requests)
    if num_blocks is None:
        num_blocks = budget
    ring_len = config.sliding_window + _ring_slack(config, schedule, engine)
    layers = tuple(layer_schema(config, layer, engine, plain_itemsize, ring_len) for layer in schedule)
    state_pools = _state_pools(layers, engine.max_concurrent_requests)
    num_snapshots = _num_snapshots(state_pools, config.sliding_window, num_blocks, engine.prefix_cache_bytes)
    return CacheSchema(
        layers=layers,
        num_slots=engine.max_concurrent_requests,
        num_blocks=num_blocks,
        max_blocks_per_request=blocks_for_tokens(engine.max_context_tokens),
        max_draft_tokens=engine.max_draft_tokens,
        window_len=config.sliding_window,
        num_snapshots=num_snapshots,
        paged_pools=_paged_pools(layers, num_blocks),
        state_pools=state_pools,
        snapshot_pools=_snapshot_pools(state_pools, config.sliding_window, num_snapshots),
    )


def compute_block_budget(
    config: ModelConfig,
    schedule: Sequence[LayerSpec],
    max_context_tokens: int,
    max_concurrent_requests: int,
    headroom: float | Fraction = 0,
) -> int:
    """Blocks that let every slot reach `max_context_tokens`, times 1 + `headroom`, rounded up at each step.

    `headroom` is a fraction of the budget (0.1 adds a tenth); blocks beyond the sum of the contexts are of use only to
    what outlives a request. A float counts as the decimal it is written as, so that 10 blocks and 0.1 give 11.
    """
    validate_schedule(schedule)
    if max_context_tokens < 1 or max_concurrent_requests < 1:
        raise ConfigError(
            "max_context_tokens and max_concurrent_requests must be positive, "
            f"found {max_context_tokens} and {max_concurrent_requests}"
        )
    if max_context_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"max_context_tokens must be at most the model's max_position_embeddings {config.max_position_embeddings}, "
            f"found {max_context_tokens}"
        )
    if not (math.isfinite(headroom) and headroom >= 0):
        raise ConfigError(f"headroom must be a fraction of at least 0, found {headroom!r}")
    base = blocks_for_tokens(max_context_tokens) * max_concurrent_requests
    return math.ceil(base * (1 + Fraction(str(headroom))))


_RowsOf = Callable[[LayerCacheSchema], tuple[RowFormat, int] | None]  # a layer's row format and rows per leading index


def _row_pools(
    name: str, layers: Sequence[LayerCacheSchema], rows_of: _RowsOf, num_leading: int
) -> tuple[PoolSchema, ...]:
    """`<name>.data` and, for quantised rows, `<name>.scales` of the layers where `rows_of` is not None."""
    holders = [(layer.layer_idx, rows) for layer in layers if (rows := rows_of(layer)) is not None]
    if not holders:
        return ()
    layer_ids = tuple(layer_idx for layer_idx, _ in holders)
    row_format, num_rows = holders[0][1]
    assert all(rows == (row_format, num_rows) for _, rows in holders), f"{name} differs between layers"
    leading = (num_leading, num_rows)
    if row_format.kind is RowKind.PLAIN:
        return (PoolSchema(f"{name}.data", layer_ids, (*leading, row_format.dim), row_format.itemsize),)
    return (
        PoolSchema(f"{name}.data", layer_ids, (*leading, row_format.data_bytes), 1),
        PoolSchema(f"{name}.scales", layer_ids, (*leading, row_format.scale_bytes), 1),
    )


def _paged_pools(layers: Sequence[LayerCacheSchema], num_blocks: int) -> tuple[PoolSchema, ...]:
    def entries_of(kind: AttentionKind) -> _RowsOf:
        def rows_of(layer: LayerCacheSchema) -> tuple[RowFormat, int] | None:
            if layer.attention is not kind or layer.entries is None:
                return None
            return layer.entries, layer.entries_per_block

        return rows_of

    def index_keys_of(layer: LayerCacheSchema) -> tuple[RowFormat, int] | None:
        return None if layer.index_keys is None else (layer.index_keys, layer.entries_per_block)

    return (
        *_row_pools("csa.entries", layers, entries_of(AttentionKind.CSA), num_blocks),
        *_row_pools("csa.index_keys", layers, index_keys_of, num_blocks),
        *_row_pools("hca.entries", layers, entries_of(AttentionKind.HCA), num_blocks),
    )


def _state_pools(layers: Sequence[LayerCacheSchema], num_slots: int) -> tuple[PoolSchema, ...]:
    layer_ids = tuple(layer.layer_idx for layer in layers)
    positions = PoolSchema("window.positions", layer_ids, (num_slots, layers[0].ring_len), POSITION_BYTES)
    pools = [*_row_pools("window", layers, lambda layer: (layer.window, layer.ring_len), num_slots), positions]
    for kind in (AttentionKind.CSA, AttentionKind.HCA):
        for compressor in ("compressor", "index_compressor"):
            for half in ("own", "following"):
                pools += _tail_pools(layers, kind, compressor, half, num_slots)
    return tuple(pools)


def _tail_pools(
    layers: Sequence[LayerCacheSchema], kind: AttentionKind, compressor: str, half: str, num_slots: int
) -> tuple[PoolSchema, ...]:
    """`<kind>.<compressor>.<half>.kv` and `.score` of the layers that have such a tail."""
    tails: dict[int, TailSchema] = {}
    for layer in layers:
        state: CompressorSchema | None = getattr(layer, compressor)
        tail: TailSchema | None = None if state is None else getattr(state, half)
        if layer.attention is kind and tail is not None:
            tails[layer.layer_idx] = tail
    if not tails:
        return ()
    tail = next(iter(tails.values()))
    assert all(other == tail for other in tails.values()), f"{kind} {compressor} differs between layers"
    shape = (num_slots, tail.ring_len, tail.dim)
    name = f"{kind.value}.{compressor}.{half}"
    return tuple(PoolSchema(f"{name}.{part}", tuple(tails), shape, tail.itemsize) for part in ("kv", "score"))


def _snapshot_rows(pool: PoolSchema, window_len: int) -> int:
    """Rows of a slot's ring that a snapshot keeps. Own tails are empty at a multiple of their ratio, positions follow
    from the number of tokens."""
    if pool.name == "window.positions":
        return 0
    if pool.name.startswith("window"):
        return window_len
    return CSA_RATIO if ".following." in pool.name else 0


def _bytes_per_snapshot(state_pools: Sequence[PoolSchema], window_len: int) -> int:
    return sum(
        _snapshot_rows(pool, window_len) * len(pool.layer_ids) * pool.shape[-1] * pool.itemsize for pool in state_pools
    )


def _snapshot_pools(state_pools: Sequence[PoolSchema], window_len: int, num_snapshots: int) -> tuple[PoolSchema, ...]:
    if num_snapshots == 0:
        return ()
    return tuple(
        PoolSchema(f"snapshot.{pool.name}", pool.layer_ids, (num_snapshots, num_rows, pool.shape[-1]), pool.itemsize)
        for pool in state_pools
        if (num_rows := _snapshot_rows(pool, window_len))
    )


def _num_snapshots(state_pools: Sequence[PoolSchema], window_len: int, num_blocks: int, max_bytes: int) -> int:
    """As many as `max_bytes` hold, alignment included. More than blocks could never be of use."""
    count = min(num_blocks, max_bytes // _bytes_per_snapshot(state_pools, window_len))
    while sum(pool.total_bytes for pool in _snapshot_pools(state_pools, window_len, count)) > max_bytes:
        count -= 1
    return count
