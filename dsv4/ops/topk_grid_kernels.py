"""Kernel of ops/topk.py for few long rows: one launch, a row spread over programs that run at once and wait for each
other.

A program has lines of LINE neighbouring columns, far apart: where the best lie close together they still belong to many
programs. It reads them once, into registers, and

1. leaves a few maxima of them (upper halves of keys). All wait. The k-th largest of all maxima is a bound that at least
   k keys reach, and commonly few more: every program finds it for itself;
2. adds what passes the bound to a list, wherever there is room. All wait. Every program finds the k-th largest of the
   list for itself, and places its share of the list by counting the chosen in lower columns.

Where more pass than the list holds (masses of equal scores), the k-th largest is found by digits of 4 bits: every
program counts what reaches each of 16 thresholds, one wait each. Slow but right.

Waiting needs all programs of the grid on the GPU: the launcher
sees to it that there are no more than multiprocessors. The interpreter runs one program after the other and cannot
wait: it runs the kernel once for every PHASE, and a program ends where it would wait for the others. PHASE is -1 on a
GPU.
"""

from __future__ import annotations

from dsv4.ops.tl_utils import jit, tl
from dsv4.ops.topk_kernels import bisect, bisect_from, load_keys, row_sizes, store_chosen, store_first, store_padding

LINE = 32
GRID_LIST = 4096  # keys that are searched in registers
NUM_DIGITS = 8
BASE = 16  # thresholds of a digit
NUM_PHASES = NUM_DIGITS + 4  # maxima, list, digits, counts, and the end
TILE = 1024  # of a chunk, where the list overflows
SHARE = 8  # entries of the list that a program places at once
# places in a row's scratch, int32
LIST_KEYS = 32  # behind the length of the list
LIST_COLUMNS = LIST_KEYS + GRID_LIST
COUNTS = LIST_COLUMNS + GRID_LIST

_LINE, _LIST, _BASE = (tl.constexpr(value) for value in (LINE, GRID_LIST, BASE))
_NUM_DIGITS, _TILE, _SHARE = (tl.constexpr(value) for value in (NUM_DIGITS, TILE, SHARE))
_LIST_KEYS, _LIST_COLUMNS, _COUNTS = (tl.constexpr(value) for value in (LIST_KEYS, LIST_COLUMNS, COUNTS))
_EMPTY, _EMPTY_HALF = tl.constexpr(-0x80000000), tl.constexpr(-0x8000)

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


def scratch_len(programs: int, num_maxima: int) -> int:
    """Of a row: the list, its length, counts of every exchange, maxima of all programs."""
    return COUNTS + (NUM_DIGITS + 1) * programs * BASE + num_maxima


