"""Quantisation points of the published inference left out, moved or added. Each plants itself in a `Bed`.

What a layer's cache rows are stored in is changed through the handle it is given: `*_rows` below take a handle and
return one.
"""

from dataclasses import replace
from functools import partial

import torch
from planted import Bed

from dsv4.cache.handle import LayerCacheHandle, PagedView
from dsv4.formats.e8m0 import E4M3_MAX
from dsv4.formats.fp8 import fp8_fake_quantize
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantTensor, as_loaded, dequantize
from dsv4.ops.indexer import turned_queries
from dsv4.ops.lib.hadamard import hadamard_ref
from dsv4.ops.lib.invariant import rows_matmul
from dsv4.ops.linear import LinearBundle, linears_ref, segments_ref
from dsv4.ops.moe import experts_ref


def _unquantised_linear(right, x, weight, out_dtype=None):
    return rows_matmul(x, dequantize(as_loaded(weight), torch.float32)).to(out_dtype or x.dtype)


def _without_codes(bed: Bed) -> None:
    """Norms hand on plain values, so that every linear layer quantises for itself and a mistake in it shows."""
    for module in ("block", "attention"):
        bed.patch.setattr(f"dsv4.model.{module}.takes_codes", lambda weight: False)


def _one_by_one(linear):
    """`linears` by `linear(right, x, weight, out_dtype)`, for plain inputs. Every product of a layer is made by it."""

    def linears(right, x, weights, out_dtypes, codes=None):
        weights = weights.weights if isinstance(weights, LinearBundle) else weights
        pairs = zip(weights, out_dtypes, strict=True)
        return tuple(linear(partial(_single, right), x, weight, out_dtype) for weight, out_dtype in pairs)

    return linears


def _single(linears, x, weight, out_dtype=None):
    return linears(x, (weight,), (out_dtype,))[0]


def _every_product_by(bed: Bed, linear) -> None:
    """Of attention and of experts."""

    def segments(right, x, weights, counts):
        pairs = zip(x.split(list(counts)), weights, strict=True)
        product = partial(linear, partial(_single, linears_ref))
        return torch.cat([torch.cat([product(rows, weight) for weight in own], -1) for rows, own in pairs])

    _without_codes(bed)
    bed.function(linears_ref, _one_by_one(linear))
    bed.function(segments_ref, segments)


def no_activation_quantisation(bed: Bed) -> None:
    _every_product_by(bed, _unquantised_linear)


def no_activation_quantisation_in_attention(bed: Bed) -> None:
    _without_codes(bed)
    bed.op("linear", _unquantised_linear)
    bed.op("linears", _one_by_one(_unquantised_linear))


def no_activation_quantisation_in_experts(bed: Bed) -> None:
    no_activation_quantisation(bed)
    bed.op("linear", lambda _, *args: _single(linears_ref, *args))
    bed.op("linears", lambda _, *args: linears_ref(*args))


def activation_scale_not_a_power_of_two(bed: Bed) -> None:
    def wrong(right, x, weight, out_dtype=None):
        if not isinstance(as_loaded(weight), QuantTensor):
            return right(x, weight, out_dtype)
        groups = x.float().unflatten(-1, (-1, ACTIVATION_GROUP))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX
        rounded = (groups / scale).to(torch.float8_e4m3fn).float() * scale
        return _unquantised_linear(right, rounded.flatten(-2), weight, out_dtype or x.dtype)

    _every_product_by(bed, wrong)


def fp8_before_wo_a(bed: Bed) -> None:
    bed.op("grouped_codes", lambda right, x, weight: right(fp8_fake_quantize(x, ACTIVATION_GROUP), weight))


def fp8_before_the_compressor(bed: Bed) -> None:
    """Of all projections only the compressors' ask for an output wider than their input."""
    _without_codes(bed)

    def wrong(right, x, weight, out_dtype):
        return right(x if out_dtype == x.dtype else fp8_fake_quantize(x, ACTIVATION_GROUP), weight, out_dtype)

    bed.op("linears", _one_by_one(wrong))


def routing_weight_after_w2(bed: Bed) -> None:
    def wrong(right, x, matrices, counts, limit, weight):
        return (right(x, matrices, counts, limit, None).float() * weight.unsqueeze(-1)).to(x.dtype)

    bed.function(experts_ref, wrong)


def no_hadamard(bed: Bed) -> None:
    bed.function(hadamard_ref, lambda right, x: x)


def no_quantisation_of_index_queries(bed: Bed) -> None:
    plain = RowFormat(RowKind.PLAIN, bed.llm.config.index_head_dim, itemsize=2)
    bed.function(turned_queries, lambda right, q, turn, _: hadamard_ref(right(q, turn, plain)))


# ---- what the cache holds ----


def _stored_as(rows: RowStore, row_format: RowFormat) -> RowStore:
    return RowStore.allocate(rows.data.shape[:-1], row_format, torch.bfloat16, rows.data.device)


def _plain(rows: RowStore) -> RowStore:
    return _stored_as(rows, RowFormat(RowKind.PLAIN, rows.format.dim, itemsize=2))


def plain_window_rows(handle: LayerCacheHandle) -> LayerCacheHandle:
    return replace(handle, window=replace(handle.window, rows=_plain(handle.window.rows)))


def plain_entry_rows(handle: LayerCacheHandle) -> LayerCacheHandle:
    return replace(handle, entries=handle.entries and PagedView(_plain(handle.entries.rows)))


def plain_kv_rows(handle: LayerCacheHandle) -> LayerCacheHandle:
    return plain_entry_rows(plain_window_rows(handle))


def rope_dims_in_fp8_rows(handle: LayerCacheHandle) -> LayerCacheHandle:
    rows = handle.window.rows
    return replace(
        handle, window=replace(handle.window, rows=_stored_as(rows, RowFormat(RowKind.ENTRY_FP8, rows.format.dim)))
    )


def plain_index_rows(handle: LayerCacheHandle) -> LayerCacheHandle:
    return replace(handle, index_keys=PagedView(_plain(handle.index_keys.rows)))


def fp8_index_rows(handle: LayerCacheHandle) -> LayerCacheHandle:
    rows = handle.index_keys.rows
    return replace(handle, index_keys=PagedView(_stored_as(rows, RowFormat(RowKind.INDEX_FP8, rows.format.dim))))
