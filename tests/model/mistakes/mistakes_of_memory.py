"""Mistakes in what a token sees of the past: compressor, indexer, attention, chunk borders, MTP."""

from collections.abc import Callable
from dataclasses import replace

import torch
from planted import CSA, HCA, NUM_TOKENS, Bed

from dsv4.config import HCA_RATIO
from dsv4.model.mtp import mtp_block
from dsv4.ops.attention import attend_ref
from dsv4.ops.compress import compress_ref
from dsv4.ops.compress import op as compress_module
from dsv4.ops.compress.op import _pool, _tail_rows, _write_tail
from dsv4.ops.indexer import entry_scores, num_visible, turned_queries
from dsv4.ops.norm import rms_norm_ref
from dsv4.ops.rows import append_swa_ref, rope_ref

# ---- compressor ----


def own_block_carry(bed: Bed) -> None:
    """After a flush the own-block stream is taken for the previous-block stream of the next entry."""

    def wrong(right, kv, score, ratio, state, batch, tokens):
        if state.following is None:
            return right(kv, score, ratio, state, batch, tokens)
        width = state.own.kv.shape[-1]
        carried = [values[:, -width:].repeat(1, 2) for values in (kv, score)]
        return right(*carried, ratio, replace(state, following=state.own), batch, tokens)

    bed.function(_pool, wrong)


def halves_swapped(bed: Bed) -> None:
    def wrong(right, kv, gate, spec, *args):
        width = kv.shape[-1] // 2
        return right(kv.roll(width, -1), gate.roll(width, -1), replace(spec, ape=spec.ape.roll(width, -1)), *args)

    bed.function(compress_ref, wrong)


def no_overlap(bed: Bed) -> None:
    """Entries of their own four tokens alone."""

    def wrong(right, kv, score, tail, batch, tokens, wanted):
        is_previous = (batch.positions[tokens].unsqueeze(-1) - wanted >= wanted.shape[1]).all()
        return right(kv, score, tail, batch, tokens, torch.full_like(wanted, -1) if is_previous else wanted)

    bed.function(_tail_rows, wrong)


def _other_spec(bed: Bed, change: Callable) -> None:
    bed.function(compress_ref, lambda right, kv, gate, spec, *args: right(kv, gate, change(spec), *args))


def no_ape(bed: Bed) -> None:
    _other_spec(bed, lambda spec: replace(spec, ape=torch.zeros_like(spec.ape)))


def ape_stacked_twice(bed: Bed) -> None:
    """[4, 2 Dc] read as [8, Dc]: rows of the two halves are mixed up."""
    _other_spec(bed, lambda spec: replace(spec, ape=spec.ape.view(2, 4, -1).transpose(0, 1).reshape(4, -1)))


def entry_position_is_its_index(bed: Bed) -> None:
    """Rope at i instead of ratio * i: the same as frequencies divided by the ratio."""
    _other_spec(bed, lambda spec: replace(spec, freqs=spec.freqs / spec.ratio))


def hca_entry_position_is_its_index(bed: Bed) -> None:
    _other_spec(bed, lambda spec: replace(spec, freqs=spec.freqs / spec.ratio) if spec.ratio == HCA_RATIO else spec)


def csa_entry_position_is_its_last_token(bed: Bed) -> None:
    bed.patch.setattr(compress_module, "rope_ref", lambda x, positions, freqs: rope_ref(x, positions + 3, freqs))


# ---- what a query may see ----


