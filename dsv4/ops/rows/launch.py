"""Launchers of the rotary embedding and of the window ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import LaunchConfig, next_power_of_2, pick_config
from dsv4.ops.norm import KERNEL_DTYPES, ROW_CONFIGS
from dsv4.ops.rows.kernel_rope import _rope_kernel
from dsv4.ops.rows.kernel_window import _append_swa_kernel, _window_rows_kernel
from dsv4.ops.rows.target import check_norm_weight, new_rows, row_shape, row_target, rows_per_tile


def rope(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """See `rope_ref`. bf16, fp16 or fp32, any strides; the result is contiguous and never x itself."""
    check_launch(x, positions, freqs)
    num_tokens, head_dim, rope_dim = x.shape[0], x.shape[-1], 2 * freqs.shape[0]
    if x.dtype not in KERNEL_DTYPES or freqs.dtype != torch.float32:
        raise KernelInputError(
            f"expected one of {KERNEL_DTYPES} and fp32 frequencies, found {x.dtype} and {freqs.dtype}"
        )
    if x.dim() < 2 or positions.shape != (num_tokens,):
        raise KernelInputError(
            f"expected x [T, ..., K] and positions [T], found {tuple(x.shape)} and {tuple(positions.shape)}"
        )
    if rope_dim > head_dim or rope_dim < 2 or rope_dim != next_power_of_2(rope_dim):
        raise KernelInputError(f"expected a rope dim that is a power of two up to {head_dim}, found {rope_dim}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    heads = x.reshape(num_tokens, -1, head_dim)  # [T, H, K]
    num_heads = heads.shape[1]
    block, config = pick_config(ROW_CONFIGS, head_dim, "the head dim")
    _rope_kernel[(num_tokens, -(-num_heads // config.rows))](
        heads, out, positions.contiguous(), freqs.contiguous(), num_heads, *heads.stride(),
        HEAD_DIM=head_dim, ROPE_DIM=rope_dim, BLOCK=block, HEADS=config.rows,
        INVERSE=inverse, **config.options,
    )
    return out


APPEND_CONFIG = LaunchConfig(rows=4, num_warps=4)


def window_rows(
    kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat
) -> RowStore:
    """See `window_rows_ref`. kv in bf16, fp16 or fp32 with contiguous columns; quantised rows only."""
    launch = RowLaunch.build(kv, norm_weight, positions, freqs, eps, row_format, None, None)
    if launch.num_tiles:
        _window_rows_kernel[(launch.num_tiles,)](*launch.arguments, **launch.shape, **rows_per_tile(row_format.dim)[1])
    return launch.rows


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
    )


def _ring_arguments(window: WindowView) -> tuple[Tensor, int]:
    positions = window.positions
    if positions.dtype != torch.int32 or positions.stride(1) != 1:
        raise KernelInputError(
            f"expected ring positions in int32 with contiguous rows, found {positions.dtype} with strides "
            f"{positions.stride()}"
        )
    return positions, positions.stride(0)


class RowLaunch(NamedTuple):
    """What `window_tile` is given: its arguments but the tile, then the ring's, the ring's length or 0 for none, its
    other constants, and how many tiles there are.
    """

    rows: RowStore
    arguments: tuple[Any, ...]
    ring: tuple[Any, ...]
    ring_len: int
    shape: dict[str, int]
    num_tiles: int

    @classmethod
    def build(
        cls, kv: Tensor, norm_weight: Tensor, positions: Tensor, freqs: Tensor, eps: float, row_format: RowFormat,
        window: WindowView | None, batch: TokenBatch | None,
    ) -> RowLaunch:
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
        shape = {**row_shape(row_format, freqs), "ROWS": tile_rows}
        rows = new_rows(num_tokens, row_format, kv.device)
        fresh = row_target(_one_by_one(rows))
        positions = positions.contiguous()
        arguments = (
            kv, check_norm_weight(norm_weight, dim), positions, freqs.contiguous(), eps, num_tokens, kv.stride(0),
            fresh,
        )
        ring: tuple[Any, ...] = fresh, positions, 0, positions, positions  # an unused pointer still needs a tensor
        ring_len = 0
        if window is not None and batch is not None:
            places = *_ring_arguments(window), batch.slots.contiguous(), batch.chunk_ends.contiguous()
            ring, ring_len = (row_target(window.rows), *places), window.ring_len
        return cls(rows, arguments, ring, ring_len, shape, -(-num_tokens // tile_rows))


def _one_by_one(rows: RowStore) -> RowStore:
    """Rows [T] as [T, 1]: the two leading indices every store in the cache has."""
    assert rows.scales is not None
    return replace(rows, data=rows.data.unsqueeze(1), scales=rows.scales.unsqueeze(1))
