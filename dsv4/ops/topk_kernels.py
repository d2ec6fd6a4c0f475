"""Kernels of ops/topk.py: the k-th largest by bisection on orderable bits, and the chosen written in ascending order.

A threshold is found bit by bit: one comparison and one addition a value and bit, against eight times as much for a
histogram without shared-memory atomics. Keys are `ordered_bits`; EMPTY, below all of them, is a value that takes no
part. The k-th largest key and how many of its equals to take are properties of the row: no division of the work shows.

* `topk_short_kernel`: a row in the registers of one program; where it is long, a bound comes first, as below.
* `topk_long_kernel`: a row in chunks. Every GROUP neighbours have a maximum, kept as the upper 16 bits of its key,
  rounded down. The k-th largest of (folded) maxima is a lower bound of the k-th largest score that commonly lets pass
  little more than k. Each program finds that bound itself and lists what passes in its chunk; the last one of a row to
  arrive selects among the lists exactly: as they lie, if each fits its share of LIST places. Rows of up to DIRECT
  scores, which may be a small part of what there is room for, have too few maxima: one program takes them whole.
"""

from __future__ import annotations

from dsv4.ops.tl_math import ordered_bits
from dsv4.ops.tl_utils import jit, tl

GROUP = 8  # neighbours that share a maximum
FOLDED = 4096  # maxima a program bisects
LIST = 4096  # listed keys that are bisected in registers
_GROUP, _FOLDED, _LIST = tl.constexpr(GROUP), tl.constexpr(FOLDED), tl.constexpr(LIST)
_EMPTY = tl.constexpr(-0x80000000)
_EMPTY_HALF = tl.constexpr(-0x8000)
_MINUS_INFINITY = tl.constexpr(-0x7F800001)  # as `ordered_bits` gives it


# ---- pieces ----


