"""Launcher of the shared expert's kernel for many tokens (kernel_dense.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor
from dsv4.ops.lib.arch import num_multiprocessors
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.moe.kernel_rows import Matrix
from dsv4.ops.moe.many.kernel_dense import TILE_SUMS, WORD_STAGES, dense_tiles_kernel
from dsv4.ops.moe.many.kernel_tiles import NUM_WARPS, TILE_OUTPUTS, TILE_TOKENS


def new_partials(x: Tensor) -> Tensor:
    """Where programs keep sums of ranges; launches that follow one another may share it."""
    return torch.empty(num_multiprocessors(x.device) * TILE_SUMS, dtype=torch.float32, device=x.device)


def launch_dense(
    x: Tensor, out: Tensor, partials: Tensor, matrices: tuple[ShuffledTensor, ...], limit: float, num_ranges: int
) -> None:
    """Gate and up, for two matrices: hidden of x, rounded to E4M3, both in product order; down, for one: parts."""
    first, *others = matrices
    (num_outs, width), num_tokens = first.shape, x.shape[0]
    tile_cols = 128 * 2 * WORD_STAGES  # the words' barriers are then as at first whenever a tile begins
    if num_outs * (1 + len(others)) % TILE_OUTPUTS or width % tile_cols or width // 128 % num_ranges:
        expected = f"multiples of {TILE_OUTPUTS} rows and {tile_cols} columns, {num_ranges} ranges of whole steps"
        raise KernelInputError(f"expected {expected}, found {len(matrices)} of {tuple(first.shape)}")
    num_work = -(-num_tokens // TILE_TOKENS) * (num_outs * (1 + len(others)) // TILE_OUTPUTS)
    dense_tiles_kernel[(min(num_multiprocessors(x.device), num_work),)](
        x, out, partials,
        *(Matrix(weight.data, weight.scale, weight.out_scale) for weight in (first, others[0] if others else first)),
        limit, num_tokens, K=width, OUTS=num_outs, RANGES=num_ranges, GATE_UP=bool(others), num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
