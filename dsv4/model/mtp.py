"""Multi-token prediction: mixes the next token's embedding into the main streams and runs one SWA block on them."""

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.config.layers import LayerSpec
from dsv4.model.block import block, enter
from dsv4.model.context import ModelContext
from dsv4.model.parameters import MtpParams


def mtp_block(
    streams: Tensor, embedding: Tensor, params: MtpParams, layer: LayerSpec, cache: LayerCacheHandle,
    batch: TokenBatch, context: ModelContext,
) -> Tensor:  # fmt: skip
    """Main streams [T, n, D] of token t and the embedding [T, D] of token t + 1, at position t -> streams [T, n, D].

    hnorm normalises each stream over D. The cache row of position t thus depends on token t + 1.
    """
    ops, eps = context.ops, context.config.rms_norm_eps
    num_tokens, num_streams, _ = streams.shape
    from_token = ops.linear(ops.rms_norm(embedding, params.enorm, eps), params.e_proj)  # [T, D]
    from_streams = ops.linear(ops.rms_norm(streams, params.hnorm, eps).flatten(0, 1), params.h_proj)
    mixed = from_token.unsqueeze(1) + from_streams.view(num_tokens, num_streams, -1)
    start = enter(mixed, params.block, context)
    return block(start, params.block, layer, cache, batch, context, None)[0].streams
