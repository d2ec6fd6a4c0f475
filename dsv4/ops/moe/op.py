"""Mixture of experts: clamped SwiGLU experts, the routing weight applied before the down projection."""

from __future__ import annotations

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
    parts = moe_parts_ref(x, experts, weights, routed, shared, limit=limit)
    return moe_fold_ref(x, parts, routed, shared, limit=limit)


def moe_parts_ref(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Matrices, shared: Matrices, *, limit: float
) -> Tensor:  # fmt: skip
    """The first half of `moe_ref`, where experts live on several ranks: what each chosen expert adds, [T, k, D] in x's
    dtype. Parts of ids outside 0 .. E - 1 are not computed and hold anything. `shared` is not run: kernels take it
    because they are compiled for its format too.
    """
    stacks = _as_loaded(routed)
    parts = x.new_zeros((*experts.shape, x.shape[1]))
    chosen = experts[(experts >= 0) & (experts < stacks[0].shape[0])].unique()
    for expert_idx in chosen.tolist():
        rows, places = (experts == expert_idx).nonzero(as_tuple=True)
        w1, w2, w3 = (stack[expert_idx] for stack in stacks)
        parts[rows, places] = expert_ref(x[rows], w1, w2, w3, limit, weights[rows, places])
    return parts


def moe_fold_ref(x: Tensor, parts: Tensor, routed: Matrices, shared: Matrices, *, limit: float) -> Tensor:
    """The second half: parts [T, k, D], complete, and the shared expert on x [T, D] -> [T, D]. `routed` is not run."""
    acc = accumulator(x)
    part = expert_ref(x, *_as_loaded(shared), limit, None)  # [T, D]
    return (ordered_sum(parts.to(acc), 1) + part.to(acc)).to(x.dtype)
