"""Attention of many queries on Hopper, in Gluon: the sums of kernel_attend.py in the same order, so the same bits.

A multiprocessor has one program, which takes query after query (64 heads of it), two tiles of keys at a time. Four
groups of four warps work at their own pace, over barriers in shared memory (the first two: kernel_pairs_rows.py):

* `find` looks up where the rows of two tiles lie, and their scales; and it fetches queries;
* `decode` makes bf16 of the rows: of a tile 64 keys x 512 columns, in quarters of 128 columns;
* `_attend`, twice: group 0 weighs the keys of even tiles, group 1 those of odd ones, 64 heads x 64 keys each. Both sum
  the values of both tiles, group 0 the first 256 columns, group 1 the others, 64 columns at a time.

What a group weighed reaches the other through shared memory. A quarter of a tile is free for the tile after the next
when its values are summed, because its keys were weighed before. Who reads what others wrote to shared memory fences
it for the tensor cores: the writer's fence would wait for the rows that it has asked for.

Four groups share 512 registers a thread. A multiplying group's sums take 128 for its 256 columns, and 32 for the
products of a tile. Next to nothing may be spilled inside the loops: beside 225 KB of shared memory the L1 cache has no
room for it. So:

* The descriptors of products' operands must not be made before the loop, which the compiler would do: their places are
  added to a product of `zero`, which it does not know, and the number of the pair.
* `find` is the group that the kernel begins as. Of one that multiplies, ptxas spills there what it keeps elsewhere.
* Which keys there are is two words of bits, not 16 registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.attention.kernel_attend import _fold, _one_over_total, _probabilities
from dsv4.ops.attention.kernel_pairs_rows import DIM, HEADS, RING, decode, find
from dsv4.ops.attention.kernel_rows import KEYS, count_tiles
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.maths import cos_sin
from dsv4.ops.lib.pdl import pdl_trigger

_HEADS, _DIM, _KEYS = gl.constexpr(HEADS), gl.constexpr(DIM), gl.constexpr(KEYS)
_GROUP, _GROUPS, _RING = gl.constexpr(64), gl.constexpr(DIM // 64), gl.constexpr(RING)
_COLS, _QUARTERS = gl.constexpr(128), gl.constexpr(4)
_OWN = gl.constexpr(DIM // 2)  # columns of a group that multiplies
_CHUNK = gl.constexpr(64)  # columns of values that are summed at once
_REGISTERS, _DECODE_REGISTERS = gl.constexpr(200), gl.constexpr(72)  # those that look up have the other 40
_NONE = gl.constexpr(-1.0e30)
if hopper is not None:
    _barrier, _mma, _mma_wait = hopper.mbarrier, hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    _fence = hopper.fence_async_shared


class Memory(NamedTuple):
    """In shared memory: a query, both tiles in quarters, what their keys weigh; which keys there are, a bit each, for
    every 32 of them as many times; highest logit and sum of both; cosines, sines and frequencies of the last columns;
    and a ring of places of rows, with scales and bits of what is there."""

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
    """Quarters of both tiles are full, or free; the tiles are weighed; the query is there, or done with; a pair is
    found, or taken."""

    full: Any
    free: Any
    weighed: Any
    q_full: Any
    q_free: Any
    found: Any
    taken: Any


@gluon_jit
def _new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], _barrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        _barrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


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
    barriers = Barriers(
        _new_barriers(2 * _QUARTERS, 1), _new_barriers(2 * _QUARTERS, 1), _new_barriers(2, 1), _new_barriers(1, 1),
        _new_barriers(1, 2), _new_barriers(_RING, 1), _new_barriers(_RING, 1),
    )
    return memory, barriers


# ---- products ----


@gluon_jit
def _existing(memory, TILE: gl.constexpr, MMA: gl.constexpr):
    """Which keys of a tile there are, [KEYS], of two words: loaded as they are used, they would take 16 registers."""
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    words = memory.exists._reinterpret(gl.int32, [2 * _KEYS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    low, high = words.index(TILE * _KEYS).load(COLS), words.index(TILE * _KEYS + 32).load(COLS)
    key = gl.arange(0, _KEYS, COLS)
    word = gl.where(key < 32, low.broadcast_to([_KEYS]), high.broadcast_to([_KEYS]))
    return (word >> (key % 32)) & 1


@gluon_jit
def _weigh(memory, barriers, scale, phase, none, GROUP: gl.constexpr):
    """Weights, highest logit and sum of the group's own tile, for both groups."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    # logit = (q @ k.T) * scale
    logits = gl.zeros([_HEADS, _KEYS], gl.float32, MMA)
    for quarter in gl.static_range(_QUARTERS):
        _barrier.wait(barriers.full.index(GROUP * _QUARTERS + quarter), phase)
        _fence()
        keys = memory.keys.index(none + (GROUP * _QUARTERS + quarter)).permute((1, 0))
        logits = _mma(memory.q.index(none + quarter), keys, logits, use_acc=quarter > 0, is_async=True)
    logits = _mma_wait(0, deps=(logits,))
    highest, weight, total = _probabilities(logits * scale, _existing(memory, GROUP, MMA))
    memory.weights.index(GROUP).store(weight.to(gl.bfloat16))
    memory.highest.index(GROUP).store(highest)
    memory.total.index(GROUP).store(total)
    _fence()
    _barrier.arrive(barriers.weighed.index(GROUP))


