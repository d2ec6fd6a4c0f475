"""Expert choice: score = sqrt(softplus(gate x)) in fp32; top-k of score + bias, or a table by token id."""

from __future__ import annotations

from torch import Tensor

from dsv4.formats.tensors import AnyWeight
from dsv4.ops.lib.invariant import accumulator, ordered_sum, rows_matmul, sqrt_softplus
from dsv4.ops.select import topk_select_ref


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
    x: Tensor, gate: AnyWeight, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, *, top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, D] -> experts int64 [T, k] in ascending order, and their weights [T, k] in at least fp32.

    Hash layers (tid2eid [V, k] given) take the experts from the table; their weights still come from the gate. The bias
    moves the choice only. weights = score / sum of the chosen scores * scale.
    """
    logits = rows_matmul(x, gate).to(accumulator(x))  # [T, E]
    if tid2eid is None:
        return activation_topk_ref(logits, bias, top_k=top_k, scale=scale)
    experts = tid2eid[token_ids].sort(-1).values
    return experts, _weights(sqrt_softplus(logits).gather(-1, experts), scale)
