"""Expert choice: score = sqrt(softplus(gate x)) in fp32; top-k of score + bias, or a table by token id.

Kernels: the gate product on tensor cores (bf16 operands, exact products, fp32 sums), then a token's logits become
scores, which are picked, sorted and renormalised. With few rows the product is cut along D over many programs, which
leave partial sums; those that arrive last wait for the few still missing and finish a row each: one launch. With many
rows one program sums its splits itself and a second launch has a program per row. Either way a logit is the sum, in
split order, of sums over SPLIT_LEN columns: a row's bits do not depend on the number of rows.

Waiting cannot hang: a program waits for programs of its own tile, which a GPU starts before those of later tiles, and a
tile has fewer programs than a GPU runs at once. In the interpreter, where programs run one after another, the last one
does all the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import QuantTensor, Weight, dequantize
from dsv4.ops.arrivals import arrival_counters, arrive_and_share, wait_for_all
from dsv4.ops.invariant import accumulator, ordered_sum, rows_matmul, sqrt_softplus
from dsv4.ops.tl_math import ordered_bits, softplus
from dsv4.ops.tl_utils import (
    KernelInputError,
    LaunchConfig,
    blackwell_registers,
    check_launch,
    jit,
    next_power_of_2,
    pdl_trigger,
    pdl_wait,
    tl,
)
from dsv4.ops.topk import topk_select_ref


def activation_topk_ref(logits: Tensor, bias: Tensor | None, *, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Gate logits [T, E] -> experts int64 [T, k], ascending, and weights [T, k] in the logits' dtype.

    score = sqrt(log(1 + e^logit)), right to the last fp32 bits for any finite logit. The k largest score + bias are
    chosen, ties to the lower expert; weights = score / sum of the chosen scores * scale.
    """
    scores = sqrt_softplus(logits)
    experts = topk_select_ref(scores if bias is None else scores + bias.to(scores.dtype), top_k).sort(-1).values
    return experts, _weights(scores.gather(-1, experts), scale)


def _weights(chosen: Tensor, scale: float) -> Tensor:
    return chosen / ordered_sum(chosen, -1).unsqueeze(-1) * scale


def route_ref(
    x: Tensor, gate: Weight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, *, top_k: int,
    scale: float, uniform_hash_weights: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, D] -> experts int64 [T, k] in ascending order, and their weights [T, k] in at least fp32.

    Hash layers (tid2eid [V, k] given) take the experts from the table; their weights still come from the gate, unless
    `uniform_hash_weights` asks for scale / k each. The bias moves the choice only. weights = score / sum of the chosen
    scores * scale.
    """
    acc = accumulator(x)
    if tid2eid is not None and uniform_hash_weights:
        experts = tid2eid[token_ids].sort(-1).values
        return experts, _weights(torch.ones(experts.shape, dtype=acc, device=x.device), scale)
    logits = rows_matmul(x, dequantize(gate, acc))  # [T, E]
    if tid2eid is None:
        return activation_topk_ref(logits, bias, top_k=top_k, scale=scale)
    experts = tid2eid[token_ids].sort(-1).values
    return experts, _weights(sqrt_softplus(logits).gather(-1, experts), scale)


# Both decide the bits of a logit: never a function of the batch.
SPLIT_LEN = 256
BLOCK_K = 128
_SPLIT_LEN, _BLOCK_K = tl.constexpr(SPLIT_LEN), tl.constexpr(BLOCK_K)


@dataclass(frozen=True)
class GateConfig:
    """How the gate product is divided over programs; results do not depend on it."""

    expert_tile: int
    row_tile: int
    is_split: bool  # one program per split
    num_warps: int = 4
    num_stages: int = 1
    is_fused: bool = True  # if split: the choice in the same launch

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return options | {"launch_pdl": True}


# by the largest number of rows
GATE_CONFIGS = {
    64: GateConfig(expert_tile=64, row_tile=16, is_split=True),
    512: GateConfig(expert_tile=64, row_tile=64, is_split=True),
    1 << 31: GateConfig(expert_tile=128, row_tile=64, is_split=False, num_warps=8, num_stages=2),
}


@jit
def _split_product(
    x_ptr, gate_ptr, rows, experts, split, num_rows, stride_xt, stride_xd, stride_ge, stride_gd,
    D: tl.constexpr, E: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """gate x^T of one split, fp32 [experts, rows]. The gate is the left operand: its 64 rows fill the tensor core's
    tile. WAITS: the gate is asked for before the launch that makes x has ended.
    """
    sums = tl.zeros([experts.shape[0], rows.shape[0]], dtype=tl.float32)
    gates = ()
    for step in tl.static_range(_SPLIT_LEN // _BLOCK_K):
        columns = split * _SPLIT_LEN + step * _BLOCK_K + tl.arange(0, _BLOCK_K)
        gate_mask = (experts < E)[:, None] & (columns < D)[None, :]
        places = gate_ptr + experts[:, None] * stride_ge + columns[None, :] * stride_gd
        gates += (tl.load(places, mask=gate_mask, other=0.0),)  # type: ignore[assignment]
    if WAITS:
        pdl_wait()
        pdl_trigger()
    for step in tl.static_range(_SPLIT_LEN // _BLOCK_K):
        columns = split * _SPLIT_LEN + step * _BLOCK_K + tl.arange(0, _BLOCK_K)
        x_mask = (rows < num_rows)[None, :] & (columns < D)[:, None]
        x = tl.load(x_ptr + rows[None, :] * stride_xt + columns[:, None] * stride_xd, mask=x_mask, other=0.0)
        sums = tl.dot(gates[step], x, sums)
    return sums


@jit
def _store_products(
    x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd,
    D: tl.constexpr, E: tl.constexpr, NUM_SPLITS: tl.constexpr,
    EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Logits [1, T, E], or (`IS_SPLIT`) the partial sums [NUM_SPLITS, T, E]: one program's part."""
    rows = tl.program_id(1).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    NUM_TILES: tl.constexpr = (E + EXPERT_TILE - 1) // EXPERT_TILE
    experts = (tl.program_id(0) % NUM_TILES) * EXPERT_TILE + tl.arange(0, EXPERT_TILE)
    split = tl.program_id(0) // NUM_TILES
    if IS_SPLIT:
        sums = _split_product(
            x_ptr, gate_ptr, rows, experts, split, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, True
        )
    else:
        pdl_wait()
        pdl_trigger()
        sums = tl.zeros([EXPERT_TILE, ROW_TILE], dtype=tl.float32)
        for part in range(NUM_SPLITS):
            sums += _split_product(
                x_ptr, gate_ptr, rows, experts, part, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, False
            )
    places = (split * num_rows + rows)[None, :] * E + experts[:, None]
    tl.store(logits_ptr + places, sums, mask=(rows < num_rows)[None, :] & (experts < E)[:, None])


