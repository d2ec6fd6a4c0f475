"""Kernel of ops/select for long rows: one launch, a row spread over programs that run at once and wait.

A program has lines of LINE neighbouring columns, far apart: where the best lie close together they still belong to many
programs. It

1. leaves a few maxima of them (upper halves of keys). All wait. The k-th largest of all maxima is a bound that at least
   k keys reach, and commonly few more: every program finds it for itself;
2. adds what passes the bound to a list, wherever there is room. All wait. Every program finds the k-th largest of the
   list for itself, and places a share of the chosen by counting those in lower columns.

Where more pass than the list holds (masses of equal scores), the k-th largest is found by digits of 4 bits: every
program counts what reaches each of 16 thresholds, one wait each. Slow but right.

Scores are compared as they are, in tiles; where a program has no more than a tile of them they stay in registers, else
they are read again, from L2, for the list. Programs of several rows share multiprocessors, so that some read while
others wait, and what counts is how little each does; with as many rows as programs none waits. Those of FEW rows have a
multiprocessor each, and what counts is how long the chain of steps is:

|                      | FEW                                    | else                                                |
|----------------------|----------------------------------------|-----------------------------------------------------|
| places in the list   | one addition for all of a program's    | one for a warp's, where any pass: no sums before it |
| a program's share    | places of the list, compared with all  | the chosen of a part of the columns, among          |
|                      | others                                 | themselves                                          |

Waiting needs all programs of the grid on the GPU: the launcher sees to it that there are no more than fit. The
interpreter runs one program after the other and cannot wait: it runs the kernel once for every PHASE, and a program
ends where it would wait for the others. PHASE is -1 on a GPU.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import ordered_bits
from dsv4.ops.select.kernel_list import _LIST, _list_passing, _load_list, _load_packed, _prefetch, _unpack
from dsv4.ops.select.kernel_pieces import (
    EMPTY,
    EMPTY_HALF,
    MINUS_INFINITY,
    bisect,
    bisect_from,
    load_keys,
    row_sizes,
    store_chosen,
    store_first,
    store_padding,
)

LINE = 32
NUM_DIGITS = 8
BASE = 16  # thresholds of a digit
NUM_PHASES = NUM_DIGITS + 4  # maxima, list, digits, counts, and the end
COUNTERS = 16  # of a row, one a wait
COUNTS = 32  # where they lie in a row's scratch: behind the length of the list

_LINE, _BASE, _NUM_DIGITS = (tl.constexpr(value) for value in (LINE, BASE, NUM_DIGITS))
_COUNTERS, _COUNTS = tl.constexpr(COUNTERS), tl.constexpr(COUNTS)
_PIECE = tl.constexpr(1024)  # of the list, looked through together: more would not fit the registers
_COUNTED = tl.constexpr(512)  # columns looked at together where the list overflows
_SHARE = tl.constexpr(8)  # entries of the list that a program places at once

# One thread counts itself in and looks until the counter, which grows by a power of two a launch, reaches its next
# multiple ($2: that power less 1).
_WAIT_PTX = tl.constexpr("""{ .reg .pred p; .reg .u32 t; .reg .u64 seen, last;
    mov.u32 t, %tid.x;
    setp.ne.u32 p, t, 0;
    @p bra DONE;
    atom.add.acq_rel.gpu.global.u64 seen, [$1], 1;
    or.b64 last, seen, $2;
    add.u64 seen, seen, 1;
LOOK:
    setp.gt.u64 p, seen, last;
    @p bra DONE;
    ld.acquire.gpu.global.u64 seen, [$1];
    bra LOOK;
DONE:
    mov.u32 $0, 0; }""")


def scratch_len(programs: int, num_maxima: int, k_block: int) -> int:
    """int32 of a row: length of the list, counts of every exchange, what every program places, maxima of all."""
    return COUNTS + (NUM_DIGITS + 1) * programs * BASE + programs * k_block + num_maxima


@jit
def arrive_and_wait(counter_ptr, PROGRAMS: tl.constexpr):
    """Until PROGRAMS (a power of two) programs came here; what they stored before can then be loaded past L1 (".cg").
    One by itself waits for its own threads only.

    The counter, int64, stays a multiple of PROGRAMS between launches.
    """
    tl.debug_barrier()
    if PROGRAMS > 1:
        last = tl.full([], PROGRAMS - 1, tl.int64)
        tl.inline_asm_elementwise(_WAIT_PTX, "=r,l,l", [counter_ptr, last], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


# ---- maxima ----


@jit
def _load_lines(
    row_ptr, program, first, stride_n, length,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr, THREADS: tl.constexpr, IS_FULL: tl.constexpr,
):
    """Scores [THREADS, TILE / THREADS] of this program's lines from line `first` of the row on, -inf from `length` on,
    and their columns. `IS_FULL`: all of them lie below `length`.
    """
    # a thread's are far apart by constants: one address serves all
    lanes = tl.arange(0, THREADS)
    places = ((lanes // _LINE * PROGRAMS + program + first) * _LINE + lanes % _LINE)[:, None]
    steps = tl.arange(0, TILE // THREADS)[None, :] * (THREADS * PROGRAMS)
    columns = places + steps
    pointers = row_ptr + places.to(tl.int64) * stride_n + steps.to(tl.int64) * stride_n
    if IS_FULL:
        return tl.load(pointers).to(tl.float32), columns
    else:
        return tl.load(pointers, mask=columns < length, other=float("-inf")).to(tl.float32), columns


@jit
def _store_maxima(maxima_ptr, scores, MAXIMA: tl.constexpr):
    """Upper halves of the keys of MAXIMA maxima of scores [threads, scores of a thread]."""
    keys = ordered_bits(scores)
    THREADS: tl.constexpr = keys.shape[0]
    if MAXIMA <= THREADS:
        maxima = tl.max(tl.reshape(tl.max(keys, 1), [THREADS // MAXIMA, MAXIMA]), 0)
    else:
        maxima = tl.max(tl.reshape(keys, [MAXIMA, THREADS * keys.shape[1] // MAXIMA]), 1)
    tl.store(maxima_ptr + tl.arange(0, MAXIMA), maxima >> 16)


@jit
def _last_chosen(list_ptr, keys, highest, total, wanted, bound):
    """Of the `wanted` best of the listed: the smallest key, and the highest column with it."""
    threshold = bisect_from(keys, wanted, bound, highest)
    # both counts in one sum: a list has fewer than 2^15 keys
    is_tie = (keys == threshold) & (keys != EMPTY)
    both = tl.sum(tl.where(keys > threshold, 1, tl.where(is_tie, 1 << 16, 0)), 0)
    budget = wanted - (both & 0xFFFF)
    last = tl.full([], 1 << 24, tl.int32)
    if (both >> 16) > budget:
        # the lowest columns: the `budget` largest distances from 2^24
        again, columns = _load_list(list_ptr, total, keys.shape[0])
        distances = tl.where((again == threshold) & (again != EMPTY), (1 << 24) - columns, -1)
        last -= bisect(distances, budget, 0, EMPTY, 1 << 24)
    return threshold, last


@jit
def _is_chosen(keys, columns, threshold, last):
    return (keys > threshold) | ((keys == threshold) & (keys != EMPTY) & (columns <= last))


@jit
def _place_share(
    list_ptr, picks_ptr, keys, columns, own, program, total, threshold, last, PROGRAMS: tl.constexpr
):
    """This program's places of the list: those chosen, each where the chosen in lower columns end."""
    ones = _is_chosen(keys, columns, threshold, last).to(tl.int32)
    first = program * _SHARE
    while first < total:
        # the next ones, while these are placed; where there are none nothing is asked for, that the end need not wait
        following = first + PROGRAMS * _SHARE
        next_ptr = list_ptr + following + tl.arange(0, _SHARE)
        ahead = tl.load(next_ptr, mask=following < total, other=0, cache_modifier=".cg")
        own_keys, own_columns = _unpack(own, total - first)
        is_chosen = _is_chosen(own_keys, own_columns, threshold, last)
        places = tl.sum(tl.where(columns[None, :] < own_columns[:, None], ones[None, :], 0), 1)
        tl.store(picks_ptr + places, own_columns.to(tl.int64), mask=is_chosen)
        own = ahead
        first = following


