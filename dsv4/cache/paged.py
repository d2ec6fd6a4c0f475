"""`PagedCache`: compressed entries and indexer keys of every layer, in blocks of 128 tokens. Allocated once."""

from __future__ import annotations

import torch

from dsv4.cache.handle import PagedView
from dsv4.cache.layer_schema import LayerCacheSchema
from dsv4.cache.pool import Pool, row_store
from dsv4.cache.schema import CacheSchema


class PagedCache:
    """Block b of a layer is rows[b]. A block handed to a new request keeps its old bytes: what a request has not
    written it does not read, because every reader stops at the request's own number of entries.

    `plain_dtype` is the dtype of plain rows; it is None exactly when the schema's rows are quantised.
    """

    def __init__(self, schema: CacheSchema, *, device: torch.device, plain_dtype: torch.dtype | None) -> None:
        self.schema = schema
        self.pools = {pool.name: Pool(pool, plain_dtype or torch.uint8, device) for pool in schema.paged_pools}
        self._entries = [self._entries_view(layer) for layer in schema.layers]
        self._index_keys = [self._index_keys_view(layer) for layer in schema.layers]

    def entries(self, layer_idx: int) -> PagedView | None:
        """Attention entries of a CSA or HCA layer."""
        return self._entries[layer_idx]

    def index_keys(self, layer_idx: int) -> PagedView | None:
        """Indexer keys of a CSA layer."""
        return self._index_keys[layer_idx]

    def memory_bytes(self) -> int:
        """Bytes really held."""
        return sum(pool.nbytes for pool in self.pools.values())

    def _entries_view(self, layer: LayerCacheSchema) -> PagedView | None:
        if layer.entries is None:
            return None
        return PagedView(row_store(self.pools, f"{layer.attention.value}.entries", layer, layer.entries))

    def _index_keys_view(self, layer: LayerCacheSchema) -> PagedView | None:
        if layer.index_keys is None:
            return None
        return PagedView(row_store(self.pools, "csa.index_keys", layer, layer.index_keys))
