"""The ops that read or write the cache: views and batches spelled out as tensors, everything written
declared.

A row format is (kind, dim, rope_dim): see formats/rows.py. A compressor is two lists: `inputs` [kv, gate, ape,
norm_weight, freqs], which are read, and `state` [own kv, own score, following kv, following score, page data, page
scales], or the same without the following two for HCA, which is written. A batch is positions, slots, chunk_starts,
chunk_ends and the block table. Pages are data and scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView, WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops import attention, indexer
from dsv4.ops import compress as compress_ops
from dsv4.ops import rows as row_ops
from dsv4.ops.lib.guard import KernelInputError


def _window_batch(positions: Tensor, slots: Tensor, chunk_ends: Tensor) -> TokenBatch:
    """What the ring's ops look at; the other fields are never read."""
    return TokenBatch(positions, positions, slots, positions, chunk_ends, positions)


def _fake_rows(kv: Tensor, kind: str, dim: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    fmt = RowFormat(RowKind(kind), dim, rope_dim)
    return (
        kv.new_empty(kv.shape[0], fmt.data_bytes, dtype=torch.uint8),
        kv.new_empty(kv.shape[0], fmt.scale_bytes, dtype=torch.uint8),
    )


def _tensors(rows: RowStore) -> tuple[Tensor, Tensor]:
    assert rows.scales is not None  # the kernels write quantised rows only
    return rows.data, rows.scales


@torch.library.custom_op("dsv4::window_rows", mutates_args=())
def window_rows(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, kind: str, dim: int, rope_dim: int
) -> tuple[Tensor, Tensor]:
    fmt = RowFormat(RowKind(kind), dim, rope_dim)
    return _tensors(row_ops.window_rows(kv, norm_weight, positions, freqs, eps, fmt))


@window_rows.register_fake
def _(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, kind: str, dim: int, rope_dim: int
) -> tuple[Tensor, Tensor]:
    return _fake_rows(kv, kind, dim, rope_dim)


@torch.library.custom_op("dsv4::append_swa", mutates_args=("ring_data", "ring_scales", "ring_positions"))
def append_swa(
    data: Tensor, scales: Tensor, ring_data: Tensor, ring_scales: Tensor, ring_positions: Tensor, positions: Tensor,
    slots: Tensor, chunk_ends: Tensor, kind: str, dim: int, rope_dim: int,
) -> None:  # fmt: skip
    fmt = RowFormat(RowKind(kind), dim, rope_dim)
    window = WindowView(RowStore(ring_data, ring_scales, fmt), ring_positions)
    row_ops.append_swa(RowStore(data, scales, fmt), window, _window_batch(positions, slots, chunk_ends))


@append_swa.register_fake
def _(
    data: Tensor, scales: Tensor, ring_data: Tensor, ring_scales: Tensor, ring_positions: Tensor, positions: Tensor,
    slots: Tensor, chunk_ends: Tensor, kind: str, dim: int, rope_dim: int,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("dsv4::store_window", mutates_args=("ring_data", "ring_scales", "ring_positions"))
def store_window(
    kv: Tensor, norm_weight: Tensor, freqs: Tensor, eps: float, ring_data: Tensor, ring_scales: Tensor,
    ring_positions: Tensor, positions: Tensor, slots: Tensor, chunk_ends: Tensor, kind: str, dim: int, rope_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    window = WindowView(RowStore(ring_data, ring_scales, RowFormat(RowKind(kind), dim, rope_dim)), ring_positions)
    batch = _window_batch(positions, slots, chunk_ends)
    return _tensors(row_ops.store_window(kv, norm_weight, freqs, eps, window, batch))


@store_window.register_fake
def _(
    kv: Tensor, norm_weight: Tensor, freqs: Tensor, eps: float, ring_data: Tensor, ring_scales: Tensor,
    ring_positions: Tensor, positions: Tensor, slots: Tensor, chunk_ends: Tensor, kind: str, dim: int, rope_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake_rows(kv, kind, dim, rope_dim)


@torch.library.custom_op("dsv4::attention_inputs", mutates_args=("ring_data", "ring_scales", "ring_positions"))
def attention_inputs(
    q: Tensor, kv: Tensor, index_q: Tensor | None, kv_norm: Tensor, freqs: Tensor, eps: float, ring_data: Tensor,
    ring_scales: Tensor, ring_positions: Tensor, positions: Tensor, slots: Tensor, chunk_ends: Tensor, appends: bool,
    kind: str, dim: int, rope_dim: int, index_kind: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, data and scales of the rows, index queries (empty where there are none)."""
    window = WindowView(RowStore(ring_data, ring_scales, RowFormat(RowKind(kind), dim, rope_dim)), ring_positions)
    keys = None
    if index_kind is not None and index_q is not None:  # of index keys only the format is looked at
        keys = PagedView(RowStore(ring_data, ring_scales, RowFormat(RowKind(index_kind), index_q.shape[-1])))
    batch = _window_batch(positions, slots, chunk_ends)
    queries, rows, index_queries = attention.attention_inputs(
        q, kv, index_q, kv_norm, freqs, eps, window, keys, batch, appends=appends
    )
    return queries, *_tensors(rows), q.new_empty(0) if index_queries is None else index_queries


@attention_inputs.register_fake
def _(
    q: Tensor, kv: Tensor, index_q: Tensor | None, kv_norm: Tensor, freqs: Tensor, eps: float, ring_data: Tensor,
    ring_scales: Tensor, ring_positions: Tensor, positions: Tensor, slots: Tensor, chunk_ends: Tensor, appends: bool,
    kind: str, dim: int, rope_dim: int, index_kind: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    index_queries = q.new_empty(0) if index_q is None else index_q.new_empty(index_q.shape)
    return q.new_empty(q.shape), *_fake_rows(kv, kind, dim, rope_dim), index_queries


def _compression(
    inputs: Sequence[Tensor], state: Sequence[Tensor], ratio: int, eps: float, dtype: torch.dtype, fmt: RowFormat
) -> compress_ops.Compression:
    if len(inputs) != 5 or len(state) not in (4, 6):
        raise KernelInputError(f"expected 5 inputs and 4 or 6 tensors of state, found {len(inputs)} and {len(state)}")
    kv, gate, ape, norm_weight, freqs = inputs
    following = TailView(state[2], state[3]) if len(state) == 6 else None
    return compress_ops.Compression(
        kv=kv,
        gate=gate,
        spec=compress_ops.CompressorSpec(ratio, ape, norm_weight, freqs, eps, dtype),
        state=CompressorView(TailView(state[0], state[1]), following),
        pages=PagedView(RowStore(state[-2], state[-1], fmt)),
    )


@torch.library.custom_op("dsv4::compress", mutates_args=("state",))
def compress(
    inputs: Sequence[Tensor], state: Sequence[Tensor], positions: Tensor, slots: Tensor, chunk_starts: Tensor,
    chunk_ends: Tensor, block_table: Tensor, ratio: int, eps: float, dtype: torch.dtype, kind: str, dim: int,
    rope_dim: int,
) -> None:  # fmt: skip
    job = _compression(inputs, state, ratio, eps, dtype, RowFormat(RowKind(kind), dim, rope_dim))
    batch = TokenBatch(positions, positions, slots, chunk_starts, chunk_ends, block_table)
    compress_ops.compress(job.kv, job.gate, job.spec, job.state, job.pages, batch)


@compress.register_fake
def _(
    inputs: Sequence[Tensor], state: Sequence[Tensor], positions: Tensor, slots: Tensor, chunk_starts: Tensor,
    chunk_ends: Tensor, block_table: Tensor, ratio: int, eps: float, dtype: torch.dtype, kind: str, dim: int,
    rope_dim: int,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("dsv4::compress_pair", mutates_args=("state", "index_state"))
def compress_pair(
    inputs: Sequence[Tensor], state: Sequence[Tensor], index_inputs: Sequence[Tensor], index_state: Sequence[Tensor],
    positions: Tensor, slots: Tensor, chunk_starts: Tensor, chunk_ends: Tensor, block_table: Tensor, ratio: int,
    eps: float, dtype: torch.dtype, kind: str, dim: int, rope_dim: int, index_kind: str, index_dim: int,
) -> None:  # fmt: skip
    entry_format, key_format = RowFormat(RowKind(kind), dim, rope_dim), RowFormat(RowKind(index_kind), index_dim)
    attention = _compression(inputs, state, ratio, eps, dtype, entry_format)
    index = _compression(index_inputs, index_state, ratio, eps, dtype, key_format)
    batch = TokenBatch(positions, positions, slots, chunk_starts, chunk_ends, block_table)
    compress_ops.compress_pair(attention, index, batch)


@compress_pair.register_fake
def _(
    inputs: Sequence[Tensor], state: Sequence[Tensor], index_inputs: Sequence[Tensor], index_state: Sequence[Tensor],
    positions: Tensor, slots: Tensor, chunk_starts: Tensor, chunk_ends: Tensor, block_table: Tensor, ratio: int,
    eps: float, dtype: torch.dtype, kind: str, dim: int, rope_dim: int, index_kind: str, index_dim: int,
) -> None:  # fmt: skip
    return None


# ---- what reads the cache ----


@torch.library.custom_op("dsv4::index_queries", mutates_args=())
def index_queries(q: Tensor, positions: Tensor, freqs: Tensor, kind: str, dim: int) -> Tensor:
    return indexer.index_queries(q, positions, freqs, RowFormat(RowKind(kind), dim))


@index_queries.register_fake
def _(q: Tensor, positions: Tensor, freqs: Tensor, kind: str, dim: int) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("dsv4::index_topk", mutates_args=())
def index_topk(
    q: Tensor, weights: Tensor, key_data: Tensor, key_scales: Tensor, positions: Tensor, slots: Tensor,
    chunk_starts: Tensor, chunk_ends: Tensor, block_table: Tensor, ratio: int, top_k: int, kind: str, dim: int,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    keys = PagedView(RowStore(key_data, key_scales, RowFormat(RowKind(kind), dim)))
    batch = TokenBatch(positions, positions, slots, chunk_starts, chunk_ends, block_table)
    return indexer.index_topk(q, weights, keys, batch, ratio=ratio, top_k=top_k, scale=scale)


@index_topk.register_fake
def _(
    q: Tensor, weights: Tensor, key_data: Tensor, key_scales: Tensor, positions: Tensor, slots: Tensor,
    chunk_starts: Tensor, chunk_ends: Tensor, block_table: Tensor, ratio: int, top_k: int, kind: str, dim: int,
    scale: float = 1.0,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], top_k, dtype=torch.int64)


@torch.library.custom_op("dsv4::sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor, data: Tensor, scales: Tensor, ring_data: Tensor, ring_scales: Tensor, ring_positions: Tensor,
    entry_data: Tensor | None, entry_scales: Tensor | None, picks: Tensor | None, sink: Tensor, positions: Tensor,
    slots: Tensor, chunk_starts: Tensor, chunk_ends: Tensor, block_table: Tensor, window_len: int, kind: str,
    dim: int, rope_dim: int, freqs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if (entry_data is None) != (entry_scales is None):
        raise KernelInputError("expected data and scales of the entries, or neither, found one of them")
    fmt = RowFormat(RowKind(kind), dim, rope_dim)
    rows, window = RowStore(data, scales, fmt), WindowView(RowStore(ring_data, ring_scales, fmt), ring_positions)
    entries = None if entry_data is None else PagedView(RowStore(entry_data, entry_scales, fmt))
    batch = TokenBatch(positions, positions, slots, chunk_starts, chunk_ends, block_table)
    return attention.sparse_attention(
        q, rows, window, entries, picks, sink, batch, window_len=window_len, freqs=freqs
    )  # fmt: skip


@sparse_attention.register_fake
def _(
    q: Tensor, data: Tensor, scales: Tensor, ring_data: Tensor, ring_scales: Tensor, ring_positions: Tensor,
    entry_data: Tensor | None, entry_scales: Tensor | None, picks: Tensor | None, sink: Tensor, positions: Tensor,
    slots: Tensor, chunk_starts: Tensor, chunk_ends: Tensor, block_table: Tensor, window_len: int, kind: str,
    dim: int, rope_dim: int, freqs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


OPS = (
    window_rows, append_swa, store_window, attention_inputs, compress, compress_pair, index_queries, index_topk,
    sparse_attention,
)  # fmt: skip
