"""One attention sublayer: low-rank queries, one shared K=V row, compressed entries, grouped output projection."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, LayerCacheHandle, PagedView
from dsv4.config.layers import LayerSpec
from dsv4.formats.tensors import QuantActivation
from dsv4.model.context import ModelContext
from dsv4.model.parameters import AttentionParams, CompressorParams, OnInput, OnLatent
from dsv4.ops.compress import Compression, CompressorSpec
from dsv4.ops.hyper import HyperInput
from dsv4.ops.lib.invariant import accumulator
from dsv4.ops.linear import takes_codes


@dataclass(frozen=True)
class SharedWindow:
    """What all rows of a draft block read alike: the last `length` ring rows up to the block's last one.

    `batch` is the block's with every position at the last of its block and every chunk behind it, so that the keys are
    those of one query and all of them, the block's own too, come from the ring. A ring of at least `length` rows.
    """

    batch: TokenBatch
    length: int


def attention(
    start: HyperInput, params: AttentionParams, layer: LayerSpec, cache: LayerCacheHandle, batch: TokenBatch,
    context: ModelContext, shared: SharedWindow | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The normed input [T, D] of `start` -> the output [T, D], and on CSA layers the picked entries [T, k].

    With `shared`, a layer without entries reads that instead of every token its own window.
    """
    ops, config, freqs = context.ops, context.config, context.freqs(layer)
    eps = config.rms_norm_eps
    projected = _project_input(start, params, context)
    with context.branches.beside(_compression_call(projected, params, layer, cache, batch, context)):
        q, index_q = _project_latent(projected.latent, params, context)  # [T, H, d], [T, Hi, Di]
        # a chunk this short replaces no row that it reads: see `attention_inputs_ref`
        appends = shared is not None or batch.num_tokens <= cache.window.ring_len - config.sliding_window + 1
        q, rows, index_q = ops.attention_inputs(
            q, projected.kv, index_q, params.kv_norm, freqs, eps, cache.window, cache.index_keys, batch, appends=appends
        )

    picks = None
    if index_q is not None:
        assert projected.index_weights is not None
        picks = _pick_entries(index_q, projected.index_weights, layer, cache, batch, context)
    if shared is None:
        out = ops.sparse_attention(
            q, rows, cache.window, cache.entries, picks, params.sink, batch,
            window_len=config.sliding_window, freqs=freqs,
        )  # [T, H, d]  # fmt: skip
    else:
        assert cache.entries is None and cache.window.ring_len >= shared.length, (layer, shared.length)
        out = ops.sparse_attention(
            q, rows, cache.window, None, None, params.sink, shared.batch, window_len=shared.length
        )
        out = ops.rope(out, batch.positions, freqs, inverse=True)  # each row from its own position
    if not appends:
        ops.append_swa(rows, cache.window, batch)
    grouped = out.flatten(1).unflatten(-1, (config.o_groups, -1))  # [T, G, H / G * d]
    if takes_codes(params.wo_b):
        return ops.linear(ops.grouped_codes(grouped, params.wo_a), params.wo_b, out.dtype), picks
    return ops.linear(ops.grouped_linear(grouped, params.wo_a).flatten(1), params.wo_b), picks


def _project_input(start: HyperInput, params: AttentionParams, context: ModelContext) -> OnInput[Tensor]:
    """Everything that reads the sublayer's input: the query latent (not yet normed), kv, and what the compressors and
    the indexer take, in at least fp32 where they pool it."""
    x, weights = start.hidden, params.on_input
    wide = accumulator(x)
    out_dtypes = OnInput(
        latent=x.dtype, kv=x.dtype, compressor_kv=wide, compressor_gate=wide, index_kv=wide, index_gate=wide,
        index_weights=x.dtype,
    )[: len(weights)]  # fmt: skip
    return OnInput(*context.ops.linears(x, params.input_bundle or weights, out_dtypes, start.quant))


def _project_latent(latent: Tensor, params: AttentionParams, context: ModelContext) -> OnLatent[Tensor]:
    """latent [T, q_lora_rank] -> queries [T, H, d], and on CSA layers the indexer's [T, Hi, Di]."""
    ops, config, weights = context.ops, context.config, params.on_latent
    normed: Tensor | QuantActivation
    if all(takes_codes(weight) for weight in weights):
        _, normed = ops.rms_norm_quant(latent, params.q_norm, config.rms_norm_eps, False)
    else:
        normed = ops.rms_norm(latent, params.q_norm, config.rms_norm_eps)
    made = OnLatent(*ops.linears(normed, params.latent_bundle or weights, [latent.dtype] * len(weights)))
    return OnLatent(
        made.q.unflatten(-1, (config.num_attention_heads, -1)),
        None if made.index_q is None else made.index_q.unflatten(-1, (config.index_n_heads, -1)),
    )


def _compression_call(
    projected: OnInput[Tensor], params: AttentionParams, layer: LayerSpec, cache: LayerCacheHandle,
    batch: TokenBatch, context: ModelContext,
) -> Callable[[], None] | None:  # fmt: skip
    """What writes the entries that close in this batch, and with an indexer their keys. None on SWA layers."""
    if params.compressor is None:
        return None
    entries = _compression(
        projected.compressor_kv, projected.compressor_gate, params.compressor, cache.compressor, cache.entries, layer,
        context,
    )  # fmt: skip
    if params.indexer is None:
        return partial(
            context.ops.compress, entries.kv, entries.gate, entries.spec, entries.state, entries.pages, batch
        )
    keys = _compression(
        projected.index_kv, projected.index_gate, params.indexer.compressor, cache.index_compressor, cache.index_keys,
        layer, context,
    )  # fmt: skip
    return partial(context.ops.compress_pair, entries, keys, batch)


def _compression(
    kv: Tensor | None, gate: Tensor | None, params: CompressorParams, state: CompressorView | None,
    pages: PagedView | None, layer: LayerSpec, context: ModelContext,
) -> Compression:  # fmt: skip
    assert kv is not None and gate is not None and state is not None and pages is not None
    spec = CompressorSpec(
        ratio=layer.ratio,
        ape=params.ape,
        norm_weight=params.norm,
        freqs=context.freqs(layer),
        eps=context.config.rms_norm_eps,
        dtype=context.dtype,
    )
    return Compression(kv, gate, spec, state, pages)


def _pick_entries(
    q: Tensor, weights: Tensor, layer: LayerSpec, cache: LayerCacheHandle, batch: TokenBatch, context: ModelContext
) -> Tensor:
    """Index queries [T, Hi, Di] and head weights [T, Hi] as projected -> the entries each token reads [T, k]."""
    config = context.config
    assert cache.index_keys is not None
    scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return context.ops.index_topk(
        q, weights, cache.index_keys, batch, ratio=layer.ratio, top_k=config.index_topk, scale=scale
    )
