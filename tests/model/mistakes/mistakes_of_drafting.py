"""Mistakes in a drafter: taps, context, what a block sees, heads, recursion, and rows left behind."""

from collections.abc import Callable
from dataclasses import replace

import torch
from planted import Bed

from dsv4.cache.manager import KVCacheManager
from dsv4.formats.tensors import as_loaded
from dsv4.model.attention import attention
from dsv4.model.dspark import DSparkDrafter, DSparkTap, context_vectors
from dsv4.model.mtp_drafter import MtpDrafter

# ---- taps and context ----


def _tap(bed: Bed, change: Callable) -> None:
    """`change(streams, layer_idx, output)`: the streams that are averaged."""
    right = DSparkTap.__call__

    def wrong(self, layer_idx, output):
        right(self, layer_idx, replace(output, streams=change(output.streams, layer_idx, output)))

    bed.patch.setattr(DSparkTap, "__call__", wrong)


def tap_of_the_first_stream(bed: Bed) -> None:
    _tap(bed, lambda streams, *_: streams[:, :1].expand_as(streams))


def tap_before_the_write_back(bed: Bed) -> None:
    _tap(bed, lambda streams, _, output: output.ffn_out.unsqueeze(1).expand_as(streams))


def tap_without_the_last_sublayer(bed: Bed) -> None:
    _tap(bed, lambda streams, _, output: streams - output.ffn_out.unsqueeze(1))


def tap_of_the_streams_that_enter(bed: Bed) -> None:
    before = {}

    def change(streams, layer_idx, output):
        before[layer_idx] = streams
        return before[layer_idx - 1] if layer_idx else streams * 0

    _tap(bed, change)


def taps_in_reverse(bed: Bed) -> None:
    bed.function(
        context_vectors,
        lambda right, hidden, params, context: right(
            hidden.unflatten(-1, (-1, context.config.hidden_size)).flip(1).flatten(1), params, context
        ),
    )


def no_main_norm(bed: Bed) -> None:
    bed.function(context_vectors, lambda right, hidden, params, context: context.ops.linear(hidden, params.main_proj))


def context_through_attn_norm(bed: Bed) -> None:
    def wrong(right, hidden, params, context):
        main = right(hidden, params, context)
        return context.ops.rms_norm(main, params.blocks[0].attn_norm, context.config.rms_norm_eps)

    bed.function(context_vectors, wrong)


def _extend(bed: Bed, drafter: type, change: Callable) -> None:
    """`change(batch, hidden, next_ids)` -> what `extend` gets instead."""
    right = drafter.extend
    bed.patch.setattr(drafter, "extend", lambda self, *args: right(self, *change(*args)))


def context_one_position_late(bed: Bed) -> None:
    def change(batch, hidden, next_ids):
        moved = {name: getattr(batch, name) + 1 for name in ("positions", "chunk_starts", "chunk_ends")}
        return replace(batch, **moved), hidden, next_ids

    _extend(bed, DSparkDrafter, change)


def context_rope_one_off(bed: Bed) -> None:
    bed.op("window_rows", lambda right, kv, norm, positions, *rest: right(kv, norm, positions + 1, *rest))


# ---- the block ----


def _block(bed: Bed, change: Callable) -> None:
    """`change(batch, shared, drafter)` -> the batch of a block and the window its rows share."""
    right = DSparkDrafter._block_batch
    bed.patch.setattr(DSparkDrafter, "_block_batch", lambda self, ends: change(*right(self, ends), self))


def causal_block(bed: Bed) -> None:
    _block(bed, lambda batch, shared, _: (batch, None))


def window_one_short(bed: Bed) -> None:
    _block(bed, lambda batch, shared, _: (batch, replace(shared, length=shared.length - 1)))


def window_that_slides(bed: Bed) -> None:
    """Row i loses the i oldest context rows, as a token at its position would."""

    def wrong(right, q, rows, window, entries, picks, sink, batch, *, window_len, freqs=None):
        if freqs is not None:
            return right(q, rows, window, entries, picks, sink, batch, window_len=window_len, freqs=freqs)
        by_row = [
            right(q, rows, window, entries, picks, sink, batch, window_len=window_len - i)[i] for i in range(len(q))
        ]
        return torch.stack(by_row)

    bed.op("sparse_attention", wrong)


def block_without_its_own_rows(bed: Bed) -> None:
    def change(batch, shared, drafter):
        before = replace(shared.batch, positions=batch.chunk_starts - 1)
        return batch, replace(shared, batch=before, length=shared.length - drafter.max_drafts)

    _block(bed, change)


def block_without_context(bed: Bed) -> None:
    _block(bed, lambda batch, shared, drafter: (batch, replace(shared, length=drafter.max_drafts)))


def output_unrotated_from_the_last_position(bed: Bed) -> None:
    def wrong(right, x, positions, freqs, inverse=False):
        return right(x, positions.max().expand_as(positions) if inverse else positions, freqs, inverse)

    bed.op("rope", wrong)


