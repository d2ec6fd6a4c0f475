"""A prototype: MXFP4 experts of many tokens on Hopper's FP8 tensor cores. No model uses it; why and what it gave is in
docs/decisions/mxfp4-on-fp8.md. `tools/fp8/probe.py` runs it on an H200.

Tiles, ring and roles are those of ops/moe/many/kernel_tiles.py, with eight MMA warps in two groups of 232 registers.
A group has 64 of 128 weight rows of two blocks: gate and up, or the halves of down's 256. Each step of 128 columns:

* A nibble and its scale become an E4M3 byte in registers. Token rows are E4M3 bytes in shared memory.
* A chain of four products from zero covers the 128 columns and all token rows of the tile.
* Its sums times the token rows' scales are added in fp32. So bits do not depend on the number of token rows.
* While the chain of one block runs, its group decodes weights of the other.

Order of columns: of 128, product q of a chain has from each group t of 32 the columns 8 q .. 8 q + 7, so that a thread
decodes weights of one scale. In a row of x, column 32 t + 8 q + i is byte 32 q + 4 t + i, from i = 4 on 16 - 4 later.

Weights: word 4 t + q of a row holds those eight nibbles. Their sizes are at bits 4 i .. 4 i + 2. Signs are at bits
8 i + 7 for i < 4, at 8 i - 29 for the others. Byte t of a row's word of scales is 8 e, for e from 0 to 11: the scale
is 2^e times the factor of the matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.arch import known_at_compile_time
from dsv4.ops.lib.codecs import e8m0_to_float, quantize_e4m3
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pipeline import (
    BARRIER_BYTES,
    later_stage,
    next_stage,
    producer_acquire,
    producer_commit_copies,
    ring_at,
)
from dsv4.ops.lib.warp_groups import load_word, trap, warp_arrive, warp_wait
from dsv4.ops.moe.kernel_rows import with_item
from dsv4.ops.moe.many.kernel_tiles import _copy_weights, _joined, _keep, activated
from dsv4.ops.moe.many.tiles import describe, described_factors, described_rows, tile_at, tile_barriers
from dsv4.ops.moe.plan import TILES_OUTPUTS, TILES_ROWS
from tools.fp8.chains import TWO_CHAINS, begin_chain, byte_tables, decoded, end_chain, here

STAGES = 4
NUM_WARPS = 8  # MMA warps

_TOKENS, _OUTPUTS, _STAGES = gl.constexpr(TILES_ROWS), gl.constexpr(TILES_OUTPUTS), gl.constexpr(STAGES)
_BLOCK = gl.constexpr(TILES_OUTPUTS // 2)
_MMA_WARPS, _PRODUCER_WARPS, _EPILOGUE_WARPS = gl.constexpr(NUM_WARPS), gl.constexpr(2), gl.constexpr(2)
_REGISTERS = gl.constexpr(40)  # of producer and epilogue warps; MMA warps then have 232
# barriers and descriptions of tiles as in kernel_tiles.py
_FREE, _SUMMED = gl.constexpr(STAGES), gl.constexpr(2 * STAGES)
_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)
_DESCRIPTIONS = gl.constexpr(128)
_X_BYTES = gl.constexpr(TILES_ROWS * 128)  # of a stage
# behind x, words, scales of weights and of x, and sums
_BARRIERS = gl.constexpr(
    STAGES * (TILES_ROWS * 128 + TILES_OUTPUTS * 64 + TILES_OUTPUTS * 4 + TILES_ROWS * 4)
    + TILES_ROWS * TILES_OUTPUTS * 2
)
_MARK = gl.constexpr(0x6B5A4938)
# token rows up to which registers hold the sums of two chains, and up to which weights of both blocks
_TWO_CHAINS, _TWO_BLOCKS = gl.constexpr(TWO_CHAINS), gl.constexpr(112)
if hopper is not None:
    _barrier, _async = hopper.mbarrier, hopper.async_copy


class Memory(NamedTuple):
    """As in kernel_tiles.py; `x_scales` are the token rows' scales of each stage."""

    x: Any
    words: Any
    scales: Any
    x_scales: Any
    sums: Any
    sources: Any
    pairs: Any
    weights: Any
    tiles: Any
    barriers: Any


