"""Kernels of ops/compress, apart from their contract because the two together would be too long for one file.

A program owns a group of neighbouring tokens and makes the entries they close. The rings are read and written in one
launch, and programs run in any order, so everything that touches a request's rings belongs to one program, that of the
first token of its chunk: the entries that reach back before the chunk (CSA: two at most, HCA: one), then, after a
barrier, the tails. All other entries are made of this batch's rows alone. Nothing else is shared between programs.

An entry is pooled channel by channel in the oracle's order, rounded into a scratch row, and read back by `store_rows`,
which gives it the tile of `rms_norm`. CSA has one row a slot, all of them in flight at once: those of one entry or, of
many tokens, four index keys side by side. The program that pools an entry finishes it. HCA has 128 slots, taken as
eight runs side by side; its columns are spread over the programs of a group, each with its own columns of the rings,
and the last of them to arrive finishes the group's entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.compress.kernel_tail import TailArguments, _write_tails
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import exp_fp32
from dsv4.ops.lib.pdl import pdl_trigger, prefetch_l2
from dsv4.ops.rows.kernel_store import row_offsets, store_rows

POOL_RUNS = 8  # see `_sum_of_slots` in ops/compress
_POOL_RUNS = tl.constexpr(POOL_RUNS)


class BatchArguments(NamedTuple):
    """The tensors of a `TokenBatch`."""

    positions: Any
    slots: Any
    chunk_starts: Any
    chunk_ends: Any
    table: Any
    table_stride: int


class CompressorArguments(NamedTuple):
    """What differs between two compressors of one layer. `pooled` is scratch [T, DIM]; ape [RATIO, w] is contiguous."""

    kv: Any
    kv_stride: int
    gate: Any
    gate_stride: int
    ape: Any
    own: TailArguments
    following: TailArguments
    pooled: Any
    norm_weight: Any
    freqs: Any
    eps: float


@jit
def _prefetch(job, batch, base, num_tokens, WIDTH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Into L2, before a program of many tokens knows what it has to do: WIDTH columns of the first ROWS, and what it
    reads at the end. Whatever is in flight this way takes no registers.
    """
    prefetch_l2(batch.chunk_ends + base)
    prefetch_l2(job.freqs)
    prefetch_l2(job.norm_weight + tl.arange(0, DIM // 32) * 32)
    tokens = tl.minimum(base + tl.arange(0, ROWS), num_tokens - 1).to(tl.int64)[:, None]
    lines = tl.arange(0, WIDTH // 32)[None, :] * 32
    prefetch_l2(job.gate + tokens * job.gate_stride + lines)
    prefetch_l2(job.kv + tokens * job.kv_stride + lines)


# ---- pooling ----


@jit
def _overlapping_rows(
    tokens, slots, positions, starts, stride, tail, SLOT: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr,
    OWN_LEN: tl.constexpr, FOLLOWING_LEN: tl.constexpr,
):
    """Of one of the 2 * RATIO slots of CSA entries [P], oldest first: its position, is it fresh, its place in the
    batch, its place in the ring.
    """
    AGE: tl.constexpr = 2 * RATIO - 1 - SLOT
    LEN: tl.constexpr = FOLLOWING_LEN if SLOT < RATIO else OWN_LEN
    wanted = positions - AGE
    place = slots * tail.slot_stride + (tl.maximum(wanted, 0) % LEN) * tail.row_stride
    return wanted, wanted >= starts, (tokens - AGE) * stride + (0 if SLOT < RATIO else DIM), place


@jit
def _pool_overlapping(
    job, batch, tokens, mask, ROWS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, OWN_LEN: tl.constexpr,
    FOLLOWING_LEN: tl.constexpr,
):
    """Pool the CSA entries that `tokens` [ROWS, 1] close, where `mask`, into their scratch rows, slot after slot, as
    `ordered_sum`. Absent slots are 0 and -inf. One token may be a number: what is loaded for it then needs no other
    layout."""
    positions = tl.load(batch.positions + tokens, mask=mask, other=0).to(tl.int32)
    slots = tl.load(batch.slots + tokens, mask=mask, other=0)
    starts = tl.load(batch.chunk_starts + tokens, mask=mask, other=0).to(tl.int32)
    tokens = tokens.to(tl.int64)
    cols = tl.arange(0, DIM)[None, :]
    scores = ()  # 2 * RATIO of [ROWS, Dc]
    highest = tl.full([ROWS, DIM], float("-inf"), tl.float32)
    for index in tl.static_range(2 * RATIO):
        tail = job.following if index < RATIO else job.own
        wanted, is_fresh, row, place = _overlapping_rows(
            tokens, slots, positions, starts, job.gate_stride, tail, index, RATIO, DIM, OWN_LEN, FOLLOWING_LEN
        )
        source = tl.where(is_fresh, job.gate + row, tail.score + place)
        score = tl.load(source + cols, mask=mask & (wanted >= 0) & (cols >= 0), other=float("-inf"))
        # a ring holds scores; a fresh row is a gate that still needs its ape, whose row is the slot's place in its
        # block
        ape = job.ape + (index % RATIO) * 2 * DIM + (0 if index < RATIO else DIM)
        score = score + tl.load(ape + cols, mask=mask & is_fresh & (cols >= 0), other=0.0)
        highest = tl.maximum(highest, score)
        scores = scores + (score,)  # type: ignore  # noqa: RUF005
    total = tl.zeros([ROWS, DIM], tl.float32)
    pooled = tl.zeros([ROWS, DIM], tl.float32)
    for index in tl.static_range(2 * RATIO):
        tail = job.following if index < RATIO else job.own
        wanted, is_fresh, row, place = _overlapping_rows(
            tokens, slots, positions, starts, job.kv_stride, tail, index, RATIO, DIM, OWN_LEN, FOLLOWING_LEN
        )
        source = tl.where(is_fresh, job.kv + row, tail.kv + place)
        kv = tl.load(source + cols, mask=mask & (wanted >= 0) & (cols >= 0), other=0.0)
        # weight = softmax over slots, channel by channel; pooled = (weight * kv).sum(slots)
        weight = exp_fp32(scores[index] - highest)
        total = total + weight
        pooled = pooled + weight * kv
    entry = tl.div_rn(pooled, total)  # [ROWS, Dc]
    tl.store(job.pooled + tokens * DIM + cols, entry.to(job.pooled.dtype.element_ty), mask=mask & (cols >= 0))


@jit
def _sum_of_runs(x):
    """fp32 [POOL_RUNS, C] -> [C]: neighbours first, as `_sum_of_slots` in ops/compress."""
    x = tl.trans(x)
    C: tl.constexpr = x.shape[0]
    left, right = tl.split(tl.reshape(x, [C, 4, 2]))
    left, right = tl.split(tl.reshape(left + right, [C, 2, 2]))
    left, right = tl.split(left + right)
    return left + right


@jit
def _plain_slots(job, token, slot, position, start, cols, STEP: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr,
                 LEN: tl.constexpr):
    """kv and score [POOL_RUNS, C] of the slots at place STEP of every run of an HCA entry."""
    slots = tl.arange(0, _POOL_RUNS) * (RATIO // _POOL_RUNS) + STEP
    ages = RATIO - 1 - slots
    wanted = position - ages
    is_fresh = (wanted >= start)[:, None]
    rows = (token - ages)[:, None]
    place = (slot * job.own.slot_stride + (wanted % LEN) * job.own.row_stride)[:, None]
    cols = cols[None, :]
    kv = tl.load(tl.where(is_fresh, job.kv + rows * job.kv_stride, job.own.kv + place) + cols)
    score = tl.load(tl.where(is_fresh, job.gate + rows * job.gate_stride, job.own.score + place) + cols)
    ape = tl.load(job.ape + slots[:, None] * DIM + cols, mask=is_fresh, other=0.0)
    return kv, score + ape


@jit
def _pool_plain(
    job, batch, token, first_col, RATIO: tl.constexpr, DIM: tl.constexpr, LEN: tl.constexpr, COLS: tl.constexpr,
):
    """Pool COLS columns, from first_col on, of the HCA entry that `token` closes into its scratch row: POOL_RUNS runs
    of slots side by side, then their sum."""
    position = tl.load(batch.positions + token).to(tl.int32)
    slot = tl.load(batch.slots + token)
    start = tl.load(batch.chunk_starts + token).to(tl.int32)
    token = token.to(tl.int64)
    cols = first_col + tl.arange(0, COLS)
    kvs = ()  # RATIO / POOL_RUNS of [POOL_RUNS, COLS]
    scores = ()
    highest = tl.full([_POOL_RUNS, COLS], float("-inf"), tl.float32)
    for step in tl.static_range(RATIO // _POOL_RUNS):
        kv, score = _plain_slots(job, token, slot, position, start, cols, step, RATIO, DIM, LEN)
        highest = tl.maximum(highest, score)
        kvs = kvs + (kv,)  # type: ignore  # noqa: RUF005
        scores = scores + (score,)  # type: ignore  # noqa: RUF005
    highest = tl.max(highest, axis=0)[None, :]
    total = tl.zeros([_POOL_RUNS, COLS], tl.float32)
    pooled = tl.zeros([_POOL_RUNS, COLS], tl.float32)
    for step in tl.static_range(RATIO // _POOL_RUNS):
        # weight = softmax over slots, channel by channel; pooled = (weight * kv).sum(slots)
        weight = exp_fp32(scores[step] - highest)
        total = total + weight
        pooled = pooled + weight * kvs[step]
    entry = tl.div_rn(_sum_of_runs(pooled), _sum_of_runs(total))  # [COLS]
    tl.store(job.pooled + token * DIM + cols, entry.to(job.pooled.dtype.element_ty))


# ---- entries and tails ----


@jit
def _finish_entries(
    job, target, tokens, entries, blocks, RATIO: tl.constexpr, PER_BLOCK: tl.constexpr, KIND: tl.constexpr,
    DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
):
    """Norm, rope, encode the pooled `entries` [R] that `tokens` close, and write them into `blocks` (-1: none)."""
    mask = blocks >= 0
    blocks, entries = blocks.to(tl.int64), entries.to(tl.int64)
    offsets = row_offsets(target, blocks, entries % PER_BLOCK)
    store_rows(
        job.pooled, tokens.to(tl.int64) * DIM, mask, job.norm_weight, entries * RATIO, job.freqs, job.eps,
        target, offsets, target, offsets, mask,
        KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, False,
    )


# ---- kernels ----


@jit
def _value_at(values, lanes, lane):
    """values[lane], a scalar."""
    return tl.sum(tl.where(lanes == lane, values, 0), axis=0)


@jit
def _compress_group(
    job, target, batch, counter_ptr, num_tokens, group, first_col,
    RATIO: tl.constexpr, OWN_LEN: tl.constexpr, FOLLOWING_LEN: tl.constexpr, PER_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr, COLS: tl.constexpr, FINISH_ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    PREFETCH_ROWS: tl.constexpr, POOL_COLS: tl.constexpr,
):
    """COLS columns of `group` neighbouring tokens: their entries, FINISH_ROWS at a time, and the tails."""
    REACH: tl.constexpr = 2 * RATIO if FOLLOWING_LEN > 0 else RATIO
    IS_WHOLE: tl.constexpr = FOLLOWING_LEN > 0
    POOL_ROWS: tl.constexpr = min(max(POOL_COLS // DIM, 1), FINISH_ROWS)
    base = tl.program_id(0) * group
    if PREFETCH_ROWS > 0:
        _prefetch(job, batch, base, num_tokens, 2 * DIM, DIM, PREFETCH_ROWS)
    # the group's tokens, and those after them whose entries may belong to this program
    lanes = tl.arange(0, CANDIDATES)
    mask = base + lanes < num_tokens
    positions = tl.load(batch.positions + base + lanes, mask=mask, other=0).to(tl.int32)  # [CANDIDATES]
    slots = tl.load(batch.slots + base + lanes, mask=mask, other=-1)
    is_real = slots >= 0
    # since the chunk's first token
    ages = positions - tl.load(batch.chunk_starts + base + lanes, mask=mask, other=0).to(tl.int32)
    leaders = tl.where(is_real & (ages == 0) & (lanes < group), lanes, CANDIDATES)
    # an entry that reaches back before its chunk belongs to the program of the chunk's first token
    owners = tl.where(ages < REACH - 1, lanes - ages, lanes)
    is_mine = is_real & (owners >= 0) & (owners < group) & ((positions + 1) % RATIO == 0)
    pending = tl.where(is_mine, lanes, CANDIDATES)
    entries = positions // RATIO
    # asked for here, beside the rows to be pooled; needed when they are finished
    blocks = tl.load(batch.table + slots * batch.table_stride + entries // PER_BLOCK, mask=is_mine, other=-1)
    finish_lanes = tl.arange(0, FINISH_ROWS)
    following = tl.min(pending, axis=0)
    has_entries = following < CANDIDATES
    if not IS_WHOLE:
        unpooled = pending
        token = following
        while token < CANDIDATES:
            _pool_plain(job, batch, base + token, first_col, RATIO, DIM, OWN_LEN, COLS)
            unpooled = tl.where(lanes == token, CANDIDATES, unpooled)
            token = tl.min(unpooled, axis=0)
        if has_entries:
            tl.debug_barrier()  # all threads have stored before one of them says so
            arrived = tl.atomic_add(counter_ptr + tl.program_id(0), 1, sem="acq_rel")
            if arrived == DIM // COLS - 1:
                tl.store(counter_ptr + tl.program_id(0), 0)
            else:
                following = CANDIDATES
    while following < CANDIDATES:
        rows = tl.zeros([FINISH_ROWS], tl.int32)
        row_entries = tl.zeros([FINISH_ROWS], tl.int32)
        row_blocks = tl.full([FINISH_ROWS], -1, tl.int32)
        count = 0
        while (following < CANDIDATES) & (count < FINISH_ROWS):
            if IS_WHOLE and POOL_ROWS == 1:
                _pool_overlapping(
                    job, batch, base + following, following >= 0, 1, RATIO, DIM, OWN_LEN, FOLLOWING_LEN
                )
            is_row = finish_lanes == count
            rows = tl.where(is_row, following, rows)
            row_entries = tl.where(is_row, _value_at(entries, lanes, following), row_entries)
            row_blocks = tl.where(is_row, _value_at(blocks, lanes, following), row_blocks)
            count += 1
            pending = tl.where(lanes == following, CANDIDATES, pending)
            following = tl.min(pending, axis=0)
        if IS_WHOLE:
            if POOL_ROWS > 1:
                for first in range(0, count, POOL_ROWS):
                    lanes_of_rows = first + tl.arange(0, POOL_ROWS)
                    is_lane = lanes_of_rows[:, None] == finish_lanes[None, :]
                    tokens = base + tl.sum(tl.where(is_lane, rows[None, :], 0), axis=1)
                    is_row = (lanes_of_rows < count)[:, None]
                    _pool_overlapping(
                        job, batch, tokens[:, None], is_row, POOL_ROWS, RATIO, DIM, OWN_LEN, FOLLOWING_LEN
                    )
            tl.debug_barrier()  # the scratch rows are read back by other threads
        _finish_entries(
            job, target, base + rows, row_entries, row_blocks, RATIO, PER_BLOCK, KIND, DIM, ROPE_DIM, LOG2_DIM,
            SCALE_BYTES,
        )

    tl.debug_barrier()  # every row of a ring that an entry needs has been read
    leader = tl.min(leaders, axis=0)
    while leader < CANDIDATES:
        _write_tails(job, batch, base + leader, first_col, RATIO, DIM, OWN_LEN, FOLLOWING_LEN, TAIL_ROWS, COLS)
        leaders = tl.where(lanes == leader, CANDIDATES, leaders)
        leader = tl.min(leaders, axis=0)


@jit(do_not_specialize=("num_tokens", "group"))
def _compress_kernel(
    job, target, batch, counter_ptr, num_tokens, group, RATIO: tl.constexpr, OWN_LEN: tl.constexpr,
    FOLLOWING_LEN: tl.constexpr, PER_BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, COLS: tl.constexpr,
    FINISH_ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr, PREFETCH_ROWS: tl.constexpr, POOL_COLS: tl.constexpr,
):
    pdl_trigger()
    _compress_group(
        job, target, batch, counter_ptr, num_tokens, group, tl.program_id(1) * COLS, RATIO, OWN_LEN, FOLLOWING_LEN,
        PER_BLOCK, CANDIDATES, COLS, FINISH_ROWS, TAIL_ROWS, KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, PREFETCH_ROWS,
        POOL_COLS,
    )


@jit(do_not_specialize=("num_tokens", "group"))
def _compress_pair_kernel(
    job, target, index_job, index_target, batch, num_tokens, group,
    RATIO: tl.constexpr, OWN_LEN: tl.constexpr, FOLLOWING_LEN: tl.constexpr, PER_BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr, FINISH_ROWS: tl.constexpr, TAIL_ROWS: tl.constexpr,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    INDEX_FINISH_ROWS: tl.constexpr, INDEX_KIND: tl.constexpr, INDEX_DIM: tl.constexpr, INDEX_ROPE_DIM: tl.constexpr,
    INDEX_LOG2_DIM: tl.constexpr, INDEX_SCALE_BYTES: tl.constexpr, PREFETCH_ROWS: tl.constexpr,
    POOL_COLS: tl.constexpr,
):
    """Two CSA compressors with the same rings' lengths; program_id(1) chooses. Columns are whole: nothing counts."""
    pdl_trigger()
    if tl.program_id(1) == 0:
        _compress_group(
            job, target, batch, batch.positions, num_tokens, group, 0, RATIO, OWN_LEN, FOLLOWING_LEN, PER_BLOCK,
            CANDIDATES, DIM, FINISH_ROWS, TAIL_ROWS, KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, PREFETCH_ROWS,
            POOL_COLS,
        )
    else:
        _compress_group(
            index_job, index_target, batch, batch.positions, num_tokens, group, 0, RATIO, OWN_LEN, FOLLOWING_LEN,
            PER_BLOCK, CANDIDATES, INDEX_DIM, INDEX_FINISH_ROWS, TAIL_ROWS, INDEX_KIND, INDEX_DIM, INDEX_ROPE_DIM,
            INDEX_LOG2_DIM, INDEX_SCALE_BYTES, PREFETCH_ROWS, POOL_COLS,
        )
