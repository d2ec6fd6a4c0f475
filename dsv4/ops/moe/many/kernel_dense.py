"""The shared expert of many tokens on Hopper, in Gluon: the products of kernel_wide.py in the same order, so its bits.

CTAs and the roles of their warps are as in kernel_tiles.py:

    role            warps  waits on                       arrives at
    producer            2  rows.free, words.free          rows.full, words.full (64 threads, as their copies end)
    MMA                16  rows.full, words.full, taken   rows.free, words.free, summed (16, warp by warp)
    epilogue            2  summed                         taken (1)

What differs:

* A tile is 128 tokens that follow one another. The last may have fewer: its other rows are copies of the last token.
* Weights are FP8. A row's 32 words of a step lie in shared memory in two parts, columns whose bit 4 is clear and the
  others. Each part is then as a step's words of FP4 are, and a byte of both is what two planes of FP4 are.
* Words have two stages of their own, beside three of token rows: a step's words are in registers before its products
  begin, so that they are free long before its rows.
* Columns are summed in ranges. Registers hold the accumulator of one: the sums of the ranges before lie in global
  memory, where a thread finds what it left itself.

Shared memory, by hand: MMA warps find rows and barriers by their offsets, in bytes (S = STAGES, W = WORD_STAGES):

         0  +------------------------------------------------+
            | x          S x 2 halves x 128 rows x 64 bf16   |   98,304   halves of 64 columns, swizzled
    98,304  +------------------------------------------------+
            | words      W x 2 parts x 256 rows x 16 int32   |   65,536
   163,840  +------------------------------------------------+
            | sums       128 rows x 256 bf16                 |   65,536
   229,376  +------------------------------------------------+
            | barriers   rows full[S] free[S]                |            8 bytes each
            |            words full[W] free[W]               |
            |            summed taken                        |
            +------------------------------------------------+
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.fp4 import fp8_plane
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pipeline import (
    BARRIER_BYTES,
    init_ring_at,
    later_stage,
    next_stage,
    producer_acquire,
    producer_commit_copies,
    ring_at,
)
from dsv4.ops.lib.warp_groups import load_word, trap, warp_arrive, warp_wait, wgmma_issue, wgmma_wait
from dsv4.ops.moe.kernel_rows import with_item
from dsv4.ops.moe.many.kernel_tiles import (
    NUM_WARPS,
    STAGES,
    TILE_OUTPUTS,
    TILE_TOKENS,
    activated,
    as_operand,
    leave_sums,
    words_layout,
)

WORD_STAGES = 2
TILE_SUMS = TILE_TOKENS * TILE_OUTPUTS
_TOKENS, _OUTPUTS, _SUMS = gl.constexpr(TILE_TOKENS), gl.constexpr(TILE_OUTPUTS), gl.constexpr(TILE_SUMS)
_STAGES, _WORD_STAGES = gl.constexpr(STAGES), gl.constexpr(WORD_STAGES)
_MMA_WARPS, _PRODUCER_WARPS, _EPILOGUE_WARPS = gl.constexpr(NUM_WARPS), gl.constexpr(2), gl.constexpr(2)
_REGISTERS = gl.constexpr(32)  # of producer and epilogue warps; MMA warps then have 112
_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)
# barriers: of the rows' ring `full` from 0 on and `free`, of the words' ring; the accumulator is there, and taken
_FREE, _WORDS = gl.constexpr(STAGES), gl.constexpr(2 * STAGES)
_WORDS_FREE, _SUMMED = gl.constexpr(2 * STAGES + WORD_STAGES), gl.constexpr(2 * STAGES + 2 * WORD_STAGES)
_TAKEN = gl.constexpr(2 * STAGES + 2 * WORD_STAGES + 1)
_X_BYTES = gl.constexpr(TILE_TOKENS * 256)  # of a stage
# where the barriers lie: after rows, words and sums
_BARRIERS = gl.constexpr(TILE_TOKENS * 256 * STAGES + TILE_OUTPUTS * 128 * WORD_STAGES + TILE_SUMS * 2)
_MARK = gl.constexpr(0x6B5A4938)
if hopper is not None:
    _barrier, _async = hopper.mbarrier, hopper.async_copy


class Memory(NamedTuple):
    """Shared memory: stages of token rows (halves of 64 columns) and of words (quarters: 128 rows of one part), sums of
    a tile, and barriers."""

    x: Any
    words: Any
    sums: Any
    rest: Any
    barriers: Any


@gluon_jit
def _allocate():
    """All that is looked for by its address comes in the order of size."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = gl.allocate_shared_memory(gl.bfloat16, [2 * _STAGES, _TOKENS, 64], gl.NVMMASharedLayout(128, 16, 2))
    words = gl.allocate_shared_memory(gl.int32, [4 * _WORD_STAGES, 128, 16], PLAIN)
    sums = gl.allocate_shared_memory(gl.bfloat16, [_TOKENS, _OUTPUTS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    rest = gl.allocate_shared_memory(gl.int32, [256], FLAT)
    mark = _MARK + gl.arange(0, 4, gl.BlockedLayout([1], [32], [_MMA_WARPS], [0]))
    x.reinterpret(gl.int32, [_STAGES * _TOKENS * 16, 4], FLAT).index(0).store(mark)
    rest.slice(0, 4).store(mark)
    gl.barrier()
    if (load_word(0) != _MARK) | (load_word(_BARRIERS) != _MARK):
        trap()
    gl.barrier()
    barriers = rest.reinterpret(gl.int64, [128, 1], _barrier.MBarrierLayout())
    init_ring_at(barriers, 0, _STAGES, 32 * _PRODUCER_WARPS, _MMA_WARPS)
    init_ring_at(barriers, _WORDS, _WORD_STAGES, 32 * _PRODUCER_WARPS, _MMA_WARPS)
    _barrier.init(barriers.index(_SUMMED), count=_MMA_WARPS)
    _barrier.init(barriers.index(_TAKEN), count=1)
    gl.barrier()
    return Memory(x, words, sums, rest, barriers)


@gluon_jit
def _keep(memory):
    """Nothing is laid over anything else."""
    memory.x._keep_alive()
    memory.words._keep_alive()
    memory.sums._keep_alive()
    memory.rest._keep_alive()


# ---- producer warps ----


@gluon_jit
def _copy_words(memory, place, half, data_ptr, tile, K: gl.constexpr):
    """128 rows of a matrix, of two tiles of which the first is `tile`: both parts of their words."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_PRODUCER_WARPS, 1], [1, 0])
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))
    source = data_ptr + tile * 2048 + ((row // 64 * (K * 16) + row % 64 * 32)[:, None] + word[None, :])
    for part in gl.static_range(2):
        _async.async_load(memory.words.index(4 * place + 2 * part + half), source + 16 * part)


@gluon_jit
def _copy_rows(memory, stage, x_ptr, first_token, num_tokens, K: gl.constexpr):
    """128 columns of the tile's tokens, 32 of them at a time, which is what there are registers for."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 8], [4, 8], [_PRODUCER_WARPS, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for first in gl.static_range(0, _TOKENS, 32):
        token = gl.minimum(first_token + first + row, num_tokens - 1)
        source = x_ptr + ((token * K)[:, None] + col[None, :])
        for half in gl.static_range(2):
            target = memory.x.index(2 * stage + half).slice(first, 32)
            _async.async_load(target, source + half * 64)


@gluon_jit
def _producer(
    x_ptr, first, second, memory, num_tokens, K: gl.constexpr, BLOCKS: gl.constexpr, GATE_UP: gl.constexpr
):
    """Waits on `free` of both rings; arrives at `full` of both, once a step: 64 threads as their copies end. Words have
    fewer stages and their own phase, which follows from the step: a tile has a multiple of 2 * WORD_STAGES steps."""
    row_ring, word_ring = ring_at(memory.barriers, 0, _STAGES), ring_at(memory.barriers, _WORDS, _WORD_STAGES)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for index in range(gl.program_id(0), gl.cdiv(num_tokens, _TOKENS) * BLOCKS, gl.num_programs(0)):
        first_token, block = index // BLOCKS * _TOKENS, index % BLOCKS
        row_tile = block * (2 if GATE_UP else 4)
        other_tile = row_tile if GATE_UP else row_tile + 2
        for step in range(K // 128):
            place = step % _WORD_STAGES
            producer_acquire(word_ring, place, step // _WORD_STAGES % 2 ^ 1)
            _copy_words(memory, place, 0, first.data, row_tile * (K // 128) + step, K)
            _copy_words(memory, place, 1, second.data, other_tile * (K // 128) + step, K)
            producer_commit_copies(word_ring, place)
            producer_acquire(row_ring, stage, phase)
            _copy_rows(memory, stage, x_ptr + step * 128, first_token, num_tokens, K)
            producer_commit_copies(row_ring, stage)
            stage, phase = next_stage(stage, phase, _STAGES)


# ---- MMA warps ----


@gluon_jit
def _load_weights(
    memory, scale_ptrs, step, WORDS: gl.constexpr, MMA: gl.constexpr, GATE_UP: gl.constexpr
):
    """Both parts of a step's words, and multipliers, as operands; the stage is free then."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    place = step % _WORD_STAGES
    codes = gl.load(scale_ptrs + step)
    warp_wait(_BARRIERS + (_WORDS + place) * _BARRIER_BYTES, step // _WORD_STAGES % 2)
    stages = memory.words.reinterpret(gl.int32, [2 * _WORD_STAGES, _OUTPUTS, 16], PLAIN)
    low = as_operand(stages.index(2 * place).load(WORDS), MMA, GATE_UP)
    high = as_operand(stages.index(2 * place + 1).load(WORDS), MMA, GATE_UP)
    warp_arrive(_BARRIERS + (_WORDS_FREE + place) * _BARRIER_BYTES)
    return low, high, as_operand(codes.expand_dims(1).broadcast_to([_OUTPUTS, 16]), MMA, GATE_UP)


@gluon_jit
def _kept_at(partials_ptr, MMA: gl.constexpr):
    """Where a thread's sums of the first 16 tokens are kept."""
    row, col = gl.arange(0, _OUTPUTS, gl.SliceLayout(1, MMA)), gl.arange(0, 16, gl.SliceLayout(0, MMA))
    return partials_ptr + gl.program_id(0) * _SUMS + (row[:, None] * 16 + col[None, :])


@gluon_jit
def _plus_kept(sums, partials_ptr, MMA: gl.constexpr, HAS_KEPT: gl.constexpr):
    """Sums of the ranges before plus those of this one; HAS_KEPT: there are some, else zeros."""
    kept_ptr, totals = _kept_at(partials_ptr, MMA), ()
    for part in gl.static_range(len(sums)):
        before = gl.load(kept_ptr + part * (_OUTPUTS * 16)) if HAS_KEPT else gl.zeros_like(sums[part])
        totals = with_item(totals, before + sums[part])
    return totals


@gluon_jit
def _keep_sums(sums, partials_ptr, MMA: gl.constexpr):
    kept_ptr = _kept_at(partials_ptr, MMA)
    for part in gl.static_range(len(sums)):
        gl.store(kept_ptr + part * (_OUTPUTS * 16), sums[part])


@gluon_jit
def _mainloop(
    memory, partials_ptr, scale_ptrs, stage, phase,
    K: gl.constexpr, RANGES: gl.constexpr, GATE_UP: gl.constexpr, WORDS: gl.constexpr, MMA: gl.constexpr,
):
    """The products of a tile, over all of K: fp32 [256, 16] for each 16 of its tokens."""
    PER_RANGE: gl.constexpr = K // 128 // RANGES
    none = (gl.zeros([_OUTPUTS, 16], gl.float32, MMA),) * (_TOKENS // 16)
    sums = none
    low, high, factors = _load_weights(memory, scale_ptrs, 0, WORDS, MMA, GATE_UP)
    for part in gl.static_range(RANGES):
        for step in range(part * PER_RANGE, part * PER_RANGE + PER_RANGE):
            warp_wait(_BARRIERS + stage * _BARRIER_BYTES, phase)
            for plane in gl.static_range(4):
                planes = (fp8_plane(low, factors, plane), fp8_plane(high, factors, plane))
                address = stage * _X_BYTES + (plane // 2 * (_X_BYTES // 2) + plane % 2 * 64)
                # sums += weight @ x.T, 32 columns
                sums = wgmma_issue(sums, planes, address, _TOKENS)
                if plane == 3:  # noqa: SIM102
                    if step + 1 < K // 128:
                        low, high, factors = _load_weights(memory, scale_ptrs, step + 1, WORDS, MMA, GATE_UP)
                sums = wgmma_wait(sums, planes)
            warp_arrive(_BARRIERS + (_FREE + stage) * _BARRIER_BYTES)
            stage, phase = next_stage(stage, phase, _STAGES)
        if RANGES > 1:
            sums = _plus_kept(sums, partials_ptr, MMA, part > 0)
            if part + 1 < RANGES:
                _keep_sums(sums, partials_ptr, MMA)
                sums = none
    return sums


@gluon_jit
def _mma(
    first, second, partials_ptr, memory, num_tokens,
    K: gl.constexpr, RANGES: gl.constexpr, BLOCKS: gl.constexpr, GATE_UP: gl.constexpr,
):
    """Waits on `full` of both rings, and on `taken` before it leaves an accumulator; arrives at `free` of both, once a
    step, and at `summed`, once a tile: 16 warps one by one."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_MMA_WARPS, 1], [16, 16, 16])
    WORDS: gl.constexpr = words_layout(GATE_UP)
    row = gl.arange(0, _OUTPUTS, gl.SliceLayout(1, WORDS))
    stage, phase, taken = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1)
    for index in range(gl.program_id(0), gl.cdiv(num_tokens, _TOKENS) * BLOCKS, gl.num_programs(0)):
        block = index % BLOCKS
        if GATE_UP:
            scale_ptrs = gl.where(row < 128, first.scale, second.scale) + (block * 2 + row % 128 // 64) * (K // 128)
        else:
            scale_ptrs = first.scale + (block * 4 + row // 64) * (K // 128)
        sums = _mainloop(memory, partials_ptr, scale_ptrs, stage, phase, K, RANGES, GATE_UP, WORDS, MMA)
        stage, phase = later_stage(stage, phase, K // 128, _STAGES)
        warp_wait(_BARRIERS + _TAKEN * _BARRIER_BYTES, taken)
        taken ^= 1
        leave_sums(memory, sums, gl.load(first.out_scale), gl.load(second.out_scale), MMA, GATE_UP)
        warp_arrive(_BARRIERS + _SUMMED * _BARRIER_BYTES)


# ---- epilogue warps ----


@gluon_jit
def _epilogue(
    out_ptr, memory, limit, num_tokens, OUTS: gl.constexpr, BLOCKS: gl.constexpr, GATE_UP: gl.constexpr
):
    """Waits on `summed`; arrives at `taken`, once a tile. Rows of hidden, rounded to E4M3, four at a time; or of
    parts."""
    COLS: gl.constexpr = _OUTPUTS // 2 if GATE_UP else _OUTPUTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_EPILOGUE_WARPS, 1], [1, 0])
    all_sums = memory.sums.reinterpret(
        gl.bfloat16, [_TOKENS // 4, 4, _OUTPUTS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    )
    row, col = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT)), gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    phase = gl.to_tensor(0)
    for index in range(gl.program_id(0), gl.cdiv(num_tokens, _TOKENS) * BLOCKS, gl.num_programs(0)):
        first_token, block = index // BLOCKS * _TOKENS, index % BLOCKS
        num_rows = gl.minimum(num_tokens - first_token, _TOKENS)
        _barrier.wait(memory.barriers.index(_SUMMED), phase)
        for four in range((num_rows + 3) // 4):
            sums = all_sums.index(four)
            if GATE_UP:
                # hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
                values = fake_quantize_e4m3(activated(sums, limit, LAYOUT).to(gl.bfloat16))
            else:
                values = sums.load(LAYOUT)
            rows, is_row = first_token + four * 4 + row, four * 4 + row < num_rows
            target = (out_ptr + rows * OUTS)[:, None] + (block * COLS + col)[None, :]
            gl.store(target, values, mask=is_row[:, None])
        _barrier.arrive(memory.barriers.index(_TAKEN))
        phase ^= 1


@gluon_jit(do_not_specialize=("num_tokens",))
def dense_tiles_kernel(
    x_ptr, out_ptr, partials_ptr, first, second, limit, num_tokens,
    K: gl.constexpr, OUTS: gl.constexpr, RANGES: gl.constexpr, GATE_UP: gl.constexpr,
):
    """GATE_UP: hidden of x, by `first` and `second`, in product order as x; else parts of hidden, by the matrix that is
    both. partials: TILE_SUMS fp32 for each program."""
    BLOCKS: gl.constexpr = OUTS // (_OUTPUTS // 2 if GATE_UP else _OUTPUTS)
    memory = _allocate()
    gl.warp_specialize(
        [
            (_mma, (first, second, partials_ptr, memory, num_tokens, K, RANGES, BLOCKS, GATE_UP)),
            (_producer, (x_ptr, first, second, memory, num_tokens, K, BLOCKS, GATE_UP)),
            (_epilogue, (out_ptr, memory, limit, num_tokens, OUTS, BLOCKS, GATE_UP)),
        ],
        [_PRODUCER_WARPS, _EPILOGUE_WARPS], [_REGISTERS, _REGISTERS],
    )
    _keep(memory)
