"""The window ring: one K=V row per token, normed, roped, quantised, written at position % ring_len.

Kernels: `_window_rows_kernel` takes a few tokens a program through `store_rows`, each row whole in registers, so that
kv is read once; `store_window` is the same launch with the ring as a second destination. `_append_swa_kernel` copies
bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.formats.row_store import RowStore, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.history import last_writers
from dsv4.ops.norm import KERNEL_DTYPES, rms_norm_ref
from dsv4.ops.rope import rope_ref
from dsv4.ops.row_kernels import (
    check_norm_weight,
    new_rows,
    row_offsets,
    row_shape,
    row_target,
    rows_per_tile,
    store_rows,
)
from dsv4.ops.tl_utils import KernelInputError, LaunchConfig, check_launch, jit, next_power_of_2, pdl_trigger, tl


def window_rows_ref(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat
) -> RowStore:
    """kv [T, d] (the raw projection) -> this batch's encoded rows [T]: RMSNorm, rope at each position, encode."""
    return encode_rows(rope_ref(rms_norm_ref(kv, norm_weight, eps), positions, freqs), row_format)


def append_swa_ref(rows: RowStore, window: WindowView, batch: TokenBatch) -> None:
    """Write the rows [T] into the ring, in place. Of tokens that share a ring row the latest wins.

    Padding writes nothing. Comes after attention: a chunk may be longer than the ring, and its first tokens still need
    the rows it replaces.
    """
    writers = last_writers(batch, window.ring_len)
    slots, positions = batch.slots[writers], batch.positions[writers]
    ring_rows = positions % window.ring_len
    window.rows[slots, ring_rows] = rows[(writers,)]
    window.positions[slots, ring_rows] = positions.to(torch.int32)


def store_window_ref(
    kv: Tensor, norm_weight: Tensor, freqs: Tensor, eps: float, window: WindowView, batch: TokenBatch
) -> RowStore:
    """`window_rows` and `append_swa` in one step, before attention: returns the rows [T], and the ring holds them
    already.

    Only for chunks of at most ring_len - window_len + 1 tokens (one token and the drafts the ring has room for).
    Attention takes positions from chunk_start on out of the returned rows, and of the ring it reads back to chunk_start
    - window_len + 1; the last token replaces position chunk_end - 1 - ring_len, which lies before that.
    """
    rows = window_rows_ref(kv, norm_weight, batch.positions, freqs, eps, window.rows.format)
    append_swa_ref(rows, window, batch)
    return rows


@jit
def _ring_writers(tokens, mask, positions, slots_ptr, chunk_ends_ptr, RING_LEN: tl.constexpr):
    """Slots [R], ring rows [R], and which tokens write: not padding, and not replaced by a later token of the chunk."""
    slots = tl.load(slots_ptr + tokens, mask=mask, other=-1)
    ends = tl.load(chunk_ends_ptr + tokens, mask=mask, other=0)
    return slots, positions % RING_LEN, mask & (slots >= 0) & (positions >= ends - RING_LEN)


@jit(do_not_specialize=("num_tokens",))
def _window_rows_kernel(
    kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
    ring, ring_positions_ptr, stride_rps, slots_ptr, chunk_ends_ptr,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr, RING_LEN: tl.constexpr,
):  # fmt: skip
    pdl_trigger()
    window_tile(
        tl.program_id(0), kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
        ring, ring_positions_ptr, stride_rps, slots_ptr, chunk_ends_ptr,
        KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, ROWS, RING_LEN,
    )  # fmt: skip


