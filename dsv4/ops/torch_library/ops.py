"""Every op of `torch.ops.dsv4`: its launcher, what its results look like, and how its dataclasses are spelled out.

A row format is (kind, dim, rope_dim): see formats/rows.py. A batch is positions, slots, chunk_starts, chunk_ends and
the block table, of which the ring's ops read three. Pages are data and scales. A compressor is two lists: `inputs` [kv,
gate, ape, norm_weight, freqs], which are read, and `state` [own kv, own score, following kv, following score, page
data, page scales], or the same without the following two for HCA, which is written.

x of a linear layer is rows, or the codes of rows where `x_scale` is given. Schemas know no lists of dtypes: `in_fp32`
says of every result whether it is fp32, else it has x's dtype (bf16 for codes). Of experts, `format` is that of the
routed ones and `width` the inner one. `attention_inputs` reads of index keys only the format: `index_kind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace as Op
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView, WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation, QuantFormat
from dsv4.ops import attention, compress, hyper, indexer, linear, moe, norm, router, rows, sampling, select
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.torch_library.define import Spelling, define, spelled
from dsv4.ops.torch_library.weights import bundle_of, experts_of, shuffled_of, weight_of, weights_of

FP8, FP32, INT64 = torch.float8_e4m3fn, torch.float32, torch.int64

# ---- arguments ----


def _together(first: Tensor | None, second: Tensor | None, what: str) -> bool:
    """Whether two tensors that belong together are there."""
    if (first is None) != (second is None):
        raise KernelInputError(f"expected {what}, or neither, found only one")
    return first is not None


def _format(op: Op) -> RowFormat:
    return RowFormat(RowKind(op.kind), op.dim, getattr(op, "rope_dim", 0))


def _batch(op: Op) -> TokenBatch:
    """With positions where the op has no tensor, which it does not read."""
    names = ("positions", "slots", "chunk_starts", "chunk_ends", "block_table")
    return TokenBatch(op.positions, *(getattr(op, name, op.positions) for name in names))


def _entries(op: Op) -> PagedView | None:
    there = _together(op.entry_data, op.entry_scales, "data and scales of the entries")
    return PagedView(RowStore(op.entry_data, op.entry_scales, _format(op))) if there else None


def _index_keys(op: Op) -> PagedView | None:
    if op.index_kind is None or op.index_q is None:
        return None
    return PagedView(RowStore(op.ring_data, op.ring_scales, RowFormat(RowKind(op.index_kind), op.index_q.shape[-1])))


def _compression(inputs: Sequence[Tensor], state: Sequence[Tensor], op: Op, fmt: RowFormat) -> compress.Compression:
    if len(inputs) != 5 or len(state) not in (4, 6):
        raise KernelInputError(f"expected 5 inputs and 4 or 6 tensors of state, found {len(inputs)} and {len(state)}")
    kv, gate, ape, norm_weight, freqs = inputs
    following = TailView(state[2], state[3]) if len(state) == 6 else None
    return compress.Compression(
        kv=kv,
        gate=gate,
        spec=compress.CompressorSpec(op.ratio, ape, norm_weight, freqs, op.eps, op.dtype),
        state=CompressorView(TailView(state[0], state[1]), following),
        pages=PagedView(RowStore(state[-2], state[-1], fmt)),
    )


def _entry_job(op: Op) -> compress.Compression:
    return _compression(op.inputs, op.state, op, _format(op))


def _key_job(op: Op) -> compress.Compression:
    return _compression(op.index_inputs, op.index_state, op, RowFormat(RowKind(op.index_kind), op.index_dim))


def _activation(op: Op) -> Tensor | QuantActivation:
    return op.x if op.x_scale is None else QuantActivation(op.x, op.x_scale)


def _codes_given(op: Op) -> QuantActivation | None:
    there = _together(op.codes, op.codes_scale, "codes and their scale")
    return QuantActivation(op.codes, op.codes_scale) if there else None


FORMAT = "str kind, SymInt dim, SymInt rope_dim"
RING = "Tensor{0} ring_data, Tensor{0} ring_scales, Tensor{0} ring_positions"
COMPRESSOR_NUMBERS = f"SymInt ratio, float eps, ScalarType dtype, {FORMAT}"
STATE = ", ".join(
    f"Tensor{'!' if field.name in ('last_tokens', 'token_counts') else ''} {field.name}"
    for field in fields(sampling.SamplingState)
)

ABSENT = Spelling(lambda op: None)
FALSE = Spelling(lambda op: False)
SETTINGS = Spelling(
    lambda op: hyper.HyperSettings(op.num_iters, op.hc_eps, op.norm_eps),
    "SymInt num_iters, float hc_eps, float norm_eps",
)
ROW_FORMAT = Spelling(_format, after=FORMAT)
NEW_ROWS = Spelling(lambda op: RowStore(op.data, op.scales, _format(op)), "Tensor data, Tensor scales")
READ_WINDOW, WINDOW = (
    Spelling(
        lambda op: WindowView(RowStore(op.ring_data, op.ring_scales, _format(op)), op.ring_positions),
        RING.format(written),
        FORMAT,
    )
    for written in ("", "!")
)
RING_BATCH = Spelling(_batch, "Tensor positions, Tensor slots, Tensor chunk_ends")
BATCH = Spelling(_batch, "Tensor positions, Tensor slots, Tensor chunk_starts, Tensor chunk_ends, Tensor block_table")
X = Spelling(_activation, "Tensor x, Tensor? x_scale")
WEIGHT = Spelling(lambda op: weight_of(op.weight), "Tensor[] weight")

# ---- results ----


def _like(name: str) -> Any:
    return lambda op: getattr(op, name).new_empty(getattr(op, name).shape)


def _nothing(op: Op) -> None:
    return None


def _codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale of rows [..., K]."""
    scale_shape = (*values.shape[:-1], values.shape[-1] // ACTIVATION_GROUP)
    return values.new_empty(values.shape, dtype=FP8), values.new_empty(scale_shape, dtype=torch.uint8)


def _rows(op: Op) -> tuple[Tensor, Tensor]:
    sizes, num_rows = (_format(op).data_bytes, _format(op).scale_bytes), op.kv.shape[0]
    data, scales = (op.kv.new_empty(num_rows, size, dtype=torch.uint8) for size in sizes)
    return data, scales


def _hyper(streams: Tensor, keep_streams: bool, has_codes: bool) -> tuple[Tensor, ...]:
    """streams (none if they are an argument), hidden, codes and scale (none without), post, comb."""
    num_tokens, num_streams, width = streams.shape
    hidden = streams.new_empty(num_tokens, width)
    post = hidden.new_empty(num_tokens, num_streams, dtype=FP32)
    comb = hidden.new_empty(num_tokens, num_streams, num_streams, dtype=FP32)
    codes = _codes(hidden if has_codes else hidden.new_empty(0))
    return streams.new_empty(streams.shape if keep_streams else 0), hidden, *codes, post, comb


def _entered(op: Op) -> tuple[Tensor, ...]:
    if op.source.dim() == 3:
        return _hyper(op.source, False, op.has_codes)
    num_streams = op.fn.shape[1] // op.source.shape[-1]
    return _hyper(op.source.unsqueeze(1).expand(-1, num_streams, -1), True, op.has_codes)


def _premixed(op: Op) -> tuple[Tensor, ...]:
    _, hidden, _, _, post, comb = _hyper(op.streams, False, False)
    return hidden, post, comb


def _hyper_results(result: hyper.HyperInput, op: Op) -> tuple[Tensor, ...]:
    none = result.hidden.new_empty(0)
    is_argument = "source" in vars(op) and op.source.dim() == 3
    quant = result.quant or QuantActivation(none.to(FP8), none.to(torch.uint8))
    return none if is_argument else result.streams, result.hidden, *spelled(quant, none), result.post, result.comb


def _head(op: Op) -> Tensor:
    return op.streams.new_empty(op.streams.shape[0], op.streams.shape[2])


def _choice(rows_chosen: Tensor, op: Op) -> tuple[Tensor, Tensor]:
    shape = rows_chosen.shape[0], op.top_k
    return rows_chosen.new_empty(shape, dtype=INT64), rows_chosen.new_empty(shape, dtype=FP32)


def _picks(op: Op) -> Tensor:
    num_rows, num_scores = op.scores.shape
    return op.scores.new_empty(num_rows, op.k if op.ascending else min(op.k, num_scores), dtype=INT64)


def _expert_order(op: Op) -> tuple[Tensor, ...]:
    num_pairs = op.experts.shape[0] * op.experts.shape[1]
    bound = moe.max_tiles(num_pairs, op.num_experts, op.tile_rows)
    sizes = op.num_experts, op.num_experts + 1, num_pairs, bound, bound
    return tuple(op.experts.new_empty(size, dtype=torch.int32) for size in sizes)


def _logprobs(op: Op) -> tuple[Tensor, Tensor, Tensor]:
    shape = op.logits.shape[0], min(op.num_top, op.logits.shape[1])
    top = op.logits.new_empty(shape, dtype=INT64), op.logits.new_empty(shape, dtype=FP32)
    return op.logits.new_empty(shape[0], dtype=FP32), *top


def _attention_inputs(op: Op) -> tuple[Tensor, ...]:
    index_queries = op.q.new_empty(0) if op.index_q is None else op.index_q.new_empty(op.index_q.shape)
    return op.q.new_empty(op.q.shape), *_rows(op), index_queries


def _plain_dtype(op: Op) -> torch.dtype:
    return op.x.dtype if getattr(op, "x_scale", None) is None else torch.bfloat16


def _product(op: Op, width: int) -> Tensor:
    return op.x.new_empty(op.x.shape[0], width, dtype=op.out_dtype or _plain_dtype(op))


def _products(op: Op) -> list[Tensor]:
    is_list = op.segments is None
    sizes = [weight.shape[0] for weight in weights_of(op.weights)] if is_list else op.segments[2::4]
    dtypes = [FP32 if is_wide else _plain_dtype(op) for is_wide in op.in_fp32]
    return [op.x.new_empty(op.x.shape[0], size, dtype=d) for size, d in zip(sizes, dtypes, strict=True)]


def _grouped(op: Op) -> Tensor:
    num_tokens, num_groups, _ = op.x.shape
    return op.x.new_empty(num_tokens, num_groups, op.weight[0].shape[0] // num_groups)


def _apart(results: Sequence[Tensor], _: Op) -> list[Tensor]:
    """Results that share memory, copied: those of an op may not."""
    seen: set[int] = set()
    apart = []
    for result in results:
        owner = result.untyped_storage().data_ptr()
        apart.append(result.clone() if owner in seen and result.numel() else result)
        seen.add(owner)
    return apart


# ---- the ops ----

OPS = (
    define(norm.rms_norm, _like("x")),
    define(norm.rms_norm_quant, lambda op: (op.x.new_empty(op.x.shape if op.keep_plain else 0), *_codes(op.x))),
    define(rows.rope, _like("x")),
    define(rows.window_rows, _rows, {"row_format": ROW_FORMAT}),
    define(rows.append_swa, _nothing, {"rows": NEW_ROWS, "window": WINDOW, "batch": RING_BATCH}),
    define(hyper.hc_enter, _entered, {"settings": SETTINGS}, _hyper_results),
    define(
        hyper.hc_boundary, lambda op: _hyper(op.streams, True, op.has_codes),
        {"settings": SETTINGS, "has_rounded": FALSE}, _hyper_results,
    ),
    define(hyper.hc_pre, _premixed),
    define(hyper.hc_post, _like("streams")),
    define(hyper.hc_head, _head),
    define(hyper.hc_head_norm, _head),
    define(select.topk_select, _picks),
    define(router.activation_topk, lambda op: _choice(op.logits, op)),
    define(router.route, lambda op: _choice(op.x, op)),
    define(
        sampling.sample, lambda op: op.logits.new_empty(op.logits.shape[0], dtype=INT64),
        {
            "rows": Spelling(
                lambda op: sampling.SamplingRows(op.slots, op.positions, op.mask, op.is_masked),
                "Tensor slots, Tensor positions, Tensor? mask, Tensor? is_masked",
            ),
            "state": Spelling(
                lambda op: sampling.SamplingState(
                    **{field.name: getattr(op, field.name) for field in fields(sampling.SamplingState)}
                ),
                STATE,
            ),
        },
    ),
    define(sampling.sampled_logprobs, _logprobs),
    define(sampling.resolve_tokens, lambda op: torch.empty_like(op.token_ids)),
    define(
        attention.attention_inputs, _attention_inputs,
        {"window": WINDOW, "keys": Spelling(_index_keys, after="str? index_kind=None"), "batch": RING_BATCH},
    ),
    define(
        attention.sparse_attention, _like("q"),
        {
            "rows": NEW_ROWS, "window": READ_WINDOW, "batch": BATCH,
            "entries": Spelling(_entries, "Tensor? entry_data, Tensor? entry_scales"),
        },
    ),
    define(
        compress.compress, _nothing,
        {
            "kv": Spelling(lambda op: _entry_job(op).kv, "Tensor[] inputs"),
            "gate": Spelling(lambda op: _entry_job(op).gate),
            "spec": Spelling(lambda op: _entry_job(op).spec, after=COMPRESSOR_NUMBERS),
            "state": Spelling(lambda op: _entry_job(op).state, "Tensor![] state"),
            "pages": Spelling(lambda op: _entry_job(op).pages),
            "batch": BATCH,
        },
    ),
    define(
        compress.compress_pair, _nothing,
        {
            "attention": Spelling(_entry_job, "Tensor[] inputs, Tensor![] state", COMPRESSOR_NUMBERS),
            "index": Spelling(
                _key_job, "Tensor[] index_inputs, Tensor![] index_state", "str index_kind, SymInt index_dim"
            ),
            "batch": BATCH,
        },
    ),
    define(
        indexer.index_topk, lambda op: op.q.new_empty(op.q.shape[0], op.top_k, dtype=INT64),
        {
            "keys": Spelling(
                lambda op: PagedView(RowStore(op.key_data, op.key_scales, _format(op))),
                "Tensor key_data, Tensor key_scales", "str kind, SymInt dim",
            ),
            "batch": BATCH,
        },
    ),
    define(linear.linear, lambda op: _product(op, op.weight[0].shape[0]), {"x": X, "weight": WEIGHT}),
    define(
        linear.linears, _products,
        {
            "x": X,
            "weights": Spelling(
                lambda op: weights_of(op.weights) if op.segments is None else bundle_of(op.weights, op.segments),
                "Tensor[] weights",
            ),
            "out_dtypes": Spelling(lambda op: [FP32 if wide else None for wide in op.in_fp32], "bool[] in_fp32"),
            "codes": Spelling(
                _codes_given, after="Tensor? codes=None, Tensor? codes_scale=None, SymInt[]? segments=None"
            ),
        },
        _apart,
    ),
    define(linear.grouped_linear, _grouped, {"weight": WEIGHT}),
    define(
        moe.moe, _like("x"),
        {
            "routed": Spelling(
                lambda op: experts_of(
                    op.routed, QuantFormat(op.format), op.routed[0].shape[:1], op.width, op.x.shape[-1]
                ),
                "Tensor[] routed",
            ),
            "shared": Spelling(
                lambda op: experts_of(op.shared, QuantFormat.FP8_BLOCK, (), op.width, op.x.shape[-1]),
                "Tensor[] shared", "str format, SymInt width",
            ),
            "rounded": ABSENT,
        },
    ),
    define(moe.expert_sort, _expert_order),
    define(
        moe.fp4_linear, lambda op: _product(op, op.shape[0]),
        {
            "weight": Spelling(
                lambda op: shuffled_of(op.weight, QuantFormat(op.format), op.shape),
                "Tensor[] weight, str format, SymInt[] shape",
            )
        },
    ),
)  # fmt: skip
