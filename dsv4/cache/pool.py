"""`Pool`: one component of several layers in one allocation, as `PoolSchema` lays it out; and the views of a layer."""

import mmap
import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dsv4.cache.handle import CompressorView, LayerCacheHandle, PagedView, TailView, WindowView
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
        self._is_dropped, self._pages = False, None
        if device.type == "cpu" and sys.platform == "linux":
            # the system's zeros until they are written: rows that no request has used take no memory
            self._pages = mmap.mmap(-1, schema.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.storage = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
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

    def drop(self) -> None:
        """Give the memory back, until `restore`: then all bytes are 0."""
        self._is_dropped = True
        if self._pages is None:
            self.storage.untyped_storage().resize_(0)
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)  # zeros again

    def restore(self) -> None:
        self._is_dropped = False
        if self._pages is None:
            self.storage.untyped_storage().resize_(self.schema.total_bytes)
            self.storage.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes really held."""
        return 0 if self._is_dropped else self.storage.untyped_storage().nbytes()


class PoolSet:
    """Pools by name, allocated once. `plain_dtype` is the dtype of plain rows; None exactly where the schema's rows are
    quantised.

    A block or slot handed to a new request keeps its old rows: what a request has not written it does not read.
    """

    def __init__(self, schemas: Iterable[PoolSchema], device: torch.device, plain_dtype: torch.dtype | None) -> None:
        self.pools = {schema.name: Pool(schema, _dtype_of(schema, plain_dtype), device) for schema in schemas}

    def memory_bytes(self) -> int:
        """Bytes really held."""
        return sum(pool.nbytes for pool in self.pools.values())


def _dtype_of(schema: PoolSchema, plain_dtype: torch.dtype | None) -> torch.dtype:
    if schema.name.endswith("window.positions"):
        return torch.int32
    if "compressor." in schema.name:  # tails
        return torch.float64 if schema.itemsize == torch.float64.itemsize else torch.float32
    return plain_dtype or torch.uint8


def layer_handle(layer: LayerCacheSchema, pools: Mapping[str, Pool]) -> LayerCacheHandle:
    """The views of one layer over all pools of a cache."""
    kind, layer_idx = layer.attention.value, layer.layer_idx

    def find(name: str) -> Tensor | None:
        pool = pools.get(name)
        return pool.layer(layer_idx) if pool is not None and layer_idx in pool else None

    def rows(name: str, row_format: RowFormat) -> RowStore:
        data = find(f"{name}.data")
        assert data is not None, (name, layer_idx)
        return RowStore(data, find(f"{name}.scales"), row_format)

    def tail(name: str) -> TailView | None:
        kv, score = find(f"{kind}.{name}.kv"), find(f"{kind}.{name}.score")
        return None if kv is None or score is None else TailView(kv, score)

    def compressor(name: str) -> CompressorView | None:
        own = tail(f"{name}.own")
        return None if own is None else CompressorView(own, tail(f"{name}.following"))

    positions = find("window.positions")
    assert positions is not None
    return LayerCacheHandle(
        window=WindowView(rows("window", layer.window), positions),
        entries=None if layer.entries is None else PagedView(rows(f"{kind}.entries", layer.entries)),
        compressor=compressor("compressor"),
        index_keys=None if layer.index_keys is None else PagedView(rows("csa.index_keys", layer.index_keys)),
        index_compressor=compressor("index_compressor"),
    )