@jit
def _choose_row(
    logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, row, stride_ls, stride_lt, stride_le,
    num_ids, scale, E: tl.constexpr, E_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr, IS_UNIFORM: tl.constexpr,
):  # fmt: skip
    """One token: sum the splits, score, choose (or look up), sort, renormalise."""
    ids = tl.arange(0, E_BLOCK)
    lanes = tl.arange(0, K_BLOCK)
    picks, values = tl.full([K_BLOCK], E_BLOCK, tl.int32), tl.full([K_BLOCK], 1.0, tl.float32)
    if not IS_UNIFORM:
        logits = tl.zeros([E_BLOCK], dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            place = split * stride_ls + row * stride_lt + ids * stride_le
            # other multiprocessors may have written it: .cg reads from the cache they share
            logits += tl.load(logits_ptr + place, mask=ids < E, other=0.0, cache_modifier=".cg")
        # softplus(logits.double()).sqrt().to(logits.dtype)
        scores = tl.sqrt(softplus(logits.to(tl.float64))).to(tl.float32)
    if HAS_TABLE:
        token_id = tl.load(token_ids_ptr + row)
        is_known = (token_id >= 0) & (token_id < num_ids)
        picks = tl.load(table_ptr + token_id * TOP_K + lanes, mask=is_known & (lanes < TOP_K), other=-1).to(tl.int32)
        picks = tl.where(lanes < TOP_K, picks, E_BLOCK)
    else:
        ranked = scores
        if HAS_BIAS:
            ranked += tl.load(bias_ptr + ids, mask=ids < E, other=0.0).to(tl.float32)
        composite = ((ordered_bits(ranked).to(tl.int64) + 0x80000000) << 16) | (0xFFFF - ids).to(tl.int64)
        composite = tl.where(ids < E, composite, -1)
        for place in tl.static_range(TOP_K):
            pick = 0xFFFF - (tl.max(composite, 0) & 0xFFFF).to(tl.int32)
            composite = tl.where(ids == pick, -1, composite)
            picks = tl.where(lanes == place, pick, picks)
    if not IS_UNIFORM:
        values = tl.gather(scores, tl.minimum(tl.maximum(picks, 0), E_BLOCK - 1), 0)
    # experts.sort(-1), by counting; a table may name an expert twice
    is_before = (picks[None, :] < picks[:, None]) | (
        (picks[None, :] == picks[:, None]) & (lanes[None, :] < lanes[:, None])
    )
    rank = tl.sum(is_before.to(tl.int32), 1)
    # chosen / ordered_sum(chosen, -1) * scale; torch keeps a running sum of fp32 in fp64
    total = tl.full([], 0.0, tl.float64)
    for place in tl.static_range(TOP_K):
        total += tl.sum(tl.where(rank == place, values, 0.0), 0).to(tl.float64)
    weights = tl.where(picks < 0, 0.0, tl.div_rn(values, total.to(tl.float32) + tl.zeros_like(values)) * scale)
    tl.store(experts_ptr + row * TOP_K + rank, picks.to(tl.int64), mask=lanes < TOP_K)
    tl.store(weights_ptr + row * TOP_K + rank, weights, mask=lanes < TOP_K)


@jit(do_not_specialize=("num_rows",))
def _gate_kernel(
    x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd,
    D: tl.constexpr, E: tl.constexpr, NUM_SPLITS: tl.constexpr,
    EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    _store_products(
        x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, NUM_SPLITS,
        EXPERT_TILE, ROW_TILE, IS_SPLIT,
    )  # fmt: skip


@jit(do_not_specialize=("num_rows", "stride_ls"))
def _choose_kernel(
    logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, num_rows, stride_ls, stride_lt, stride_le,
    num_ids, scale, E: tl.constexpr, E_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr, IS_UNIFORM: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    pdl_trigger()
    _choose_row(
        logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, tl.program_id(0).to(tl.int64),
        stride_ls, stride_lt, stride_le, num_ids, scale, E, E_BLOCK, NUM_SPLITS, TOP_K, K_BLOCK, HAS_BIAS, HAS_TABLE,
        IS_UNIFORM,
    )  # fmt: skip


@jit(do_not_specialize=("num_rows", "stride_ls"))
def _route_kernel(
    x_ptr, gate_ptr, stride_xt, stride_xd, stride_ge, stride_gd, counter_ptr,
    logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, num_rows, stride_ls, stride_lt, stride_le,
    num_ids, scale, D: tl.constexpr, EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr,
    E: tl.constexpr, E_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr, IS_UNIFORM: tl.constexpr,
):  # fmt: skip
    """`_gate_kernel` with IS_SPLIT, and `_choose_kernel`, in one launch. The counter only grows."""
    NUM_PROGRAMS: tl.constexpr = (E + EXPERT_TILE - 1) // EXPERT_TILE * NUM_SPLITS
    _store_products(
        x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, NUM_SPLITS,
        EXPERT_TILE, ROW_TILE, True,
    )  # fmt: skip
    tile = tl.program_id(1)
    tile_rows = tl.minimum(num_rows - tile * ROW_TILE, ROW_TILE)
    worker, num_workers, complete = arrive_and_share(counter_ptr + tile, tile_rows, NUM_PROGRAMS, NUM_PROGRAMS)
    if worker >= 0:
        wait_for_all(counter_ptr + tile, complete)
        for row in range(worker, tile_rows, num_workers):
            _choose_row(
                logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr,
                tile.to(tl.int64) * ROW_TILE + row, stride_ls, stride_lt, stride_le, num_ids, scale, E, E_BLOCK,
                NUM_SPLITS, TOP_K, K_BLOCK, HAS_BIAS, HAS_TABLE, IS_UNIFORM,
            )  # fmt: skip


def activation_topk(logits: Tensor, bias: Tensor | None, *, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `activation_topk_ref`. fp32 logits of any strides."""
    check_launch(logits, bias)
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise KernelInputError(f"expected fp32 logits [T, E], found {logits.dtype} {tuple(logits.shape)}")
    return _choose(logits.unsqueeze(0), bias, None, None, top_k, scale, False)


def route(
    x: Tensor, gate: Weight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, *, top_k: int,
    scale: float, uniform_hash_weights: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `route_ref`. bf16 or fp16 x and a plain gate of the same dtype, any strides; weights are fp32.

    A token id outside the table, which the oracle rejects, gets experts -1 and weights 0.
    """
    config = next(config for rows, config in GATE_CONFIGS.items() if x.shape[0] <= rows)
    return launch_route(x, gate, bias, tid2eid, token_ids, top_k, scale, uniform_hash_weights, config)


def launch_route(
    x: Tensor, gate: Weight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, top_k: int, scale: float,
    uniform_hash_weights: bool, config: GateConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`route` with the gate product divided as `config` says."""
    _check(x, gate, tid2eid, token_ids, top_k)
    assert isinstance(gate, Tensor)
    if tid2eid is not None and uniform_hash_weights:
        no_logits = x.new_empty((1, x.shape[0], gate.shape[0]), dtype=torch.float32)
        return _choose(no_logits, None, tid2eid, token_ids, top_k, scale, True)
    bias = None if tid2eid is not None else bias
    if config.is_split and config.is_fused and x.numel():
        return _route_in_one(x, gate, bias, tid2eid, token_ids, top_k, scale, config)
    return _choose(_gate_products(x, gate, config), bias, tid2eid, token_ids, top_k, scale, False)


def _gate_products(x: Tensor, gate: Tensor, config: GateConfig) -> Tensor:
    """fp32 [splits, T, E], whose sum in split order is the logits."""
    products = _empty_products(x, gate, config)
    if products.numel() == 0:
        return products
    num_experts, width = gate.shape
    grid = (-(-num_experts // config.expert_tile) * products.shape[0], -(-x.shape[0] // config.row_tile))
    _gate_kernel[grid](
        x, gate, products, x.shape[0], *x.stride(), *gate.stride(), D=width, E=num_experts,
        NUM_SPLITS=-(-width // SPLIT_LEN), EXPERT_TILE=config.expert_tile, ROW_TILE=config.row_tile,
        IS_SPLIT=config.is_split, **config.options,
    )  # fmt: skip
    return products


def _empty_products(x: Tensor, gate: Tensor, config: GateConfig) -> Tensor:
    num_splits = -(-x.shape[1] // SPLIT_LEN) if config.is_split else 1
    return torch.empty((num_splits, x.shape[0], gate.shape[0]), dtype=torch.float32, device=x.device)


def _route_in_one(
    x: Tensor, gate: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor, top_k: int, scale: float,
    config: GateConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    products = _empty_products(x, gate, config)
    num_splits, num_rows, num_experts = products.shape
    arguments, flags = _choice_arguments(products, bias, table, token_ids, top_k, scale, False)
    num_programs = -(-num_experts // config.expert_tile) * num_splits
    _route_kernel[(num_programs, -(-num_rows // config.row_tile))](
        x, gate, *x.stride(), *gate.stride(), arrival_counters(f"route, {num_programs} programs", x.device), *arguments,
        D=x.shape[1], EXPERT_TILE=config.expert_tile, ROW_TILE=config.row_tile, **flags, **config.options,
        **blackwell_registers(168),
    )  # fmt: skip
    return arguments[4], arguments[5]


def _choose(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None, top_k: int, scale: float,
    is_uniform: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits fp32 [splits, T, E] (not read if uniform)."""
    arguments, flags = _choice_arguments(logits, bias, table, token_ids, top_k, scale, is_uniform)
    if logits.shape[1]:
        options = LaunchConfig(rows=1, num_warps=4, launch_pdl=True).options
        _choose_kernel[(logits.shape[1],)](*arguments, **flags, **options)
    return arguments[4], arguments[5]


def _choice_arguments(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None, top_k: int, scale: float,
    is_uniform: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What `_choose_row` is given: arguments, of which [4] and [5] are the results, and constants."""
    num_splits, num_rows, num_experts = logits.shape
    if not 0 < top_k <= num_experts <= 4096:
        raise KernelInputError(f"expected 1 to 4096 experts and a smaller top_k, found {num_experts} and {top_k}")
    if bias is not None and bias.shape != (num_experts,):
        raise KernelInputError(f"expected a bias of shape ({num_experts},), found {tuple(bias.shape)}")
    experts = torch.empty(num_rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    # an unused pointer still needs a tensor
    arguments = (
        logits, logits if bias is None else bias.contiguous(), experts if table is None else table.contiguous(),
        experts if token_ids is None else token_ids.contiguous(), experts, weights, num_rows, *logits.stride(),
        0 if table is None else table.shape[0], scale,
    )  # fmt: skip
    flags = {
        "E": num_experts, "E_BLOCK": max(next_power_of_2(num_experts), 32), "NUM_SPLITS": num_splits, "TOP_K": top_k,
        "K_BLOCK": next_power_of_2(top_k), "HAS_BIAS": bias is not None, "HAS_TABLE": table is not None,
        "IS_UNIFORM": is_uniform,
    }  # fmt: skip
    return arguments, flags


def _check(x: Tensor, gate: Weight, tid2eid: Tensor | None, token_ids: Tensor, top_k: int) -> None:
    if isinstance(gate, QuantTensor):
        raise KernelInputError(f"expected a plain gate weight, found {gate.format}")
    check_launch(x, gate, tid2eid, token_ids)
    if x.dtype not in (torch.bfloat16, torch.float16) or gate.dtype != x.dtype:
        raise KernelInputError(f"expected x and gate both bf16 or both fp16, found {x.dtype} and {gate.dtype}")
    if x.dim() != 2 or gate.dim() != 2 or gate.shape[1] != x.shape[1] or token_ids.shape != x.shape[:1]:
        raise KernelInputError(
            "expected x [T, D], gate [E, D] and token ids [T], "
            f"found {tuple(x.shape)}, {tuple(gate.shape)} and {tuple(token_ids.shape)}"
        )
    if tid2eid is not None and (tid2eid.dim() != 2 or tid2eid.shape[1] != top_k):
        raise KernelInputError(f"expected a table [V, {top_k}], found {tuple(tid2eid.shape)}")
