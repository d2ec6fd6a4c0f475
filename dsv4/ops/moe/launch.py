"""Launchers of the experts.

FEW tokens: two launches (kernel_few.py), one for each product. More: a launch before them sorts the (token, choice)
pairs by expert and brings x into the form the products take (kernel_prepare.py); beyond COUNT_FIRST pairs a first one
counts for the sort. The products are those of the NARROW form (kernel_gate_up.py, kernel_down.py), of the WIDE one
(kernel_wide.py), or TILES (kernel_tiles.py, kernel_dense.py), and then a last launch sums the parts. All forms give the
same bits; plan.py picks one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dsv4.formats.layouts import LayoutError, ShuffledTensor, shuffle
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.lib.arrivals import NEVER, NUM_COUNTERS, arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.moe.kernel_down import _down_kernel
from dsv4.ops.moe.kernel_few import Partials, _few_down_kernel, _few_gate_up_kernel
from dsv4.ops.moe.kernel_gate_up import _gate_up_kernel
from dsv4.ops.moe.kernel_parts import DownResults, _sum_parts_kernel
from dsv4.ops.moe.kernel_prepare import _moe_prepare_kernel
from dsv4.ops.moe.kernel_rows import DIRECT_PAIRS, GateUpMatrices, Matrix, PairOrder
from dsv4.ops.moe.many.kernel_wide import _wide_down_kernel, _wide_gate_up_kernel
from dsv4.ops.moe.many.launch_dense import launch_dense, new_partials
from dsv4.ops.moe.many.launch_tiles import launch_tiles, takes_tiles
from dsv4.ops.moe.op import Matrices, _Shuffled, moe_ref
from dsv4.ops.moe.plan import (
    BLOCK,
    FEW_ROWS,
    FEW_TOKENS,
    OPERAND,
    PAIR_BLOCK,
    PRODUCT,
    TILES_OUTPUTS,
    Form,
    MoeConfig,
    pick_moe_config,
)
from dsv4.ops.moe.sort import COUNT_FIRST, SORT_OPTIONS, ExpertOrder, begin_sort

ROUTED_FORMATS = QuantFormat.NVFP4, QuantFormat.MXFP4
FORMATS = {QuantFormat.NVFP4: 0, QuantFormat.MXFP4: 1, QuantFormat.FP8_BLOCK: 2}
SUM_BLOCK = 2, 1024  # tokens and columns of a program that sums parts
QUANTISE_GROUPS = 16  # groups of 128 channels of x that a step of the first launch takes


def moe(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float,
    rounded: Tensor | None = None,
) -> Tensor:
    """See `moe_ref`. x in bf16; weights as `prepare_experts` makes them: routed in NVFP4 or MXFP4, shared in FP8.
    `rounded` is read for few tokens, of which otherwise every program rounds what it reads (`takes_rounded`). Weights
    of other kinds (bf16, FP8 experts) go to the oracle, which a graph cannot capture (`backend_for_weights`).
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
    has_tiles = takes_tiles(cast(ShuffledTensor, routed[0]))
    return pick_moe_config(x.shape[0], experts.shape[1], num_ranks * num_experts, min(sizes), has_tiles=has_tiles)


def prepare_experts(weights: Sequence[QuantTensor]) -> tuple[ShuffledTensor, ...]:
    """w1, w2, w3 (stacked or not) as the kernels take them."""
    return tuple(shuffle(weight) for weight in weights)


def prepare_routed(weights: Sequence[QuantTensor]) -> Sequence[QuantTensor | ShuffledTensor]:
    """Of routed experts, once at load: as the kernels take them, or as they are where no kernel does (FP8)."""
    formats = {weight.format for weight in weights}
    return prepare_experts(weights) if len(formats) == 1 and formats <= set(ROUTED_FORMATS) else weights


def prepare_shared(weights: Sequence[QuantTensor]) -> Sequence[QuantTensor | ShuffledTensor]:
    """Of the shared expert: as they are in FP4, and where block scales are no powers of two."""
    if any(weight.format is not QuantFormat.FP8_BLOCK for weight in weights):
        return weights
    try:
        return prepare_experts(weights)
    except LayoutError:
        return weights


