"""One feed-forward sublayer: choose experts, run them and the shared expert.

Where experts are divided among ranks (`ModelContext.exchange`) the same happens in pieces: every rank computes the
parts of its own experts for all ranks' tokens, and each token's rank sums the parts as one process would. The shared
expert needs no other rank: it runs beside the exchange.
"""

from functools import partial

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.model.context import ModelContext
from dsv4.model.parameters import MoeParams
from dsv4.ops.hyper import HyperInput


def moe(start: HyperInput, params: MoeParams, batch: TokenBatch, context: ModelContext) -> tuple[Tensor, Tensor]:
    """The normed input [T, D] of `start` -> the sublayer's output [T, D], and the experts chosen [T, k], ascending."""
    config, x = context.config, start.hidden
    experts, weights = context.ops.route(
        x, params.gate, params.bias, params.tid2eid, batch.token_ids,
        top_k=config.num_experts_per_tok, scale=config.routed_scaling_factor,
    )  # fmt: skip
    routed, shared, limit = params.experts.matrices, params.shared.matrices, config.swiglu_limit
    exchange = context.exchange
    if exchange is None:
        out = context.ops.moe(x, experts, weights, routed, shared, limit=limit, rounded=start.rounded)
        return out, experts
    shared_out = torch.empty_like(x)
    run_shared = partial(
        context.ops.moe_shared, x, routed, shared, shared_out, top_k=config.num_experts_per_tok, limit=limit
    )
    with context.branches.beside(run_shared, can_fork=not context.backend.cuts_calls):
        rows = exchange.dispatch(x, experts, weights, batch.slots)
        parts = context.ops.moe_parts(
            rows.x, rows.experts, rows.weights, routed, shared, limit=limit, peer_buffers=rows.peer_buffers
        )  # fmt: skip
        parts = exchange.collect(parts, rows)
    return context.ops.moe_fold(parts, shared_out), experts
