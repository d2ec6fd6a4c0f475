"""Launchers of the experts' op in two halves, for experts that live on several ranks: parts, then the fold."""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor

from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.moe.kernel_fold import _fold_parts_kernel
from dsv4.ops.moe.launch import are_prepared, config_for, launch_moe, moe
from dsv4.ops.moe.op import Matrices, _Shuffled, moe_fold_ref, moe_parts_ref

_COLS = 1024  # of a program of the fold
_KEPT_TOKENS = 1024


def moe_parts(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float
) -> Tensor:  # fmt: skip
    """See `moe_parts_ref`; the launches of `moe` without the programs of the shared expert."""
    if not are_prepared(routed, shared):
        return moe_parts_ref(x, experts, weights, routed, shared, limit=limit)
    config, matrices = config_for(x, experts, routed), (cast(_Shuffled, routed), cast(_Shuffled, shared))
    return launch_moe(x, experts, weights, *matrices, limit, config, has_shared=False)


def moe_fold(x: Tensor, parts: Tensor, routed: Matrices, shared: Matrices, *, limit: float) -> Tensor:
    """See `moe_fold_ref`; the launches of `moe` for tokens without routed experts, then the sum."""
    if not are_prepared(routed, shared):
        return moe_fold_ref(x, parts, routed, shared, limit=limit)
    check_launch(x, parts)
    (num_tokens, dim), top_k = x.shape, parts.shape[1]
    if parts.dtype != torch.bfloat16 or parts.shape != (num_tokens, top_k, dim):
        raise KernelInputError(
            f"expected bf16 parts [{num_tokens}, k, {dim}], found {parts.dtype} {tuple(parts.shape)}"
        )
    kept = _kept_nobody(top_k, x.device) if num_tokens <= _KEPT_TOKENS else _nobody(num_tokens, top_k, x.device)
    experts, weights = (choice[:num_tokens] for choice in kept)
    return fold_parts(parts, moe(x, experts, weights, routed, shared, limit=limit))


@cache
def _kept_nobody(top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For decode steps: their graphs would fill them anew in every layer."""
    return _nobody(_KEPT_TOKENS, top_k, device)


def _nobody(num_tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The choices of tokens that choose no expert, and their weights, [T, k]."""
    shape = num_tokens, top_k
    return torch.full(shape, -1, dtype=torch.int32, device=device), torch.zeros(shape, device=device)


def fold_parts(parts: Tensor, shared: Tensor) -> Tensor:
    """parts [T, k, D] and the shared expert's [T, D], bf16 -> [T, D]: summed in fp32, first to last, shared behind."""
    num_tokens, top_k, dim = parts.shape
    out = torch.empty_like(shared, memory_format=torch.contiguous_format)
    block = min(_COLS, next_power_of_2(dim))
    if num_tokens:
        _fold_parts_kernel[(num_tokens, -(-dim // block))](
            parts.contiguous(), shared.contiguous(), out, D=dim, TOP_K=top_k, BLOCK=block, num_warps=4
        )
    return out