class _Call(NamedTuple):
    """What a form launches: contiguous x [T, D], T > 0, choices and weights [T, k]; which experts run; where results
    go. Hidden [rows, I] and parts [rows, D] have a row for each pair, then one for each token.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor
    routed: _Shuffled
    shared: _Shuffled
    limit: float
    config: MoeConfig
    has_routed: bool
    has_shared: bool
    out: Tensor
    hidden: Tensor
    parts: Tensor
    peer_buffers: Tensor | None

    @property
    def purpose(self) -> str:
        """Of counters: the shared expert may run beside routed ones."""
        return "moe" if self.has_routed else "shared expert"

    @property
    def num_shared_tiles(self) -> int:
        return -(-self.x.shape[0] // self.config.shared_rows) if self.has_shared else 0

    @property
    def gate_up_matrices(self) -> GateUpMatrices:
        return GateUpMatrices(
            *(matrix_of(weight) for weight in (self.routed[0], self.routed[2], self.shared[0], self.shared[2]))
        )

    @property
    def down_matrices(self) -> tuple[Matrix, Matrix]:
        return matrix_of(self.routed[1]), matrix_of(self.shared[1])

    def results(self, sums: Tensor, arrivals: Tensor) -> DownResults:
        return DownResults(self.parts if self.peer_buffers is None else self.peer_buffers, sums, arrivals, self.out)

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of all kernels but TILES."""
        return {
            "D": self.x.shape[1], "I": self.hidden.shape[1], "TOP_K": self.experts.shape[1],
            "FORMAT": FORMATS[self.routed[0].format], "SHARED_FORMAT": FORMATS[self.shared[0].format],
        }

    @property
    def num_experts(self) -> int:
        return self.routed[0].shape[0]

    @property
    def num_ranks(self) -> int:
        return 0 if self.peer_buffers is None else len(self.peer_buffers)

    def gate_up_ranges(self) -> dict[str, int]:
        ranges, dim = self.config.ranges, self.x.shape[1]
        return {"RANGES": ranges.of(ranges.gate_up, dim), "SHARED_RANGES": ranges.of(ranges.shared_gate_up, dim)}

    def down_ranges(self) -> dict[str, int]:
        ranges, width = self.config.ranges, self.hidden.shape[1]
        return {"RANGES": ranges.of(ranges.down, width), "SHARED_RANGES": ranges.of(ranges.shared_down, width)}