@gluon_jit
def allocate(
    STAGES: gl.constexpr, STEPS: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, FULL_ARRIVALS: gl.constexpr,
    MMA_WARPS: gl.constexpr,
):  # fmt: skip
    """All that is looked for by its address comes in the order of size: with fewer TOKENS words are the largest. STEPS:
    of 128 columns, in all stages; ROWS: weight rows that lie together, of the 256 of a step."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLACES: gl.constexpr = STEPS * (_OUTPUTS // ROWS)
    if TOKENS < _TOKENS:
        words = gl.allocate_shared_memory(gl.int32, [PLACES, ROWS, 16], PLAIN)
    x = gl.allocate_shared_memory(gl.int8, [STEPS, TOKENS, 128], gl.NVMMASharedLayout(128, 8, 2))
    sums = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, _OUTPUTS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    if TOKENS == _TOKENS:
        words = gl.allocate_shared_memory(gl.int32, [PLACES, ROWS, 16], PLAIN)
    scales = gl.allocate_shared_memory(gl.int32, [PLACES, ROWS], FLAT)
    x_scales = gl.allocate_shared_memory(gl.float32, [STEPS, TOKENS], FLAT)
    rest = gl.allocate_shared_memory(gl.int32, [128], FLAT)
    sources = gl.allocate_shared_memory(gl.int32, [TOKENS], FLAT)
    pairs = gl.allocate_shared_memory(gl.int32, [TOKENS], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT)
    tiles = rest.reinterpret(gl.int32, [32, 4], FLAT)
    mark = _MARK + gl.arange(0, 4, gl.BlockedLayout([1], [32], [MMA_WARPS], [0]))
    x.reinterpret(gl.int32, [STEPS * TOKENS * 8, 4], FLAT).index(0).store(mark)
    tiles.index(_DESCRIPTIONS // 16).store(mark)
    barriers = tile_barriers(rest, STAGES, FULL_ARRIVALS, MMA_WARPS)
    if TOKENS < _TOKENS:
        hopper.fence_async_shared()  # the copy engine counts at them
    gl.barrier()
    return Memory(x, words, scales, x_scales, sums, sources, pairs, weights, tiles, barriers)


@gluon_jit
def check_places(X: gl.constexpr, DESCRIPTIONS: gl.constexpr):
    """The marks of `allocate` are at these offsets."""
    if (load_word(X) != _MARK) | (load_word(DESCRIPTIONS) != _MARK):
        trap()
    gl.barrier()


@gluon_jit
def keep_all(memory):
    memory.x_scales._keep_alive()
    _keep(memory)


# ---- producer warps ----


@gluon_jit
def _copy_rows(memory, stage, x_ptr, x_scale_ptr, step, num_rows, K: gl.constexpr):
    """128 columns of token rows, 32 rows at a time, and their scales."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 16], [4, 8], [_PRODUCER_WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [_PRODUCER_WARPS], [0])
    row = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    for first in gl.static_range(0, _TOKENS, 32):
        places = memory.sources.slice(first, 32).load(gl.SliceLayout(1, LAYOUT)) * 16
        source = x_ptr + (places[:, None] + col[None, :])
        is_row = (first + row < num_rows)[:, None]
        _async.async_load(memory.x.index(stage).slice(first, 32), source + step * 128, mask=is_row)
    place = gl.arange(0, _TOKENS, FLAT)
    sources = memory.sources.load(FLAT) // 8
    _async.async_load(memory.x_scales.index(stage), x_scale_ptr + sources + step, mask=place < num_rows)


