"""Mixture of experts: clamped SwiGLU experts, the routing weight applied before the down projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor, unshuffle
from dsv4.formats.tensors import AnyWeight
from dsv4.ops.lib.invariant import accumulator, ordered_sum, silu
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.linear import segments_ref

Expert = tuple[AnyWeight, AnyWeight, AnyWeight]  # w1, w2, w3


def experts_ref(
    x: Tensor, matrices: Sequence[Expert], counts: Sequence[int], limit: float, weight: Tensor | None
) -> Tensor:
    """Experts side by side: the first counts[0] rows of x [P, D] meet the first of `matrices`, and so on. Each row gets
    w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight). weight [P] or None.

    gate is clamped from above only; both products are rounded to x's dtype before the activation.
    """
    products = segments_ref(x, [(w1, w3) for w1, _, w3 in matrices], counts).to(accumulator(x))
    gate, up = products.chunk(2, -1)
    hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if weight is not None:
        hidden = hidden * weight.to(hidden.dtype).unsqueeze(-1)
    return segments_ref(hidden.to(x.dtype), [(w2,) for _, w2, _ in matrices], counts)


_Shuffled = tuple[ShuffledTensor, ShuffledTensor, ShuffledTensor]
Matrices = Expert | _Shuffled


def _as_loaded(matrices: Matrices) -> Expert:
    w1, w2, w3 = (unshuffle(weight) if isinstance(weight, ShuffledTensor) else weight for weight in matrices)
    return w1, w2, w3


@waits_for_device
def moe_ref(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    routed: Matrices,
    shared: Matrices,
    *,
    limit: float,
    rounded: Tensor | None = None,
) -> Tensor:
    """x [T, D], experts and weights [T, k], (w1, w2, w3) stacked [E, ...] and of the shared expert -> [T, D].

    Outputs are summed in at least fp32 in ascending expert order (`route` returns them so), the shared expert last. An
    expert id outside 0 .. E - 1 (-1 by convention) is left out. `rounded`: x as FP8 layers see it (`HyperInput`), if
    it is there already; not used here.
    """
    pairs, num_tokens = _Pairs.of(experts, routed), x.shape[0]
    everyone = torch.arange(num_tokens, device=x.device)
    inputs = x[torch.cat((pairs.rows, everyone))]
    scales = torch.cat((weights.flatten()[pairs.order], weights.new_ones(num_tokens)))
    matrices = [*pairs.matrices, _as_loaded(shared)]
    out = experts_ref(inputs, matrices, [*pairs.counts, num_tokens], limit, scales)
    routed_out, shared_out = out.split_with_sizes((out.shape[0] - num_tokens, num_tokens))
    return moe_fold_ref(pairs.in_place(routed_out, experts), shared_out)


@waits_for_device
def moe_parts_ref(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    routed: Matrices,
    shared: Matrices,
    *,
    limit: float,
    peer_buffers: Tensor | None = None,
) -> Tensor | None:
    """The first half of `moe_ref`, where experts live on several ranks: what each chosen expert adds, [T, k, D] in x's
    dtype. Parts of ids outside 0 .. E - 1 are not computed and hold anything. `shared` is not run: kernels take it
    because they are compiled for its format too.

    peer_buffers int64 [N]: addresses of bf16 [T / N, k, D] on each of N ranks, of whose tokens x consists. Kernels may
    store the parts there, and return None.
    """
    pairs = _Pairs.of(experts, routed)
    if not pairs.counts:
        return x.new_zeros(*experts.shape, x.shape[1])
    scales = weights.flatten()[pairs.order]
    return pairs.in_place(experts_ref(x[pairs.rows], pairs.matrices, pairs.counts, limit, scales), experts)


def moe_shared_ref(x: Tensor, routed: Matrices, shared: Matrices, out: Tensor, *, top_k: int, limit: float) -> None:
    """The shared expert alone, on x [T, D], into out [T, D]. It needs no other rank, so it may run beside the exchange.
    `routed` is not run, nor is anyone chosen: kernels take it and `top_k` because they are compiled for them too.
    """
    out.copy_(experts_ref(x, [_as_loaded(shared)], [x.shape[0]], limit, None))


def moe_fold_ref(parts: Tensor, shared_out: Tensor) -> Tensor:
    """The end of `moe_ref`: parts [T, k, D], complete, and the shared expert's [T, D] -> [T, D]."""
    acc = accumulator(parts)
    return (ordered_sum(parts.to(acc), 1) + shared_out.to(acc)).to(parts.dtype)


class _Pairs(NamedTuple):
    """Tokens and the experts they chose, by expert: `order` [P] of the pairs, their tokens' `rows` [P], and the experts
    with how many pairs each has."""

    order: Tensor
    rows: Tensor
    matrices: list[Expert]
    counts: list[int]

    @classmethod
    def of(cls, experts: Tensor, routed: Matrices) -> _Pairs:
        w1, w2, w3 = _as_loaded(routed)
        num_experts, chosen = w1.shape[0], dict[int, list[int]]()
        for pair, expert in enumerate(experts.flatten().tolist()):
            if 0 <= expert < num_experts:
                chosen.setdefault(expert, []).append(pair)
        order = experts.new_tensor([pair for pairs in chosen.values() for pair in pairs], dtype=torch.int64)
        matrices = [(w1[expert], w2[expert], w3[expert]) for expert in chosen]
        return cls(order, order // experts.shape[1], matrices, [len(pairs) for pairs in chosen.values()])

    def in_place(self, out: Tensor, experts: Tensor) -> Tensor:
        """Results [P, D] -> [T, k, D], zeros where there is no pair."""
        parts = out.new_zeros(experts.numel(), out.shape[1])
        return parts.index_copy(0, self.order, out).unflatten(0, experts.shape)
