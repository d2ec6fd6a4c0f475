"""Routed experts of many tokens on Hopper, in Gluon: the products of kernel_wide.py in the same order, so its bits.

A persistent CTA on every multiprocessor takes tile after tile: up to 128 token rows of an expert, and 256 weight rows,
128 of gate and of up or 256 of down. Its 20 warps have three roles, and meet at barriers in shared memory (S = STAGES):

    role            warps  waits on                arrives at
    producer            2  free[stage]             full[stage] (64 threads, as their copies end), described[tile % 2]
    MMA                16  described, full, taken  free[stage] (16, warp by warp), summed (16)
    epilogue            2  summed                  taken (1)

* Producer warps copy steps of 128 columns, as far ahead as the ring of stages holds: words, scales and token rows.
  They also describe each tile: its number of token rows and the factors of its sums.
* MMA warps, mainloop over K: each four of them decode and multiply 64 weight rows. They do not wait for one another:
  the tensor cores work for some while others decode. A product is as wide as the tile has token rows, in eights. Then
  they leave the accumulator in shared memory, scaled and rounded, and go on with the next tile.
* Epilogue warps: activation, routing weight, rounding, stores.

Shared memory, by hand: MMA warps find rows, barriers and descriptions by their offsets, in bytes (NVFP4; MXFP4's
scales have half the size, 4 bytes a weight row):

         0  +------------------------------------------------+
            | x          S x 2 halves x 128 rows x 64 bf16   |   98,304   halves of 64 columns, swizzled
    98,304  +------------------------------------------------+
            | sums       128 rows x 256 bf16                 |   65,536
   163,840  +------------------------------------------------+
            | words      S x 256 weight rows x 16 int32      |   49,152
   212,992  +------------------------------------------------+
            | scales     S x 256 weight rows x 8 bytes       |    6,144
   219,136  +------------------------------------------------+
            | barriers   full[S] free[S] summed taken        |   + 0     8 bytes each
            |            described[2]                        |
            | tiles      2 x (num_rows, scale, scale, -)     |   + 128   int32
            +------------------------------------------------+   the last of the scales' allocations
            | sources, pairs, weights   128 x 4 bytes each   |
            +------------------------------------------------+

Triton lays allocations out in the order in which they are made, if none is larger than one before: marks are stored at
both ends, and looked for at their offsets before anything else happens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.arch import known_at_compile_time
from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.fp4 import fp4_planes, fp4_scales
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pipeline import (
    BARRIER_BYTES,
    later_stage,
    next_stage,
    producer_acquire,
    producer_commit_copies,
    ring_at,
)
from dsv4.ops.lib.warp_groups import load_word, trap, warp_arrive, warp_wait, wgmma_issue, wgmma_wait
from dsv4.ops.moe.kernel_hidden import activate
from dsv4.ops.moe.kernel_parts import part_rows
from dsv4.ops.moe.kernel_rows import with_item
from dsv4.ops.moe.many.tiles import describe, described_factors, described_rows, tile_at, tile_barriers
from dsv4.ops.moe.plan import TILES_OUTPUTS, TILES_ROWS

TILE_TOKENS = TILES_ROWS
TILE_OUTPUTS = TILES_OUTPUTS  # weight rows of a tile
STAGES = 3
NUM_WARPS = 16  # MMA warps

_TOKENS, _OUTPUTS, _STAGES = gl.constexpr(TILE_TOKENS), gl.constexpr(TILE_OUTPUTS), gl.constexpr(STAGES)
_MMA_WARPS, _PRODUCER_WARPS, _EPILOGUE_WARPS = gl.constexpr(NUM_WARPS), gl.constexpr(2), gl.constexpr(2)
_REGISTERS = gl.constexpr(32)  # of producer and epilogue warps; MMA warps then have 112
# barriers: the ring's `full` from 0 on and `free`; the accumulator is there, and taken; a description in either place
_FREE, _SUMMED, _TAKEN = gl.constexpr(STAGES), gl.constexpr(2 * STAGES), gl.constexpr(2 * STAGES + 1)
_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)
_DESCRIPTIONS = gl.constexpr(128)  # bytes after the first barrier; of 16 each
_X_BYTES, _WORD_BYTES = gl.constexpr(TILE_TOKENS * 256), gl.constexpr(TILE_OUTPUTS * 64)  # of a stage
_SUM_BYTES = gl.constexpr(TILE_TOKENS * TILE_OUTPUTS * 2)
_MARK = gl.constexpr(0x6B5A4938)
# token rows up to which registers hold all weights of a step, and up to which half of them are decoded at once
_SPLIT_ROWS, _HALF_ROWS = gl.constexpr(96), gl.constexpr(64)
if hopper is not None:
    _barrier, _async = hopper.mbarrier, hopper.async_copy


class Memory(NamedTuple):
    """Shared memory: stages of token rows (halves of 64 columns), of words and of scales; sums of a tile; where rows of
    x begin, which pairs they are of, and those pairs' weights; descriptions of two tiles; barriers."""

    x: Any
    words: Any
    scales: Any
    sums: Any
    sources: Any
    pairs: Any
    weights: Any
    tiles: Any
    barriers: Any


