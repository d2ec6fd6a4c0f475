"""Launcher of one FP4 linear (kernel_fp4_linear.py)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import QuantFormat
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.moe.kernel_fp4_linear import _fp4_linear_kernel, _wide_linear_kernel
from dsv4.ops.moe.kernel_prepare import _prepare_rows_kernel
from dsv4.ops.moe.launch import FORMATS, QUANTISE_GROUPS, matrix_of
from dsv4.ops.moe.plan import BLOCK, GemmConfig, pick_linear_config
from dsv4.ops.moe.sort import SORT_OPTIONS

_WIDE_BLOCK = 128  # weight rows of a CTA with two warp groups


def fp4_linear(x: Tensor, weight: ShuffledTensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """`linear_ref` for a shuffled NVFP4 or MXFP4 weight [N, K]: x bf16 [T, K] -> [T, N]."""
    tile_rows, config, wide = pick_linear_config(x.shape[0], x.shape[-1])
    return launch_fp4_linear(x, weight, out_dtype, tile_rows, config, wide)


def launch_fp4_linear(
    x: Tensor, weight: ShuffledTensor, out_dtype: torch.dtype | None, tile_rows: int, config: GemmConfig,
    wide: bool = False,
) -> Tensor:
    """`fp4_linear` with tiles of `tile_rows` tokens, a power of two in the wide form, and launched as `config` says."""
    check_launch(x, weight.data)
    if weight.format is QuantFormat.FP8_BLOCK or len(weight.shape) != 2 or x.dtype != torch.bfloat16:
        raise KernelInputError(
            f"expected bf16 rows and an NVFP4 or MXFP4 weight [N, K], found {x.dtype}, {weight.format} {weight.shape}"
        )
    (num_rows, cols), num_outs = x.shape, weight.shape[0]
    if cols != weight.shape[1] or (weight.format is QuantFormat.MXFP4 and cols % 128):
        raise KernelInputError(f"expected x [T, {weight.shape[1]}], a multiple of 128 for MXFP4, found {cols} columns")
    padded_cols = -(-cols // 128) * 128
    if num_rows * max(padded_cols, num_outs) >= 2**31:
        raise KernelInputError(f"expected fewer than 2^31 values, found {num_rows} rows of {cols} and {num_outs}")
    out = torch.empty(num_rows, num_outs, dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    if not wide:
        _fp4_linear_kernel[(-(-num_rows // tile_rows) * -(-num_outs // BLOCK),)](
            x.contiguous(), *matrix_of(weight), out, num_rows, N=num_outs, K=cols, FORMAT=FORMATS[weight.format],
            ROWS=tile_rows, BLOCK=BLOCK, UNROLL=config.unroll, **config.options,
        )
        return out
    block = _WIDE_BLOCK
    if -(-num_outs // BLOCK) * BLOCK % block:  # rows are stored in tiles of 64
        block, config = BLOCK, replace(config, num_warps=4)
    is_quantised = weight.format is QuantFormat.MXFP4
    prepared = torch.empty(num_rows, padded_cols, dtype=x.dtype, device=x.device)
    _prepare_rows_kernel[(num_rows,)](
        x.contiguous(), prepared, K=cols, GROUPS=QUANTISE_GROUPS, QUANTISE=is_quantised, **SORT_OPTIONS
    )
    _wide_linear_kernel[(-(-num_rows // tile_rows) * -(-num_outs // block),)](
        prepared, *matrix_of(weight), out, num_rows, N=num_outs, K=padded_cols, FORMAT=FORMATS[weight.format],
        ROWS=tile_rows, BLOCK=block, **config.options,
    )
    return out
