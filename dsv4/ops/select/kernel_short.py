"""Kernels of ops/select for short rows, one program a row with the row in registers, and for the order best first.

Where a row is long for that, a bound comes first: the k-th largest of the maxima of every GROUP neighbours, of which
the upper 16 bits are compared.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.select.kernel_pieces import (
    EMPTY,
    EMPTY_HALF,
    bisect,
    bisect_from,
    load_keys,
    row_sizes,
    store_chosen,
    store_first,
    store_padding,
)

_GROUP = tl.constexpr(8)  # neighbours that share a maximum


@jit
def _select_row(
    row_ptr, picks_ptr, stride_n, length, size,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr,
):
    """The K largest of a row of up to BLOCK columns, ascending, then -1 where there are fewer."""
    keys = load_keys(row_ptr, tl.arange(0, BLOCK), stride_n, length, size, DROP)  # [BLOCK]
    wanted = tl.minimum(K, tl.sum((keys != EMPTY).to(tl.int32), 0))
    if BLOCK // _GROUP >= 2 * K:
        # fewer bits and an eighth of the values first
        maxima = tl.max(tl.reshape(keys, [BLOCK // _GROUP, _GROUP]), axis=1) >> 16  # [BLOCK / GROUP]
        half = bisect(maxima, K, K // 16, EMPTY_HALF, 1 << 14)
        threshold = bisect_from(keys, wanted, half << 16, tl.max(keys, 0))
    else:
        threshold = bisect(keys, wanted, 0, EMPTY, 1 << 30)
    budget = wanted - tl.sum((keys > threshold).to(tl.int32), 0)
    if BLOCK <= TILE:
        store_chosen(picks_ptr, keys, tl.arange(0, BLOCK), threshold, 0, 0, budget)
    else:
        # read again in tiles: addresses of the whole row would not fit the registers
        num_sure, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):
            columns = start + tl.arange(0, TILE)  # [TILE]
            tile = load_keys(row_ptr, columns, stride_n, length, size, DROP)  # [TILE]
            num_sure, num_ties = store_chosen(picks_ptr, tile, columns, threshold, num_sure, num_ties, budget)
    store_padding(picks_ptr, wanted, K, K_BLOCK)


@jit(do_not_specialize=("num_columns",))
def topk_short_kernel(
    scores_ptr, lengths_ptr, picks_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ASCENDING: tl.constexpr, DROP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    picks_ptr += row * K
    length, size = row_sizes(lengths_ptr, row, num_columns, ASCENDING, HAS_LENGTHS)
    if (size <= K) & (not DROP):
        store_first(picks_ptr, size, K, K_BLOCK)
    else:
        _select_row(scores_ptr + row * stride_st, picks_ptr, stride_sn, length, size, K, K_BLOCK, BLOCK, TILE, DROP)


# ---- best first ----


@jit
def _composite(keys, columns):
    """int64 >= 0: 32 bits of score, 24 of reversed index: a total order."""
    return ((keys.to(tl.int64) + 0x80000000) << 24) | (0xFFFFFF - columns).to(tl.int64)


@jit(do_not_specialize=("num_columns",))
def topk_rank_kernel(
    scores_ptr, lengths_ptr, picks_ptr, out_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):
    """Place each of the K chosen by the number of chosen that come before it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * stride_st
    length, size = row_sizes(lengths_ptr, row, num_columns, False, HAS_LENGTHS)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], of the chosen
    columns = tl.load(picks_ptr + row * K + lanes, mask=lanes < K, other=num_columns).to(tl.int32)
    own = _composite(load_keys(row_ptr, columns, stride_sn, length, size, False), columns)  # [BLOCK]
    rank = tl.zeros([BLOCK], dtype=tl.int32)  # [BLOCK]
    for start in range(0, K, OTHERS):
        others = start + tl.arange(0, OTHERS)  # [OTHERS]
        other_columns = tl.load(picks_ptr + row * K + others, mask=others < K, other=num_columns).to(tl.int32)
        keys = load_keys(row_ptr, other_columns, stride_sn, length, size, False)
        composite = tl.where(others < K, _composite(keys, other_columns), -1)  # [OTHERS]
        rank += tl.sum((composite[None, :] > own[:, None]).to(tl.int32), 1)
    tl.store(out_ptr + row * K + rank, columns.to(tl.int64), mask=lanes < K)