def block_in_progress_visible(bed: Bed) -> None:
    """One entry too many: a token of a prefill sees the block it has not closed yet."""
    bed.function(num_visible, lambda right, positions, ratio: (positions // ratio + 1).clamp_max(NUM_TOKENS // ratio))


def own_block_hidden(bed: Bed) -> None:
    """One entry too few: the block a token closes is hidden from that token."""
    bed.function(num_visible, lambda right, positions, ratio: positions // ratio)


def no_causal_limit_in_prefill(bed: Bed) -> None:
    bed.function(num_visible, lambda right, positions, ratio: torch.full_like(positions, NUM_TOKENS // ratio))


def entries_written_after_attention(bed: Bed) -> None:
    late: list[Callable[[], None]] = []

    def attend(right, *args, **kwargs):
        out = right(*args, **kwargs)
        late.pop()()
        return out

    def write_later(right, kv, gate, spec, state, pages, batch):
        is_index = pages is bed.llm.cache.handle(CSA).index_keys
        if is_index:
            right(kv, gate, spec, state, pages, batch)
        else:
            late.append(lambda: right(kv, gate, spec, state, pages, batch))

    bed.function(compress_ref, write_later)
    bed.op("sparse_attention", attend)


def _other_window(bed: Bed, change: int) -> None:
    bed.op(
        "sparse_attention",
        lambda right, *args, window_len, **rest: right(*args, window_len=window_len + change, **rest),
    )


def window_one_short(bed: Bed) -> None:
    _other_window(bed, -1)


def window_one_long(bed: Bed) -> None:
    _other_window(bed, 1)


def no_sink(bed: Bed) -> None:
    bed.function(
        attend_ref, lambda right, q, keys, times, sink: right(q, keys, times, torch.full_like(sink, float("-inf")))
    )


def sink_in_the_numerator(bed: Bed) -> None:
    """The sink's share of the probability goes to the oldest row that a token reads."""

    def wrong(right, q, keys, times, sink):
        with_sink = right(q, keys, times, sink)
        without = right(q, keys, times, torch.full_like(sink, float("-inf")))
        kept = (with_sink * without).sum(-1, keepdim=True) / without.square().sum(-1, keepdim=True)
        return with_sink + (1 - kept) * keys[(times > 0).long().argmax(-1)].unsqueeze(1)

    bed.function(attend_ref, wrong)


# ---- indexer ----


def indexer_without_relu(bed: Bed) -> None:
    """sum_h w (q.k) = relu part for q minus relu part for -q."""

    def wrong(right, q, *args):
        return right(q, *args) - right(-q, *args)

    bed.function(entry_scores, wrong)


def indexer_queries_without_rope(bed: Bed) -> None:
    bed.function(turned_queries, lambda right, q, *args: q)


def indexer_without_rope(bed: Bed) -> None:
    """Neither queries nor keys."""

    def compress(right, kv, gate, spec, state, pages, batch):
        is_index = pages is bed.llm.cache.handle(CSA).index_keys
        right(kv, gate, replace(spec, freqs=spec.freqs * 0) if is_index else spec, state, pages, batch)

    indexer_queries_without_rope(bed)
    bed.function(compress_ref, compress)


def indexer_without_head_weights(bed: Bed) -> None:
    bed.op("index_topk", lambda right, q, weights, *args, **kw: right(q, torch.ones_like(weights), *args, **kw))


def every_visible_entry_read(bed: Bed) -> None:
    bed.config(index_topk=NUM_TOKENS)


def latest_entries_read(bed: Bed) -> None:
    """No scores at all: the most recent entries."""

    def wrong(right, q, weights, keys, batch, *, ratio, top_k, scale):
        picks = num_visible(batch.positions, ratio).unsqueeze(-1) - 1 - torch.arange(top_k)
        return picks.clamp_min(-1).sort(-1).values

    bed.op("index_topk", wrong)


# ---- chunk borders ----


def window_lost(bed: Bed) -> None:
    bed.function(append_swa_ref, lambda right, rows, window, batch: None)


def _lose(bed: Bed, is_lost: Callable) -> None:
    """Tails for which `is_lost(tail)` are never written."""
    bed.function(_write_tail, lambda right, tail, *args: None if is_lost(tail) else right(tail, *args))


def tails_lost(bed: Bed) -> None:
    _lose(bed, lambda tail: True)


def carry_lost(bed: Bed) -> None:
    """Only the following halves of the last block: what a snapshot at a multiple of 4 tokens forgets."""
    _lose(bed, lambda tail: tail is bed.llm.cache.handle(CSA).compressor.following)


def index_carry_lost(bed: Bed) -> None:
    _lose(bed, lambda tail: tail is bed.llm.cache.handle(CSA).index_compressor.following)


def own_tail_lost(bed: Bed) -> None:
    _lose(bed, lambda tail: any(tail is bed.llm.cache.handle(layer).compressor.own for layer in (CSA, HCA)))


def every_chunk_at_position_zero(bed: Bed) -> None:
    make_batch = bed.llm.cache.make_batch

    def restarted(*args):
        batch = make_batch(*args)
        start = batch.chunk_starts
        return replace(
            batch, positions=batch.positions - start, chunk_starts=start - start, chunk_ends=batch.chunk_ends - start
        )

    bed.patch.setattr(bed.llm.cache, "make_batch", restarted)


# ---- MTP ----


def mtp_norm_of_all_streams(bed: Bed) -> None:
    """hnorm over the streams together; of the op's callers only this one hands it streams [T, n, D]."""

    def wrong(right, x, weight, eps):
        if x.dim() == 2:
            return right(x, weight, eps)
        return rms_norm_ref(x.flatten(1), None, eps).view(x.shape) * weight

    bed.op("rms_norm", wrong)


def mtp_without_embedding(bed: Bed) -> None:
    bed.function(mtp_block, lambda right, streams, embedding, *args: right(streams, embedding * 0, *args))


def mtp_with_the_current_token(bed: Bed) -> None:
    """The embedding of token t instead of t + 1."""
    bed.function(mtp_block, lambda right, streams, embedding, *args: right(streams, embedding.roll(1, 0), *args))


def mtp_without_hnorm(bed: Bed) -> None:
    bed.op("rms_norm", lambda right, x, weight, eps: x if x.dim() == 3 else right(x, weight, eps))