@jit
def _collect_own(own_ptr, keys, columns, threshold, last, start, end, num_before, num_own):
    """Add columns of the chosen from `start` to `end` to this program's own, behind `num_own`.

    Returns how many there are then, and how many of the chosen lie before `start`.
    """
    is_chosen = _is_chosen(keys, columns, threshold, last)
    is_own = (is_chosen & (columns >= start) & (columns < end)).to(tl.int32)
    tl.store(own_ptr + num_own + tl.cumsum(is_own, 0) - 1, columns, mask=is_own == 1)
    num_before += tl.sum((is_chosen & (columns < start)).to(tl.int32), 0)
    return num_own + tl.sum(is_own, 0), num_before


@jit
def _place_part(
    list_ptr, own_ptr, picks_ptr, keys, columns, program, size, total, threshold, last,
    PROGRAMS: tl.constexpr, RANKED: tl.constexpr,
):
    """The chosen of this program's part of the columns, one part behind the other, in ascending order: each where the
    chosen in lower columns end.
    """
    part = (size + PROGRAMS - 1) // PROGRAMS
    start = program * part
    num_own, num_before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if keys.shape[0] <= _PIECE:
        num_own, num_before = _collect_own(
            own_ptr, keys, columns, threshold, last, start, start + part, num_before, num_own
        )
    else:
        for first in range(0, total, _PIECE):
            some_keys, some_columns = _load_list(list_ptr + first, total - first, _PIECE)
            num_own, num_before = _collect_own(
                own_ptr, some_keys, some_columns, threshold, last, start, start + part, num_before, num_own
            )
    tl.debug_barrier()
    for first in range(0, num_own, RANKED):
        lanes = first + tl.arange(0, RANKED)
        own = tl.load(own_ptr + lanes, mask=lanes < num_own, other=0, cache_modifier=".cg")
        lower = tl.zeros([RANKED, 32], tl.int32)  # a warp's lanes side by side: counts meet within a warp
        for start_others in range(0, num_own, 128):
            for quarter in tl.static_range(4):
                places = start_others + quarter * 32 + tl.arange(0, 32)
                others = tl.load(own_ptr + places, mask=places < num_own, other=1 << 24, cache_modifier=".cg")
                lower += (others[None, :] < own[:, None]).to(tl.int32)
        tl.store(picks_ptr + num_before + tl.sum(lower, 1), own.to(tl.int64), mask=lanes < num_own)


