"""Attention of many queries on Hopper, in Gluon: the sums of kernel_attend.py in the same order, so the same bits.

A persistent CTA on every multiprocessor takes query after query (64 heads of it), two tiles of keys at a time. Its 16
warps are four warp groups, which work at their own pace (the first two: kernel_pairs_rows.py). A pair is two tiles; a
tile of 64 keys x 512 columns has four quarters of 128 columns:

    warp group                 waits on                               arrives at (1 arrival a group)
    producer, gathers rows     places.free, query.free                places.full (a pair), query.full (a query)
    producer, decodes rows     places.full, keys.free[8 quarters]     keys.full[8 quarters], places.free
    MMA 0 and 1                query.full, keys.full (own tile),      probs[own tile], keys.free (own columns of both
                               probs[both tiles]                      tiles), query.free (2 arrivals, both groups)

* `producer_gather` looks up where the rows of a pair lie, and their scales, two pairs ahead; and it copies queries.
* `producer_decode` makes bf16 of the rows.
* `_attend`, twice, alternates two steps: `_qk_softmax`, the probabilities of the group's own tile, 64 heads x 64 keys,
  even tiles for group 0 and odd ones for group 1; `_pv_accumulate`, P V of both tiles, the first 256 columns for group
  0 and the others for group 1, 64 columns at a time. The epilogue is `_store_result`.

The probabilities of one group reach the other through shared memory. A quarter of a tile is free for the tile after the
next when its values are summed, because its keys were multiplied before. The warps that read what others wrote to
shared memory fence it for the tensor cores: the writer's fence would wait for the rows that it has asked for.

Shared memory, 226 KB in all (S = RING pairs looked up ahead; the compiler places it):

    q        4 quarters x 64 heads x 128 bf16              65,536
    keys     2 tiles x 4 quarters x 64 keys x 128 bf16    131,072
    weights  2 tiles x 64 heads x 64 keys bf16             16,384
    places, scales, bits of S x 2 x 64 keys                11,264
    exists, highest, total, turn, barriers                  about 3,200

Four groups share 512 registers a thread. The accumulator of an MMA group takes 128 for its 256 columns, and 32 for the
products of a tile. Next to nothing may be spilled inside the loops: beside 226 KB of shared memory the L1 cache has no
room for it. So:

* The descriptors of products' operands must not be made before the loop, which the compiler would do: their places are
  added to a product of `zero`, which it does not know, and the number of the pair.
* `producer_gather` is the group that the kernel begins as. Of an MMA group, ptxas spills there what it keeps elsewhere.
* Which keys there are is two words of bits, not 16 registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.attention.kernel_attend import _fold, _one_over_total, _probabilities
from dsv4.ops.attention.kernel_pairs_rows import DIM, HEADS, RING, producer_decode, producer_gather
from dsv4.ops.attention.kernel_rows import KEYS, count_tiles
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.maths import cos_sin
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.lib.pipeline import Ring, consumer_release, consumer_wait, new_barriers, new_ring

_HEADS, _DIM, _KEYS = gl.constexpr(HEADS), gl.constexpr(DIM), gl.constexpr(KEYS)
_GROUP, _GROUPS, _RING = gl.constexpr(64), gl.constexpr(DIM // 64), gl.constexpr(RING)
_COLS, _QUARTERS = gl.constexpr(128), gl.constexpr(4)
_OWN = gl.constexpr(DIM // 2)  # columns of an MMA group
_CHUNK = gl.constexpr(64)  # columns of values that are summed at once
_REGISTERS, _DECODE_REGISTERS = gl.constexpr(200), gl.constexpr(72)  # the gathering producer has the other 40
_NONE = gl.constexpr(-1.0e30)
if hopper is not None:
    _barrier, _mma, _mma_wait = hopper.mbarrier, hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    _fence = hopper.fence_async_shared


class Memory(NamedTuple):
    """In shared memory: a query, both tiles in quarters, their keys' probabilities; which keys there are, a bit each,
    for every 32 of them as many times; highest logit and sum of both; cosines, sines and frequencies of the last
    columns; and a ring of places of rows, with scales and bits of what is there."""

    q: Any
    keys: Any
    weights: Any
    exists: Any
    highest: Any
    total: Any
    turn: Any
    places: Any
    scales: Any
    bits: Any


class Barriers(NamedTuple):
    """Rings of the quarters of both tiles [8], of queries [1] and of places of rows [RING]; and whether the
    probabilities of either tile are there [2]."""

    keys: Ring
    probs: Any
    query: Ring
    places: Ring


@gluon_jit
def _allocate():
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = Memory(
        gl.allocate_shared_memory(gl.bfloat16, [_QUARTERS, _HEADS, _COLS], MATRIX),
        gl.allocate_shared_memory(gl.bfloat16, [2 * _QUARTERS, _KEYS, _COLS], MATRIX),
        gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, _KEYS], MATRIX),
        gl.allocate_shared_memory(gl.int32, [2, _KEYS], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, _HEADS], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, _HEADS], VECTOR),
        gl.allocate_shared_memory(gl.float32, [3, _COLS], VECTOR),
        gl.allocate_shared_memory(gl.int64, [_RING * 2, _KEYS], VECTOR),
        gl.allocate_shared_memory(gl.int32, [_RING * _GROUPS * 2, _KEYS], VECTOR),
        gl.allocate_shared_memory(gl.int32, [_RING * 2, _KEYS], VECTOR),
    )
    barriers = Barriers(new_ring(2 * _QUARTERS, 1, 1), new_barriers(2, 1), new_ring(1, 1, 2), new_ring(_RING, 1, 1))
    return memory, barriers


# ---- MMA groups ----


@gluon_jit
def _existing(memory, TILE: gl.constexpr, MMA: gl.constexpr):
    """Which keys of a tile there are, [KEYS], of two words: loaded as they are used, they would take 16 registers."""
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    words = memory.exists.reinterpret(gl.int32, [2 * _KEYS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    low, high = words.index(TILE * _KEYS).load(COLS), words.index(TILE * _KEYS + 32).load(COLS)
    key = gl.arange(0, _KEYS, COLS)
    word = gl.where(key < 32, low.broadcast_to([_KEYS]), high.broadcast_to([_KEYS]))
    return (word >> (key % 32)) & 1


@gluon_jit
def _qk_softmax(memory, barriers, scale, phase, none, GROUP: gl.constexpr):
    """Waits on `keys.full`, quarter by quarter; arrives at `probs`. Probabilities, highest logit and sum of the
    group's own tile, for both groups."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    # logit = (q @ k.T) * scale
    logits = gl.zeros([_HEADS, _KEYS], gl.float32, MMA)
    for quarter in gl.static_range(_QUARTERS):
        consumer_wait(barriers.keys, GROUP * _QUARTERS + quarter, phase)
        _fence()
        keys = memory.keys.index(none + (GROUP * _QUARTERS + quarter)).permute((1, 0))
        logits = _mma(memory.q.index(none + quarter), keys, logits, use_acc=quarter > 0, is_async=True)
    logits = _mma_wait(0, deps=(logits,))
    # weight = exp2(logit - logit.amax(-1)); total = weight.sum(-1)
    highest, weight, total = _probabilities(logits * scale, _existing(memory, GROUP, MMA))  # [H], [H, KEYS], [H]
    memory.weights.index(GROUP).store(weight.to(gl.bfloat16))
    memory.highest.index(GROUP).store(highest)
    memory.total.index(GROUP).store(total)
    _fence()
    _barrier.arrive(barriers.probs.index(GROUP))


