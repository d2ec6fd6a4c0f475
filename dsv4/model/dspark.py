"""DSpark: a head that drafts a block of tokens in one pass, from taps of the target's layers.

Context. The mean of the streams after each tapped layer, side by side [T, taps * D], becomes one vector of a token by
`main_proj` and `main_norm`; each layer of the head makes its window row of position p from the vector of token p. No
hyper-connection, no query, no look-ahead.

Block. Rows (anchor, noise, noise, ...) at the positions from the anchor's on run through the layers. Every row reads
the same keys: the `sliding_window` context rows before the anchor, and all rows of the block, in both directions.
Changing the number of rows changes every row, so there are always `block_size`. Row i predicts the token behind its
position: its logits plus a Markov bias, which depends on the token before, the anchor or the draft of row i - 1.

The block's rows go into the rings in front of the context, where the next context rows replace them. A ring is at
least `sliding_window + block_size` long, so they replace nothing that is read.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.formats.tensors import QuantActivation
from dsv4.model.attention import SharedWindow
from dsv4.model.block import BlockOutput
from dsv4.model.context import ModelContext
from dsv4.model.drafter import Choose, DraftEnds, Proposal
from dsv4.model.parameters import DSparkParams
from dsv4.model.transformer import Transformer
from dsv4.ops.linear import takes_codes


class DSparkTap:
    """Means of the streams after the tapped layers, in the order of the layers."""

    def __init__(self, num_tokens: int, layer_ids: tuple[int, ...], context: ModelContext) -> None:
        config = context.config
        self.hidden = torch.empty(
            num_tokens, len(layer_ids) * config.hidden_size, dtype=context.dtype, device=context.window_freqs.device
        )
        self._columns = dict(zip(sorted(layer_ids), self.hidden.split(config.hidden_size, -1), strict=True))
        self._tap_streams = context.ops.tap_streams

    def __call__(self, layer_idx: int, output: BlockOutput) -> None:
        if layer_idx in self._columns:
            self._tap_streams(output.streams, self._columns[layer_idx])


class DSparkDrafter:
    """See `Drafter`. `cache(layer_idx)` gives the handle of a layer, draft layers counted on from the main ones."""

    def __init__(self, model: Transformer, cache: Callable[[int], LayerCacheHandle], block_table: Tensor) -> None:
        params, dspark = model.weights.dspark, model.config.dspark
        assert params is not None and dspark is not None, "a model without a DSpark head"
        self._model, self._params, self._dspark = model, params, dspark
        self._layers = model.schedule[model.config.num_hidden_layers :]
        self._handles = [cache(layer.layer_idx) for layer in self._layers]
        self._block_table = block_table
        device = block_table.device
        self._offsets = torch.arange(dspark.block_size, device=device)  # [g]
        self._noise = torch.full((dspark.block_size,), dspark.noise_token_id, device=device)  # [g]

    @property
    def max_drafts(self) -> int:
        return self._dspark.block_size

    @property
    def rows_per_request(self) -> int:
        return self._dspark.block_size

    def tap(self, num_tokens: int) -> DSparkTap:
        return DSparkTap(num_tokens, self._dspark.target_layer_ids, self._model.context)

    def extend(self, batch: TokenBatch, hidden: Tensor, next_ids: Tensor) -> Tensor | None:
        """Context rows. The ids do not matter here: a row depends on the tokens up to its own."""
        context = self._model.context
        ops, eps = context.ops, context.config.rms_norm_eps
        main = context_vectors(hidden, self._params, context)
        for params, layer, handle in zip(self._params.blocks, self._layers, self._handles, strict=True):
            window = handle.window
            kv = ops.linear(main, params.attn.wkv)  # [T, d]
            rows = ops.window_rows(
                kv, params.attn.kv_norm, batch.positions, context.freqs(layer), eps, window.rows.format
            )
            ops.append_swa(rows, window, batch)
        return None

    def propose(self, ends: DraftEnds, extended: Tensor | None, num_drafts: int, choose: Choose) -> Proposal:
        assert 1 <= num_drafts <= self.max_drafts, num_drafts
        params, context = self._params, self._model.context
        ops, wide = context.ops, torch.promote_types(context.dtype, torch.float32)
        hidden, base_logits = self._block_pass(ends)  # [R, g, D], [R, g, vocab]
        previous, drafts, embeddings = ends.anchors, [], []
        for i in range(num_drafts):
            embedded = params.markov_w1.index_select(0, previous)  # [R, r]
            bias = ops.linear(embedded, params.markov_w2, out_dtype=wide)
            previous = choose(base_logits[:, i] + bias, i)
            drafts.append(previous)
            embeddings.append(embedded)
        used = hidden[:, :num_drafts].flatten(0, 1)  # [R k, D]
        confidences = ops.confidence(used, torch.stack(embeddings, 1).flatten(0, 1), params.confidence)
        return Proposal(torch.stack(drafts, 1), confidences.view(-1, num_drafts), base_logits[:, :num_drafts])

    def _block_pass(self, ends: DraftEnds) -> tuple[Tensor, Tensor]:
        """The block's rows through the layers -> their vectors before the norm [R, g, D] and logits [R, g, vocab]."""
        model, params = self._model, self._params
        context, config = model.context, model.config
        ops, eps = context.ops, config.rms_norm_eps
        batch, shared = self._block_batch(ends)
        streams = model.dspark(batch, self._handles, shared)
        hc = params.head.hc
        hidden = ops.hc_head(streams, hc.fn, hc.base, hc.scale, hc_eps=config.hc_eps, norm_eps=eps)  # [R g, D]
        wide = torch.promote_types(context.dtype, torch.float32)
        logits = ops.linear(ops.rms_norm(hidden, params.head.norm, eps), model.weights.lm_head, out_dtype=wide)
        shape = (ends.slots.shape[0], self.max_drafts)
        return hidden.unflatten(0, shape), logits.unflatten(0, shape)

    def _block_batch(self, ends: DraftEnds) -> tuple[TokenBatch, SharedWindow]:
        block_size = self._dspark.block_size
        num_requests = ends.slots.shape[0]
        token_ids = torch.cat((ends.anchors.unsqueeze(1), self._noise[1:].expand(num_requests, -1)), 1)  # [R, g]
        starts = ends.positions.repeat_interleave(block_size)  # [R g]
        batch = TokenBatch(
            token_ids=token_ids.flatten(),
            positions=(ends.positions.unsqueeze(1) + self._offsets).flatten(),
            slots=ends.slots.repeat_interleave(block_size),
            chunk_starts=starts,
            chunk_ends=starts + block_size,
            block_table=self._block_table,
        )
        as_last = replace(batch, positions=starts + block_size - 1, chunk_starts=batch.chunk_ends)
        return batch, SharedWindow(as_last, self._model.config.sliding_window + block_size)


def context_vectors(hidden: Tensor, params: DSparkParams, context: ModelContext) -> Tensor | QuantActivation:
    """Taps [T, taps * D] -> one vector of each token [T, D], or its codes where every layer's wkv takes codes."""
    ops, eps = context.ops, context.config.rms_norm_eps
    projected = ops.linear(hidden, params.main_proj)
    if all(takes_codes(draft.attn.wkv) for draft in params.blocks):
        return ops.rms_norm_quant(projected, params.main_norm, eps, False)[1]
    return ops.rms_norm(projected, params.main_norm, eps)
