"""One attention sublayer: low-rank queries, one shared K=V row, compressed entries, grouped output projection."""

from __future__ import annotations

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, LayerCacheHandle, PagedView
from dsv4.model.context import ModelContext
from dsv4.model.parameters import AttentionParams, CompressorParams, IndexerParams
from dsv4.ops.compress import Compression, CompressorSpec
from dsv4.ops.invariant import accumulator
from dsv4.schedule import LayerSpec


def attention(
    x: Tensor, params: AttentionParams, layer: LayerSpec, cache: LayerCacheHandle, batch: TokenBatch,
    context: ModelContext,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """x [T, D] (normed) -> the sublayer's output [T, D], and the picked entries [T, k] on CSA layers."""
    ops, config, freqs = context.ops, context.config, context.freqs(layer)
    eps = config.rms_norm_eps
    query_latent = ops.rms_norm(ops.linear(x, params.wq_a), params.q_norm, eps)  # [T, q_lora_rank]
    q = ops.linear(query_latent, params.wq_b).unflatten(-1, (config.num_attention_heads, -1))  # [T, H, d]
    q = ops.head_norm_rope(q, batch.positions, freqs, eps)
    kv = ops.linear(x, params.wkv)  # [T, d]
    rows = ops.window_rows(kv, params.kv_norm, batch.positions, freqs, eps, cache.window.rows.format)

    if params.compressor is not None:
        _compress(x, params, layer, cache, batch, context)
    picks = None
    if params.indexer is not None:
        picks = _pick_entries(x, query_latent, params.indexer, layer, cache, batch, context)

    out = ops.sparse_attention(
        q, rows, cache.window, cache.entries, picks, params.sink, batch, window_len=config.sliding_window
    )  # [T, H, d]
    ops.append_swa(rows, cache.window, batch)
    out = ops.rope(out, batch.positions, freqs, inverse=True)
    grouped = out.flatten(1).unflatten(-1, (config.o_groups, -1))  # [T, G, H / G * d]
    return ops.linear(ops.grouped_linear(grouped, params.wo_a).flatten(1), params.wo_b), picks


def _compress(
    x: Tensor, params: AttentionParams, layer: LayerSpec, cache: LayerCacheHandle, batch: TokenBatch,
    context: ModelContext,
) -> None:  # fmt: skip
    """Write the entries that close in this batch, and with an indexer their keys."""
    assert params.compressor is not None
    entries = _compression(x, params.compressor, cache.compressor, cache.entries, layer, context)
    if params.indexer is None:
        context.ops.compress(entries.kv, entries.gate, entries.spec, entries.state, entries.pages, batch)
    else:
        keys = _compression(x, params.indexer.compressor, cache.index_compressor, cache.index_keys, layer, context)
        context.ops.compress_pair(entries, keys, batch)


def _compression(
    x: Tensor, params: CompressorParams, state: CompressorView | None, pages: PagedView | None, layer: LayerSpec,
    context: ModelContext,
) -> Compression:  # fmt: skip
    assert state is not None and pages is not None
    spec = CompressorSpec(
        ratio=layer.ratio,
        ape=params.ape,
        norm_weight=params.norm,
        freqs=context.freqs(layer),
        eps=context.config.rms_norm_eps,
        dtype=context.dtype,
    )
    kv, gate = (context.ops.linear(x, weight, out_dtype=accumulator(x)) for weight in (params.wkv, params.wgate))
    return Compression(kv, gate, spec, state, pages)


def _pick_entries(
    x: Tensor, query_latent: Tensor, params: IndexerParams, layer: LayerSpec, cache: LayerCacheHandle,
    batch: TokenBatch, context: ModelContext,
) -> Tensor:  # fmt: skip
    """The entries each token reads [T, index_topk]."""
    ops, config = context.ops, context.config
    assert cache.index_keys is not None
    q = ops.linear(query_latent, params.wq_b).unflatten(-1, (config.index_n_heads, -1))  # [T, Hi, Di]
    q = ops.index_queries(q, batch.positions, context.freqs(layer), cache.index_keys.rows.format)
    scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    weights = ops.linear(x, params.weights_proj).to(accumulator(x)) * scale  # [T, Hi]
    return ops.index_topk(q, weights, cache.index_keys, batch, ratio=layer.ratio, top_k=config.index_topk)
