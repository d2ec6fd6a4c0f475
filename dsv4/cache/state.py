"""`StateCache`: the fixed part of every request, one slot each: window rings and compressor tails. Allocated once."""

from __future__ import annotations

import torch

from dsv4.cache.errors import UnknownSlot
from dsv4.cache.handle import CompressorView, TailView, WindowView
from dsv4.cache.layer_schema import LayerCacheSchema
from dsv4.cache.pool import Pool, find_pool, row_store
from dsv4.cache.schema import CacheSchema, PoolSchema

NO_POSITION = -1
ABSENT_SCORE = float("-inf")  # softmax weight exactly 0


class StateCache:
    """Rows are addressed by position (p % ring_len), so that taking back draft tokens moves no data.

    `plain_dtype` is the dtype of plain rows; it is None exactly when the schema's rows are quantised.
    """

    def __init__(self, schema: CacheSchema, *, device: torch.device, plain_dtype: torch.dtype | None) -> None:
        self.schema = schema
        self.pools = {pool.name: Pool(pool, _dtype_of(pool, plain_dtype), device) for pool in schema.state_pools}
        self.reset()
        self._windows = [self._window_view(layer) for layer in schema.layers]
        self._compressors = [self._compressor_view(layer, "compressor") for layer in schema.layers]
        self._index_compressors = [self._compressor_view(layer, "index_compressor") for layer in schema.layers]

    def reset(self) -> None:
        """Every slot is that of a new request."""
        for pool in self.pools.values():
            pool.all_layers.fill_(_fresh_value(pool.schema.name))

    def window(self, layer_idx: int) -> WindowView:
        return self._windows[layer_idx]

    def compressor(self, layer_idx: int) -> CompressorView | None:
        """State of the attention compressor of a CSA or HCA layer."""
        return self._compressors[layer_idx]

    def index_compressor(self, layer_idx: int) -> CompressorView | None:
        """State of the indexer's compressor of a CSA layer."""
        return self._index_compressors[layer_idx]

    def reset_slot(self, slot: int) -> None:
        """Exactly the state of a new request: no positions, rows zero, tails kv 0 and score -inf. No other slot."""
        self._check_slot(slot)
        for pool in self.pools.values():
            pool.all_layers[:, slot].fill_(_fresh_value(pool.schema.name))

    def memory_bytes(self) -> int:
        """Bytes really held."""
        return sum(pool.nbytes for pool in self.pools.values())

    def _check_slot(self, slot: int) -> None:
        # a negative index would reach another request's slot from the end
        if not 0 <= slot < self.schema.num_slots:
            raise UnknownSlot(f"slot {slot} is not one of 0 .. {self.schema.num_slots - 1}")

    def _window_view(self, layer: LayerCacheSchema) -> WindowView:
        positions = self.pools["window.positions"].layer(layer.layer_idx)
        return WindowView(row_store(self.pools, "window", layer, layer.window), positions)

    def _compressor_view(self, layer: LayerCacheSchema, compressor: str) -> CompressorView | None:
        own = self._tail_view(layer, f"{layer.attention.value}.{compressor}.own")
        if own is None:
            return None
        return CompressorView(own, self._tail_view(layer, f"{layer.attention.value}.{compressor}.following"))

    def _tail_view(self, layer: LayerCacheSchema, name: str) -> TailView | None:
        kv, score = find_pool(self.pools, f"{name}.kv", layer), find_pool(self.pools, f"{name}.score", layer)
        if kv is None or score is None:
            return None
        return TailView(kv.layer(layer.layer_idx), score.layer(layer.layer_idx))


def _dtype_of(pool: PoolSchema, plain_dtype: torch.dtype | None) -> torch.dtype:
    if pool.name == "window.positions":
        return torch.int32
    if pool.name.startswith("window."):
        return plain_dtype or torch.uint8
    return torch.float64 if pool.itemsize == torch.float64.itemsize else torch.float32


def _fresh_value(pool_name: str) -> float:
    if pool_name == "window.positions":
        return NO_POSITION
    return ABSENT_SCORE if pool_name.endswith(".score") else 0