@gluon_jit
def _pv_accumulate(
    memory, barriers, state, phase, none, TILE: gl.constexpr, GROUP: gl.constexpr, MMA: gl.constexpr
):
    """Waits on `probs`; releases its quarters of the tile. The group's columns of P V of a tile, folded into a state:
    highest [H], total [H], accumulators [H, 64]."""
    highest, total, out = state
    _barrier.wait(barriers.probs.index(TILE), phase)
    tile_highest = memory.highest.index(TILE).load(gl.SliceLayout(1, MMA))
    new_highest = gl.maximum(highest, tile_highest)
    shrink = gl.exp2(highest - new_highest)
    share = gl.exp2(tile_highest - new_highest)
    total = total * shrink + memory.total.index(TILE).load(gl.SliceLayout(1, MMA)) * share
    CHUNKS: gl.constexpr = _OWN // _CHUNK
    keys = memory.keys.reinterpret(gl.bfloat16, [2 * _DIM // _CHUNK, _KEYS, _CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    weights = memory.weights.index(none + TILE)
    folded = ()
    none_yet = gl.zeros([_HEADS, _CHUNK], gl.float32, MMA)
    FIRST: gl.constexpr = (TILE * 2 + GROUP) * CHUNKS
    # part = weight @ v; out = out * shrink + part * share
    part = _mma(weights, keys.index(none + FIRST), none_yet, use_acc=False, is_async=True)
    for matrix in gl.static_range(CHUNKS):
        part = _mma_wait(0, deps=(part,))
        if (matrix + 1) * _CHUNK % _COLS == 0:
            consumer_release(barriers.keys, (TILE * 2 + GROUP) * 2 + matrix * _CHUNK // _COLS)
        folded += (_fold(out[matrix], shrink, part, share),)  # type: ignore[assignment]
        if matrix + 1 < CHUNKS:
            part = _mma(weights, keys.index(none + (FIRST + matrix + 1)), none_yet, use_acc=False, is_async=True)
    return new_highest, total, folded


@gluon_jit
def _empty(MMA: gl.constexpr):
    """The state of no keys."""
    out = ()
    for _ in gl.static_range(_OWN // _CHUNK):
        out += (gl.zeros([_HEADS, _CHUNK], gl.float32, MMA),)  # type: ignore[assignment]
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    return gl.full([_HEADS], _NONE, gl.float32, ROW), gl.zeros([_HEADS], gl.float32, ROW), out


@gluon_jit
def _state_rows(GROUP: gl.constexpr, MMA: gl.constexpr):
    """Where this group stores a state: half the columns of one."""
    return (gl.program_id(0) * 2 + GROUP) * _HEADS + gl.arange(0, _HEADS, gl.SliceLayout(1, MMA))


@gluon_jit
def _state_ptrs(states, rows, MATRIX: gl.constexpr, MMA: gl.constexpr):
    cols = gl.arange(0, _CHUNK, gl.SliceLayout(0, MMA)) + MATRIX * _CHUNK
    return gl.expand_dims(states.part + rows.to(gl.int64) * _OWN, 1) + gl.expand_dims(cols, 0)


@gluon_jit
def _store_state(states, state, GROUP: gl.constexpr, MMA: gl.constexpr):
    highest, total, out = state
    rows = _state_rows(GROUP, MMA)
    gl.store(states.highest + rows, highest)
    gl.store(states.total + rows, total)
    for matrix in gl.static_range(len(out)):
        gl.store(_state_ptrs(states, rows, matrix, MMA), out[matrix])


@gluon_jit
def _after_stored(states, state, GROUP: gl.constexpr, MMA: gl.constexpr):
    """The fold of the stored state, of the runs before, and the one of this run."""
    run_highest, run_total, run_out = state
    rows = _state_rows(GROUP, MMA)
    highest, total = gl.load(states.highest + rows), gl.load(states.total + rows)
    new_highest = gl.maximum(highest, run_highest)
    shrink = gl.exp2(highest - new_highest)
    share = gl.exp2(run_highest - new_highest)
    folded = ()
    for matrix in gl.static_range(len(run_out)):
        out = gl.load(_state_ptrs(states, rows, matrix, MMA))
        folded += (_fold(out, shrink, run_out[matrix], share),)  # type: ignore[assignment]
    return new_highest, total * shrink + run_total * share, folded


@gluon_jit
def _turned_back(memory, out, position):
    """rope_ref(out, positions, freqs, inverse=True) of the last 64 columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    MMA: gl.constexpr = out.type.layout
    col = gl.arange(0, _COLS, LAYOUT)
    cos, sin = cos_sin(position.to(gl.float32) * memory.turn.index(2).load(LAYOUT))
    memory.turn.index(0).store(cos)
    memory.turn.index(1).store(gl.where(col % 2 == 0, sin, sin * -1.0))
    wide = out.to(gl.float32)
    even, odd = gl.split(gl.reshape(wide, [_HEADS, _GROUP // 2, 2]))
    others = gl.convert_layout(gl.reshape(gl.join(odd, even), [_HEADS, _GROUP]), MMA, assert_trivial=True)
    cos = gl.expand_dims(memory.turn.index(0).slice(_GROUP, _GROUP).load(gl.SliceLayout(0, MMA)), 0)
    sin = gl.expand_dims(memory.turn.index(1).slice(_GROUP, _GROUP).load(gl.SliceLayout(0, MMA)), 0)
    return (wide * cos + others * sin).to(gl.bfloat16)


@gluon_jit
def _store_result(
    memory, state, tables, out_ptr, token, first_head, num_heads, position, GROUP: gl.constexpr, MMA: gl.constexpr,
    INVERSE_ROPE: gl.constexpr,
):
    """The epilogue: sink, quotient, inverse rope, [H, 256] of out."""
    highest, total, out = state
    heads = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, MMA))
    inverse = _one_over_total(highest, total, heads, heads < num_heads, tables.sink)
    # eight columns of a head to a thread, as far as its warp has them
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [_HEADS, _CHUNK],
    )
    rows = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, LAYOUT))
    cols = GROUP * _OWN + gl.arange(0, _CHUNK, gl.SliceLayout(0, LAYOUT))
    row_ptr = out_ptr + (token.to(gl.int64) * num_heads + rows) * _DIM
    ptrs = gl.expand_dims(row_ptr, 1) + gl.expand_dims(cols, 0)
    for matrix in gl.static_range(len(out)):
        result = (out[matrix] * gl.expand_dims(inverse, 1)).to(gl.bfloat16)
        if INVERSE_ROPE and GROUP == 1 and matrix == len(out) - 1:
            result = _turned_back(memory, result, position)
        result = gl.convert_layout(result, LAYOUT)
        gl.store(ptrs + matrix * _CHUNK, result, mask=gl.expand_dims(rows < num_heads, 1))


@gluon_jit
def _attend(
    memory, barriers, out_ptr, num_heads, scale, tables, tokens, states, num_programs, zero, GROUP: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, HAS_ENTRIES: gl.constexpr, NUM_PICKS: gl.constexpr, RATIO: gl.constexpr,
    WINDOW: gl.constexpr, INVERSE_ROPE: gl.constexpr, RUN: gl.constexpr, HAS_RUNS: gl.constexpr,
):
    """Waits on `query.full`, once a query, and as `_qk_softmax` and `_pv_accumulate`; arrives at `query.free` after the
    last `_qk_softmax` of a query."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _CHUNK, 16])
    RUN_PAIRS: gl.constexpr = RUN // 2
    phase, second_phase, q_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    position = gl.load(tokens.positions + gl.program_id(0) // HEAD_BLOCKS)
    slot = gl.load(tokens.slots + gl.program_id(0) // HEAD_BLOCKS)
    for index in range(gl.program_id(0), num_programs, gl.num_programs(0)):
        token = index // HEAD_BLOCKS
        num_tiles = count_tiles(position.to(gl.int32), slot, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
        num_pairs = (num_tiles + 1) // 2
        state = _empty(MMA)
        if num_tiles > 0:
            consumer_wait(barriers.query, 0, q_phase)
            q_phase ^= 1
        for pair in range(num_pairs):
            has_second = pair * 2 + 1 < num_tiles
            none = pair * zero
            if GROUP == 0:
                _qk_softmax(memory, barriers, scale, phase, none, GROUP)
            elif has_second:
                _qk_softmax(memory, barriers, scale, second_phase, none, GROUP)
            consumer_release(barriers.query, 0, pair + 1 == num_pairs)
            state = _pv_accumulate(memory, barriers, state, phase, none, 0, GROUP, MMA)
            phase ^= 1
            if has_second:
                state = _pv_accumulate(memory, barriers, state, second_phase, none, 1, GROUP, MMA)
                second_phase ^= 1
            if HAS_RUNS:  # noqa: SIM102
                if ((pair + 1) % RUN_PAIRS == 0) & (pair + 1 < num_pairs):
                    if pair + 1 > RUN_PAIRS:
                        state = _after_stored(states, state, GROUP, MMA)
                    _store_state(states, state, GROUP, MMA)
                    state = _empty(MMA)
        if HAS_RUNS:  # noqa: SIM102
            if num_pairs > RUN_PAIRS:
                state = _after_stored(states, state, GROUP, MMA)
        # asked for while the result is stored
        following = gl.minimum(index + gl.num_programs(0), num_programs - 1) // HEAD_BLOCKS
        next_position, slot = gl.load(tokens.positions + following), gl.load(tokens.slots + following)
        _store_result(
            memory, state, tables, out_ptr, token, index % HEAD_BLOCKS * _HEADS, num_heads, position.to(gl.int32),
            GROUP, MMA, INVERSE_ROPE,
        )
        position = next_position


@gluon_jit(do_not_specialize=("num_heads", "num_programs", "zero", "stride_rps", "stride_pt", "stride_bs"))
def attend_pairs_kernel(
    queries, out_ptr, num_heads, scale, tables, tokens, num_programs, rows, ring, ring_positions_ptr, stride_rps,
    pages, picks_ptr, stride_pt, block_table_ptr, stride_bs, states, zero,
    HAS_ENTRIES: gl.constexpr, NUM_PICKS: gl.constexpr, RATIO: gl.constexpr, WINDOW: gl.constexpr,
    RING_LEN: gl.constexpr, HEAD_BLOCKS: gl.constexpr, INVERSE_ROPE: gl.constexpr, RUN: gl.constexpr,
    HAS_RUNS: gl.constexpr,
):
    """`_attend_kernel` with persistent CTAs: `num_programs` are queries times blocks of heads. states: one for each CTA
    and MMA group, of half the columns, where queries have several runs."""
    pdl_trigger()
    memory, barriers = _allocate()
    if INVERSE_ROPE:
        # here, because Triton 3.6 cannot compile this load inside a group
        pair = (gl.arange(0, _COLS, gl.BlockedLayout([1], [32], [4], [0])) - (_COLS - _GROUP)) // 2
        memory.turn.index(2).store(gl.load(tables.freqs + pair, mask=pair >= 0, other=0.0))
    gl.warp_specialize(
        [
            (producer_gather, (
                memory, barriers, queries, num_heads, tokens, num_programs, rows, ring, ring_positions_ptr, stride_rps,
                pages, picks_ptr, stride_pt, block_table_ptr, stride_bs, HEAD_BLOCKS, HAS_ENTRIES, NUM_PICKS, RATIO,
                WINDOW, RING_LEN,
            )),
            (_attend, (
                memory, barriers, out_ptr, num_heads, scale, tables, tokens, states, num_programs, zero, 0, HEAD_BLOCKS,
                HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW, INVERSE_ROPE, RUN, HAS_RUNS,
            )),
            (_attend, (
                memory, barriers, out_ptr, num_heads, scale, tables, tokens, states, num_programs, zero, 1, HEAD_BLOCKS,
                HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW, INVERSE_ROPE, RUN, HAS_RUNS,
            )),
            (producer_decode, (
                memory, barriers, tokens, num_programs, HEAD_BLOCKS, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW,
            )),
        ],
        [4, 4, 4], [_REGISTERS, _REGISTERS, _DECODE_REGISTERS],
    )
