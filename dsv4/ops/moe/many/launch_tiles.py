"""Launcher of the routed experts' kernel for many tokens (kernel_tiles.py), and which layers it takes."""

from __future__ import annotations

from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor
from dsv4.ops.lib.arch import architecture, num_multiprocessors
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.moe.kernel_rows import Matrix, PairOrder
from dsv4.ops.moe.many.kernel_tiles import NUM_WARPS, STAGES, TILE_OUTPUTS, expert_tiles_kernel
from dsv4.ops.moe.sort import ExpertOrder

# I and D of experts for which it has been timed, and was faster: Flash and Pro
TIMED = ((2048, 4096), (3072, 7168))


def takes_tiles(first: ShuffledTensor) -> bool:
    """Whether it is used for experts of which `first` are the gates: on Hopper, where it has been timed."""
    return architecture().has_wide_kernels and tuple(first.shape[-2:]) in TIMED


def launch_tiles(
    x: Tensor, out: Tensor, weights: Tensor, order: ExpertOrder, matrices: tuple[ShuffledTensor, ...], limit: float,
    number_format: int, num_ranks: int = 0,
) -> None:
    """Gate and up, for two matrices: rows of x, in product order, into those of `out` that their pairs have; down, for
    one: rows of hidden into parts, or into those of ranks, whose addresses `out` then holds. `order` in tiles of
    TILE_TOKENS."""
    first, *others = matrices
    num_outs, width = first.shape[-2:]
    if num_outs * (1 + len(others)) % TILE_OUTPUTS or width <= 128 * STAGES:
        expected = f"multiples of {TILE_OUTPUTS} rows, more than {128 * STAGES} columns"
        raise KernelInputError(f"expected {expected}, found {len(matrices)} of {tuple(first.shape)}")
    num_work = len(order.tile_experts) * (num_outs * (1 + len(others)) // TILE_OUTPUTS)
    expert_tiles_kernel[(min(num_multiprocessors(x.device), num_work),)](
        x, out, weights, PairOrder(order.pairs, order.offsets, order.tile_experts, order.tile_starts),
        *(Matrix(weight.data, weight.scale, weight.out_scale) for weight in (first, others[0] if others else first)),
        limit, len(order.tile_experts), weights.numel(),
        K=width, OUTS=num_outs, E=first.shape[0], TOP_K=weights.shape[1],
        FORMAT=number_format, GATE_UP=bool(others), DATA_WORDS=first.data[0].numel(),
        SCALE_WORDS=first.scale[0].numel(), RANKS=num_ranks, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )
