"""The kernel side of formats/row_store.py, on the host: a store as pointers and strides, a format as constants."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.lib.launch import next_power_of_2, pick_config
from dsv4.ops.norm import KERNEL_DTYPES, ROW_CONFIGS

ENTRY_FP8, INDEX_FP4, INDEX_FP8 = 0, 1, 2
_KINDS = {RowKind.ENTRY_FP8: ENTRY_FP8, RowKind.INDEX_FP4: INDEX_FP4, RowKind.INDEX_FP8: INDEX_FP8}


class RowTarget(NamedTuple):
    """Rows [A, B] of a `RowStore` for a kernel: pointers, and strides of both leading indices in elements of each.

    `wide` is the data as bf16 (the rope half of an entry), `factor` the scales as fp32 (index keys in FP8); where a
    format has no such part they repeat `data` and `scales`.
    """

    data: Any
    data_stride: int
    data_row: int
    wide: Any
    wide_stride: int
    wide_row: int
    scales: Any
    scales_stride: int
    scales_row: int
    factor: Any
    factor_stride: int
    factor_row: int


def row_kind(row_format: RowFormat) -> int:
    """The kernels' number of a quantised format. Plain rows belong to the oracles."""
    if row_format.kind not in _KINDS:
        raise KernelInputError(f"expected quantised rows, found {row_format.kind}; the TORCH backend stores plain rows")
    if row_format.dim != next_power_of_2(row_format.dim) or row_format.dim > max(ROW_CONFIGS):
        raise KernelInputError(
            f"expected rows of a power of two values up to {max(ROW_CONFIGS)}, found {row_format.dim}"
        )
    return _KINDS[row_format.kind]


def row_target(rows: RowStore) -> RowTarget:
    """Rows [A, B] as a kernel sees them; the bytes of a row must be contiguous and aligned to their widest part."""
    row_kind(rows.format)
    data, scales = rows.data, rows.scales
    assert scales is not None, rows.format
    if data.dim() != 3 or data.stride(2) != 1 or scales.stride(2) != 1:
        raise KernelInputError(
            f"expected rows [A, B] with contiguous bytes, found shape {tuple(data.shape)} with strides {data.stride()} "
            f"and {scales.stride()}"
        )
    is_entry, is_index_fp8 = rows.format.kind is RowKind.ENTRY_FP8, rows.format.kind is RowKind.INDEX_FP8
    wide = _as_dtype(data, torch.bfloat16) if is_entry else data
    factor = _as_dtype(scales, torch.float32) if is_index_fp8 else scales
    return RowTarget(
        data=data,
        data_stride=data.stride(0),
        data_row=data.stride(1),
        wide=wide,
        wide_stride=wide.stride(0),
        wide_row=wide.stride(1),
        scales=scales,
        scales_stride=scales.stride(0),
        scales_row=scales.stride(1),
        factor=factor,
        factor_stride=factor.stride(0),
        factor_row=factor.stride(1),
    )


def _as_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    if data.storage_offset() % size or any(stride % size for stride in data.stride()[:2]):
        raise KernelInputError(f"expected rows aligned to {size} bytes, found strides {data.stride()}")
    return data.view(dtype)


def new_rows(num_rows: int, row_format: RowFormat, device: torch.device) -> RowStore:
    """Rows [num_rows] that a kernel will fill: `RowStore.allocate` without the zeros."""
    row_kind(row_format)
    return RowStore(
        torch.empty(num_rows, row_format.data_bytes, dtype=torch.uint8, device=device),
        torch.empty(num_rows, row_format.scale_bytes, dtype=torch.uint8, device=device),
        row_format,
    )


def row_shape(row_format: RowFormat, freqs: Tensor) -> dict[str, int]:
    """The constexpr arguments of `store_rows`."""
    rope_dim = 2 * freqs.shape[0]
    if (
        freqs.dtype != torch.float32
        or rope_dim < 2
        or rope_dim != next_power_of_2(rope_dim)
        or rope_dim > row_format.dim
    ):
        raise KernelInputError(
            f"expected fp32 frequencies of a power of two dims up to {row_format.dim}, found {freqs.dtype}, {rope_dim}"
        )
    if row_format.kind is RowKind.ENTRY_FP8 and rope_dim != row_format.rope_dim:
        raise KernelInputError(f"expected frequencies of {row_format.rope_dim} dims, found {rope_dim}")
    return {
        "KIND": row_kind(row_format),
        "DIM": row_format.dim,
        "ROPE_DIM": rope_dim,
        "LOG2_DIM": row_format.dim.bit_length() - 1,
        "SCALE_BYTES": next_power_of_2(row_format.scale_bytes),
    }


def check_norm_weight(weight: Tensor, dim: int) -> Tensor:
    if weight.shape != (dim,) or weight.dtype not in KERNEL_DTYPES:
        raise KernelInputError(f"expected a norm weight of shape ({dim},), found {weight.dtype} {tuple(weight.shape)}")
    return weight.contiguous()


def rows_per_tile(dim: int) -> tuple[int, dict[str, Any]]:
    """Rows of a tile and launch options for rows of `dim` values: those of `rms_norm`."""
    _, config = pick_config(ROW_CONFIGS, dim, "a cached row")
    return config.rows, config.options