@jit
def _place_listed(
    list_ptr, own_ptr, picks_ptr, keys, columns, highest, own, program, size, total, bound,
    K: tl.constexpr, K_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, RANKED: tl.constexpr, FEW: tl.constexpr,
):
    """The K best of a list that is wholly in `keys` and `columns`, this program's share of them."""
    wanted = tl.minimum(K, total)
    threshold, last = _last_chosen(list_ptr, keys, highest, total, wanted, bound)
    if FEW:
        _place_share(list_ptr, picks_ptr, keys, columns, own, program, total, threshold, last, PROGRAMS)
    else:
        _place_part(
            list_ptr, own_ptr, picks_ptr, keys, columns, program, size, total, threshold, last, PROGRAMS, RANKED
        )
    if program == 0:
        store_padding(picks_ptr, wanted, K, K_BLOCK)


@jit
def _place_counted(
    row_ptr, counters_ptr, scratch_ptr, picks_ptr, program, stride_n, length, size,
    K: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, DROP: tl.constexpr, PHASE: tl.constexpr,
):
    """The K best of a row that has more, without a list. A program now has neighbouring columns."""
    counts_ptr = scratch_ptr + _COUNTS
    programs, steps = tl.arange(0, PROGRAMS), tl.arange(0, _BASE)
    start = program * CHUNK
    end = tl.minimum(start + CHUNK, size)
    threshold = tl.full([], EMPTY, tl.int32)
    for digit in range(_NUM_DIGITS):
        shift = 28 - 4 * digit
        candidates = threshold + (steps << shift)
        counts = tl.zeros([_BASE], tl.int32)
        for tile in range(start, end, _COUNTED):
            keys = load_keys(row_ptr, tile + tl.arange(0, _COUNTED), stride_n, length, end, DROP)
            is_reached = (keys[None, :] >= candidates[:, None]) & (keys != EMPTY)[None, :]
            counts += tl.sum(is_reached.to(tl.int32), 1)
        tl.store(counts_ptr + (digit * PROGRAMS + program) * _BASE + steps, counts)
        if PHASE < 0:
            arrive_and_wait(counters_ptr + 2 + digit, PROGRAMS)
        elif digit == PHASE - 2:
            return
        places = (digit * PROGRAMS + programs[:, None]) * _BASE + steps[None, :]
        totals = tl.sum(tl.load(counts_ptr + places, cache_modifier=".cg"), 0)
        threshold += (tl.sum((totals >= K).to(tl.int32), 0) - 1) << shift
    num_sure, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for tile in range(start, end, _COUNTED):
        keys = load_keys(row_ptr, tile + tl.arange(0, _COUNTED), stride_n, length, end, DROP)
        num_sure += tl.sum((keys > threshold).to(tl.int32), 0)
        num_ties += tl.sum(((keys == threshold) & (keys != EMPTY)).to(tl.int32), 0)
    last_ptr = counts_ptr + _NUM_DIGITS * PROGRAMS * _BASE
    tl.store(last_ptr + program, num_sure)
    tl.store(last_ptr + PROGRAMS + program, num_ties)
    if PHASE < 0:
        arrive_and_wait(counters_ptr + 2 + _NUM_DIGITS, PROGRAMS)
    elif PHASE == _NUM_DIGITS + 2:
        return
    all_sure = tl.load(last_ptr + programs, cache_modifier=".cg")
    all_ties = tl.load(last_ptr + PROGRAMS + programs, cache_modifier=".cg")
    budget = K - tl.sum(all_sure, 0)
    num_sure = tl.sum(tl.where(programs < program, all_sure, 0), 0)
    num_ties = tl.sum(tl.where(programs < program, all_ties, 0), 0)
    for tile in range(start, end, _COUNTED):
        columns = tile + tl.arange(0, _COUNTED)
        keys = load_keys(row_ptr, columns, stride_n, length, end, DROP)
        num_sure, num_ties = store_chosen(picks_ptr, keys, columns, threshold, num_sure, num_ties, budget)