@jit
def window_tile(
    tile, kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
    ring, ring_positions_ptr, stride_rps, slots_ptr, chunk_ends_ptr,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr, RING_LEN: tl.constexpr,
):  # fmt: skip
    """The rows of tile `tile` of ROWS tokens, into the ring as well where RING_LEN is not 0."""
    tokens = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=mask, other=0)
    HAS_RING: tl.constexpr = RING_LEN > 0
    offsets = row_offsets(target, tokens, tokens * 0)
    ring_offsets = offsets
    is_writer = mask
    if HAS_RING:
        slots, ring_rows, is_writer = _ring_writers(tokens, mask, positions, slots_ptr, chunk_ends_ptr, RING_LEN)
        ring_offsets = row_offsets(ring, slots, ring_rows)
        tl.store(ring_positions_ptr + slots * stride_rps + ring_rows, positions.to(tl.int32), mask=is_writer)
    store_rows(
        kv_ptr, tokens * stride_kvt, mask, weight_ptr, positions, freqs_ptr, eps,
        target, offsets, ring, ring_offsets, is_writer,
        KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, HAS_RING,
    )  # fmt: skip


@jit(do_not_specialize=("num_tokens",))
def _append_swa_kernel(
    data_ptr, scales_ptr, ring, ring_positions_ptr, stride_rps, positions_ptr, slots_ptr, chunk_ends_ptr, num_tokens,
    stride_dt, stride_st, DATA_BYTES: tl.constexpr, DATA_BLOCK: tl.constexpr, SCALE_BYTES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, ROWS: tl.constexpr, RING_LEN: tl.constexpr,
):  # fmt: skip
    pdl_trigger()
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=mask, other=0)
    slots, ring_rows, is_writer = _ring_writers(tokens, mask, positions, slots_ptr, chunk_ends_ptr, RING_LEN)
    offsets = row_offsets(ring, slots, ring_rows)
    # window.rows[slots, ring_rows] = rows[writers]. Asked for before it is known who writes: one wait, not two
    cols, scale_cols = tl.arange(0, DATA_BLOCK)[None, :], tl.arange(0, SCALE_BLOCK)[None, :]
    is_data, is_scale = cols < DATA_BYTES, scale_cols < SCALE_BYTES
    data = tl.load(data_ptr + tokens[:, None] * stride_dt + cols, mask=mask[:, None] & is_data)
    scales = tl.load(scales_ptr + tokens[:, None] * stride_st + scale_cols, mask=mask[:, None] & is_scale)
    tl.store(ring.data + offsets[0][:, None] + cols, data, mask=is_writer[:, None] & is_data)
    tl.store(ring.scales + offsets[2][:, None] + scale_cols, scales, mask=is_writer[:, None] & is_scale)
    tl.store(ring_positions_ptr + slots * stride_rps + ring_rows, positions.to(tl.int32), mask=is_writer)


APPEND_CONFIG = LaunchConfig(rows=4, num_warps=4)


def window_rows(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat
) -> RowStore:
    """See `window_rows_ref`. kv in bf16, fp16 or fp32 with contiguous columns; quantised rows only."""
    return _launch_rows(kv, norm_weight, positions, freqs, eps, row_format, None, None)


def append_swa(rows: RowStore, window: WindowView, batch: TokenBatch) -> None:
    """See `append_swa_ref`. Quantised rows only."""
    launch_append(rows, window, batch, APPEND_CONFIG)


