"""Launchers of the experts' op in pieces, for experts that live on several ranks: parts, shared expert, fold."""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor

from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.moe.kernel_parts import _fold_parts_kernel
from dsv4.ops.moe.launch import are_prepared, config_for, launch_moe
from dsv4.ops.moe.op import Matrices, _Shuffled, moe_parts_ref, moe_shared_ref

_COLS = 1024  # of a program of the fold
_KEPT_TOKENS = 1024


def moe_parts(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float,
    peer_buffers: Tensor | None = None,
) -> Tensor | None:
    """See `moe_parts_ref`; the launches of `moe` without the programs of the shared expert."""
    if not are_prepared(routed, shared):
        return moe_parts_ref(x, experts, weights, routed, shared, limit=limit)
    config = config_for(x, experts, routed, 1 if peer_buffers is None else len(peer_buffers))
    matrices = cast(_Shuffled, routed), cast(_Shuffled, shared)
    parts = launch_moe(x, experts, weights, *matrices, limit, config, has_shared=False, peer_buffers=peer_buffers)
    return parts if peer_buffers is None else None


def moe_shared(
    x: Tensor, routed: Matrices, shared: Matrices, out: Tensor, *, top_k: int, limit: float
) -> None:
    """See `moe_shared_ref`; the launches of `moe` without the programs of routed experts."""
    if not are_prepared(routed, shared):
        moe_shared_ref(x, routed, shared, out, top_k=top_k, limit=limit)
        return
    num_tokens = x.shape[0]
    kept = _kept_no_choices(top_k, x.device) if num_tokens <= _KEPT_TOKENS else _no_choices(num_tokens, top_k, x.device)
    experts, weights = (choice[:num_tokens] for choice in kept)
    config, matrices = config_for(x, experts, routed), (cast(_Shuffled, routed), cast(_Shuffled, shared))
    launch_moe(x, experts, weights, *matrices, limit, config, has_routed=False, out=out)


@cache
def _kept_no_choices(top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For decode steps: their graphs would fill them anew in every layer."""
    return _no_choices(_KEPT_TOKENS, top_k, device)


def _no_choices(num_tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The choices of tokens that choose no expert, and their weights, [T, k]."""
    shape = num_tokens, top_k
    return torch.full(shape, -1, dtype=torch.int32, device=device), torch.zeros(shape, device=device)


def moe_fold(parts: Tensor, shared_out: Tensor) -> Tensor:
    """See `moe_fold_ref`; summed in fp32, first to last, the shared expert last."""
    check_launch(parts, shared_out)
    (num_tokens, dim), top_k = shared_out.shape, parts.shape[1]
    if parts.dtype != torch.bfloat16 or parts.shape != (num_tokens, top_k, dim):
        raise KernelInputError(
            f"expected bf16 parts [{num_tokens}, k, {dim}], found {parts.dtype} {tuple(parts.shape)}"
        )
    if shared_out.dtype != torch.bfloat16:
        raise KernelInputError(f"expected the shared expert's output in bf16, found {shared_out.dtype}")
    out = torch.empty_like(shared_out, memory_format=torch.contiguous_format)
    block = min(_COLS, next_power_of_2(dim))
    if num_tokens:
        _fold_parts_kernel[(num_tokens, -(-dim // block))](
            parts.contiguous(), shared_out.contiguous(), out, D=dim, TOP_K=top_k, BLOCK=block, num_warps=4,
            enable_fp_fusion=False,
        )
    return out
