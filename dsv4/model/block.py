"""One block: hyper-connection around attention, hyper-connection around the experts, fused where they meet."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.config.layers import LayerSpec
from dsv4.model.attention import SharedWindow, attention
from dsv4.model.context import ModelContext
from dsv4.model.moe import moe
from dsv4.model.parameters import BlockParams, HyperParams
from dsv4.ops.hyper import HyperInput, HyperSettings
from dsv4.ops.linear import takes_codes
from dsv4.ops.moe import takes_rounded


@dataclass(frozen=True)
class BlockOutput:
    """streams [T, n, D] after the block; the sublayers' outputs [T, D] before they were mixed in; the experts chosen
    [T, k], ascending; on CSA layers the entries picked [T, index_topk], ascending, -1 padded."""

    streams: Tensor
    attn_out: Tensor
    ffn_out: Tensor
    experts: Tensor
    entries: Tensor | None


def enter(streams: Tensor, params: BlockParams, context: ModelContext) -> HyperInput:
    """Streams [T, n, D], or an embedding [T, D], -> what the block's attention starts from."""
    has_codes = takes_codes(params.attn.wq_a)
    return context.ops.hc_enter(streams, *_mixing(params.hc_attn), params.attn_norm, _settings(context), has_codes)


def block(
    start: HyperInput, params: BlockParams, layer: LayerSpec, cache: LayerCacheHandle, batch: TokenBatch,
    context: ModelContext, following: BlockParams | None, shared: SharedWindow | None = None,
) -> tuple[BlockOutput, HyperInput | None]:  # fmt: skip
    """From `start` (see `enter`) through the block, and into the `following` one if there is one: what its attention
    starts from comes out of the same step that ends this block. `shared`: what the rows of a draft block read."""
    ops = context.ops
    attn_out, entries = attention(start, params.attn, layer, cache, batch, context, shared)
    has_rounded = context.exchange is None and takes_rounded(batch.num_tokens, params.ffn.experts.matrices)
    middle = _cross(attn_out, start, params.hc_ffn, params.ffn_norm, context, False, has_rounded)
    ffn_out, experts = moe(middle, params.ffn, batch, context)
    if following is None:
        streams, next_start = ops.hc_post(ffn_out, middle.streams, middle.post, middle.comb), None
    else:
        has_codes = takes_codes(following.attn.wq_a)
        next_start = _cross(ffn_out, middle, following.hc_attn, following.attn_norm, context, has_codes)
        streams = next_start.streams
    return BlockOutput(streams, attn_out, ffn_out, experts, entries), next_start


def _cross(
    out: Tensor, before: HyperInput, hyper: HyperParams, norm: Tensor, context: ModelContext, has_codes: bool,
    has_rounded: bool = False,
) -> HyperInput:  # fmt: skip
    """A sublayer's output [T, D] back into the streams, and on to the next sublayer's input (and its codes)."""
    return context.ops.hc_boundary(
        out, before.streams, before.post, before.comb, *_mixing(hyper), norm, _settings(context), has_codes, has_rounded
    )


def _mixing(hyper: HyperParams) -> tuple[Tensor, Tensor, Tensor]:
    return hyper.fn, hyper.base, hyper.scale


def _settings(context: ModelContext) -> HyperSettings:
    config = context.config
    return HyperSettings(config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