@jit
def load_keys(row_ptr, columns, stride_n, length, size, DROP: tl.constexpr):
    """Keys of a row's scores at `columns`: -inf from `length` on, where nothing is read, and EMPTY from `size` on.

    `DROP`: -inf and NaN take no part either.
    """
    is_read = columns < tl.minimum(length, size)
    score = tl.load(row_ptr + columns.to(tl.int64) * stride_n, mask=is_read, other=float("-inf"))
    keys = ordered_bits(score.to(tl.float32))
    if DROP:
        return tl.where(keys == _MINUS_INFINITY, _EMPTY, keys)
    return tl.where(columns < size, keys, _EMPTY)


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
def group_maxima(keys):
    """int32 [N] -> int16 [N / GROUP]: the upper halves of the groups' largest keys."""
    return (tl.max(tl.reshape(keys, [keys.shape[0] // _GROUP, _GROUP]), axis=1) >> 16).to(tl.int16)


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
def bisect_from(keys, wanted, low):
    """The largest t with `wanted` or more keys at or above it, given that so many reach `low`; or one with just
    `wanted`.
    """
    high = tl.max(keys, 0)
    below = low ^ high  # the bits below the common ones
    threshold = low
    if below < 0:
        threshold = bisect(keys, wanted, 0, _EMPTY, 1 << 30)
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
    is_tie = ((keys == threshold) & (keys != _EMPTY)).to(tl.int32)
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


# ---- one program a row, the row in registers ----


@jit
def _select_row(
    row_ptr, picks_ptr, stride_n, length, size,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """The K largest of a row of up to BLOCK columns, ascending, then -1 where there are fewer."""
    keys = load_keys(row_ptr, tl.arange(0, BLOCK), stride_n, length, size, DROP)
    wanted = tl.minimum(K, tl.sum((keys != _EMPTY).to(tl.int32), 0))
    if BLOCK // _GROUP >= 2 * K:
        # fewer bits and an eighth of the values first
        half = bisect(group_maxima(keys).to(tl.int32), K, K // 16, _EMPTY_HALF, 1 << 14)
        threshold = bisect_from(keys, wanted, half << 16)
    else:
        threshold = bisect(keys, wanted, 0, _EMPTY, 1 << 30)
    budget = wanted - tl.sum((keys > threshold).to(tl.int32), 0)
    if BLOCK <= TILE:
        store_chosen(picks_ptr, keys, tl.arange(0, BLOCK), threshold, 0, 0, budget)
    else:
        # read again in tiles: addresses of the whole row would not fit the registers
        num_sure, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in range(0, size, TILE):
            columns = start + tl.arange(0, TILE)
            tile = load_keys(row_ptr, columns, stride_n, length, size, DROP)
            num_sure, num_ties = store_chosen(picks_ptr, tile, columns, threshold, num_sure, num_ties, budget)
    store_padding(picks_ptr, wanted, K, K_BLOCK)


@jit(do_not_specialize=("num_columns",))
def topk_short_kernel(
    scores_ptr, lengths_ptr, picks_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ASCENDING: tl.constexpr, DROP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    picks_ptr += row * K
    length, size = row_sizes(lengths_ptr, row, num_columns, ASCENDING, HAS_LENGTHS)
    if (size <= K) & (not DROP):
        store_first(picks_ptr, size, K, K_BLOCK)
    else:
        _select_row(scores_ptr + row * stride_st, picks_ptr, stride_sn, length, size, K, K_BLOCK, BLOCK, TILE, DROP)


# ---- a row in chunks ----


@jit(do_not_specialize=("num_columns", "num_maxima"))
def topk_maxima_kernel(
    scores_ptr, lengths_ptr, maxima_ptr, arrivals_ptr, num_columns, num_maxima, stride_st, stride_sn,
    BLOCK: tl.constexpr, ASCENDING: tl.constexpr, DROP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Maxima of BLOCK scores, and the row's count of arrivals back to 0. Blocks beyond the row's size have none."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length, size = row_sizes(lengths_ptr, row, num_columns, ASCENDING, HAS_LENGTHS)
    if block == 0:
        tl.store(arrivals_ptr + row, 0)
    start = block * BLOCK
    if start < size:
        columns = start + tl.arange(0, BLOCK)
        keys = load_keys(scores_ptr + row * stride_st, columns, stride_sn, length, size, DROP)
        lanes = block * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
        tl.store(maxima_ptr + row * num_maxima + lanes, group_maxima(keys), mask=lanes * _GROUP < size)


@jit
def _lower_bound(maxima_ptr, size, K: tl.constexpr, FOLDS: tl.constexpr):
    """A key that at least K keys of the row reach, and commonly few more; EMPTY if the maxima are too few to say."""
    num = (size + _GROUP - 1) // _GROUP
    folded = tl.full([_FOLDED], _EMPTY_HALF, tl.int32)
    for start in range(0, num, FOLDS * _FOLDED):
        places = start + tl.arange(0, FOLDS)[:, None] * _FOLDED + tl.arange(0, _FOLDED)[None, :]
        tile = tl.load(maxima_ptr + places, mask=places < num, other=_EMPTY_HALF).to(tl.int32)
        folded = tl.maximum(folded, tl.max(tile, axis=0))
    half = bisect(folded, K, K // 16, _EMPTY_HALF, 1 << 14)
    return half << 16


@jit(do_not_specialize=("num_columns", "num_maxima", "list_len"))
def topk_long_kernel(
    scores_ptr, lengths_ptr, maxima_ptr, arrivals_ptr, counts_ptr, keys_ptr, list_ptr, picks_ptr,
    num_columns, num_maxima, list_len, stride_st, stride_sn,
    K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, FOLDS: tl.constexpr,
    DIRECT: tl.constexpr,
    ASCENDING: tl.constexpr, DROP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Lists of columns [T, list_len], each chunk's where its chunk begins, and the first keys of each [T, LIST]. Where
    these are not all, the second half of the lists has them side by side.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    picks_ptr += row * K
    length, size = row_sizes(lengths_ptr, row, num_columns, ASCENDING, HAS_LENGTHS)
    if (size <= K) & (not DROP):
        if chunk == 0:
            store_first(picks_ptr, size, K, K_BLOCK)
    elif size <= DIRECT:
        if chunk == 0:
            row_ptr = scores_ptr + row * stride_st
            _select_row(row_ptr, picks_ptr, stride_sn, length, size, K, K_BLOCK, DIRECT, TILE, DROP)
    else:
        row_ptr = scores_ptr + row * stride_st
        list_ptr += row * list_len
        counts_ptr += row * CHUNKS
        keys_ptr += row * _LIST
        chunk_len = ((size + CHUNKS - 1) // CHUNKS + 15) // 16 * 16
        start = chunk * chunk_len
        end = tl.minimum(start + chunk_len, size)
        # on their way while the bound is found
        keys = load_keys(row_ptr, start + tl.arange(0, TILE), stride_sn, length, end, DROP)
        bound = _lower_bound(maxima_ptr + row * num_maxima, size, K, FOLDS)
        SLOTS: tl.constexpr = _LIST // CHUNKS
        num_listed = tl.full([], 0, tl.int32)
        for tile in range(start, end, TILE):
            columns = tile + tl.arange(0, TILE)
            following = load_keys(row_ptr, columns + TILE, stride_sn, length, end, DROP)
            passes = ((keys >= bound) & (keys != _EMPTY)).to(tl.int32)
            places = num_listed + tl.cumsum(passes, 0) - 1
            tl.store(list_ptr + start + places, columns, mask=passes == 1)
            tl.store(keys_ptr + chunk * SLOTS + places, keys, mask=(passes == 1) & (places < SLOTS))
            num_listed += tl.sum(passes, 0)
            keys = following
        tl.store(counts_ptr + chunk, num_listed)
        tl.debug_barrier()  # every thread's list entries before the arrival
        is_last = True
        if CHUNKS > 1:
            is_last = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == CHUNKS - 1
        if is_last:
            _select_lists(
                row_ptr, list_ptr, keys_ptr, counts_ptr, picks_ptr, list_len, chunk_len, bound, stride_sn, length, size,
                K, K_BLOCK, CHUNKS, DROP,
            )  # fmt: skip


@jit
def _select_lists(
    row_ptr, list_ptr, keys_ptr, counts_ptr, picks_ptr, list_len, chunk_len, bound, stride_n, length, size,
    K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNKS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """The K largest of all chunks' lists."""
    SLOTS: tl.constexpr = _LIST // CHUNKS
    lanes = tl.arange(0, _LIST)
    # all on their way at once: which of them count is known with the counts
    keys = tl.load(keys_ptr + lanes, cache_modifier=".cg")
    columns = tl.load(
        list_ptr + tl.minimum(lanes // SLOTS * chunk_len + lanes % SLOTS, list_len - 1), cache_modifier=".cg"
    )
    own_counts = tl.load(counts_ptr + lanes // SLOTS, cache_modifier=".cg")
    counts = tl.load(counts_ptr + tl.arange(0, CHUNKS), cache_modifier=".cg")
    num_listed = tl.sum(counts, 0)
    if tl.max(counts, 0) <= SLOTS:
        keys = tl.where(lanes % SLOTS < own_counts, keys, _EMPTY)
        wanted = tl.minimum(K, num_listed)
        threshold = bisect_from(keys, wanted, bound)
        num_above = tl.sum((keys > threshold).to(tl.int32), 0)
        store_chosen(picks_ptr, keys, columns, threshold, 0, 0, wanted - num_above)
        store_padding(picks_ptr, wanted, K, K_BLOCK)
    elif CHUNKS == 1:
        _select_listed(row_ptr, list_ptr, picks_ptr, num_listed, stride_n, length, size, K, K_BLOCK, DROP)
    else:
        joined_ptr = list_ptr + list_len // 2
        _join_lists(list_ptr, joined_ptr, counts_ptr, chunk_len, CHUNKS)
        tl.debug_barrier()
        _select_listed(row_ptr, joined_ptr, picks_ptr, num_listed, stride_n, length, size, K, K_BLOCK, DROP)


@jit
def _join_lists(list_ptr, joined_ptr, counts_ptr, chunk_len, CHUNKS: tl.constexpr):
    """The chunks' lists side by side, still ascending."""
    BLOCK: tl.constexpr = _LIST // CHUNKS
    chunks = tl.arange(0, CHUNKS)
    counts = tl.load(counts_ptr + chunks, cache_modifier=".cg")
    sources = chunks * chunk_len
    targets = tl.cumsum(counts, 0) - counts
    for first in range(0, tl.max(counts, 0), BLOCK):
        lanes = first + tl.arange(0, BLOCK)[None, :]
        mask = lanes < counts[:, None]
        columns = tl.load(list_ptr + sources[:, None] + lanes, mask=mask, cache_modifier=".cg")
        tl.store(joined_ptr + targets[:, None] + lanes, columns, mask=mask)


@jit
def _listed(row_ptr, list_ptr, start, num_listed, stride_n, length, size, DROP: tl.constexpr):
    """LIST keys from place `start` of the list on, and their columns; EMPTY behind its end."""
    lanes = start + tl.arange(0, _LIST)
    columns = tl.load(list_ptr + lanes, mask=lanes < num_listed, other=size, cache_modifier=".cg")
    return load_keys(row_ptr, columns, stride_n, length, size, DROP), columns


@jit
def _count_listed(row_ptr, list_ptr, num_listed, stride_n, length, size, threshold, DROP: tl.constexpr):
    total = tl.zeros([_LIST], dtype=tl.int32)
    for start in range(0, num_listed, _LIST):
        keys, _columns = _listed(row_ptr, list_ptr, start, num_listed, stride_n, length, size, DROP)
        total += (keys >= threshold).to(tl.int32)
    return tl.sum(total, 0)


@jit
def _bisect_listed(row_ptr, list_ptr, num_listed, stride_n, length, size, wanted, DROP: tl.constexpr):
    """`bisect` of a list of any length, read again for every bit: many equal scores are slow but right."""
    threshold = tl.full([], _EMPTY, tl.int32)
    num = _count_listed(row_ptr, list_ptr, num_listed, stride_n, length, size, 0, DROP)
    if num >= wanted:
        threshold = tl.full([], 0, tl.int32)
    step = tl.full([], 1 << 30, tl.int32)
    while (step > 0) & (num != wanted):
        num = _count_listed(row_ptr, list_ptr, num_listed, stride_n, length, size, threshold + step, DROP)
        threshold = tl.where(num >= wanted, threshold + step, threshold)
        step = step >> 1
    return threshold


@jit
def _select_listed(
    row_ptr, list_ptr, picks_ptr, num_listed, stride_n, length, size,
    K: tl.constexpr, K_BLOCK: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """The K largest of the listed, ascending, then -1 where there are fewer."""
    wanted = tl.minimum(K, num_listed)
    if num_listed <= _LIST:
        keys, columns = _listed(row_ptr, list_ptr, 0, num_listed, stride_n, length, size, DROP)
        threshold = bisect(keys, wanted, 0, _EMPTY, 1 << 30)
        num_above = tl.sum((keys > threshold).to(tl.int32), 0)
        store_chosen(picks_ptr, keys, columns, threshold, 0, 0, wanted - num_above)
    else:
        threshold = _bisect_listed(row_ptr, list_ptr, num_listed, stride_n, length, size, wanted, DROP)
        num_above = _count_listed(row_ptr, list_ptr, num_listed, stride_n, length, size, threshold + 1, DROP)
        num_sure, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for start in range(0, num_listed, _LIST):
            keys, columns = _listed(row_ptr, list_ptr, start, num_listed, stride_n, length, size, DROP)
            num_sure, num_ties = store_chosen(
                picks_ptr, keys, columns, threshold, num_sure, num_ties, wanted - num_above
            )
    store_padding(picks_ptr, wanted, K, K_BLOCK)


# ---- best first ----


@jit
def _composite(keys, columns):
    """int64 >= 0: 32 bits of score, 24 of reversed index: a total order."""
    return ((keys.to(tl.int64) + 0x80000000) << 24) | (0xFFFFFF - columns).to(tl.int64)


@jit(do_not_specialize=("num_columns",))
def topk_rank_kernel(
    scores_ptr, lengths_ptr, picks_ptr, out_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Place each of the K chosen by the number of chosen that come before it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * stride_st
    length, size = row_sizes(lengths_ptr, row, num_columns, False, HAS_LENGTHS)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(picks_ptr + row * K + lanes, mask=lanes < K, other=num_columns).to(tl.int32)
    own = _composite(load_keys(row_ptr, columns, stride_sn, length, size, False), columns)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, K, OTHERS):
        others = start + tl.arange(0, OTHERS)
        other_columns = tl.load(picks_ptr + row * K + others, mask=others < K, other=num_columns).to(tl.int32)
        keys = load_keys(row_ptr, other_columns, stride_sn, length, size, False)
        composite = tl.where(others < K, _composite(keys, other_columns), -1)
        rank += tl.sum((composite[None, :] > own[:, None]).to(tl.int32), 1)
    tl.store(out_ptr + row * K + rank, columns.to(tl.int64), mask=lanes < K)
