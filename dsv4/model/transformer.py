"""The whole model: embedding, blocks, head. It owns no state; the cache comes in through handles."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.config import ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.exchange import Exchange
from dsv4.formats.trees import ReadOnly
from dsv4.model.attention import SharedWindow
from dsv4.model.block import BlockOutput, block, enter
from dsv4.model.context import ModelContext
from dsv4.model.mtp import mtp_block
from dsv4.model.parameters import HeadParams, ModelParams
from dsv4.ops import TORCH, Backend
from dsv4.ops.hyper import HyperInput


class Transformer:
    """DeepSeek-V4 over given parameters.

    Numerics follow from what it is handed: quantised weights, bf16 activations and quantised cache rows compute the
    published (`official`) function; plain weights, plain rows and any float dtype the `exact` one.

    weights   the tensors that run; who writes into them behind the engine's back gets answers of neither old nor new
    exchange  where other ranks hold some of the experts: the way to them. Every rank then makes the same calls
    """

    def __init__(
        self, config: ModelConfig, params: ModelParams, dtype: torch.dtype, *, backend: Backend = TORCH,
        exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.weights = params
        self.schedule = build_schedule(config, with_mtp=bool(params.draft_blocks))
        self.context = ModelContext.build(config, backend, dtype, params.embed.device, exchange)

    @property
    def params(self) -> ReadOnly:
        """The weights to look at: copies, made when they are asked for. Writing into them changes no answer."""
        return ReadOnly(self.weights)

    def block(self, layer_idx: int, streams: Tensor, cache: LayerCacheHandle, batch: TokenBatch) -> BlockOutput:
        """One main layer on given streams [T, n, D]."""
        params = self.weights.layers[layer_idx]
        start = enter(streams, params, self.context)
        return block(start, params, self.schedule[layer_idx], cache, batch, self.context, None)[0]

    def forward(
        self, batch: TokenBatch, cache: Callable[[int], LayerCacheHandle],
        observe: Callable[[int, BlockOutput], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """The new tokens through every main layer -> streams [T, n, D]. `cache(layer_idx)` gives a layer's handle."""
        layers = self.weights.layers
        start: HyperInput | None = enter(self.embed(batch.token_ids), layers[0], self.context)
        for layer_idx, (params, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            assert start is not None
            layer = self.schedule[layer_idx]
            output, start = block(start, params, layer, cache(layer_idx), batch, self.context, following)
            if observe is not None:
                observe(layer_idx, output)
        return output.streams

    def logits(self, streams: Tensor) -> Tensor:
        """streams [T, n, D] -> fp32 (or wider) logits [T, vocab]."""
        return self._logits(streams, self.weights.head)

    def mtp(self, mtp_idx: int, streams: Tensor, batch: TokenBatch, cache: LayerCacheHandle) -> Tensor:
        """MTP block: main streams of tokens t and batch.token_ids = tokens t + 1, at position t -> its streams."""
        layer = self.schedule[self.config.num_hidden_layers + mtp_idx]
        params = self.weights.mtp[mtp_idx]
        return mtp_block(streams, self.embed(batch.token_ids), params, layer, cache, batch, self.context)

    def mtp_logits(self, mtp_idx: int, streams: Tensor) -> Tensor:
        """The MTP block's streams [T, n, D] -> logits [T, vocab] for token t + 2."""
        return self._logits(streams, self.weights.mtp[mtp_idx].head)

    def dspark(
        self, batch: TokenBatch, handles: Sequence[LayerCacheHandle], shared: SharedWindow | None
    ) -> Tensor:  # fmt: skip
        """Blocks of draft rows through the layers of the DSpark head -> streams [T, n, D]. `shared`: what they read."""
        assert self.weights.dspark is not None, "a model without a DSpark head"
        blocks, layers = self.weights.dspark.blocks, self.schedule[self.config.num_hidden_layers :]
        start: HyperInput | None = enter(self.embed(batch.token_ids), blocks[0], self.context)
        for place, following in enumerate([*blocks[1:], None]):
            assert start is not None
            output, start = block(
                start, blocks[place], layers[place], handles[place], batch, self.context, following, shared
            )
        return output.streams

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> their embeddings [T, D]."""
        return self.weights.embed[token_ids].to(self.context.dtype)

    def _logits(self, streams: Tensor, head: HeadParams) -> Tensor:
        config, ops = self.config, self.context.ops
        normed = ops.hc_head_norm(
            streams,
            head.hc.fn,
            head.hc.base,
            head.hc.scale,
            head.norm,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        wide = torch.promote_types(self.context.dtype, torch.float32)
        return ops.linear(normed, self.weights.lm_head, out_dtype=wide)
