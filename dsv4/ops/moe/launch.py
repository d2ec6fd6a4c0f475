"""Launchers of the experts.

Kernels (kernel_gate_up.py, kernel_down.py): gate, up and activation; down and combination. Up to 5 tokens that is all:
two launches. Beyond, a launch before them sorts the (token, choice) pairs by expert and brings x into the form the
products take; beyond COUNT_FIRST pairs a first one counts for the sort. Beyond NARROW_ROWS tokens the two products are
those of kernel_wide.py: other instructions, the same bits. On Hopper those of kernel_tiles.py and kernel_dense.py take
their place, and a launch behind them sums the parts. How work is divided is said in config.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor, shuffle
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.lib.arrivals import NEVER, NUM_COUNTERS, arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.moe.kernel_down import DownResults, _down_kernel
from dsv4.ops.moe.kernel_fold import _sum_parts_kernel
from dsv4.ops.moe.kernel_gate_up import SplitSums, _fp4_linear_kernel, _gate_up_kernel, _moe_prepare_kernel
from dsv4.ops.moe.kernel_rows import DIRECT_PAIRS, GateUpMatrices, Matrix, PairOrder
from dsv4.ops.moe.kernel_wide import _prepare_rows_kernel, _wide_down_kernel, _wide_gate_up_kernel, _wide_linear_kernel
from dsv4.ops.moe.launch_dense import launch_dense, new_partials
from dsv4.ops.moe.launch_tiles import launch_tiles, takes_tiles
from dsv4.ops.moe.op import Matrices, _Shuffled, moe_ref
from dsv4.ops.moe.plan import (
    FEW_TOKENS,
    NATURAL,
    OPERAND,
    PRODUCT,
    TILES_CONFIG,
    WIDE_CONFIGS,
    GemmConfig,
    MoeConfig,
    pick_linear_config,
    pick_moe_config,
)
from dsv4.ops.moe.sort import SORT_CONFIG, TILE_BLOCK, ExpertOrder, _count_experts_kernel, max_tiles

_FORMATS = {QuantFormat.NVFP4: 0, QuantFormat.MXFP4: 1, QuantFormat.FP8_BLOCK: 2}
COUNT_FIRST = 2048  # with more pairs than this a launch of its own counts for the sort
SUM_BLOCK = 2, 1024  # tokens and columns of a program that sums parts
QUANTISE_GROUPS = 16  # groups of 128 channels of x that a step of the first launch takes


def moe(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float,
    rounded: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `moe_ref`. x in bf16; weights as `prepare_experts` makes them: routed in NVFP4 or MXFP4, shared in FP8.
    `rounded` is read for few tokens, of which otherwise every program rounds what it reads (`takes_rounded`). Weights
    of other kinds (bf16, FP8 experts) go to the oracle, which a graph cannot capture.
    """
    if not are_prepared(routed, shared):
        return moe_ref(x, experts, weights, routed, shared, limit=limit)
    config, matrices = config_for(x, experts, routed), (cast(_Shuffled, routed), cast(_Shuffled, shared))
    return launch_moe(x, experts, weights, *matrices, limit, config, rounded=rounded)


def are_prepared(routed: Matrices, shared: Matrices) -> bool:
    """Whether the kernels take these weights."""
    return all(isinstance(weight, ShuffledTensor) for weight in (*routed, *shared))


def takes_rounded(num_tokens: int, routed: Any) -> bool:
    """Whether `moe` is faster with its input rounded to E4M3 as well: where routed experts in MXFP4 are to see it so,
    and tokens are too few for a launch that prepares them. `routed`: matrices, or a layer of a pool, whose are its
    `stack`.
    """
    first = getattr(routed, "stack", routed)[0]
    return isinstance(first, ShuffledTensor) and first.format is QuantFormat.MXFP4 and num_tokens <= FEW_TOKENS


