"""What the kernels of ops/select share: keys, the k-th largest by bisection on their bits, and the chosen written in
ascending order.

A threshold is found bit by bit: one comparison and one addition a value and bit, against eight times as much for a
histogram without shared-memory atomics. Keys are `ordered_bits`; EMPTY, below all of them, is a value that takes no
part. The k-th largest key and how many of its equals to take are properties of the row: no division of the work shows.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import ordered_bits

EMPTY = tl.constexpr(-0x80000000)
EMPTY_HALF = tl.constexpr(-0x8000)  # its upper 16 bits
MINUS_INFINITY = tl.constexpr(-0x7F800001)  # as `ordered_bits` gives it


@jit
def load_keys(row_ptr, columns, stride_n, length, size, DROP: tl.constexpr):
    """Keys of a row's scores at `columns`: -inf from `length` on, where nothing is read, and EMPTY from `size` on.

    `DROP`: -inf and NaN take no part either.
    """
    is_read = columns < tl.minimum(length, size)
    score = tl.load(row_ptr + columns.to(tl.int64) * stride_n, mask=is_read, other=float("-inf"))
    keys = ordered_bits(score.to(tl.float32))
    if DROP:
        return tl.where(keys == MINUS_INFINITY, EMPTY, keys)
    return tl.where(columns < size, keys, EMPTY)


@jit
def row_sizes(lengths_ptr, row, num_columns, ASCENDING: tl.constexpr, HAS_LENGTHS: tl.constexpr):
    """How many scores of a row may be read, and how many may be chosen: best first must choose k in any case."""
    length = num_columns
    if HAS_LENGTHS:
        length = tl.maximum(tl.minimum(tl.load(lengths_ptr + row), num_columns), 0).to(tl.int32)
    if ASCENDING:
        return length, length
    return length, num_columns


@jit
def bisect(keys, wanted, slack, FIRST: tl.constexpr, HIGHEST: tl.constexpr):
    """The largest t with `wanted` or more keys at or above it; FIRST if there is none.

    FIRST is the smallest number of the keys' format, HIGHEST its highest bit but the sign. Stops early at a t with no
    more than wanted + slack.
    """
    threshold = tl.full([], FIRST, tl.int32)
    step = tl.full([], HIGHEST, tl.int32)
    num = tl.sum((keys >= 0).to(tl.int32), 0)
    if num >= wanted:
        threshold = tl.full([], 0, tl.int32)
    is_done = (num >= wanted) & (num <= wanted + slack)
    while (step > 0) & (is_done == 0):
        num = tl.sum((keys >= threshold + step).to(tl.int32), 0)
        is_enough = num >= wanted
        threshold = tl.where(is_enough, threshold + step, threshold)
        is_done = is_enough & (num <= wanted + slack)
        step = step >> 1
    return threshold


@jit
def bisect_from(keys, wanted, low, high):
    """The largest t with `wanted` or more keys at or above it, given that as many reach `low`, and that none is above
    `high`; or one with just `wanted`.
    """
    below = low ^ high  # the bits below the common ones
    threshold = low
    if below < 0:
        threshold = bisect(keys, wanted, 0, EMPTY, 1 << 30)
    else:
        below |= below >> 1
        below |= below >> 2
        below |= below >> 4
        below |= below >> 8
        below |= below >> 16
        threshold = low & ~below
        step = below - (below >> 1)
        is_done = step < 0
        while (step > 0) & (is_done == 0):
            num = tl.sum((keys >= threshold + step).to(tl.int32), 0)
            threshold = tl.where(num >= wanted, threshold + step, threshold)
            is_done = num == wanted
            step = step >> 1
    return threshold


@jit
def store_chosen(picks_ptr, keys, columns, threshold, num_sure, num_ties, budget):
    """Columns of the keys above the threshold, and of its first `budget` equals, behind `num_sure` and `num_ties`
    already met.

    Returns both numbers with this tile's.
    """
    # both running counts in one scan: a tile has fewer than 2^15 keys
    is_sure = (keys > threshold).to(tl.int32)
    is_tie = ((keys == threshold) & (keys != EMPTY)).to(tl.int32)
    both = is_sure | (is_tie << 16)
    running = tl.cumsum(both, 0)
    sure = num_sure + (running & 0xFFFF)
    ties = num_ties + (running >> 16)
    is_chosen = (is_sure == 1) | ((is_tie == 1) & (ties <= budget))
    tl.store(picks_ptr + sure + tl.minimum(ties, budget) - 1, columns.to(tl.int64), mask=is_chosen)
    total = tl.sum(both, 0)
    return num_sure + (total & 0xFFFF), num_ties + (total >> 16)


@jit
def store_first(picks_ptr, num, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """0 .. num - 1, then -1."""
    lanes = tl.arange(0, K_BLOCK)
    tl.store(picks_ptr + lanes, tl.where(lanes < num, lanes, -1).to(tl.int64), mask=lanes < K)


@jit
def store_padding(picks_ptr, num, K: tl.constexpr, K_BLOCK: tl.constexpr):
    lanes = tl.arange(0, K_BLOCK)
    tl.store(picks_ptr + lanes, tl.full([K_BLOCK], -1, tl.int64), mask=(lanes >= num) & (lanes < K))