def launch_moe(
    x: Tensor, experts: Tensor, weights: Tensor, routed: _Shuffled, shared: _Shuffled, limit: float, config: MoeConfig,
    *, has_routed: bool = True, has_shared: bool = True, rounded: Tensor | None = None, out: Tensor | None = None,
    peer_buffers: Tensor | None = None,
) -> Tensor:
    """`moe` with the work divided as `config` says, into `out` where given. Without the shared expert: `moe_parts`. No
    token is complete then, so nothing is summed; with `peer_buffers` (see there) nothing is left here. Without routed
    experts: `moe_shared`, whose tokens choose none; it has counters of its own, since it may run beside `moe_parts`.
    """
    _check(x, experts, weights, routed, shared)
    (num_tokens, dim), top_k, width = x.shape, experts.shape[1], routed[0].shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else _checked(out, x)
    if num_tokens == 0:
        return out if has_shared else x.new_empty((0, top_k, dim))
    _check_size(num_tokens, top_k, dim, width, config, has_shared, peer_buffers)
    num_rows = num_tokens * top_k
    if has_shared:
        is_padded = config.form in (Form.FEW, Form.NARROW)  # rows for whole tiles
        num_rows += -(-num_tokens // config.shared_rows) * config.shared_rows if is_padded else num_tokens
    call = _Call(
        x.contiguous(), experts.contiguous(), weights.float().contiguous(), routed, shared, limit, config,
        has_routed, has_shared, out,
        torch.empty(num_rows, width, dtype=x.dtype, device=x.device),
        torch.empty(num_rows if peer_buffers is None else 0, dim, dtype=x.dtype, device=x.device), peer_buffers,
    )
    if config.form is Form.FEW:
        _launch_few(call, rounded)
    elif config.form is Form.TILES:
        _launch_tiles(call)
    else:
        _launch_sorted(call)
    is_kept = has_shared or peer_buffers is not None
    return out if is_kept else call.parts[: num_tokens * top_k].view(num_tokens, top_k, dim)


def _launch_few(call: _Call, rounded: Tensor | None) -> None:
    (num_tokens, dim), config, num_pairs = call.x.shape, call.config, call.experts.numel()
    (w1, w2, _), width, device = call.routed, call.hidden.shape[1], call.x.device
    num_tiles, num_shared_tiles = num_pairs * call.has_routed, call.num_shared_tiles
    shape = call.sizes | {"E": call.num_experts, "SPARSE": not call.has_shared}
    ranges = call.gate_up_ranges()
    parts, shared_parts = 2 * ranges["RANGES"], 2 * ranges["SHARED_RANGES"]
    num_work, num_shared_work = num_tiles * (width // BLOCK), num_shared_tiles * (width // BLOCK)
    if num_pairs > DIRECT_PAIRS or max(num_work + num_shared_work, num_tokens * (dim // BLOCK)) > NUM_COUNTERS:
        raise KernelInputError(f"expected few tokens, found {num_tokens} with {num_pairs} choices")
    num_sums = num_shared_work * shared_parts + num_work * parts
    sums = torch.empty(num_sums * FEW_ROWS * BLOCK, dtype=torch.float32, device=device)
    _few_gate_up_kernel[(num_work * parts + num_shared_work * shared_parts,)](
        call.x, call.x if rounded is None else _checked(rounded.contiguous(), call.x), call.hidden, call.experts,
        call.weights, call.gate_up_matrices, Partials(sums, arrival_counters(f"{call.purpose} gate and up", device)),
        call.limit, num_tokens, num_shared_tiles, **shape, **_strides(w1), UNROLL=config.gate_up.unroll, **ranges,
        ROUND_X=rounded is None, **config.gate_up.options,
    )
    ranges = call.down_ranges()
    num_sums = num_pairs * ranges["RANGES"] * (ranges["RANGES"] > 1) + num_tokens * ranges["SHARED_RANGES"]
    sums = torch.empty(num_sums, dim, dtype=torch.float32, device=device)
    # counters are set back by the CTA that sums; of parts alone, none does
    counters = arrival_counters(call.purpose, device) if call.has_shared else arrival_counters("parts", device, NEVER)
    num_work, num_shared_work = num_tiles * ranges["RANGES"], num_shared_tiles * ranges["SHARED_RANGES"]
    _few_down_kernel[((num_work + num_shared_work) * (dim // BLOCK),)](
        call.hidden, call.results(sums, counters), call.experts, *call.down_matrices, num_tokens, num_shared_tiles,
        **shape, **_strides(w2), UNROLL=config.down.unroll, **ranges, RANKS=call.num_ranks, **config.down.options,
    )


def _launch_sorted(call: _Call) -> None:
    """NARROW or WIDE."""
    (num_tokens, dim), config, width = call.x.shape, call.config, call.hidden.shape[1]
    is_wide = config.form is Form.WIDE
    order, ordered, quantised, arrivals = _prepare(call, dim // PAIR_BLOCK, PRODUCT if is_wide else OPERAND)
    num_tiles, num_shared_tiles = len(order.tile_experts) * call.has_routed, call.num_shared_tiles
    shape = call.sizes | {"ROWS": config.rows, "SHARED_ROWS": config.shared_rows}
    gate_up_flags, down_flags = call.gate_up_ranges(), call.down_ranges()
    if not is_wide:
        gate_up_flags |= {"UNROLL": config.gate_up.unroll, "ROUNDS_SHARED": config.rounds_shared}
        down_flags |= {"UNROLL": config.down.unroll, "SHARED_QUANTISE": not config.rounds_shared}
    gate_up, down = (_wide_gate_up_kernel, _wide_down_kernel) if is_wide else (_gate_up_kernel, _down_kernel)
    num_work = num_tiles * (width // BLOCK) + num_shared_tiles * (width // (128 if config.rounds_shared else BLOCK))
    gate_up[(num_work,)](
        ordered, quantised, call.hidden, call.weights, _pair_order(order), call.gate_up_matrices, call.limit,
        num_tokens, num_shared_tiles, **shape, **_strides(call.routed[0]), **gate_up_flags, **config.gate_up.options,
    )
    num_work = num_tiles * (dim // PAIR_BLOCK) + num_shared_tiles * (dim // (PAIR_BLOCK if is_wide else BLOCK))
    down[(num_work,)](
        call.hidden, call.results(call.parts, arrivals), call.experts, _pair_order(order), *call.down_matrices,
        num_tokens, num_shared_tiles, **shape, E=call.num_experts, **_strides(call.routed[1]), **down_flags,
        RANKS=call.num_ranks, **config.down.options,
    )


def _launch_tiles(call: _Call) -> None:
    """Routed experts, then the shared one, whose rows lie after the pairs', and the sum of all parts."""
    (num_tokens, dim), (w1, w2, w3), ranges = call.x.shape, call.routed, call.config.ranges
    order, ordered, quantised, _ = _prepare(call, dim // TILES_OUTPUTS, PRODUCT)
    number_format, num_pairs = FORMATS[w1.format], call.experts.numel()
    if call.has_routed:
        source = quantised if w1.format is QuantFormat.MXFP4 else ordered
        target = call.parts if call.peer_buffers is None else call.peer_buffers
        launch_tiles(source, call.hidden, call.weights, order, (w1, w3), call.limit, number_format)
        launch_tiles(call.hidden, target, call.weights, order, (w2,), call.limit, number_format, call.num_ranks)
    if not call.has_shared:
        return
    (w1, w2, w3), partials = call.shared, new_partials(call.x)
    hidden, parts = call.hidden[num_pairs:], call.parts[num_pairs:]
    launch_dense(quantised, hidden, partials, (w1, w3), call.limit, ranges.of(ranges.shared_gate_up, dim))
    launch_dense(hidden, parts, partials, (w2,), call.limit, ranges.of(ranges.shared_down, w2.shape[1]))
    rows, cols = SUM_BLOCK
    cols = min(cols, dim & -dim)
    _sum_parts_kernel[(-(-num_tokens // rows), dim // cols)](
        call.parts, call.experts, call.out, num_tokens, D=dim, E=call.num_experts, TOP_K=call.experts.shape[1],
        ROWS=rows, COLS=cols, num_warps=8, enable_fp_fusion=False,
    )


def _prepare(call: _Call, num_arrivals: int, column_order: int) -> tuple[ExpertOrder, Tensor, Tensor, Tensor]:
    """The sort (if routed experts run), x as it is and rounded to E4M3 groups [T, D], and `num_arrivals` zeroed
    counters for each token. Columns are in `column_order`; x as it is only where routed experts take it.
    """
    x, experts, device = call.x, call.experts, call.x.device
    num_tokens, num_pairs = len(x), experts.numel()
    has_plain = call.routed[0].format is QuantFormat.NVFP4
    order, chunk_counts, num_chunks, num_sort_programs, flags = begin_sort(
        experts, call.num_experts, call.config.rows, COUNT_FIRST, is_wanted=call.has_routed
    )
    quantised = torch.empty_like(x)
    ordered = torch.empty_like(x) if has_plain else x
    arrivals = torch.empty(num_tokens, num_arrivals, dtype=torch.int64, device=device)
    _moe_prepare_kernel[(num_sort_programs + num_tokens,)](
        experts, chunk_counts, *vars(order).values(), num_pairs, num_chunks, len(order.tile_experts), x, ordered,
        quantised, arrivals, num_sort_programs, **flags, D=x.shape[1], GROUPS=QUANTISE_GROUPS,
        ARRIVALS=num_arrivals, ARRIVALS_BLOCK=next_power_of_2(num_arrivals), PLAIN=has_plain, ORDER=column_order,
        **SORT_OPTIONS,
    )
    return order, ordered, quantised, arrivals


def matrix_of(weight: ShuffledTensor) -> Matrix:
    return Matrix(weight.data, weight.scale, weight.out_scale)


def _pair_order(order: ExpertOrder) -> PairOrder:
    return PairOrder(order.pairs, order.offsets, order.tile_experts, order.tile_starts)


def _strides(weight: ShuffledTensor) -> dict[str, int]:
    """Words of one matrix of a stack."""
    return {"DATA_WORDS": weight.data[0].numel(), "SCALE_WORDS": weight.scale[0].numel()}


def _check_size(
    num_tokens: int, top_k: int, dim: int, width: int, config: MoeConfig, has_shared: bool, peer_buffers: Tensor | None
) -> None:
    if (num_tokens * (top_k + 1) + config.shared_rows) * max(dim, width) >= 2**31:
        raise KernelInputError(f"expected fewer than 2^31 hidden or partial values, found {num_tokens} tokens")
    if not has_shared and config.form is Form.FEW and config.ranges.of(config.ranges.down, width) > 1:
        raise KernelInputError(f"expected parts made by one program each, found {config.ranges}")
    if peer_buffers is not None and (has_shared or peer_buffers.dtype != torch.int64 or num_tokens % len(peer_buffers)):
        found = f"{peer_buffers.dtype} {tuple(peer_buffers.shape)}"
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
