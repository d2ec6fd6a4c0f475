"""One block: hyper-connection around attention, hyper-connection around the experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.model.attention import attention
from dsv4.model.context import ModelContext
from dsv4.model.moe import moe
from dsv4.model.parameters import BlockParams, HyperParams
from dsv4.schedule import LayerSpec


@dataclass(frozen=True)
class BlockOutput:
    """streams [T, n, D] after the block; the sublayers' outputs [T, D] before they were mixed in; the experts chosen
    [T, k], ascending; on CSA layers the entries picked [T, index_topk], ascending, -1 padded."""

    streams: Tensor
    attn_out: Tensor
    ffn_out: Tensor
    experts: Tensor
    entries: Tensor | None


def block(
    streams: Tensor, params: BlockParams, layer: LayerSpec, cache: LayerCacheHandle, batch: TokenBatch,
    context: ModelContext,
) -> BlockOutput:  # fmt: skip
    """streams [T, n, D] -> the next streams, with what the sublayers did on the way."""
    ops, eps = context.ops, context.config.rms_norm_eps
    hidden, post, comb = _collapse(streams, params.hc_attn, context)
    attn_out, entries = attention(
        ops.rms_norm(hidden, params.attn_norm, eps), params.attn, layer, cache, batch, context
    )
    streams = ops.hc_post(attn_out, streams, post, comb)
    hidden, post, comb = _collapse(streams, params.hc_ffn, context)
    ffn_out, experts = moe(ops.rms_norm(hidden, params.ffn_norm, eps), params.ffn, batch.token_ids, context)
    streams = ops.hc_post(ffn_out, streams, post, comb)
    return BlockOutput(streams, attn_out, ffn_out, experts, entries)


def _collapse(streams: Tensor, hyper: HyperParams, context: ModelContext) -> tuple[Tensor, Tensor, Tensor]:
    config = context.config
    return context.ops.hc_pre(
        streams, hyper.fn, hyper.base, hyper.scale,
        num_iters=config.hc_sinkhorn_iters, hc_eps=config.hc_eps, norm_eps=config.rms_norm_eps,
    )  # fmt: skip
