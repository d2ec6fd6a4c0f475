"""Expert choice: score = sqrt(softplus(gate x)) in fp32; top-k of score + bias, or a table by token id."""

from __future__ import annotations

from torch import Tensor

from dsv4.formats.tensors import Weight, dequantize
from dsv4.ops.invariant import accumulator, ordered_sum, rows_matmul, sqrt_softplus


def topk_select_ref(scores: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the k largest of scores [T, N], best first; ties go to the lower index, NaN is never chosen
    over a number."""
    ordered = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    return ordered.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def route_ref(
    x: Tensor, gate: Weight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, *, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """x [T, D] -> experts int64 [T, k] in ascending order, and their weights [T, k] in at least fp32.

    Hash layers (tid2eid given) take the experts from the table; their weights still come from the gate. The bias moves
    the choice only. weights = score / sum of the chosen scores * scale.
    """
    acc = accumulator(x)
    scores = sqrt_softplus(rows_matmul(x, dequantize(gate, acc)))  # [T, E]
    if tid2eid is not None:
        experts = tid2eid[token_ids]
    else:
        experts = topk_select_ref(scores if bias is None else scores + bias.to(acc), top_k)
    experts = experts.sort(-1).values
    chosen = scores.gather(-1, experts)
    return experts, chosen / ordered_sum(chosen, -1).unsqueeze(-1) * scale
