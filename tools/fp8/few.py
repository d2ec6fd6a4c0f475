"""The prototype's form for few tokens: the same chains as kernel.py, added in the same order, so its bits.

Bytes of weights bound it. A persistent CTA on every multiprocessor takes tile after tile: up to 32 token rows of an
expert, and 256 weight rows, 128 of gate and of up or 256 of down. Its 20 warps have four roles (S = STAGES):

    role            warps  waits on                arrives at
    words               1  free[stage]             full[stage], by the copy engine
    rows                1  free[stage]             full[stage] (32 threads, as their copies end), described[tile % 2]
    MMA                16  described, full, taken  free[stage] (16, warp by warp), summed (16)
    epilogue            2  summed                  taken (1)

* A stage is two steps of 128 columns, 35 KB of weights: words by bulk copies, one for 64 rows of a step, scales with
  the token rows. Both producers run ahead, across tiles, as far as the ring holds: 139 KB on each multiprocessor.
* MMA: each four warps decode 64 weight rows and multiply them by 8, 16 or 32 token rows, a chain a step. The
  second step of a stage is decoded beside the first one's chain, and groups decode while others multiply.
* No range of columns is summed apart from others (no split-K). So no order differs from that of many tokens.

Shared memory, in the order of size: words [2 S, 256, 16], x [2 S, 32, 128], swizzled, sums [32, 256] in bf16, scales
[2 S, 256], x_scales [2 S, 32], barriers and descriptions as in kernel.py.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pipeline import (
    BARRIER_BYTES,
    later_stage,
    next_stage,
    producer_acquire,
    producer_commit_copies,
    ring_at,
)
from dsv4.ops.lib.warp_groups import warp_arrive, warp_wait
from dsv4.ops.moe.kernel_rows import PairOrder
from dsv4.ops.moe.many.tiles import describe, described_factors, described_rows, tile_at
from tools.fp8.chains import begin_chain, end_chain
from tools.fp8.kernel import allocate, check_places, epilogue, keep_all, plus_scaled, step_weights

ROWS = 32  # token rows of a tile
STAGES = 4  # of two steps of 128 columns
NUM_WARPS = 16  # MMA warps

_ROWS, _OUTPUTS, _STAGES = gl.constexpr(ROWS), gl.constexpr(256), gl.constexpr(STAGES)
_MMA_WARPS, _EPILOGUE_WARPS = gl.constexpr(NUM_WARPS), gl.constexpr(2)
_REGISTERS = gl.constexpr(64)  # of all warps but those of MMA, which then have 104
_FREE, _SUMMED = gl.constexpr(STAGES), gl.constexpr(2 * STAGES)
_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)
_DESCRIPTIONS = gl.constexpr(128)
_X_BYTES = gl.constexpr(ROWS * 128)  # of a step
_BLOCK_BYTES = gl.constexpr(64 * 64)  # 64 weight rows of a step
_STEPS, _X = gl.constexpr(2 * STAGES), gl.constexpr(2 * STAGES * 256 * 64)
_BARRIERS = gl.constexpr(2 * STAGES * (256 * 68 + ROWS * 132) + ROWS * 512)
if hopper is not None:
    _barrier, _async = hopper.mbarrier, hopper.async_copy


# ---- producer warps ----


@gluon_jit
def _bulk_copy(source, target, size, barrier):
    """Each lane's `size` bytes, if any: from an address to an offset of shared memory, counted at a barrier."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 at, bar; setp.ne.b32 p, $3, 0; mov.u32 bar, global_smem; add.u32 at, bar, $2;\n"
        "add.u32 bar, bar, $4; mov.b32 $0, $2;\n"
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [$1], $3, [bar]; }",
        "=r,l,r,r,r", [source, target, size, barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon_jit
def _first_block(tile, BLOCKS: gl.constexpr, GATE_UP: gl.constexpr):
    """The first 64 weight rows of a tile, among those of all experts."""
    PER_TILE: gl.constexpr = 2 if GATE_UP else 4
    return (tile.expert * BLOCKS + tile.block) * PER_TILE


@gluon_jit
def _words_warp(
    order, first, second, memory, num_tiles,
    K: gl.constexpr, BLOCKS: gl.constexpr, E: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Words of four blocks of 64 weight rows in two steps: a lane for each."""
    ring = ring_at(memory.barriers, 0, _STAGES)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    place, size = lane % 4, gl.where(lane < 8, _BLOCK_BYTES, 0)
    start = first.data.to(gl.int64)
    if GATE_UP:
        start = gl.where(place < 2, start, second.data.to(gl.int64))
    num_pairs = gl.load(order.offsets + E)
    index, stage, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(1)
    tile = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
    while tile.expert >= 0:
        block = _first_block(tile, BLOCKS, GATE_UP) + (place % 2 if GATE_UP else place)
        source = start + (block.to(gl.int64) * (K // 128) + lane // 4) * _BLOCK_BYTES
        index += gl.num_programs(0)
        tile = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
        for _ in range(K // 256):
            producer_acquire(ring, stage, phase)
            _barrier.expect(ring.full.index(stage), 8 * _BLOCK_BYTES)
            _bulk_copy(source, (stage * 8 + lane) * _BLOCK_BYTES, size, _BARRIERS + stage * _BARRIER_BYTES)
            source += 2 * _BLOCK_BYTES
            stage, phase = next_stage(stage, phase, _STAGES)


@gluon_jit
def _rows_warp(
    x_ptr, x_scale_ptr, order, first, second, memory, num_tiles,
    K: gl.constexpr, BLOCKS: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Token rows and their scales, scales of weights, and descriptions of tiles for the MMA warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = ring_at(memory.barriers, 0, _STAGES)
    scales = memory.scales.reinterpret(gl.int32, [_STEPS, 4, 64], PLAIN)
    num_pairs = gl.load(order.offsets + E)
    row, col = gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    place = gl.arange(0, _ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    block, word = gl.arange(0, 4, gl.SliceLayout(1, SCALES)), gl.arange(0, 64, gl.SliceLayout(0, SCALES))
    index, described = gl.program_id(0), gl.to_tensor(0)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    tile = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
    while tile.expert >= 0:
        num_rows = tile.end - tile.start
        scale, other_scale = gl.load(first.out_scale + tile.expert), gl.load(second.out_scale + tile.expert)
        describe(memory, described, num_rows, scale, other_scale, _STAGES, _DESCRIPTIONS, 1)
        described ^= 1
        rows = _row_of(order, tile, row, TOP_K, GATE_UP) * K  # [32]
        scale_rows = x_scale_ptr + _row_of(order, tile, place, TOP_K, GATE_UP) * (K // 128)
        first_block = _first_block(tile, BLOCKS, GATE_UP)
        inside = (block % 2 if GATE_UP else block)[:, None] * (K // 2) + word[None, :]
        scale_ptr = first.scale + first_block * (K // 2)
        if GATE_UP:
            scale_ptr = gl.where(block[:, None] < 2, scale_ptr, second.scale + first_block * (K // 2))
        index += gl.num_programs(0)
        tile = tile_at(order, index, num_tiles, num_pairs, BLOCKS)
        for first_step in range(0, K // 128, 2):
            producer_acquire(ring, stage, phase)
            for half in gl.static_range(2):
                to, step = 2 * stage + half, first_step + half
                source = x_ptr + step * 128 + (rows[:, None] + col[None, :])
                _async.async_load(memory.x.index(to), source, mask=(row < num_rows)[:, None])
                _async.async_load(scales.index(to), scale_ptr + (inside + step * 64))
                _async.async_load(memory.x_scales.index(to), scale_rows + step, mask=place < num_rows)
            producer_commit_copies(ring, stage)
            stage, phase = next_stage(stage, phase, _STAGES)
    zero = gl.to_tensor(0.0)
    describe(memory, described, gl.to_tensor(0), zero, zero, _STAGES, _DESCRIPTIONS, 1)


@gluon_jit
def _row_of(order, tile, place, TOP_K: gl.constexpr, GATE_UP: gl.constexpr):
    """Rows of x or hidden at places of a tile; behind its last, that one."""
    pair = gl.load(order.pairs + gl.minimum(tile.start + place, tile.end - 1))
    return pair // TOP_K if GATE_UP else pair


# ---- MMA warps ----


@gluon_jit
def _mainloop(memory, sums, stage, phase, N: gl.constexpr, K: gl.constexpr, MMA: gl.constexpr):
    """Sums over all of K: `sums` are zeros [256, 16] for each 16 of N rows."""
    for _ in range(K // 256):
        warp_wait(_BARRIERS + stage * _BARRIER_BYTES, phase)
        low, high = step_weights(memory, 2 * stage, MMA)
        parts = begin_chain((), low, high, _X + stage * (2 * _X_BYTES), 0, N)
        later, last = step_weights(memory, 2 * stage + 1, MMA)  # beside the chain
        parts = end_chain(parts, low, high)
        sums = plus_scaled(memory, 2 * stage, sums, parts, MMA, N)
        parts = begin_chain((), later, last, _X + stage * (2 * _X_BYTES) + _X_BYTES, 0, N)
        parts = end_chain(parts, later, last)
        sums = plus_scaled(memory, 2 * stage + 1, sums, parts, MMA, N)
        warp_arrive(_BARRIERS + (_FREE + stage) * _BARRIER_BYTES)
        stage, phase = next_stage(stage, phase, _STAGES)
    return sums


@gluon_jit
def _leave_sums(memory, sums, scale, other_scale, MMA: gl.constexpr):
    """[32, 256], the second half with a factor of its own."""
    row = gl.arange(0, _OUTPUTS, gl.SliceLayout(1, MMA))
    factor = gl.where(row < _OUTPUTS // 2, scale, other_scale).expand_dims(1)
    first = (sums[0] * factor).to(gl.bfloat16)
    last = (sums[len(sums) - 1] * factor).to(gl.bfloat16)  # of up to 16 rows: anything
    memory.sums.store(gl.join(first, last).permute((2, 1, 0)).reshape([_ROWS, _OUTPUTS]))


@gluon_jit
def _mma(memory, K: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_MMA_WARPS, 1], [16, 16, 16])
    zeros = gl.zeros([_OUTPUTS, 16], gl.float32, MMA)
    stage, phase, number = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    num_rows = described_rows(number, _BARRIERS, _STAGES, _DESCRIPTIONS)
    while num_rows > 0:
        for size in gl.static_range(3):
            if (num_rows <= 8 << size) & (num_rows > (4 << size) * (size > 0)):
                sums = _mainloop(memory, (zeros,) * (1 + size // 2), stage, phase, 8 << size, K, MMA)
                scale, other_scale = described_factors(number, _BARRIERS, _STAGES, _DESCRIPTIONS)
                _leave_sums(memory, sums, scale, other_scale, MMA)
        warp_arrive(_BARRIERS + _SUMMED * _BARRIER_BYTES)
        stage, phase = later_stage(stage, phase, K // 256, _STAGES)
        number += 1
        num_rows = described_rows(number, _BARRIERS, _STAGES, _DESCRIPTIONS)


# ---- the order of pairs, where no launch has sorted them ----


@gluon_jit
def _order_at(scratch, E: gl.constexpr):
    """At `scratch`: pairs, experts of tiles, where tiles start, number of pairs in use."""
    return PairOrder(scratch, scratch + (3 * _ROWS - E), scratch + _ROWS, scratch + 2 * _ROWS)


@gluon_jit
def _find_order(memory, order, experts_ptr, num_pairs, E: gl.constexpr):
    """What a sort by expert would leave of up to 32 pairs, each of which counts those before it. An expert has one
    tile. Sums are those of a warp's own lanes: others would take shared memory, and all that lies there is found by
    its address."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [_MMA_WARPS, 1], [1, 0])
    row, col = gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, _ROWS, gl.SliceLayout(0, LAYOUT))
    own = _expert_at(experts_ptr, row, num_pairs, E)
    other = _expert_at(experts_ptr, col, num_pairs, E)[None, :]
    is_earlier = (other == own[:, None]) & (col[None, :] < row[:, None])
    rank = gl.sum(is_earlier.to(gl.int32), 1)
    memory.pairs.store(rank)
    gl.store(order.tile_experts + row, gl.full_like(row, -1))
    gl.store(order.tile_starts + row, gl.full_like(row, -1))
    gl.barrier()
    is_less = other < own[:, None]
    place = rank + gl.sum(is_less.to(gl.int32), 1)
    is_first = (memory.pairs.load(gl.SliceLayout(0, LAYOUT)) == 0)[None, :]
    tile = gl.sum((is_less & is_first).to(gl.int32), 1)
    gl.store(order.pairs + place, row, mask=own < E)
    gl.store(order.tile_experts + tile, own, mask=(own < E) & (rank == 0))
    gl.store(order.tile_starts + tile, place, mask=(own < E) & (rank == 0))
    gl.store(order.offsets + E + row * 0, gl.sum((other < E).to(gl.int32) + row[:, None] * 0, 1))
    gl.barrier()


@gluon_jit
def _expert_at(experts_ptr, pair, num_pairs, E: gl.constexpr):
    """E where there is none."""
    expert = gl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1).to(gl.int32)
    return gl.where((expert >= 0) & (expert < E), expert, E)


