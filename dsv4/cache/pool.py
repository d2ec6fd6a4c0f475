"""`Pool`: one component of several layers in one allocation, as `PoolSchema` lays it out."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.schema import LayerCacheSchema, PoolSchema
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat


class Pool:
    """`all_layers` [len(layer_ids), *shape] and `layer(layer_idx)` [*shape] are views of the same zeroed bytes."""

    def __init__(self, schema: PoolSchema, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype.itemsize == schema.itemsize, (schema, dtype)
        self.schema = schema
        # the allocator's own alignment covers ALIGNMENT, so offsets inside the pool decide every layer's alignment
        self.storage = torch.zeros(schema.total_bytes, dtype=torch.uint8, device=device)
        by_layer = self.storage.view(len(schema.layer_ids), schema.layer_stride)
        self.all_layers: Tensor = by_layer[:, : schema.layer_bytes].view(dtype).unflatten(-1, schema.shape)
        self._row_of_layer = {layer_idx: row for row, layer_idx in enumerate(schema.layer_ids)}

    def __contains__(self, layer_idx: int) -> bool:
        return layer_idx in self._row_of_layer

    def layer(self, layer_idx: int) -> Tensor:
        return self.all_layers[self._row_of_layer[layer_idx]]

    @property
    def nbytes(self) -> int:
        """Bytes really held."""
        return self.storage.untyped_storage().nbytes()


def find_pool(pools: dict[str, Pool], name: str, layer: LayerCacheSchema) -> Pool | None:
    """The pool of that name, if it holds this layer."""
    pool = pools.get(name)
    return pool if pool is not None and layer.layer_idx in pool else None


def row_store(pools: dict[str, Pool], name: str, layer: LayerCacheSchema, row_format: RowFormat) -> RowStore:
    """The rows `<name>` of one layer as a view of its pools."""
    data, scales = find_pool(pools, f"{name}.data", layer), find_pool(pools, f"{name}.scales", layer)
    assert data is not None, (name, layer.layer_idx)
    return RowStore(data.layer(layer.layer_idx), None if scales is None else scales.layer(layer.layer_idx), row_format)