def output_not_unrotated(bed: Bed) -> None:
    bed.op("rope", lambda right, x, positions, freqs, inverse=False: x)


def block_one_position_late(bed: Bed) -> None:
    """Rows and window at A + 1 on: the context ends one row before them."""

    right = DSparkDrafter._block_batch
    bed.patch.setattr(
        DSparkDrafter, "_block_batch", lambda self, ends: right(self, replace(ends, positions=ends.positions + 1))
    )


def noise_id_one_off(bed: Bed) -> None:
    right = DSparkDrafter._block_batch

    def wrong(self, ends):
        bed.patch.setattr(self, "_noise", self._noise.clamp(max=196))
        return right(self, ends)

    bed.patch.setattr(DSparkDrafter, "_block_batch", wrong)


def _ids(bed: Bed, change: Callable) -> None:
    def of_batch(batch, shared, drafter):
        ids = change(batch.token_ids.unflatten(0, (-1, drafter.max_drafts))).flatten()
        return replace(batch, token_ids=ids), shared

    _block(bed, of_batch)


def every_row_the_anchor(bed: Bed) -> None:
    _ids(bed, lambda ids: ids[:, :1].expand_as(ids))


def anchor_in_the_last_row(bed: Bed) -> None:
    _ids(bed, lambda ids: ids.roll(-1, 1))


def shared_experts_dropped(bed: Bed) -> None:
    """Of one draft layer: what a loader that matches names by their ends may lose."""
    shared = bed.llm.model.weights.dspark.blocks[1].ffn.shared
    bed.patch.setattr(shared, "w2", torch.zeros_like(as_loaded(shared.w2)))


# ---- heads ----


def _passed(bed: Bed, change: Callable) -> None:
    """`change(hidden, logits)` -> what the Markov loop gets of the block."""
    right = DSparkDrafter._block_pass
    bed.patch.setattr(DSparkDrafter, "_block_pass", lambda self, ends: change(*right(self, ends)))


def rows_one_late(bed: Bed) -> None:
    """The first draft from row 1, not from the anchor's row."""
    _passed(bed, lambda hidden, logits: (hidden.roll(-1, 1), logits.roll(-1, 1)))


def the_targets_norm(bed: Bed) -> None:
    bed.patch.setattr(bed.llm.model.weights.dspark.head, "norm", bed.llm.model.weights.head.norm)


def the_targets_collapse(bed: Bed) -> None:
    bed.patch.setattr(bed.llm.model.weights.dspark.head, "hc", bed.llm.model.weights.head.hc)


def no_markov_bias(bed: Bed) -> None:
    dspark = bed.llm.model.weights.dspark
    bed.patch.setattr(dspark, "markov_w2", torch.zeros_like(as_loaded(dspark.markov_w2)))


def markov_matrices_swapped(bed: Bed) -> None:
    dspark = bed.llm.model.weights.dspark
    first, second = dspark.markov_w1, as_loaded(dspark.markov_w2)
    bed.patch.setattr(dspark, "markov_w1", second)
    bed.patch.setattr(dspark, "markov_w2", first)


def markov_of_the_anchor_alone(bed: Bed) -> None:
    """Every row's bias comes from the anchor."""
    right = DSparkDrafter.propose

    def wrong(self, ends, extended, num_drafts, choose):
        def anchor(logits, draft_idx):
            choose(logits, draft_idx)
            return ends.anchors

        return right(self, ends, extended, num_drafts, anchor)

    bed.patch.setattr(DSparkDrafter, "propose", wrong)


def _confidence(bed: Bed, change: Callable) -> None:
    bed.op("confidence", lambda right, hidden, embedded, weight: right(*change(hidden, embedded, weight)))


def confidence_behind_the_norm(bed: Bed) -> None:
    model = bed.llm.model
    norm = model.weights.dspark.head.norm
    _confidence(
        bed, lambda hidden, embedded, weight: (model.context.ops.rms_norm(hidden, norm, 1e-6), embedded, weight)
    )


def confidence_embedding_first(bed: Bed) -> None:
    _confidence(bed, lambda hidden, embedded, weight: (hidden, embedded, weight.roll(-embedded.shape[1], 1)))


def confidence_without_embedding(bed: Bed) -> None:
    _confidence(bed, lambda hidden, embedded, weight: (hidden, embedded * 0, weight))


def confidence_of_the_draft_itself(bed: Bed) -> None:
    _confidence(bed, lambda hidden, embedded, weight: (hidden, embedded.roll(-1, 0), weight))


# ---- rows left behind, for both drafters ----


def never_extended_after_the_prompt(drafter: type) -> Callable[[Bed], None]:
    """Verified tokens keep the rows that drafting wrote."""

    def plant(bed: Bed) -> None:
        right = drafter.extend

        def wrong(self, batch, hidden, next_ids):
            if batch.num_tokens != self.max_drafts + 1:
                return right(self, batch, hidden, next_ids)
            kept = [replace(handle, window=_copied(handle.window)) for handle in _handles(self)]
            found = right(self, batch, hidden, next_ids)
            for handle, old in zip(_handles(self), kept, strict=True):
                handle.window.rows.data.copy_(old.window.rows.data)
                handle.window.positions.copy_(old.window.positions)
            return found

        bed.patch.setattr(drafter, "extend", wrong)

    plant.__name__ = f"{drafter.__name__}_never_extended"
    return plant