def config_for(x: Tensor, experts: Tensor, routed: Matrices, num_ranks: int = 1) -> MoeConfig:
    """How the work of this call is divided. `num_ranks`: among which the experts are divided that x's tokens chose."""
    num_experts, *sizes = routed[0].shape
    config = pick_moe_config(x.shape[0], experts.shape[1], num_ranks * num_experts, min(sizes))
    in_tiles = config is WIDE_CONFIGS[-1] and takes_tiles(cast(ShuffledTensor, routed[0]))
    return TILES_CONFIG if in_tiles else config


def prepare_experts(weights: tuple[QuantTensor, QuantTensor, QuantTensor]) -> tuple[ShuffledTensor, ...]:
    """w1, w2, w3 (stacked or not) as `moe` takes them; once, at load."""
    return tuple(shuffle(weight) for weight in weights)


def launch_moe(
    x: Tensor, experts: Tensor, weights: Tensor, routed: _Shuffled, shared: _Shuffled, limit: float, config: MoeConfig,
    *, has_routed: bool = True, has_shared: bool = True, rounded: Tensor | None = None, out: Tensor | None = None,
    homes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`moe` with the work divided as `config` says, into `out` where given. Without the shared expert: `moe_parts`. No
    token is complete then, so nobody sums; with `homes` (see there) nothing is left here. Without routed experts, of
    which nobody is chosen: `moe_shared`; it has counters of its own, since it may run beside `moe_parts`.
    """
    _check(x, experts, weights, routed, shared)
    w1, w2, _ = routed
    num_tokens, dim = x.shape
    top_k, (num_experts, width) = experts.shape[1], w1.shape[:2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else _checked(out, x)
    if num_tokens == 0:
        return out if has_shared else x.new_empty((0, top_k, dim))
    _check_size(num_tokens, top_k, dim, width, config, has_shared, homes)
    x, experts, weights = x.contiguous(), experts.contiguous(), weights.float().contiguous()
    if config.wide:
        parts = _launch_wide(x, experts, weights, routed, shared, limit, config, out, has_routed, has_shared, homes)
        return out if has_shared or homes is not None else parts[: experts.numel()].view(num_tokens, top_k, dim)
    gate_up, down, ranges = config.gate_up, config.down, config.ranges
    num_pairs, num_arrivals = experts.numel(), num_tokens * (dim // down.block)
    purpose = "moe" if has_routed else "shared expert"
    is_direct = config.direct and num_pairs <= DIRECT_PAIRS and num_arrivals <= NUM_COUNTERS
    if is_direct:
        # what the programs do not read stands for what is not there
        order, ordered, num_tiles = ExpertOrder(*(experts for _ in range(5))), x, num_pairs
        quantised = x if rounded is None else _checked(rounded.contiguous(), x)
        # counters are set back by whoever sums
        arrivals = arrival_counters(purpose, x.device) if has_shared else arrival_counters("parts", x.device, NEVER)
    else:
        order, ordered, quantised, arrivals = _prepare(x, experts, w1, dim // down.block, config, has_routed)
        num_tiles = len(order.tile_experts)
    num_tiles *= has_routed
    num_shared_tiles = -(-num_tokens // config.shared_rows) if has_shared else 0
    num_rows = num_tokens * top_k + num_shared_tiles * config.shared_rows
    hidden = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_rows if homes is None else 0, dim, dtype=x.dtype, device=x.device)
    common = {
        "D": dim, "I": width, "E": num_experts, "TOP_K": top_k, "FORMAT": _FORMATS[w1.format],
        "SHARED_FORMAT": _FORMATS[shared[0].format], "ROWS": config.rows, "SHARED_ROWS": config.shared_rows,
        "DIRECT": is_direct, "SPARSE": is_direct and not has_shared,
    }  # fmt: skip
    routed_ranges, shared_ranges = ranges.of(ranges.gate_up, dim), ranges.of(ranges.shared_gate_up, dim)
    shared_block = gate_up.block if is_direct or config.shared_block is None else config.shared_block
    num_work, num_shared_work = num_tiles * (width // gate_up.block), num_shared_tiles * (width // shared_block)
    is_split = gate_up.split and shared_block == gate_up.block and num_work + num_shared_work <= NUM_COUNTERS
    partials, counters = hidden, arrivals
    if is_split:
        num_sums = num_shared_work * shared_ranges * config.shared_rows + num_work * routed_ranges * config.rows
        partials = torch.empty(2 * num_sums * gate_up.block, dtype=torch.float32, device=x.device)
        counters = arrival_counters(f"{purpose} gate and up", x.device)
        num_work, num_shared_work = num_work * 2 * routed_ranges, num_shared_work * 2 * shared_ranges
    # whether gate and up round what they leave: groups of 128 columns, of one block or, in natural order, of two
    is_rounded = gate_up.block == 128 or (is_split and gate_up.block == 64 and not config.ordered)
    _gate_up_kernel[(num_work + num_shared_work,)](
        ordered, quantised, hidden, experts, weights, _pair_order(order), _gate_up_matrices(routed, shared),
        SplitSums(partials, counters), limit, num_tokens, num_shared_tiles, **common, **_strides(w1),
        BLOCK=gate_up.block, UNROLL=gate_up.unroll, RANGES=routed_ranges, SHARED_RANGES=shared_ranges, SPLIT=is_split,
        SHARED_BLOCK=shared_block, ORDERED_X=config.ordered and not is_direct,
        ORDER=OPERAND if config.ordered else NATURAL, ROUND_X=is_direct and rounded is None, **gate_up.options,
    )  # fmt: skip

    routed_ranges, shared_ranges = ranges.of(ranges.down, width), ranges.of(ranges.shared_down, width)
    num_work, num_shared_work = num_tiles * (dim // down.block), num_shared_tiles * (dim // down.at_once)
    sums = parts
    if down.split:
        num_sums = num_pairs * routed_ranges * (routed_ranges > 1) + num_tokens * shared_ranges
        sums = torch.empty(num_sums, dim, dtype=torch.float32, device=x.device)
        num_work, num_shared_work = num_work * routed_ranges, num_shared_work * shared_ranges
    targets, num_ranks = (parts, 0) if homes is None else (homes, len(homes))
    _down_kernel[(num_work + num_shared_work,)](
        hidden, DownResults(targets, sums, arrivals, out), experts, _pair_order(order), _matrix(w2), _matrix(shared[1]),
        num_tokens, num_shared_tiles, **common, **_strides(w2), BLOCK=down.block, UNROLL=down.unroll,
        RANGES=routed_ranges, SHARED_RANGES=shared_ranges, SPLIT=down.split, QUANTISE=not is_rounded,
        SHARED_QUANTISE=not is_rounded and shared_block != 128, ORDERED=config.ordered, PAIR=down.pair,
        RANKS=num_ranks, **down.options,
    )  # fmt: skip
    return out if has_shared or homes is not None else parts.view(num_tokens, top_k, dim)


def _launch_wide(
    x: Tensor, experts: Tensor, weights: Tensor, routed: _Shuffled, shared: _Shuffled, limit: float, config: MoeConfig,
    out: Tensor, has_routed: bool, has_shared: bool, homes: Tensor | None,
) -> Tensor:  # fmt: skip
    """The wide form: out [T, D] of T > 0 tokens, if the shared expert runs; returns the parts, pair by pair."""
    (w1, w2, _), (num_tokens, dim), top_k = routed, x.shape, experts.shape[1]
    num_experts, width = w1.shape[:2]
    gate_up, down, ranges = config.gate_up, config.down, config.ranges
    if dim % down.block:
        down = replace(down, block=128, pair=False)
    order, ordered, quantised, arrivals = _prepare(x, experts, w1, dim // down.block, config, has_routed)
    num_rows = num_tokens * (top_k + 1)
    hidden = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_rows if homes is None else 0, dim, dtype=x.dtype, device=x.device)
    targets, num_ranks = (parts, 0) if homes is None else (homes, len(homes))
    number_format = _FORMATS[w1.format]
    if config.tiles:
        if has_routed:
            source = quantised if w1.format is QuantFormat.MXFP4 else ordered
            launch_tiles(source, hidden, weights, order, (w1, routed[2]), limit, number_format)
            launch_tiles(hidden, targets, weights, order, (w2,), limit, number_format, num_ranks)
        if has_shared:
            _launch_dense_shared(quantised, hidden, parts, experts, shared, limit, config, num_experts, out)
        return parts
    num_shared_tiles = -(-num_tokens // config.shared_rows) if has_shared else 0
    num_tiles = len(order.tile_experts) * has_routed + num_shared_tiles
    common = {
        "D": dim, "I": width, "TOP_K": top_k, "FORMAT": number_format,
        "SHARED_FORMAT": _FORMATS[shared[0].format], "ROWS": config.rows, "MIDDLE": config.sizes[0],
        "SMALL": config.sizes[1], "SHARED_ROWS": config.shared_rows,
    }  # fmt: skip
    _wide_gate_up_kernel[(num_tiles * (width // gate_up.block),)](
        ordered, quantised, hidden, weights, _pair_order(order), _gate_up_matrices(routed, shared), limit, num_tokens,
        num_shared_tiles, **common, **_strides(w1), BLOCK=gate_up.block,
        RANGES=ranges.of(ranges.gate_up, dim), SHARED_RANGES=ranges.of(ranges.shared_gate_up, dim), **gate_up.options,
    )  # fmt: skip
    _wide_down_kernel[(num_tiles * (dim // down.block),)](
        hidden, targets, arrivals, out, experts, _pair_order(order), _matrix(w2), _matrix(shared[1]), num_tokens,
        num_shared_tiles, **common, **_strides(w2), E=num_experts,
        BLOCK=down.block, RANGES=ranges.of(ranges.down, width), SHARED_RANGES=ranges.of(ranges.shared_down, width),
        QUANTISE=gate_up.block != 128, PAIR=down.pair, RANKS=num_ranks, **down.options,
    )  # fmt: skip
    return parts


def _launch_dense_shared(
    x: Tensor, hidden: Tensor, parts: Tensor, experts: Tensor, shared: _Shuffled, limit: float, config: MoeConfig,
    num_experts: int, out: Tensor,
) -> None:  # fmt: skip
    """The shared expert in tiles, behind the pairs in `hidden` and `parts`; then the sum of all parts."""
    (w1, w2, w3), ranges, (num_tokens, dim) = shared, config.ranges, x.shape
    hidden, own_parts, partials = hidden[experts.numel() :], parts[experts.numel() :], new_partials(x)
    launch_dense(x, hidden, partials, (w1, w3), limit, ranges.of(ranges.shared_gate_up, dim))
    launch_dense(hidden, own_parts, partials, (w2,), limit, ranges.of(ranges.shared_down, w2.shape[1]))
    rows, cols = SUM_BLOCK
    cols = min(cols, dim & -dim)
    _sum_parts_kernel[(-(-num_tokens // rows), dim // cols)](
        parts, experts, out, num_tokens, D=dim, E=num_experts, TOP_K=experts.shape[1], ROWS=rows, COLS=cols, num_warps=8
    )  # fmt: skip


def _prepare(
    x: Tensor, experts: Tensor, w1: ShuffledTensor, num_arrivals: int, config: MoeConfig, has_routed: bool
) -> tuple[ExpertOrder, Tensor, Tensor, Tensor]:
    """The sort (if routed experts run), x as it is and rounded to E4M3 groups [T, D], and a zeroed counter for each
    token and block of the output. In an order of the columns that is not x's own, x as it is too, where routed experts
    take it.
    """
    (num_tokens, top_k), device, sort = experts.shape, x.device, SORT_CONFIG
    num_pairs, num_experts = experts.numel(), w1.shape[0]
    column_order = PRODUCT if config.wide else OPERAND if config.ordered else NATURAL
    has_plain = column_order != NATURAL and w1.format is QuantFormat.NVFP4
    bound = max_tiles(num_pairs, num_experts, config.rows)
    sizes = num_experts, num_experts + 1, num_pairs, bound, bound
    order = ExpertOrder(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
    quantised = torch.empty_like(x)
    ordered = torch.empty_like(x) if has_plain else x
    arrivals = torch.empty(num_tokens, num_arrivals, dtype=torch.int64, device=device)
    num_chunks = -(-num_pairs // sort.chunk)
    flags = {"TOP_K": top_k, "E": num_experts, "E_BLOCK": max(next_power_of_2(num_experts), 32), "CHUNK": sort.chunk}
    chunk_counts, is_counted = order.counts, num_pairs > COUNT_FIRST
    if is_counted and has_routed:
        chunk_counts = torch.empty(num_chunks, flags["E_BLOCK"], dtype=torch.int32, device=device)
        _count_experts_kernel[(num_chunks,)](
            experts, experts, chunk_counts, num_pairs, **flags, HAS_SLOTS=False, **sort.options
        )
    num_sort_programs = num_chunks + -(-bound // TILE_BLOCK) if has_routed else 0
    _moe_prepare_kernel[(num_sort_programs + num_tokens,)](
        experts, chunk_counts, order.counts, order.offsets, order.pairs, order.tile_experts, order.tile_starts,
        num_pairs, num_chunks, bound, x, ordered, quantised, arrivals, num_sort_programs, **flags,
        TILE_ROWS=config.rows, TILES=TILE_BLOCK, D=x.shape[1], GROUPS=QUANTISE_GROUPS,
        ARRIVALS=num_arrivals, ARRIVALS_BLOCK=next_power_of_2(num_arrivals), COUNT_HERE=not is_counted,
        PLAIN=has_plain, ORDER=column_order, **sort.options,
    )  # fmt: skip
    return order, ordered, quantised, arrivals


def _matrix(weight: ShuffledTensor) -> Matrix:
    return Matrix(weight.data, weight.scale, weight.out_scale)


def _pair_order(order: ExpertOrder) -> PairOrder:
    return PairOrder(order.pairs, order.offsets, order.tile_experts, order.tile_starts)


def _gate_up_matrices(routed: _Shuffled, shared: _Shuffled) -> GateUpMatrices:
    return GateUpMatrices(*(_matrix(weight) for weight in (routed[0], routed[2], shared[0], shared[2])))


def _strides(weight: ShuffledTensor) -> dict[str, int]:
    """Words of one matrix of a stack."""
    return {"DATA_WORDS": weight.data[0].numel(), "SCALE_WORDS": weight.scale[0].numel()}


def fp4_linear(x: Tensor, weight: ShuffledTensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """`linear_ref` for a shuffled NVFP4 or MXFP4 weight [N, K]: x bf16 [T, K] -> [T, N]."""
    tile_rows, config, wide = pick_linear_config(x.shape[0], x.shape[-1])
    return launch_fp4_linear(x, weight, out_dtype, tile_rows, config, wide)


def launch_fp4_linear(
    x: Tensor, weight: ShuffledTensor, out_dtype: torch.dtype | None, tile_rows: int, config: GemmConfig,
    wide: bool = False,
) -> Tensor:  # fmt: skip
    """`fp4_linear` with tiles of `tile_rows` tokens and the product divided as `config` says."""
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
    if wide:
        if not config.is_wide or config.pair:
            raise KernelInputError(f"expected whole warp groups and 64 weight rows, found {config}")
        if -(-num_outs // 64) * 64 % config.block:  # rows are stored in tiles of 64
            config = replace(config, block=64, num_warps=4)
        is_quantised = weight.format is QuantFormat.MXFP4
        prepared = torch.empty(num_rows, padded_cols, dtype=x.dtype, device=x.device)
        _prepare_rows_kernel[(num_rows,)](
            x.contiguous(), prepared, K=cols, GROUPS=QUANTISE_GROUPS, QUANTISE=is_quantised, **SORT_CONFIG.options
        )
        _wide_linear_kernel[(-(-num_rows // tile_rows) * -(-num_outs // config.block),)](
            prepared, *_matrix(weight), out, num_rows, N=num_outs, K=padded_cols, FORMAT=_FORMATS[weight.format],
            ROWS=tile_rows, BLOCK=config.block, **config.options,
        )  # fmt: skip
        return out
    _fp4_linear_kernel[(-(-num_rows // tile_rows) * -(-num_outs // config.block),)](
        x.contiguous(), *_matrix(weight), out, num_rows, N=num_outs, K=cols, FORMAT=_FORMATS[weight.format],
        ROWS=tile_rows, BLOCK=config.block, UNROLL=config.unroll, **config.options,
    )  # fmt: skip
    return out


def _check_size(
    num_tokens: int, top_k: int, dim: int, width: int, config: MoeConfig, has_shared: bool, homes: Tensor | None
) -> None:
    if (num_tokens * (top_k + 1) + config.shared_rows) * max(dim, width) >= 2**31:
        raise KernelInputError(f"expected fewer than 2^31 hidden or partial values, found {num_tokens} tokens")
    if not has_shared and config.down.split and config.ranges.of(config.ranges.down, width) > 1:
        raise KernelInputError(f"expected parts made by one program each, found {config.ranges}")
    if homes is not None and (has_shared or homes.dtype != torch.int64 or num_tokens % len(homes)):
        found = f"{homes.dtype} {tuple(homes.shape)}"
        raise KernelInputError(f"expected addresses for equal shares of {num_tokens} tokens, found {found}")


def _checked(out: Tensor, x: Tensor) -> Tensor:
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise KernelInputError(f"expected contiguous rows like x {tuple(x.shape)}, not {out.dtype} {tuple(out.shape)}")
    return out


def _check(x: Tensor, experts: Tensor, weights: Tensor, routed: Any, shared: Any) -> None:
    for weight in (*routed, *shared):
        if not isinstance(weight, ShuffledTensor):
            raise KernelInputError(f"expected weights from prepare_experts, found {type(weight).__name__}")
    check_launch(x, experts, weights, *(weight.data for weight in (*routed, *shared)))
    if x.dim() != 2 or x.dtype != torch.bfloat16:
        raise KernelInputError(f"expected x [T, D] in bf16, found {x.dtype} {tuple(x.shape)}")
    dim, width = x.shape[1], routed[0].shape[-2]
    if dim % 128 or width % 128:
        raise KernelInputError(f"expected D and I in multiples of 128, found {dim} and {width}")
    if experts.dim() != 2 or experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise KernelInputError(
            f"expected experts and weights [{x.shape[0]}, k], found {tuple(experts.shape)} and {tuple(weights.shape)}"
        )
    if experts.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(f"expected int32 or int64 experts, found {experts.dtype}")
    num_experts = routed[0].shape[0]
    matrices = ((width, dim), (dim, width), (width, dim))
    for weight, shape in zip(
        (*routed, *shared), (*((num_experts, *shape) for shape in matrices), *matrices), strict=True
    ):
        if tuple(weight.shape) != shape:
            raise KernelInputError(f"expected a weight {shape}, found {tuple(weight.shape)}")
    if len({weight.format for weight in routed}) > 1 or routed[0].format is QuantFormat.FP8_BLOCK:
        raise KernelInputError(f"expected routed experts in one FP4 format, found {[w.format for w in routed]}")
    if any(weight.format is not QuantFormat.FP8_BLOCK for weight in shared):
        raise KernelInputError(f"expected a shared expert in FP8, found {[w.format for w in shared]}")
