"""What the cache of a model holds, byte for byte, before anything is allocated. Arithmetic only, no torch.

One block is 128 tokens of every layer at once: 32 entries and 32 indexer keys on a CSA layer, 1 entry on an HCA layer,
nothing on an SWA layer. One slot is the fixed part of one request: in every layer the window ring with its positions,
and on CSA and HCA layers the compressor tails. One snapshot is what a request needs of its slot to go on from a
multiple of 128 tokens. The cache allocates exactly the pools listed here.

A pool is one component of several layers in one allocation. Each layer's share starts on an `ALIGNMENT` boundary, so
that a kernel sees the same pointer alignment on every layer; the bytes this costs are `padding_bytes`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from dsv4.cache.layer_schema import (
    POSITION_BYTES,
    LayerCacheSchema,
    _ring_slack,
    layer_schema,
)
from dsv4.config import BLOCK_TOKENS, CSA_RATIO, ConfigError, EngineConfig, ModelConfig
from dsv4.config.layers import LayerSpec, validate_schedule
from dsv4.formats.rows import RowFormat, RowKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIGNMENT = 256


def blocks_for_tokens(num_tokens: int) -> int:
    """Whole blocks to set aside for `num_tokens`; a started block counts."""
    return -(-num_tokens // BLOCK_TOKENS)


_Positions = TypeVar("_Positions", int, "NDArray[np.int64]")


def blocks_at_position(position: _Positions) -> _Positions:
    """Blocks a request owns once its first `position` tokens are processed; for an array, of each.

    A block is needed as soon as its first entry closes, which is the CSA entry of its fourth token; its HCA entry
    closes together with its last CSA entry. So a request at 131 owns one block, at 132 two.
    """
    return (position + BLOCK_TOKENS - CSA_RATIO) // BLOCK_TOKENS


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
    def bytes_each(self) -> int:
        """Of one block, slot or snapshot, in all layers, without padding."""
        return len(self.layer_ids) * self.layer_bytes // self.shape[0]

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


_Pools = tuple[PoolSchema, ...]


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
    paged_pools: _Pools
    state_pools: _Pools
    snapshot_pools: _Pools

    def bytes_of(self, name: str) -> int:
        """Of one block or slot, in the pools whose names begin with this: `csa.entries`, `window`, ..."""
        pools = (*self.paged_pools, *self.state_pools)
        return sum(pool.bytes_each for pool in pools if pool.name.startswith(name))

    @property
    def bytes_per_block(self) -> int:
        return sum(pool.bytes_each for pool in self.paged_pools)

    @property
    def bytes_per_token(self) -> Fraction:
        """The growing part, exact: a block's bytes over its 128 tokens."""
        return Fraction(self.bytes_per_block, BLOCK_TOKENS)

    @property
    def window_bytes_per_request(self) -> int:
        return self.bytes_of("window") - self.position_bytes_per_request

    @property
    def position_bytes_per_request(self) -> int:
        return self.bytes_of("window.positions")

    @property
    def state_bytes_per_request(self) -> int:
        """The compressor tails."""
        return sum(pool.bytes_each for pool in self.state_pools) - self.bytes_of("window")

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
    if engine.max_context_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"max_context_tokens must be at most the model's max_position_embeddings {config.max_position_embeddings}, "
            f"found {engine.max_context_tokens}"
        )
    num_slots, num_blocks = engine.max_concurrent_requests, engine.num_blocks
    if num_blocks is None:  # every slot can reach the longest context
        num_blocks = blocks_for_tokens(engine.max_context_tokens) * num_slots
    ring_len = config.sliding_window + _ring_slack(config, schedule, engine)
    layers = tuple(layer_schema(config, layer, engine, plain_itemsize, ring_len) for layer in schedule)
    state_pools = _pools(layers, lambda layer: _state_parts(layer, num_slots))
    num_snapshots = _num_snapshots(state_pools, config.sliding_window, num_blocks, engine.prefix_cache_bytes)
    return CacheSchema(
        layers=layers,
        num_slots=num_slots,
        num_blocks=num_blocks,
        max_blocks_per_request=blocks_for_tokens(engine.max_context_tokens),
        max_draft_tokens=engine.max_draft_tokens,
        window_len=config.sliding_window,
        num_snapshots=num_snapshots,
        paged_pools=_pools(layers, lambda layer: _paged_parts(layer, num_blocks)),
        state_pools=state_pools,
        snapshot_pools=_snapshot_pools(state_pools, config.sliding_window, num_snapshots),
    )