def _handles(drafter):
    return [drafter._handle] if isinstance(drafter, MtpDrafter) else drafter._handles


def _copied(window):
    rows = replace(window.rows, data=window.rows.data.clone())
    return replace(window, rows=rows, positions=window.positions.clone())


def rejected_rows_kept(bed: Bed) -> None:
    """The request goes on behind all drafts, whatever was accepted."""
    bed.patch.setattr(KVCacheManager, "rewind", lambda self, slot, position: None)


# ---- MTP ----


def ids_not_shifted(bed: Bed) -> None:
    """Row t gets token t."""
    _extend(bed, MtpDrafter, lambda batch, hidden, next_ids: (batch, hidden, batch.token_ids))


def border_repeats_its_token(bed: Bed) -> None:
    """The last row of a chunk does not look at the next prompt token."""

    def change(batch, hidden, next_ids):
        is_border = (batch.positions + 1 == batch.chunk_ends) & (batch.chunk_starts == 0)
        return batch, hidden, torch.where(is_border, batch.token_ids, next_ids)

    _extend(bed, MtpDrafter, change)


def _step(bed: Bed, change: Callable) -> None:
    """`change(streams, batch)` -> what a recursion step gets."""
    propose, mtp = MtpDrafter.propose, bed.llm.model.mtp

    def wrong(self, *args):
        bed.patch.setattr(self._model, "mtp", lambda i, streams, batch, cache: mtp(i, *change(streams, batch), cache))
        try:
            return propose(self, *args)
        finally:
            bed.patch.setattr(self._model, "mtp", mtp)

    bed.patch.setattr(MtpDrafter, "propose", wrong)


def recursion_from_one_stream(bed: Bed) -> None:
    """As if the collapsed vector were handed on."""
    _step(bed, lambda streams, batch: (streams.mean(1, keepdim=True).expand_as(streams), batch))


def recursion_stands_still(bed: Bed) -> None:
    def change(streams, batch):
        back = {name: getattr(batch, name) - 1 for name in ("positions", "chunk_starts", "chunk_ends")}
        return streams, replace(batch, **back)

    _step(bed, change)


def recursion_skips_a_position(bed: Bed) -> None:
    def change(streams, batch):
        ahead = {name: getattr(batch, name) + 1 for name in ("positions", "chunk_starts", "chunk_ends")}
        return streams, replace(batch, **ahead)

    _step(bed, change)


def recursion_from_the_targets_streams(bed: Bed) -> None:
    taken = {}

    def change(streams, batch):
        return taken.get("streams", streams), batch

    right = MtpDrafter.extend

    def extend(self, batch, hidden, next_ids):
        taken["streams"] = hidden[-1:]
        return right(self, batch, hidden, next_ids)

    bed.patch.setattr(MtpDrafter, "extend", extend)
    _step(bed, change)


def first_draft_of_the_last_row(bed: Bed) -> None:
    """Of all verified rows, the rejected ones too."""
    right = MtpDrafter.propose

    def wrong(self, ends, extended, *rest):
        return right(self, replace(ends, rows=ends.rows * 0 + extended.shape[0] - 1), extended, *rest)

    bed.patch.setattr(MtpDrafter, "propose", wrong)


def mtp_with_the_targets_head(bed: Bed) -> None:
    bed.patch.setattr(bed.llm.model.weights.mtp[0], "head", bed.llm.model.weights.head)


def projections_swapped(bed: Bed) -> None:
    block = bed.llm.model.weights.mtp[0]
    first, second = block.e_proj, block.h_proj
    bed.patch.setattr(block, "e_proj", second)
    bed.patch.setattr(block, "h_proj", first)


def no_embedding_at_position_0(bed: Bed) -> None:
    right = bed.llm.model.mtp

    def wrong(mtp_idx, streams, batch, cache):
        embed = bed.llm.model.embed
        bed.patch.setattr(bed.llm.model, "embed", lambda ids: embed(ids) * (batch.positions > 0).unsqueeze(-1))
        found = right(mtp_idx, streams, batch, cache)
        bed.patch.setattr(bed.llm.model, "embed", embed)
        return found

    bed.patch.setattr(bed.llm.model, "mtp", wrong)


def compressed_frequencies(bed: Bed) -> None:
    """YaRN and the compressed layers' base on draft layers."""
    context = bed.llm.model.context
    num_main = bed.llm.config.num_hidden_layers

    def wrong(right, start, params, layer, cache, batch, context_, *rest):
        if layer.layer_idx >= num_main:
            context_ = replace(context_, window_freqs=context.compressed_freqs)
        return right(start, params, layer, cache, batch, context_, *rest)

    bed.function(attention, wrong)
