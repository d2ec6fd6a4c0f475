"""Launchers of the router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import AnyWeight, QuantTensor, Weight, as_loaded
from dsv4.ops.lib.arch import blackwell_registers
from dsv4.ops.lib.arrivals import arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import LaunchConfig, next_power_of_2
from dsv4.ops.router.kernel_route import _choose_kernel, _gate_kernel, _route_kernel
from dsv4.ops.router.plan import GATE_CONFIGS, SPLIT_LEN, GateConfig


def activation_topk(logits: Tensor, bias: Tensor | None, *, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `activation_topk_ref`. fp32 logits of any strides."""
    check_launch(logits, bias)
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise KernelInputError(f"expected fp32 logits [T, E], found {logits.dtype} {tuple(logits.shape)}")
    return _choose(logits.unsqueeze(0), bias, None, None, top_k, scale)


def route(
    x: Tensor, gate: AnyWeight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, *, top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `route_ref`. bf16 or fp16 x and a plain gate of the same dtype, any strides; weights are fp32.

    A token id outside the table, which the oracle rejects, gets experts -1 and weights 0.
    """
    config = next(config for rows, config in GATE_CONFIGS.items() if x.shape[0] <= rows)
    return launch_route(x, as_loaded(gate), bias, tid2eid, token_ids, top_k, scale, config)


def launch_route(
    x: Tensor, gate: Weight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, top_k: int, scale: float,
    config: GateConfig,
) -> tuple[Tensor, Tensor]:
    """`route` with the gate product divided as `config` says."""
    _check(x, gate, tid2eid, token_ids, top_k)
    assert isinstance(gate, Tensor)
    bias = None if tid2eid is not None else bias
    if config.is_split and config.is_fused and x.numel():
        return _route_in_one(x, gate, bias, tid2eid, token_ids, top_k, scale, config)
    return _choose(_gate_products(x, gate, config), bias, tid2eid, token_ids, top_k, scale)


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
    )
    return products


def _empty_products(x: Tensor, gate: Tensor, config: GateConfig) -> Tensor:
    num_splits = -(-x.shape[1] // SPLIT_LEN) if config.is_split else 1
    return torch.empty((num_splits, x.shape[0], gate.shape[0]), dtype=torch.float32, device=x.device)


def _route_in_one(
    x: Tensor, gate: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor, top_k: int, scale: float,
    config: GateConfig,
) -> tuple[Tensor, Tensor]:
    products = _empty_products(x, gate, config)
    num_splits, num_rows, num_experts = products.shape
    arguments, flags = _choice_arguments(products, bias, table, token_ids, top_k, scale)
    num_programs = -(-num_experts // config.expert_tile) * num_splits
    _route_kernel[(num_programs, -(-num_rows // config.row_tile))](
        x, gate, *x.stride(), *gate.stride(), arrival_counters(f"route, {num_programs} programs", x.device), *arguments,
        D=x.shape[1], EXPERT_TILE=config.expert_tile, ROW_TILE=config.row_tile, **flags, **config.options,
        **blackwell_registers(168),
    )
    return arguments[4], arguments[5]


def _choose(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """logits fp32 [splits, T, E]."""
    arguments, flags = _choice_arguments(logits, bias, table, token_ids, top_k, scale)
    if logits.shape[1]:
        options = LaunchConfig(rows=1, num_warps=4, launch_pdl=True).options
        _choose_kernel[(logits.shape[1],)](*arguments, **flags, **options)
    return arguments[4], arguments[5]


def _choice_arguments(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None, top_k: int, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    )
    flags = {
        "E": num_experts, "E_BLOCK": max(next_power_of_2(num_experts), 32), "NUM_SPLITS": num_splits, "TOP_K": top_k,
        "K_BLOCK": next_power_of_2(top_k), "HAS_BIAS": bias is not None, "HAS_TABLE": table is not None,
    }
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