@gluon_jit
def _sum(
    memory, barriers, state, phase, none, TILE: gl.constexpr, GROUP: gl.constexpr, MMA: gl.constexpr
):
    """The group's columns of the values of a tile, folded into a state: highest, total, matrices."""
    highest, total, out = state
    _barrier.wait(barriers.weighed.index(TILE), phase)
    tile_highest = memory.highest.index(TILE).load(gl.SliceLayout(1, MMA))
    new_highest = gl.maximum(highest, tile_highest)
    shrink = gl.exp2(highest - new_highest)
    share = gl.exp2(tile_highest - new_highest)
    total = total * shrink + memory.total.index(TILE).load(gl.SliceLayout(1, MMA)) * share
    CHUNKS: gl.constexpr = _OWN // _CHUNK
    keys = memory.keys._reinterpret(gl.bfloat16, [2 * _DIM // _CHUNK, _KEYS, _CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    weights = memory.weights.index(none + TILE)
    folded = ()
    none_yet = gl.zeros([_HEADS, _CHUNK], gl.float32, MMA)
    FIRST: gl.constexpr = (TILE * 2 + GROUP) * CHUNKS
    part = _mma(weights, keys.index(none + FIRST), none_yet, use_acc=False, is_async=True)
    for matrix in gl.static_range(CHUNKS):
        part = _mma_wait(0, deps=(part,))
        if (matrix + 1) * _CHUNK % _COLS == 0:
            _barrier.arrive(barriers.free.index((TILE * 2 + GROUP) * 2 + matrix * _CHUNK // _COLS))
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
def _behind_stored(states, state, GROUP: gl.constexpr, MMA: gl.constexpr):
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
            _barrier.wait(barriers.q_full.index(0), q_phase)
            q_phase ^= 1
        for pair in range(num_pairs):
            has_second = pair * 2 + 1 < num_tiles
            none = pair * zero
            if GROUP == 0:
                _weigh(memory, barriers, scale, phase, none, GROUP)
            elif has_second:
                _weigh(memory, barriers, scale, second_phase, none, GROUP)
            _barrier.arrive(barriers.q_free.index(0), pred=pair + 1 == num_pairs)
            state = _sum(memory, barriers, state, phase, none, 0, GROUP, MMA)
            phase ^= 1
            if has_second:
                state = _sum(memory, barriers, state, second_phase, none, 1, GROUP, MMA)
                second_phase ^= 1
            if HAS_RUNS:  # noqa: SIM102
                if ((pair + 1) % RUN_PAIRS == 0) & (pair + 1 < num_pairs):
                    if pair + 1 > RUN_PAIRS:
                        state = _behind_stored(states, state, GROUP, MMA)
                    _store_state(states, state, GROUP, MMA)
                    state = _empty(MMA)
        if HAS_RUNS:  # noqa: SIM102
            if num_pairs > RUN_PAIRS:
                state = _behind_stored(states, state, GROUP, MMA)
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
    """`_attend_kernel` with programs that stay: `num_programs` are queries times blocks of heads. states: one for each
    program and group, of half the columns, where queries have several runs."""
    pdl_trigger()
    memory, barriers = _allocate()
    if INVERSE_ROPE:
        # here, because Triton 3.6 cannot compile this load inside a group
        pair = (gl.arange(0, _COLS, gl.BlockedLayout([1], [32], [4], [0])) - (_COLS - _GROUP)) // 2
        memory.turn.index(2).store(gl.load(tables.freqs + pair, mask=pair >= 0, other=0.0))
    gl.warp_specialize(
        [
            (find, (
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
            (decode, (
                memory, barriers, tokens, num_programs, HEAD_BLOCKS, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW,
            )),
        ],
        [4, 4, 4], [_REGISTERS, _REGISTERS, _DECODE_REGISTERS],
    )
