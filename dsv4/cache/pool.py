"""`Pool`: one component of several layers in one allocation, as `PoolSchema` lays it out."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.layer_schema import LayerCacheSchema
from dsv4.cache.schema import PoolSchema
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Pool:
    """`all_layers` [len(layer_ids), *shape] and `layer(layer_idx)` [*shape] are views of the same zeroed bytes.

    `words` are those bytes in the widest integers that a row is made of: [len(layer_ids), *shape[:-1], words of a row].
    Copies are made of them: a GPU moves eight bytes as fast as one.
    """

    def __init__(self, schema: PoolSchema, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype.itemsize == schema.itemsize, (schema, dtype)
        self.schema = schema
        # the allocator's own alignment covers ALIGNMENT, so offsets inside the pool decide every layer's alignment
        self.storage = torch.zeros(schema.total_bytes, dtype=torch.uint8, device=device)
        by_layer = self.storage.view(len(schema.layer_ids), schema.layer_stride)
        used = by_layer[:, : schema.layer_bytes]
        self.all_layers: Tensor = used.view(dtype).unflatten(-1, schema.shape)
        row_bytes = schema.shape[-1] * schema.itemsize
        word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
        self.words: Tensor = used.view(word).unflatten(-1, (*schema.shape[:-1], row_bytes // word.itemsize))
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
