"""Mixture of experts: clamped SwiGLU experts, the routing weight applied before the down projection."""

from __future__ import annotations

from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor, unshuffle
from dsv4.formats.tensors import AnyWeight
from dsv4.ops.lib.invariant import accumulator, ordered_sum, silu
from dsv4.ops.linear import linear_ref, linears_ref


def expert_ref(x: Tensor, w1: AnyWeight, w2: AnyWeight, w3: AnyWeight, limit: float, weight: Tensor | None) -> Tensor:
    """One expert on x [T, D]: w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight). weight [T] or None.

    gate is clamped from above only; both products are rounded to x's dtype before the activation.
    """
    acc = accumulator(x)
    gate, up = (product.to(acc) for product in linears_ref(x, (w1, w3), (x.dtype, x.dtype)))
    hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if weight is not None:
        hidden = hidden * weight.to(acc).unsqueeze(-1)
    return linear_ref(hidden.to(x.dtype), w2)


_Shuffled = tuple[ShuffledTensor, ShuffledTensor, ShuffledTensor]
Matrices = tuple[AnyWeight, AnyWeight, AnyWeight] | _Shuffled  # w1, w2, w3


def _as_loaded(matrices: Matrices) -> tuple[AnyWeight, AnyWeight, AnyWeight]:
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
    w1, w2, w3 = _as_loaded(routed)
    num_experts = w1.shape[0]
    ids = experts.flatten()
    ids = ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)
    order = ids.argsort(stable=True)  # pairs of a token and its expert, by expert
    inputs, scales = x[order // experts.shape[1]], weights.flatten()[order]
    parts = x.new_zeros((experts.numel(), x.shape[1]))
    start = 0
    for idx, count in enumerate(ids.bincount(minlength=num_experts)[:num_experts].tolist()):
        if count:
            pairs = slice(start, start + count)
            start += count
            parts[order[pairs]] = expert_ref(inputs[pairs], w1[idx], w2[idx], w3[idx], limit, scales[pairs])
    return parts.unflatten(0, experts.shape)


def moe_fold_ref(x: Tensor, parts: Tensor, routed: Matrices, shared: Matrices, *, limit: float) -> Tensor:
    """The second half: parts [T, k, D], complete, and the shared expert on x [T, D] -> [T, D]. `routed` is not run."""
    acc = accumulator(x)
    part = expert_ref(x, *_as_loaded(shared), limit, None)  # [T, D]
    return (ordered_sum(parts.to(acc), 1) + part.to(acc)).to(x.dtype)
