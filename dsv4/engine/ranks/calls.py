"""Calls of the model outside the engine (`LLM.logits` and its like), which rank 0 makes: the other ranks run as many
rows of padding through the same layers, so that their experts are there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.engine.ranks.agreement import Agreement, Said
from dsv4.engine.run.bucket import padding_batch
from dsv4.model.attention import SharedWindow
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer


class Call(IntEnum):
    """Kinds of what ranks agree on, besides steps."""

    FORWARD = 1  # through all layers
    BLOCK = 2  # through one layer
    MTP = 3  # through an MTP block
    DSPARK = 4  # through the layers of a DSpark head


class LeadingTransformer(Transformer):
    """Rank 0's model for these calls."""

    def __init__(self, inner: Transformer, agreement: Agreement) -> None:
        self.config, self.weights = inner.config, inner.weights
        self.schedule, self.context = inner.schedule, inner.context
        self._agreement = agreement

    def block(self, layer_idx: int, streams: Tensor, cache: LayerCacheHandle, batch: TokenBatch) -> BlockOutput:
        with self._together(Call.BLOCK, batch, layer_idx):
            return super().block(layer_idx, streams, cache, batch)

    def forward(
        self, batch: TokenBatch, cache: Callable[[int], LayerCacheHandle],
        observe: Callable[[int, BlockOutput], None] | None = None,
    ) -> Tensor:  # fmt: skip
        with self._together(Call.FORWARD, batch):
            return super().forward(batch, cache, observe)

    def mtp(self, mtp_idx: int, streams: Tensor, batch: TokenBatch, cache: LayerCacheHandle) -> Tensor:
        with self._together(Call.MTP, batch, mtp_idx):
            return super().mtp(mtp_idx, streams, batch, cache)

    def dspark(
        self, batch: TokenBatch, handles: Sequence[LayerCacheHandle], shared: SharedWindow | None
    ) -> Tensor:  # fmt: skip
        with self._together(Call.DSPARK, batch):
            return super().dspark(batch, handles, shared)

    @contextmanager
    def _together(self, call: Call, batch: TokenBatch, layer_idx: int = 0) -> Iterator[None]:
        with self._agreement.working():
            self._agreement.call(call, batch.num_tokens, layer_idx)
            yield


def padding_server(
    model: Transformer, cache: KVCacheManager, make_drafts: Callable[[], KVCacheManager]
) -> Callable[[Said], None]:  # fmt: skip
    """What a rank does with a call of rank 0's. `make_drafts` makes a cache that has the draft blocks' layers."""

    @torch.no_grad()
    def serve(said: Said) -> None:
        call, num_rows, layer_idx = Call(said.kind), said.first, said.second
        _, batch = padding_batch(num_rows, cache.block_table)
        if call is Call.FORWARD:
            model.forward(batch, cache.handle)
            return
        streams = model.context.window_freqs.new_zeros(
            (num_rows, model.config.hc_mult, model.config.hidden_size), dtype=model.context.dtype
        )
        if call is Call.BLOCK:
            model.block(layer_idx, streams, cache.handle(layer_idx), batch)
            return
        drafts, num_main = make_drafts(), model.config.num_hidden_layers
        _, batch = padding_batch(num_rows, drafts.block_table)
        if call is Call.MTP:
            model.mtp(layer_idx, streams, batch, drafts.handle(num_main + layer_idx))
            return
        handles = [drafts.handle(place) for place in range(num_main, len(model.schedule))]
        model.dspark(batch, handles, SharedWindow(batch, handles[0].window.ring_len))

    return serve