@gluon_jit
def _allocate(FORMAT: gl.constexpr):
    """All that is looked for by its address comes in the order of size."""
    SIZE: gl.constexpr = 256 if FORMAT == 0 else 128
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = gl.allocate_shared_memory(gl.bfloat16, [2 * _STAGES, _TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2))
    sums = gl.allocate_shared_memory(gl.bfloat16, [_TOKENS, _OUTPUTS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    words = gl.allocate_shared_memory(gl.int32, [2 * _STAGES, 128, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    scales = gl.allocate_shared_memory(gl.int32, [2 * _STAGES, SIZE], FLAT)
    rest = gl.allocate_shared_memory(gl.int32, [SIZE], FLAT)
    sources = gl.allocate_shared_memory(gl.int32, [_TOKENS], FLAT)
    pairs = gl.allocate_shared_memory(gl.int32, [_TOKENS], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [_TOKENS], FLAT)
    tiles = rest.reinterpret(gl.int32, [SIZE // 4, 4], FLAT)
    mark = _MARK + gl.arange(0, 4, gl.BlockedLayout([1], [32], [_MMA_WARPS], [0]))
    x.reinterpret(gl.int32, [_STAGES * _TOKENS * 16, 4], FLAT).index(0).store(mark)
    tiles.index(_DESCRIPTIONS // 16).store(mark)
    barriers = tile_barriers(rest, _STAGES, 32 * _PRODUCER_WARPS, _MMA_WARPS)
    gl.barrier()
    return Memory(x, words, scales, sums, sources, pairs, weights, tiles, barriers)


@gluon_jit
def _keep(memory):
    """Nothing is laid over anything else."""
    memory.x._keep_alive()
    memory.words._keep_alive()
    memory.scales._keep_alive()
    memory.sums._keep_alive()
    memory.tiles._keep_alive()


# ---- producer warps ----


@gluon_jit
def _copy_weights(memory, half, data_ptr, scale_ptr, tile, K: gl.constexpr, FORMAT: gl.constexpr):
    """128 rows of a matrix, of two tiles of which the first is `tile`, into half a stage."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_PRODUCER_WARPS, 1], [1, 0])
    SIZE: gl.constexpr = 128 if FORMAT == 0 else 64  # words of scales
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    inside = (row // 64 * (K * 8) + row % 64 * 16)[:, None] + word[None, :]
    _async.async_load(memory.words.index(half), data_ptr + tile * 1024 + inside)
    scale = gl.arange(0, 2 * SIZE, gl.BlockedLayout([4], [32], [_PRODUCER_WARPS], [0]))
    inside = scale // SIZE * (K // 128 * SIZE) + scale % SIZE
    _async.async_load(memory.scales.index(half), scale_ptr + tile * SIZE + inside)


@gluon_jit
def _copy_rows(memory, stage, source_ptr, num_rows):
    """128 columns of token rows, 32 rows at a time, which is what there are registers for."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [_PRODUCER_WARPS, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for first in gl.static_range(0, _TOKENS, 32):
        places = memory.sources.slice(first, 32).load(gl.SliceLayout(1, LAYOUT)) * 8
        source = source_ptr + (places[:, None] + col[None, :])
        is_row = (first + row < num_rows)[:, None]
        for half in gl.static_range(2):
            target = memory.x.index(2 * stage + half).slice(first, 32)
            _async.async_load(target, source + half * 64, mask=is_row)


@gluon_jit
def _producer(
    x_ptr, order, first, second, memory, num_tiles,
    K: gl.constexpr, BLOCKS: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, FORMAT: gl.constexpr,
    GATE_UP: gl.constexpr, DATA_WORDS: gl.constexpr, SCALE_WORDS: gl.constexpr,
):
    """Waits on the ring's `free`; arrives at its `full`, 64 threads as their copies end, and at `described`, once a
    tile. Weight rows of the tile, of gate and up or two halves of down's, and its token rows, step by step."""
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
        memory.sources.store((pair // TOP_K if GATE_UP else pair) * (K // 8))
        expert = tile.expert.to(gl.int64)
        data_ptr, scale_ptr = first.data + expert * DATA_WORDS, first.scale + expert * SCALE_WORDS
        other_data_ptr, other_scale_ptr = second.data + expert * DATA_WORDS, second.scale + expert * SCALE_WORDS
        row_tile = tile.block * (2 if GATE_UP else 4)
        other_tile = row_tile if GATE_UP else row_tile + 2
        for step in range(K // 128):
            producer_acquire(ring, stage, phase)
            _copy_weights(memory, 2 * stage, data_ptr, scale_ptr, row_tile * (K // 128) + step, K, FORMAT)
            other = other_tile * (K // 128) + step
            _copy_weights(memory, 2 * stage + 1, other_data_ptr, other_scale_ptr, other, K, FORMAT)
            _copy_rows(memory, stage, x_ptr + step * 128, (num_rows + 7) // 8 * 8)
            producer_commit_copies(ring, stage)
            stage, phase = next_stage(stage, phase, _STAGES)
        tile = following
    zero = gl.to_tensor(0.0)
    describe(memory, described, gl.to_tensor(0), zero, zero, _STAGES, _DESCRIPTIONS, _PRODUCER_WARPS)


# ---- MMA warps ----


@known_at_compile_time
def words_layout(is_gate_up: bool) -> Any:
    """Which of a stage's words [256, 16] a thread has: four neighbours of two rows, which an MMA has 8 apart."""
    lanes = [[0, 4], [0, 8], [1, 0], *([[4, 0], [8, 0]] if is_gate_up else [[2, 0], [4, 0]])]
    warps = [[16, 0], [2, 0], [32, 0], [64, 0]] if is_gate_up else [[16, 0], [32, 0], [64, 0], [128, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [128 if is_gate_up else 8, 0]], lanes, warps, [], [256, 16])


@gluon_jit
def as_operand(words, MMA: gl.constexpr, GATE_UP: gl.constexpr):
    """[256, 16] of a stage as rows and columns of products. Columns: bit 1 is the highest. Rows: of gate and of up
    eight in turns, so that both of a channel are a thread's; channels in the order of hidden in memory
    (`in_product_order`). All of it is but names."""
    if GATE_UP:
        words = words.reshape([2, 4, 2, 4, 2, 2, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5, 7, 6, 8))
    else:
        words = words.reshape([_OUTPUTS, 4, 2, 2]).permute((0, 2, 1, 3))
    return gl.convert_layout(words.reshape([_OUTPUTS, 16]), MMA, assert_trivial=True)


@gluon_jit
def _scales(codes, MMA: gl.constexpr, FORMAT: gl.constexpr, GATE_UP: gl.constexpr):
    even, odd = fp4_scales(codes, FORMAT)
    even = as_operand(even.expand_dims(1).broadcast_to([_OUTPUTS, 16]), MMA, GATE_UP)
    return even, as_operand(odd.expand_dims(1).broadcast_to([_OUTPUTS, 16]), MMA, GATE_UP)


@gluon_jit
def _load_weights(
    memory, stage, WORDS: gl.constexpr, MMA: gl.constexpr, FORMAT: gl.constexpr, GATE_UP: gl.constexpr
):
    """Words of a stage, as operands, and the codes of scales of its rows: in NVFP4 eight each, in MXFP4 four."""
    CODES: gl.constexpr = gl.int64 if FORMAT == 0 else gl.int32
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = memory.words.reinterpret(gl.int32, [_STAGES, _OUTPUTS, 16], PLAIN).index(stage).load(WORDS)
    codes = memory.scales.reinterpret(CODES, [_STAGES, _OUTPUTS], FLAT).index(stage).load(gl.SliceLayout(1, WORDS))
    return as_operand(words, MMA, GATE_UP), codes


@gluon_jit
def _mainloop(
    memory, sums, stage, phase,
    N: gl.constexpr, K: gl.constexpr, FORMAT: gl.constexpr, GATE_UP: gl.constexpr, MMA: gl.constexpr,
    BARRIERS: gl.constexpr,
):
    """The products of a tile of up to N rows, over all of K: `sums` are zeros [256, 16] for each 16 of them. Weights of
    the next step are loaded beside the last products of a step."""
    WORDS: gl.constexpr = words_layout(GATE_UP)
    PLANES: gl.constexpr = 4 if N <= _HALF_ROWS else 2  # decoded at a time
    warp_wait(BARRIERS + stage * _BARRIER_BYTES, phase)
    words, codes = _load_weights(memory, stage, WORDS, MMA, FORMAT, GATE_UP)  # [256, 16], [256]
    for step in range(K // 128):
        following, next_phase = next_stage(stage, phase, _STAGES)
        under_way = ()
        for plane in gl.static_range(0, 8, PLANES):
            some = (codes >> 32 if FORMAT == 0 and plane >= 4 else codes).to(gl.int32)
            even, odd = _scales(some, MMA, FORMAT, GATE_UP)
            planes = fp4_planes(words, even, odd, FORMAT, plane, PLANES)
            address = stage * _X_BYTES + (plane // 4 * (_X_BYTES // 2) + plane % 4 * 32)
            # sums += weight @ x.T, 64 columns
            sums = wgmma_issue(sums, planes, address, N)
            under_way = under_way + planes
            if plane + PLANES == 8:  # noqa: SIM102
                if step + 1 < K // 128:
                    warp_wait(BARRIERS + following * _BARRIER_BYTES, next_phase)
                    words, codes = _load_weights(memory, following, WORDS, MMA, FORMAT, GATE_UP)
            if N > _SPLIT_ROWS or plane + PLANES == 8:
                sums = wgmma_wait(sums, under_way)
                under_way = ()
        warp_arrive(BARRIERS + (_FREE + stage) * _BARRIER_BYTES)
        stage, phase = following, next_phase
    return sums


@gluon_jit
def _joined(parts):
    """Eight [256, 16] -> [256, 16, bits 4, 5 and 6 of the token row]."""
    first, second = gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3])
    third, last = gl.join(parts[4], parts[5]), gl.join(parts[6], parts[7])
    return gl.join(gl.join(first, second), gl.join(third, last))


@gluon_jit
def leave_sums(memory, sums, scale, other_scale, MMA: gl.constexpr, GATE_UP: gl.constexpr):
    """The accumulator, scaled, for the epilogue: [128, 256], the columns of gate before those of up."""
    row = gl.arange(0, _OUTPUTS, gl.SliceLayout(1, MMA))
    factor = gl.where(row // 8 % 2 == 0, scale, other_scale).expand_dims(1) if GATE_UP else scale
    parts = ()
    for part in gl.static_range(_TOKENS // 16):  # after the last: anything
        parts = with_item(parts, (sums[min(part, len(sums) - 1)] * factor).to(gl.bfloat16))
    joined = _joined(parts)
    if GATE_UP:
        joined = joined.reshape([16, 2, 8, 16, 2, 2, 2]).permute((6, 5, 4, 3, 1, 0, 2))
    else:
        joined = joined.permute((4, 3, 2, 1, 0))
    memory.sums.store(joined.reshape([_TOKENS, _OUTPUTS]))


@gluon_jit
def _mma(memory, K: gl.constexpr, FORMAT: gl.constexpr, GATE_UP: gl.constexpr, BARRIERS: gl.constexpr):
    """Waits on `described`, the ring's `full`, and `taken` before it leaves an accumulator; arrives at the ring's
    `free`, once a step, and at `summed`, once a tile: 16 warps one by one."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_MMA_WARPS, 1], [16, 16, 16])
    zeros = gl.zeros([_OUTPUTS, 16], gl.float32, MMA)
    stage, phase, number = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    num_rows = described_rows(number, BARRIERS, _STAGES, _DESCRIPTIONS)
    while num_rows > 0:
        for eight in gl.static_range(1, _TOKENS // 8 + 1):
            if (num_rows + 7) // 8 == eight:
                sums = _mainloop(
                    memory, (zeros,) * ((eight + 1) // 2), stage, phase, 8 * eight, K, FORMAT, GATE_UP, MMA, BARRIERS
                )
                scale, other_scale = described_factors(number, BARRIERS, _STAGES, _DESCRIPTIONS)
                leave_sums(memory, sums, scale, other_scale, MMA, GATE_UP)
        warp_arrive(BARRIERS + _SUMMED * _BARRIER_BYTES)
        stage, phase = later_stage(stage, phase, K // 128, _STAGES)
        number += 1
        num_rows = described_rows(number, BARRIERS, _STAGES, _DESCRIPTIONS)


# ---- epilogue warps ----


@gluon_jit
def activated(sums, limit, LAYOUT: gl.constexpr):
    """Rows that `leave_sums` left of gate and up -> fp32 of hidden."""
    COLS: gl.constexpr = _OUTPUTS // 2
    gate = sums.slice(0, COLS, 1).load(LAYOUT).to(gl.float32)
    up = sums.slice(COLS, COLS, 1).load(LAYOUT).to(gl.float32)
    return activate(gate, up, limit)


@gluon_jit
def _epilogue(
    out_ptr, weights_ptr, order, memory, limit, num_tiles, num_choices,
    OUTS: gl.constexpr, BLOCKS: gl.constexpr, E: gl.constexpr, FORMAT: gl.constexpr, GATE_UP: gl.constexpr,
    RANKS: gl.constexpr,
):
    """Waits on `summed`; arrives at `taken`, once a tile. Rows of hidden, four at a time, or of parts, of which
    `part_rows` says where they go."""
    COLS: gl.constexpr = _OUTPUTS // 2 if GATE_UP else _OUTPUTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_EPILOGUE_WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    all_pairs = memory.pairs.reinterpret(gl.int32, [_TOKENS // 4, 4], FLAT)
    all_weights = memory.weights.reinterpret(gl.float32, [_TOKENS // 4, 4], FLAT)
    all_sums = memory.sums.reinterpret(
        gl.bfloat16, [_TOKENS // 4, 4, _OUTPUTS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    )
    row, col = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    place = gl.arange(0, _TOKENS, gl.BlockedLayout([2], [32], [_EPILOGUE_WARPS], [0]))
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
        _barrier.wait(memory.barriers.index(_SUMMED), phase)
        for four in range((num_rows + 3) // 4):
            sums = all_sums.index(four)
            if GATE_UP:
                # hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight
                hidden = activated(sums, limit, LAYOUT)  # [4, 128]
                weight = all_weights.index(four).load(gl.SliceLayout(1, LAYOUT))
                values = (hidden * weight.expand_dims(1)).to(gl.bfloat16)
                if FORMAT != 0:
                    values = fake_quantize_e4m3(values)
            else:
                values = sums.load(LAYOUT)
            rows, is_row = all_pairs.index(four).load(gl.SliceLayout(1, LAYOUT)), four * 4 + row < num_rows
            row_ptr = part_rows(rows, is_row, out_ptr, num_choices, OUTS, RANKS)
            gl.store(row_ptr[:, None] + (tile.block * COLS + col)[None, :], values, mask=is_row[:, None])
        _barrier.arrive(memory.barriers.index(_TAKEN))
        phase ^= 1
        tile = following


@gluon_jit(do_not_specialize=("num_tiles", "num_choices"))
def expert_tiles_kernel(
    x_ptr, out_ptr, weights_ptr, order, first, second, limit, num_tiles, num_choices,
    K: gl.constexpr, OUTS: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, FORMAT: gl.constexpr,
    GATE_UP: gl.constexpr, DATA_WORDS: gl.constexpr, SCALE_WORDS: gl.constexpr, RANKS: gl.constexpr,
):
    """GATE_UP: hidden of x, by `first` and `second`, in product order as x; else parts of hidden, by the matrix that is
    both. RANKS > 0: the parts of `num_choices` pairs go to the ranks of their tokens (`part_rows`)."""
    BLOCKS: gl.constexpr = OUTS // (_OUTPUTS // 2 if GATE_UP else _OUTPUTS)
    BARRIERS: gl.constexpr = (
        _STAGES * (_X_BYTES + _WORD_BYTES + _OUTPUTS * (8 if FORMAT == 0 else 4)) + _SUM_BYTES
    )
    memory = _allocate(FORMAT)
    if (load_word(0) != _MARK) | (load_word(BARRIERS + _DESCRIPTIONS) != _MARK):
        trap()
    gl.barrier()
    gl.warp_specialize(
        [
            (_mma, (memory, K, FORMAT, GATE_UP, BARRIERS)),
            (_producer, (
                x_ptr, order, first, second, memory, num_tiles,
                K, BLOCKS, E, TOP_K, FORMAT, GATE_UP, DATA_WORDS, SCALE_WORDS,
            )),
            (_epilogue, (
                out_ptr, weights_ptr, order, memory, limit, num_tiles, num_choices,
                OUTS, BLOCKS, E, FORMAT, GATE_UP, RANKS,
            )),
        ],
        [_PRODUCER_WARPS, _EPILOGUE_WARPS], [_REGISTERS, _REGISTERS],
    )
    _keep(memory)