_Part = tuple[str, tuple[int, ...], int]  # of one layer: name, shape, bytes of an element


def _pools(layers: Sequence[LayerCacheSchema], parts_of: Callable[[LayerCacheSchema], Iterable[_Part]]) -> _Pools:
    """A pool for each component, of the layers that have it."""
    found: dict[str, PoolSchema] = {}
    for layer in layers:
        for name, shape, itemsize in parts_of(layer):
            pool = found.get(name, PoolSchema(name, (), shape, itemsize))
            assert (pool.shape, pool.itemsize) == (shape, itemsize), f"{name} differs between layers"
            found[name] = replace(pool, layer_ids=(*pool.layer_ids, layer.layer_idx))
    return tuple(found.values())


def _row_parts(name: str, row_format: RowFormat, leading: tuple[int, int]) -> Iterator[_Part]:
    """`<name>.data` and, for quantised rows, `<name>.scales`."""
    if row_format.kind is RowKind.PLAIN:
        yield f"{name}.data", (*leading, row_format.dim), row_format.itemsize
    else:
        yield f"{name}.data", (*leading, row_format.data_bytes), 1
        yield f"{name}.scales", (*leading, row_format.scale_bytes), 1


def _paged_parts(layer: LayerCacheSchema, num_blocks: int) -> Iterator[_Part]:
    leading = (num_blocks, layer.entries_per_block)
    if layer.entries is not None:
        yield from _row_parts(f"{layer.attention.value}.entries", layer.entries, leading)
    if layer.index_keys is not None:
        yield from _row_parts("csa.index_keys", layer.index_keys, leading)


def _state_parts(layer: LayerCacheSchema, num_slots: int) -> Iterator[_Part]:
    """The window, and `<kind>.<compressor>.<half>.kv` and `.score` of every tail."""
    yield from _row_parts("window", layer.window, (num_slots, layer.ring_len))
    yield "window.positions", (num_slots, layer.ring_len), POSITION_BYTES
    for name, state in (("compressor", layer.compressor), ("index_compressor", layer.index_compressor)):
        for half, tail in () if state is None else (("own", state.own), ("following", state.following)):
            if tail is not None:
                shape = (num_slots, tail.ring_len, tail.dim)
                for part in ("kv", "score"):
                    yield f"{layer.attention.value}.{name}.{half}.{part}", shape, tail.itemsize


def _snapshot_rows(pool: PoolSchema, window_len: int) -> int:
    """Rows of a slot's ring that a snapshot keeps. Own tails are empty at a multiple of their ratio, positions follow
    from the number of tokens."""
    if pool.name == "window.positions":
        return 0
    if pool.name.startswith("window"):
        return window_len
    return CSA_RATIO if ".following." in pool.name else 0


def _bytes_per_snapshot(state_pools: _Pools, window_len: int) -> int:
    return sum(
        _snapshot_rows(pool, window_len) * len(pool.layer_ids) * pool.shape[-1] * pool.itemsize for pool in state_pools
    )


def _snapshot_pools(state_pools: _Pools, window_len: int, num_snapshots: int) -> _Pools:
    if num_snapshots == 0:
        return ()
    return tuple(
        PoolSchema(f"snapshot.{pool.name}", pool.layer_ids, (num_snapshots, num_rows, pool.shape[-1]), pool.itemsize)
        for pool in state_pools
        if (num_rows := _snapshot_rows(pool, window_len))
    )


def _num_snapshots(state_pools: _Pools, window_len: int, num_blocks: int, max_bytes: int) -> int:
    """As many as `max_bytes` hold, alignment included. More than blocks could never be of use."""
    count = min(num_blocks, max_bytes // _bytes_per_snapshot(state_pools, window_len))
    while sum(pool.total_bytes for pool in _snapshot_pools(state_pools, window_len, count)) > max_bytes:
        count -= 1
    return count
