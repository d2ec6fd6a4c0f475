"""One feed-forward sublayer: choose experts, run them and the shared expert."""

from __future__ import annotations

from torch import Tensor

from dsv4.model.context import ModelContext
from dsv4.model.parameters import MoeParams


def moe(x: Tensor, params: MoeParams, token_ids: Tensor, context: ModelContext) -> tuple[Tensor, Tensor]:
    """x [T, D] (normed) -> the sublayer's output [T, D], and the experts chosen [T, k], ascending."""
    config = context.config
    experts, weights = context.ops.route(
        x, params.gate, params.bias, params.tid2eid, token_ids,
        top_k=config.num_experts_per_tok, scale=config.routed_scaling_factor,
    )  # fmt: skip
    out = context.ops.moe(
        x, experts, weights, params.experts.matrices, params.shared.matrices, limit=config.swiglu_limit
    )
    return out, experts
