"""The launch before the products of ops/moe: the sort of the pairs, and rows of x as the products take them."""

from __future__ import annotations

from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.moe.kernel_products import IN_PRODUCT, in_order
from dsv4.ops.moe.sort import _expert_sort_kernel


@jit
def _prepare_row(
    x_ptr, plain_ptr, rounded_ptr, row, K: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr,
    ROUNDED: tl.constexpr, ORDER: tl.constexpr,
):
    """Row of x [K] -> the same with zeros up to a multiple of 128 columns: as it is, and rounded to E4M3, whichever is
    asked for, in the order ORDER.
    """
    NUM: tl.constexpr = (K + 127) // 128
    for start in range(0, NUM, GROUPS):
        groups = start + tl.arange(0, GROUPS)[:, None]
        cols = groups * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + row * K + cols, mask=cols < K, other=0.0)  # [GROUPS, 128]
        x = in_order(x, ORDER)
        if PLAIN:
            tl.store(plain_ptr + row * (NUM * 128) + cols, x, mask=groups < NUM)
        if ROUNDED:
            tl.store(rounded_ptr + row * (NUM * 128) + cols, fake_quantize_e4m3(x), mask=groups < NUM)


@jit(do_not_specialize=("num_pairs", "num_chunks", "num_tiles", "num_sort_programs"))
def _moe_prepare_kernel(
    experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr, tile_starts_ptr,
    num_pairs, num_chunks, num_tiles, x_ptr, ordered_ptr, quantised_ptr, arrivals_ptr, num_sort_programs,
    E: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr, GROUPS: tl.constexpr, ARRIVALS: tl.constexpr, ARRIVALS_BLOCK: tl.constexpr,
    COUNT_HERE: tl.constexpr, PLAIN: tl.constexpr, ORDER: tl.constexpr,
):
    """The sort's CTAs, then one for each token: x as the products take it, and its arrivals set to zero."""
    program = tl.program_id(0)
    if program < num_sort_programs:
        _expert_sort_kernel(
            experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr, tile_starts_ptr,
            num_pairs, num_chunks, num_tiles, E, E_BLOCK, CHUNK, TILE_ROWS, TILES, COUNT_HERE,
        )
    else:
        token = (program - num_sort_programs).to(tl.int64)
        places = tl.arange(0, ARRIVALS_BLOCK)
        none_yet = tl.zeros([ARRIVALS_BLOCK], dtype=tl.int64)
        tl.store(arrivals_ptr + token * ARRIVALS + places, none_yet, mask=places < ARRIVALS)
        _prepare_row(x_ptr, ordered_ptr, quantised_ptr, token, D, GROUPS, PLAIN, True, ORDER)


@jit
def _prepare_rows_kernel(x_ptr, prepared_ptr, K: tl.constexpr, GROUPS: tl.constexpr, QUANTISE: tl.constexpr):
    """Rows of x as `_wide_linear_kernel` takes them, one for each CTA."""
    row = tl.program_id(0).to(tl.int64)
    _prepare_row(x_ptr, prepared_ptr, prepared_ptr, row, K, GROUPS, not QUANTISE, QUANTISE, IN_PRODUCT)
