"""One block: hyper-connection around attention, hyper-connection around the experts, fused where they meet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.model.attention import attention
from dsv4.model.context import ModelContext
from dsv4.model.moe import moe
from dsv4.model.parameters import BlockParams
from dsv4.ops.hyper import HyperSettings
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
    ops, config = context.ops, context.config
    settings = HyperSettings(config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
    hc_attn, hc_ffn = params.hc_attn, params.hc_ffn
    start = ops.hc_enter(streams, hc_attn.fn, hc_attn.base, hc_attn.scale, params.attn_norm, settings, has_codes=False)
    attn_out, entries = attention(start.hidden, params.attn, layer, cache, batch, context)
    middle = ops.hc_boundary(
        attn_out, start.streams, start.post, start.comb, hc_ffn.fn, hc_ffn.base, hc_ffn.scale, params.ffn_norm,
        settings, has_codes=False,
    )  # fmt: skip
    ffn_out, experts = moe(middle.hidden, params.ffn, batch.token_ids, context)
    streams = ops.hc_post(ffn_out, middle.streams, middle.post, middle.comb)
    return BlockOutput(streams, attn_out, ffn_out, experts, entries)