def launch_append(rows: RowStore, window: WindowView, batch: TokenBatch, config: LaunchConfig) -> None:
    """`append_swa` with a given number of rows a program; results do not depend on it."""
    num_tokens = batch.num_tokens
    data, scales = rows.data, rows.scales
    check_launch(data, window.rows.data, batch.positions)
    if rows.format != window.rows.format or data.shape[:-1] != (num_tokens,):
        raise KernelInputError(
            f"expected {num_tokens} rows of {window.rows.format}, found {tuple(data.shape[:-1])} of {rows.format}"
        )
    ring = row_target(window.rows)
    assert scales is not None  # the format is a quantised one
    if data.stride(-1) != 1 or scales.stride(-1) != 1:
        raise KernelInputError(
            f"expected rows with contiguous bytes, found strides {data.stride()} and {scales.stride()}"
        )
    if num_tokens == 0:
        return
    fmt = rows.format
    _append_swa_kernel[(-(-num_tokens // config.rows),)](
        data, scales, ring, *_ring_arguments(window), batch.positions.contiguous(), batch.slots.contiguous(),
        batch.chunk_ends.contiguous(), num_tokens, data.stride(0), scales.stride(0),
        DATA_BYTES=fmt.data_bytes, DATA_BLOCK=next_power_of_2(fmt.data_bytes), SCALE_BYTES=fmt.scale_bytes,
        SCALE_BLOCK=next_power_of_2(fmt.scale_bytes), ROWS=config.rows, RING_LEN=window.ring_len, **config.options,
    )  # fmt: skip


def store_window(
    kv: Tensor, norm_weight: Tensor, freqs: Tensor, eps: float, window: WindowView, batch: TokenBatch
) -> RowStore:
    """See `store_window_ref`; the same bytes as `window_rows` and `append_swa`, in one launch."""
    return _launch_rows(kv, norm_weight, batch.positions, freqs, eps, window.rows.format, window, batch)


def _ring_arguments(window: WindowView) -> tuple[Tensor, int]:
    positions = window.positions
    if positions.dtype != torch.int32 or positions.stride(1) != 1:
        raise KernelInputError(
            f"expected ring positions in int32 with contiguous rows, found {positions.dtype} with strides "
            f"{positions.stride()}"
        )
    return positions, positions.stride(0)


def _launch_rows(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat,
    window: WindowView | None, batch: TokenBatch | None,
) -> RowStore:  # fmt: skip
    launch = RowLaunch.build(kv, norm_weight, positions, freqs, eps, row_format, window, batch)
    if launch.num_tiles:
        _window_rows_kernel[(launch.num_tiles,)](*launch.arguments, **launch.shape, **rows_per_tile(row_format.dim)[1])
    return launch.rows


class RowLaunch(NamedTuple):
    """What `window_tile` is given: its arguments but the tile, its constants, and how many tiles there are."""

    rows: RowStore
    arguments: tuple[Any, ...]
    shape: dict[str, int]
    num_tiles: int

    @classmethod
    def build(
        cls, kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat,
        window: WindowView | None, batch: TokenBatch | None,
    ) -> RowLaunch:  # fmt: skip
        """With a window and a batch the rows go into the ring as well."""
        check_launch(kv, norm_weight, positions, freqs, None if window is None else window.rows.data)
        num_tokens, dim = positions.shape[0], row_format.dim
        if kv.dtype not in KERNEL_DTYPES or kv.shape != (num_tokens, dim) or kv.stride(1) != 1:
            raise KernelInputError(
                f"expected kv [{num_tokens}, {dim}] in one of {KERNEL_DTYPES} with contiguous columns, found "
                f"{kv.dtype} {tuple(kv.shape)} with strides {kv.stride()}"
            )
        if row_format.kind is not RowKind.ENTRY_FP8:
            raise KernelInputError(f"expected rows of {RowKind.ENTRY_FP8}, found {row_format.kind}")
        tile_rows = rows_per_tile(dim)[0]
        ring_len = 0 if window is None else window.ring_len
        shape = {**row_shape(row_format, freqs), "ROWS": tile_rows, "RING_LEN": ring_len}
        rows = new_rows(num_tokens, row_format, kv.device)
        fresh = row_target(_one_by_one(rows))
        positions = positions.contiguous()
        ring, ring_positions = fresh, (positions, 0)  # an unused pointer still needs a tensor
        slots = ends = positions
        if window is not None and batch is not None:
            ring, ring_positions = row_target(window.rows), _ring_arguments(window)
            slots, ends = batch.slots.contiguous(), batch.chunk_ends.contiguous()
        arguments = (
            kv, check_norm_weight(norm_weight, dim), positions, freqs.contiguous(), eps, num_tokens, kv.stride(0),
            fresh, ring, *ring_positions, slots, ends,
        )  # fmt: skip
        return cls(rows, arguments, shape, -(-num_tokens // tile_rows))


def _one_by_one(rows: RowStore) -> RowStore:
    """Rows [T] as [T, 1]: the two leading indices every store in the cache has."""
    assert rows.scales is not None
    return replace(rows, data=rows.data.unsqueeze(1), scales=rows.scales.unsqueeze(1))