@gluon_jit(do_not_specialize=("num_tiles",))
def fp8_few_kernel(
    x_ptr, x_scale_ptr, out_ptr, out_scale_ptr, weights_ptr, experts_ptr, order, first, second, limit, num_tiles,
    K: gl.constexpr, OUTS: gl.constexpr, E: gl.constexpr, TOP_K: gl.constexpr, GATE_UP: gl.constexpr,
    IS_SORTED: gl.constexpr,
):  # fmt: skip
    """As `fp8_experts_kernel`. Not IS_SORTED: `num_tiles` is the number of pairs, up to ROWS, of which `experts_ptr`
    has the experts. A CTA of gate and up sorts them for itself, at a place of its own behind `order.pairs`; those of
    down read what the first has left there."""
    BLOCKS: gl.constexpr = OUTS // (_OUTPUTS // 2 if GATE_UP else _OUTPUTS)
    memory = allocate(_STAGES, _STEPS, _ROWS, _OUTPUTS, 33, _MMA_WARPS)
    if not IS_SORTED:
        if GATE_UP:
            order = _order_at(order.pairs + gl.program_id(0) * (4 * _ROWS), E)
            _find_order(memory, order, experts_ptr, num_tiles, E)
        else:
            order = _order_at(order.pairs, E)
    check_places(_X, _BARRIERS + _DESCRIPTIONS)
    gl.warp_specialize(
        [
            (_mma, (memory, K)),
            (_words_warp, (order, first, second, memory, num_tiles, K, BLOCKS, E, GATE_UP)),
            (_rows_warp, (
                x_ptr, x_scale_ptr, order, first, second, memory, num_tiles, K, BLOCKS, E, TOP_K, GATE_UP,
            )),
            (epilogue, (
                out_ptr, out_scale_ptr, weights_ptr, order, memory, limit, num_tiles, OUTS, BLOCKS, E, GATE_UP,
                _SUMMED,
            )),
        ],
        [1, 1, _EPILOGUE_WARPS], [_REGISTERS, _REGISTERS, _REGISTERS],
    )  # fmt: skip
    keep_all(memory)