# Row strides of unknown alignment: loads of single scores keep one layout of registers, from the scores to the list
@jit(do_not_specialize=("num_columns", "stride_st"))
def topk_long_kernel(
    scores_ptr, lengths_ptr, counters_ptr, scratch_ptr, lists_ptr, picks_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, K_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    THREADS: tl.constexpr, MAXIMA: tl.constexpr, SMALL: tl.constexpr, RANKED: tl.constexpr, SCRATCH: tl.constexpr,
    FEW: tl.constexpr, ASCENDING: tl.constexpr, DROP: tl.constexpr, HAS_LENGTHS: tl.constexpr, PHASE: tl.constexpr,
):
    """Lists int64 [T, LIST]: a score's bits and its column. MAXIMA of every program, SMALL places of the list read
    first, RANKED columns of a program ranked at once. Counters [T, COUNTERS].
    """
    KEEP: tl.constexpr = CHUNK <= TILE
    LINES: tl.constexpr = TILE // _LINE * PROGRAMS  # of all programs' tiles
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    picks_ptr += row * K
    counters_ptr += row * _COUNTERS
    scratch_ptr += row * SCRATCH
    list_ptr = lists_ptr + row * _LIST
    maxima_ptr = scratch_ptr + SCRATCH - PROGRAMS * MAXIMA
    own_ptr = maxima_ptr - (PROGRAMS - program) * K_BLOCK
    row_ptr = scores_ptr + row * stride_st
    length, size = row_sizes(lengths_ptr, row, num_columns, ASCENDING, HAS_LENGTHS)
    if (size <= K) & (not DROP):
        if program == 0:
            store_first(picks_ptr, size, K, K_BLOCK)
    else:
        if PHASE > 2:
            listed = tl.load(scratch_ptr)
            if listed <= _LIST:
                return
        # scores behind `length` count as -inf, if at all: a tile is read without a mask where it ends before
        num_full = length // (LINES * _LINE)
        if KEEP:
            scores, columns = _load_lines(row_ptr, program, 0, stride_sn, length, PROGRAMS, TILE, THREADS, False)
        _prefetch(counters_ptr, scratch_ptr, list_ptr, program, PROGRAMS, SMALL)
        if PHASE <= 0:
            best = tl.full([THREADS, TILE // THREADS], float("-inf"), tl.float32)
            if KEEP:
                best = tl.where(scores > best, scores, best)
            else:
                for tile in range(0, num_full):
                    full, _columns = _load_lines(
                        row_ptr, program, tile * LINES, stride_sn, length, PROGRAMS, TILE, THREADS, True
                    )
                    best = tl.where(full > best, full, best)
                if num_full * (LINES * _LINE) < length:
                    rest, _columns = _load_lines(
                        row_ptr, program, num_full * LINES, stride_sn, length, PROGRAMS, TILE, THREADS, False
                    )
                    best = tl.where(rest > best, rest, best)
            _store_maxima(maxima_ptr + program * MAXIMA, best, MAXIMA)
            if program == 0:
                tl.store(scratch_ptr, 0)
        if PHASE < 0:
            arrive_and_wait(counters_ptr, PROGRAMS)
        elif PHASE == 0:
            return
        maxima = tl.load(maxima_ptr + tl.arange(0, PROGRAMS * MAXIMA), cache_modifier=".cg")
        bound = bisect(maxima, K, K // 16, EMPTY_HALF, 1 << 14) << 16
        if PHASE == -1 or PHASE == 1:
            is_all = (bound <= MINUS_INFINITY) & (not DROP)
            lowest = tl.maximum(bound, MINUS_INFINITY + 1)
            lowest = (lowest ^ ((lowest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)  # of `ordered_bits`
            if KEEP:
                _list_passing(scratch_ptr, list_ptr, scores, columns, size, lowest, is_all, False, FEW)
            else:
                for tile in range(0, num_full):
                    full, places = _load_lines(
                        row_ptr, program, tile * LINES, stride_sn, length, PROGRAMS, TILE, THREADS, True
                    )
                    _list_passing(scratch_ptr, list_ptr, full, places, size, lowest, is_all, True, FEW)
                # with what is not read but takes part, as -inf
                for tile in range(num_full, (size + LINES * _LINE - 1) // (LINES * _LINE)):
                    rest, places = _load_lines(
                        row_ptr, program, tile * LINES, stride_sn, length, PROGRAMS, TILE, THREADS, False
                    )
                    _list_passing(scratch_ptr, list_ptr, rest, places, size, lowest, is_all, False, FEW)
        if PHASE < 0:
            arrive_and_wait(counters_ptr + 1, PROGRAMS)
        elif PHASE == 1:
            return
        # all on their way at once: which of them count is known with the total. The highest key, which only a short
        # list needs, is found before the branch: else ptxas asks for the list behind it
        total = tl.load(scratch_ptr, cache_modifier=".cg")
        keys, columns = _load_list(list_ptr, total, SMALL)
        own = _load_packed(list_ptr + program * _SHARE, _SHARE)
        highest = tl.max(keys, 0)
        if total <= SMALL:
            _place_listed(
                list_ptr, own_ptr, picks_ptr, keys, columns, highest, own, program, size, total, bound,
                K, K_BLOCK, PROGRAMS, RANKED, FEW,
            )
        elif total <= _LIST:
            all_keys, all_columns = _load_list(list_ptr, total, _LIST)
            _place_listed(
                list_ptr, own_ptr, picks_ptr, all_keys, all_columns, tl.max(all_keys, 0), own, program, size, total,
                bound, K, K_BLOCK, PROGRAMS, RANKED, FEW,
            )
        else:
            _place_counted(
                row_ptr, counters_ptr, scratch_ptr, picks_ptr, program, stride_sn, length, size,
                K, PROGRAMS, CHUNK, DROP, PHASE,
            )