@jit
def wait_for_all(counter_ptr, PROGRAMS: tl.constexpr):
    """Until PROGRAMS (a power of two) programs came here; what they stored before can then be loaded past L1 (".cg").

    The counter, int64, stays a multiple of PROGRAMS between launches.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _WAIT_PTX, "=r,l,l", [counter_ptr, tl.full([], PROGRAMS - 1, tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@jit
def _load_lines(
    row_ptr, program, stride_n, length, size,
    PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Keys of this program's lines [THREADS, CHUNK / THREADS], and their columns."""
    lanes = tl.arange(0, THREADS)[:, None] + tl.arange(0, CHUNK // THREADS)[None, :] * THREADS
    columns = (lanes // _LINE * PROGRAMS + program) * _LINE + lanes % _LINE
    return load_keys(row_ptr, columns, stride_n, length, size, DROP), columns


@jit
def _load_list(scratch_ptr, start, LEN: tl.constexpr):
    """LEN keys and columns of the list from place `start` on, whether they were stored or not."""
    lanes = start + tl.arange(0, LEN)
    keys = tl.load(scratch_ptr + _LIST_KEYS + lanes, cache_modifier=".cg")
    return keys, tl.load(scratch_ptr + _LIST_COLUMNS + lanes, cache_modifier=".cg")


@jit
def _place_listed(
    scratch_ptr, picks_ptr, keys, columns, own_keys, own_columns, program, total, bound,
    K: tl.constexpr, K_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """This program's shares of the list: those among the K best, each where the chosen in lower columns end."""
    wanted = tl.minimum(K, total)
    keys = tl.where(tl.arange(0, keys.shape[0]) < total, keys, _EMPTY)
    threshold = bisect_from(keys, wanted, bound)
    budget = wanted - tl.sum((keys > threshold).to(tl.int32), 0)
    # both counts in one sum: a list has fewer than 2^15 keys
    is_tie = (keys == threshold) & (keys != _EMPTY)
    marks = tl.where(keys > threshold, 1, tl.where(is_tie, 1 << 16, 0))
    first = program * _SHARE
    while first < total:
        is_listed = (first + tl.arange(0, _SHARE) < total) & (own_keys != _EMPTY)
        before = tl.sum(tl.where(columns[None, :] < own_columns[:, None], marks[None, :], 0), 1)
        ties = before >> 16
        is_chosen = (own_keys > threshold) | ((own_keys == threshold) & (ties < budget))
        places = (before & 0xFFFF) + tl.minimum(ties, budget)
        tl.store(picks_ptr + places, own_columns.to(tl.int64), mask=is_chosen & is_listed)
        first += PROGRAMS * _SHARE
        own_keys, own_columns = _load_list(scratch_ptr, tl.minimum(first, _LIST - _SHARE), _SHARE)
    if program == 0:
        store_padding(picks_ptr, wanted, K, K_BLOCK)


@jit
def _place_counted(
    row_ptr, counters_ptr, scratch_ptr, picks_ptr, program, stride_n, length, size,
    K: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, DROP: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """The K best of a row that has more, without a list. A program now has neighbouring columns."""
    counts_ptr = scratch_ptr + _COUNTS
    programs, steps = tl.arange(0, PROGRAMS), tl.arange(0, _BASE)
    start = program * CHUNK
    end = tl.minimum(start + CHUNK, size)
    threshold = tl.full([], _EMPTY, tl.int32)
    for digit in range(_NUM_DIGITS):
        shift = 28 - 4 * digit
        candidates = threshold + (steps << shift)
        counts = tl.zeros([_BASE], tl.int32)
        for tile in range(start, end, _TILE):
            keys = load_keys(row_ptr, tile + tl.arange(0, _TILE), stride_n, length, end, DROP)
            is_reached = (keys[None, :] >= candidates[:, None]) & (keys != _EMPTY)[None, :]
            counts += tl.sum(is_reached.to(tl.int32), 1)
        tl.store(counts_ptr + (digit * PROGRAMS + program) * _BASE + steps, counts)
        if PHASE < 0:
            wait_for_all(counters_ptr + 2 + digit, PROGRAMS)
        elif digit == PHASE - 2:
            return
        places = (digit * PROGRAMS + programs[:, None]) * _BASE + steps[None, :]
        totals = tl.sum(tl.load(counts_ptr + places, cache_modifier=".cg"), 0)
        threshold += (tl.sum((totals >= K).to(tl.int32), 0) - 1) << shift
    num_sure, num_ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for tile in range(start, end, _TILE):
        keys = load_keys(row_ptr, tile + tl.arange(0, _TILE), stride_n, length, end, DROP)
        num_sure += tl.sum((keys > threshold).to(tl.int32), 0)
        num_ties += tl.sum(((keys == threshold) & (keys != _EMPTY)).to(tl.int32), 0)
    last_ptr = counts_ptr + _NUM_DIGITS * PROGRAMS * _BASE
    tl.store(last_ptr + program, num_sure)
    tl.store(last_ptr + PROGRAMS + program, num_ties)
    if PHASE < 0:
        wait_for_all(counters_ptr + 2 + _NUM_DIGITS, PROGRAMS)
    elif PHASE == _NUM_DIGITS + 2:
        return
    all_sure = tl.load(last_ptr + programs, cache_modifier=".cg")
    all_ties = tl.load(last_ptr + PROGRAMS + programs, cache_modifier=".cg")
    budget = K - tl.sum(all_sure, 0)
    num_sure = tl.sum(tl.where(programs < program, all_sure, 0), 0)
    num_ties = tl.sum(tl.where(programs < program, all_ties, 0), 0)
    for tile in range(start, end, _TILE):
        columns = tile + tl.arange(0, _TILE)
        keys = load_keys(row_ptr, columns, stride_n, length, end, DROP)
        num_sure, num_ties = store_chosen(picks_ptr, keys, columns, threshold, num_sure, num_ties, budget)


# a stride that the compiler does not know to be 1 keeps one layout of registers: a thread's keys stay its own
@jit(do_not_specialize=("num_columns", "stride_sn"))
def topk_grid_kernel(
    scores_ptr, lengths_ptr, counters_ptr, scratch_ptr, picks_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, K_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, MAXIMA: tl.constexpr,
    THREADS: tl.constexpr, SMALL: tl.constexpr, SCRATCH: tl.constexpr,
    ASCENDING: tl.constexpr, DROP: tl.constexpr, HAS_LENGTHS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """MAXIMA of every program, SMALL places of the list read first, counters [T, 16], one a wait."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    picks_ptr += row * K
    counters_ptr += row * 16
    scratch_ptr += row * SCRATCH
    maxima_ptr = scratch_ptr + SCRATCH - PROGRAMS * MAXIMA
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
        keys, columns = _load_lines(row_ptr, program, stride_sn, length, size, PROGRAMS, CHUNK, THREADS, DROP)
        if PHASE <= 0:
            if MAXIMA <= THREADS:
                own_maxima = tl.max(tl.reshape(tl.max(keys, 1), [THREADS // MAXIMA, MAXIMA]), 0)
            else:
                own_maxima = tl.max(tl.reshape(keys, [MAXIMA, CHUNK // MAXIMA]), 1)
            own_maxima = own_maxima >> 16
            tl.store(maxima_ptr + program * MAXIMA + tl.arange(0, MAXIMA), own_maxima)
            if program == 0:
                tl.store(scratch_ptr, 0)
        if PHASE < 0:
            wait_for_all(counters_ptr, PROGRAMS)
        elif PHASE == 0:
            return
        maxima = tl.load(maxima_ptr + tl.arange(0, PROGRAMS * MAXIMA), cache_modifier=".cg")
        bound = bisect(maxima, K, K // 16, _EMPTY_HALF, 1 << 14) << 16
        if PHASE == -1 or PHASE == 1:
            passes = ((keys >= bound) & (keys != _EMPTY)).to(tl.int32)
            # a thread's keys stand side by side: the order of the list does not matter
            counts = tl.sum(passes, 1)
            places = (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(passes, 1) - 1
            places += tl.atomic_add(scratch_ptr, tl.sum(counts, 0), sem="relaxed")
            has_place = (passes == 1) & (places < _LIST)
            tl.store(scratch_ptr + _LIST_KEYS + places, keys, mask=has_place)
            tl.store(scratch_ptr + _LIST_COLUMNS + places, columns, mask=has_place)
        if PHASE < 0:
            wait_for_all(counters_ptr + 1, PROGRAMS)
        elif PHASE == 1:
            return
        # all on their way at once: which of them count is known with the total
        total = tl.load(scratch_ptr, cache_modifier=".cg")
        own_keys, own_columns = _load_list(scratch_ptr, program * _SHARE, _SHARE)
        keys, columns = _load_list(scratch_ptr, 0, SMALL)
        if total <= SMALL:
            _place_listed(
                scratch_ptr, picks_ptr, keys, columns, own_keys, own_columns, program, total, bound,
                K, K_BLOCK, PROGRAMS,
            )  # fmt: skip
        elif total <= _LIST:
            all_keys, all_columns = _load_list(scratch_ptr, 0, _LIST)
            _place_listed(
                scratch_ptr, picks_ptr, all_keys, all_columns, own_keys, own_columns, program, total, bound,
                K, K_BLOCK, PROGRAMS,
            )  # fmt: skip
        else:
            _place_counted(
                row_ptr, counters_ptr, scratch_ptr, picks_ptr, program, stride_sn, length, size,
                K, PROGRAMS, CHUNK, DROP, PHASE,
            )  # fmt: skip
