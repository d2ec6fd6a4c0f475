"""Mixture of experts: clamped SwiGLU experts, the routing weight applied before the down projection."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor, unshuffle
from dsv4.formats.tensors import Weight
from dsv4.ops.lib.invariant import accumulator, ordered_sum, silu
from dsv4.ops.linear import linear_ref


def expert_ref(x: Tensor, w1: Weight, w2: Weight, w3: Weight, limit: float, weight: Tensor | None) -> Tensor:
    """One expert on x [T, D]: w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight). weight [T] or None.

    gate is clamped from above only; both products are rounded to x's dtype before the activation.
    """
    acc = accumulator(x)
    gate = linear_ref(x, w1).to(acc).clamp(max=limit)
    up = linear_ref(x, w3).to(acc).clamp(-limit, limit)
    hidden = silu(gate) * up
    if weight is not None:
        hidden = hidden * weight.to(acc).unsqueeze(-1)
    return linear_ref(hidden.to(x.dtype), w2)


_Shuffled = tuple[ShuffledTensor, ShuffledTensor, ShuffledTensor]
Matrices = tuple[Weight, Weight, Weight] | _Shuffled  # w1, w2, w3


def _as_loaded(matrices: Matrices) -> tuple[Weight, Weight, Weight]:
    w1, w2, w3 = (unshuffle(weight) if isinstance(weight, ShuffledTensor) else weight for weight in matrices)
    return w1, w2, w3


def moe_ref(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float
) -> Tensor:  # fmt: skip
    """x [T, D], experts and weights [T, k], (w1, w2, w3) stacked [E, ...] and of the shared expert -> [T, D].

    Outputs are summed in at least fp32 in ascending expert order (`route` returns them so), the shared expert last. An
    expert id outside 0 .. E - 1 (-1 by convention) is left out.
    """
    routed, shared = (_as_loaded(matrices) for matrices in (routed, shared))
    acc = accumulator(x)
    parts = torch.zeros((*experts.shape, x.shape[1]), dtype=acc, device=x.device)  # [T, k, D]
    chosen = experts[(experts >= 0) & (experts < routed[0].shape[0])].unique()
    for expert_idx in chosen.tolist():
        rows, places = (experts == expert_idx).nonzero(as_tuple=True)
        w1, w2, w3 = (stack[expert_idx] for stack in routed)
        parts[rows, places] = expert_ref(x[rows], w1, w2, w3, limit, weights[rows, places]).to(acc)
    return (ordered_sum(parts, 1) + expert_ref(x, *shared, limit, None).to(acc)).to(x.dtype)