@gluon_jit
def _producer(
    x_ptr, x_scale_ptr, order, first, second, memory, num_tiles,
    K: gl.constexpr, BLOCKS: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr,
    GATE_UP: gl.constexpr, DATA_WORDS: gl.constexpr, SCALE_WORDS: gl.constexpr,
):  # fmt: skip
    """As in kernel_tiles.py, with the token rows' scales."""
    ring = ring_at(memory.barriers, 0, _STAGES)
    num_pairs = gl.load(order.offsets + E)
    place = gl.arange(0, _TOKENS, gl.BlockedLayout([2], [32], [_PRODUCER_WARPS], [0]))
    index, described = gl.program_id(0), gl.to_tensor(0)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    tile = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
    while tile.expert >= 0:
        num_rows = tile.end - tile.start
        scale, other_scale = gl.load(first.out_scale + tile.expert), gl.load(second.out_scale + tile.expert)
        describe(memory, described, num_rows, scale, other_scale, _STAGES, _DESCRIPTIONS, _PRODUCER_WARPS)
        described ^= 1
        pair = gl.load(order.pairs + gl.minimum(tile.start + place, tile.end - 1))
        index += gl.num_programs(0)
        following = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
        memory.sources.store((pair // TOP_K if GATE_UP else pair) * (K // 16))
        expert = tile.expert.to(gl.int64)
        data_ptr, scale_ptr = first.data + expert * DATA_WORDS, first.scale + expert * SCALE_WORDS
        other_data_ptr, other_scale_ptr = second.data + expert * DATA_WORDS, second.scale + expert * SCALE_WORDS
        row_tile = tile.block * (2 if GATE_UP else 4)
        other_tile = row_tile if GATE_UP else row_tile + 2
        for step in range(K // 128):
            producer_acquire(ring, stage, phase)
            _copy_weights(memory, 2 * stage, data_ptr, scale_ptr, row_tile * (K // 128) + step, K, 1)
            other = other_tile * (K // 128) + step
            _copy_weights(memory, 2 * stage + 1, other_data_ptr, other_scale_ptr, other, K, 1)
            _copy_rows(memory, stage, x_ptr, x_scale_ptr, step, (num_rows + 7) // 8 * 8, K)
            producer_commit_copies(ring, stage)
            stage, phase = next_stage(stage, phase, _STAGES)
        tile = following
    zero = gl.to_tensor(0.0)
    describe(memory, described, gl.to_tensor(0), zero, zero, _STAGES, _DESCRIPTIONS, _PRODUCER_WARPS)


# ---- weights ----


@gluon_jit
def _as_operand(words, MMA: gl.constexpr):
    """Two bits of the column of a thread's own words, as the MMA's layout has them: but names."""
    ROWS: gl.constexpr = words.shape[0]
    words = words.reshape([ROWS, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([ROWS, 16])
    return gl.convert_layout(words, MMA, assert_trivial=True)


@known_at_compile_time
def _words_layout(num_rows: int, *rest: int) -> Any:
    """Which of the words [rows, 16] a thread has, or with 1 as `rest` of their groups' scales [rows, 4, any]."""

    def at(row: int, column: int) -> list[int]:
        return [row, column // 4, column % 4] if rest else [row, column]

    warps = [at(16 << i, 0) for i in range((num_rows // 16).bit_length() - 1)]
    lanes = [at(0, 4), at(0, 8), at(1, 0), at(2, 0), at(4, 0)]
    return gl.DistributedLinearLayout(
        [at(0, 1), at(0, 2), at(8, 0)], lanes, warps, [], [num_rows, 4, 4] if rest else [num_rows, 16]
    )


@gluon_jit
def step_weights(memory, place, MMA: gl.constexpr):
    """The bytes of a step and a block: those of the first 16 columns of each product, and of the last."""
    ROWS: gl.constexpr = memory.words.shape[1]
    WORDS: gl.constexpr = _words_layout(ROWS)
    GROUPS: gl.constexpr = _words_layout(ROWS, 1)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = memory.words.index(place).load(WORDS)
    exponents = memory.scales.reinterpret(gl.int8, [memory.scales.shape[0], ROWS, 4], PLAIN).index(place)
    low, high = byte_tables(exponents.load(gl.SliceLayout(2, GROUPS)).to(gl.int32))
    first, last = decoded(words, _of_words(low, WORDS), _of_words(high, WORDS))
    return _as_operand(first, MMA), _as_operand(last, MMA)


@gluon_jit
def _of_words(table, WORDS: gl.constexpr):
    """[rows, 4] -> [rows, 16]: that of a word's group."""
    ROWS: gl.constexpr = table.shape[0]
    table = table.expand_dims(2).broadcast_to([ROWS, 4, 4]).reshape([ROWS, 16])
    return gl.convert_layout(table, WORDS, assert_trivial=True)


@gluon_jit
def plus_scaled(memory, stage, sums, parts, MMA: gl.constexpr, N: gl.constexpr):
    """sums + parts times the token rows' scales. Where registers are few, before the next chain begins."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGES: gl.constexpr = memory.x_scales.shape[0]
    PARTS: gl.constexpr = memory.x_scales.shape[1] // 16
    x_scales = memory.x_scales.reinterpret(gl.float32, [STAGES * PARTS, 16], FLAT)
    added = ()
    for part in gl.static_range(len(parts)):
        scale = x_scales.index(stage * PARTS + part).load(gl.SliceLayout(0, MMA))
        scale = scale.expand_dims(0).broadcast_to(parts[part].shape)
        added = with_item(added, gl.fma(parts[part], scale, sums[part]))
    if N > _TWO_CHAINS:
        added = here(added)
    return added


# ---- MMA warps ----


@gluon_jit
def _mainloop(memory, sums, stage, phase, never, N: gl.constexpr, K: gl.constexpr, MMA: gl.constexpr):
    """Sums of the first block and of the second, over all of K: `sums` are zeros [128, 16] for each 16 of N rows."""
    IS_EARLY: gl.constexpr = N <= _TWO_BLOCKS  # the next block's weights are decoded while a chain runs
    first, second, parts = sums, sums, sums
    warp_wait(_BARRIERS + stage * _BARRIER_BYTES, phase)
    low, high = step_weights(memory, 2 * stage, MMA)
    for step in range(K // 128):
        following, next_phase = next_stage(stage, phase, _STAGES)
        parts = begin_chain(parts, low, high, stage * _X_BYTES, never, N)
        if IS_EARLY:
            later, last = step_weights(memory, 2 * stage + 1, MMA)
        parts = end_chain(parts, low, high)
        first = plus_scaled(memory, stage, first, parts, MMA, N)
        if not IS_EARLY:
            later, last = step_weights(memory, 2 * stage + 1, MMA)
        parts = begin_chain(parts, later, last, stage * _X_BYTES, never, N)
        if IS_EARLY:  # noqa: SIM102
            if step + 1 < K // 128:
                warp_wait(_BARRIERS + following * _BARRIER_BYTES, next_phase)
                low, high = step_weights(memory, 2 * following, MMA)
        parts = end_chain(parts, later, last)
        second = plus_scaled(memory, stage, second, parts, MMA, N)
        warp_arrive(_BARRIERS + (_FREE + stage) * _BARRIER_BYTES)
        if not IS_EARLY:  # noqa: SIM102
            if step + 1 < K // 128:
                warp_wait(_BARRIERS + following * _BARRIER_BYTES, next_phase)
                low, high = step_weights(memory, 2 * following, MMA)
        stage, phase = following, next_phase
    return first, second


@gluon_jit
def _leave_sums(memory, sums, factor, BLOCK: gl.constexpr):
    parts = ()
    for part in gl.static_range(_TOKENS // 16):  # after the last: anything
        parts = with_item(parts, (sums[min(part, len(sums) - 1)] * factor).to(gl.bfloat16))
    rows = _joined(parts).permute((4, 3, 2, 1, 0)).reshape([_TOKENS, _BLOCK])
    memory.sums.slice(BLOCK * 128, 128, 1).store(rows)


@gluon_jit
def _mma(memory, never, K: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_MMA_WARPS, 1], [16, 16, 16])
    zeros = gl.zeros([_BLOCK, 16], gl.float32, MMA)
    stage, phase, number = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    num_rows = described_rows(number, _BARRIERS, _STAGES, _DESCRIPTIONS)
    while num_rows > 0:
        for eight in gl.static_range(1, _TOKENS // 8 + 1):
            if (num_rows + 7) // 8 == eight:
                sums = (zeros,) * ((eight + 1) // 2)
                first, second = _mainloop(memory, sums, stage, phase, never, 8 * eight, K, MMA)
                scale, other_scale = described_factors(number, _BARRIERS, _STAGES, _DESCRIPTIONS)
                _leave_sums(memory, first, scale, 0)
                _leave_sums(memory, second, other_scale, 1)
        warp_arrive(_BARRIERS + _SUMMED * _BARRIER_BYTES)
        stage, phase = later_stage(stage, phase, K // 128, _STAGES)
        number += 1
        num_rows = described_rows(number, _BARRIERS, _STAGES, _DESCRIPTIONS)


# ---- epilogue warps ----


@gluon_jit
def epilogue(
    out_ptr, out_scale_ptr, weights_ptr, order, memory, limit, num_tiles,
    OUTS: gl.constexpr, BLOCKS: gl.constexpr, E: gl.constexpr, GATE_UP: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Codes of hidden and their scales, or parts, four rows at a time."""
    TOKENS: gl.constexpr = memory.pairs.shape[0]
    COLS: gl.constexpr = _OUTPUTS // 2 if GATE_UP else _OUTPUTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_EPILOGUE_WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    all_pairs = memory.pairs.reinterpret(gl.int32, [TOKENS // 4, 4], FLAT)
    all_weights = memory.weights.reinterpret(gl.float32, [TOKENS // 4, 4], FLAT)
    all_sums = memory.sums.reinterpret(
        gl.bfloat16, [TOKENS // 4, 4, _OUTPUTS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    )
    row, col = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    place = gl.arange(0, TOKENS, gl.BlockedLayout([2], [32], [_EPILOGUE_WARPS], [0]))
    num_pairs = gl.load(order.offsets + E)
    index, phase = gl.program_id(0), gl.to_tensor(0)
    tile = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
    while tile.expert >= 0:
        pair = gl.load(order.pairs + gl.minimum(tile.start + place, tile.end - 1))
        memory.pairs.store(pair)
        if GATE_UP:
            memory.weights.store(gl.load(weights_ptr + pair))
        index += gl.num_programs(0)
        following = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
        num_rows = tile.end - tile.start
        _barrier.wait(memory.barriers.index(SUMMED), phase)
        for four in range((num_rows + 3) // 4):
            sums = all_sums.index(four)
            rows, is_row = all_pairs.index(four).load(gl.SliceLayout(1, LAYOUT)), four * 4 + row < num_rows
            target = out_ptr + ((rows * OUTS)[:, None] + (tile.block * COLS + col)[None, :])
            if GATE_UP:
                hidden = activated(sums, limit, LAYOUT)  # [4, 128]
                weight = all_weights.index(four).load(gl.SliceLayout(1, LAYOUT))
                codes, scale = quantize_e4m3((hidden * weight.expand_dims(1)).to(gl.bfloat16).to(gl.float32))
                gl.store(target, codes.to(gl.int8, bitcast=True), mask=is_row[:, None])
                gl.store(out_scale_ptr + rows * BLOCKS + tile.block, e8m0_to_float(scale), mask=is_row)
            else:
                gl.store(target, sums.load(LAYOUT), mask=is_row[:, None])
        _barrier.arrive(memory.barriers.index(SUMMED + 1))
        phase ^= 1
        tile = following


@gluon_jit(do_not_specialize=("num_tiles",))
def fp8_experts_kernel(
    x_ptr, x_scale_ptr, out_ptr, out_scale_ptr, weights_ptr, order, first, second, limit, num_tiles,
    K: gl.constexpr, OUTS: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr,
    GATE_UP: gl.constexpr, DATA_WORDS: gl.constexpr, SCALE_WORDS: gl.constexpr,
):  # fmt: skip
    """GATE_UP: codes of hidden and their scales; else parts of pairs."""
    BLOCKS: gl.constexpr = OUTS // (_BLOCK if GATE_UP else _OUTPUTS)
    memory = allocate(_STAGES, _STAGES, _TOKENS, _BLOCK, 32 * _PRODUCER_WARPS, _MMA_WARPS)
    check_places(0, _BARRIERS + _DESCRIPTIONS)
    gl.warp_specialize(
        [
            (_mma, (memory, num_tiles >> 30, K)),
            (_producer, (
                x_ptr, x_scale_ptr, order, first, second, memory, num_tiles,
                K, BLOCKS, E, TOP_K, GATE_UP, DATA_WORDS, SCALE_WORDS,
            )),
            (epilogue, (
                out_ptr, out_scale_ptr, weights_ptr, order, memory, limit, num_tiles, OUTS, BLOCKS, E, GATE_UP, _SUMMED,
            )),
        ],
        [_PRODUCER_WARPS, _EPILOGUE_WARPS], [_REGISTERS, _REGISTERS],
    )  # fmt: skip
    keep_all(memory)
