"""Linear layers of many rows on Hopper, in Gluon: the sums of kernel_linear.py in the same order, so the same bits.

A multiprocessor has one program, which takes tile after tile. One of its warps copies: stages of 128 bytes of every row
of both operands, through the tensor copy engine, as many ahead as shared memory holds. Two groups of four warps
multiply, each half of the tile's tokens, and each at its own pace: while one adds its products up, or stores its part
of a tile, the tensor cores work for the other. Barriers in shared memory say which stages are full and which are free.

Of 64 tokens x 128 outputs a thread holds 64 sums of the step's products, 64 of its range of K, and 64 of the ranges
before.

Products of both groups that begin together end together, and then the tensor cores wait for both. Where ranges of K
follow each other the groups take turns (TAKES_TURNS): one begins its step when the other's is under way. Where a tile
is short that would keep a group from going on while the other stores its tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.codecs import e8m0_to_float
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.linear.kernel_linear import as_float, item_of, segment_of

ROW_BYTES = 128  # of a stage: 128 columns of FP8 or 64 of bf16
NUM_GROUPS = 2  # of warps that multiply
GROUP_TOKENS = 64  # rows of one product
TILE_TOKENS = NUM_GROUPS * GROUP_TOKENS
TILE_OUTPUTS = 128  # a block of weight scales

_ROW_BYTES, _NUM_GROUPS = gl.constexpr(ROW_BYTES), gl.constexpr(NUM_GROUPS)
_GROUP_TOKENS, _TILE_TOKENS = gl.constexpr(GROUP_TOKENS), gl.constexpr(TILE_TOKENS)
_FP8_COLS, _PLAIN_COLS = gl.constexpr(ROW_BYTES), gl.constexpr(ROW_BYTES // 2)
_OUTPUTS = gl.constexpr(TILE_OUTPUTS)
_COPY_REGISTERS = gl.constexpr(24)
if hopper is not None:
    _barrier, _copy = hopper.mbarrier, hopper.tma.async_load
    _mma, _mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait


class Operands(NamedTuple):
    """Tensor descriptors of a weight and of its input. Launchers take them one by one."""

    w: Any
    x: Any


class WideScales(NamedTuple):
    """Of the weight's blocks and of the input's groups, and the stride of a token in the latter."""

    w: Any
    x: Any
    x_stride: int


class WideResult(NamedTuple):
    """Outputs in bf16 and in fp32."""

    out: Any
    wide: Any


class Stages(NamedTuple):
    """In shared memory: rows of both operands, the barriers of stages that are full and that are free, and those of the
    groups' turns."""

    w: Any
    x: Any
    full: Any
    free: Any
    turns: Any


# ---- stages ----


@gluon_jit
def _allocate(STAGES: gl.constexpr):
    """Stages of FP8."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(_ROW_BYTES, 8, 2)
    w = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _OUTPUTS, _FP8_COLS], LAYOUT)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _TILE_TOKENS, _FP8_COLS], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _barrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _barrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        _barrier.init(full.index(i), count=1)
        _barrier.init(free.index(i), count=_NUM_GROUPS)
    turns = gl.allocate_shared_memory(gl.int64, [_NUM_GROUPS, 1], _barrier.MBarrierLayout())
    for i in gl.static_range(_NUM_GROUPS):
        _barrier.init(turns.index(i), count=1)
    return Stages(w, x, full, free, turns)


@gluon_jit
def _as_plain(stages, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Stages of FP8 as stages of bf16; the input's in pieces of ROWS rows."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(_ROW_BYTES, 16, 2)
    w = stages.w.reinterpret(gl.bfloat16, [STAGES, _OUTPUTS, _PLAIN_COLS], LAYOUT)
    x = stages.x.reinterpret(gl.bfloat16, [STAGES * _TILE_TOKENS // ROWS, ROWS, _PLAIN_COLS], LAYOUT)
    return Stages(w, x, stages.full, stages.free, stages.turns)


@gluon_jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The stage behind this one, and whether it is in an odd round."""
    following = stage + 1
    is_end = following == STAGES
    return gl.where(is_end, 0, following), gl.where(is_end, phase ^ 1, phase)


@gluon_jit
def _previous(stage, STAGES: gl.constexpr):
    """The stage before this one. Not kept under a name: one that begins as an alias of another is not carried from step
    to step by the compiler."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon_jit
def _copy_tile(
    operands, stages, first_row, first_token, stage, phase,
    K: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
):
    """The steps of a tile, COLS columns each, as soon as a stage is free."""
    for step in range(K // COLS):
        full = stages.full.index(stage)
        _barrier.wait(stages.free.index(stage), phase)
        _barrier.expect(full, (_OUTPUTS + _TILE_TOKENS) * _ROW_BYTES)
        _copy(operands.x, [first_token, step * COLS], full, stages.x.index(stage))
        _copy(operands.w, [first_row, step * COLS], full, stages.w.index(stage))
        stage, phase = _next(stage, phase, STAGES)
    return stage, phase


# ---- products ----


@gluon_jit
def _fp8_tile(
    scales, stages, scale_row, first_token, num_tokens, stage, phase, turn,
    GROUP: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, TAKES_TURNS: gl.constexpr,
):
    """As `_fp8_range` of kernel_linear.py: a group's sums [64, 128] over all of K, split after split."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _OUTPUTS, 32])
    BLOCKS: gl.constexpr = K // _FP8_COLS
    PER_SPLIT: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    tokens = gl.minimum(first_token + gl.arange(0, _GROUP_TOKENS, gl.SliceLayout(1, MMA)), num_tokens - 1)
    places = tokens * scales.x_stride  # 32 bits: scales are a hundredth of the codes
    w_scale_ptr = scales.w + scale_row * BLOCKS
    acc = gl.zeros([_GROUP_TOKENS, _OUTPUTS], gl.float32, MMA)
    total = acc
    none = acc
    for split in range(SPLITS):
        for block in range(split * PER_SPLIT, gl.minimum(split * PER_SPLIT + PER_SPLIT, BLOCKS)):
            _barrier.wait(stages.full.index(stage), phase)
            if TAKES_TURNS:
                _barrier.wait(stages.turns.index(GROUP), turn)
                turn ^= 1
            x_rows = stages.x.index(stage).slice(GROUP * _GROUP_TOKENS, _GROUP_TOKENS)
            partial = _mma(x_rows, stages.w.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            # asked for while the products are under way
            scale = e8m0_to_float(gl.load(scales.x + block + places)) * as_float(gl.load(w_scale_ptr + block))
            if TAKES_TURNS:
                _barrier.arrive(stages.turns.index(1 - GROUP))
            partial = _mma_wait(0, deps=(partial,))
            _barrier.arrive(stages.free.index(stage))
            acc = gl.fma(partial, gl.expand_dims(scale, 1).broadcast_to(acc.shape), acc)
            stage, phase = _next(stage, phase, STAGES)
        if SPLITS > 1:
            total += acc
            acc = none
    return total if SPLITS > 1 else acc, stage, phase, turn


@gluon_jit
def _plain_tile(stages, stage, phase, GROUP: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr):
    """As `_plain_range` of kernel_linear.py, which the compiler makes one chain of products of. A step's products begin
    before those of the step before have ended."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _OUTPUTS, 16])
    STEPS: gl.constexpr = K // _PLAIN_COLS
    PER_SPLIT: gl.constexpr = (K // 128 + SPLITS - 1) // SPLITS * (128 // _PLAIN_COLS)
    stages = _as_plain(stages, _GROUP_TOKENS, STAGES)
    acc = gl.zeros([_GROUP_TOKENS, _OUTPUTS], gl.float32, MMA)
    total = acc
    for split in range(SPLITS):
        first = split * PER_SPLIT
        last = gl.minimum(first + PER_SPLIT, STEPS)
        for step in range(first, last):
            _barrier.wait(stages.full.index(stage), phase)
            x_rows, weights = stages.x.index(stage * _NUM_GROUPS + GROUP), stages.w.index(stage).permute((1, 0))
            acc = _mma(x_rows, weights, acc, use_acc=step != first, is_async=True)
            acc = _mma_wait(1, deps=(acc,))
            _barrier.arrive(stages.free.index(_previous(stage, STAGES)), pred=step != first)
            stage, phase = _next(stage, phase, STAGES)
        acc = _mma_wait(0, deps=(acc,))
        _barrier.arrive(stages.free.index(_previous(stage, STAGES)))
        if SPLITS > 1:
            total += acc
    return total if SPLITS > 1 else acc, stage, phase


@gluon_jit
def _store_tile(acc, result, is_wide, out_col, col, num_cols, first_token, num_tokens, HAS_WIDE: gl.constexpr):
    """A segment's output is a matrix [T, num_cols] of its own, behind those of the segments before it. Through shared
    memory, so that a warp stores whole rows. HAS_WIDE: some results of this format are fp32."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tokens = first_token + gl.arange(0, _GROUP_TOKENS, gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, _OUTPUTS, gl.SliceLayout(0, LAYOUT))
    mask = (tokens < num_tokens)[:, None] & (cols < num_cols)[None, :]
    places = out_col * num_tokens.to(gl.int64) + tokens.to(gl.int64)[:, None] * num_cols + cols[None, :]
    if HAS_WIDE:
        acc = gl.convert_layout(acc, LAYOUT)
        gl.store(result.wide + places, acc, mask=mask & (is_wide == 1))
        gl.store(result.out + places, acc.to(gl.bfloat16), mask=mask & (is_wide == 0))
    else:
        gl.store(result.out + places, gl.convert_layout(acc.to(gl.bfloat16), LAYOUT), mask=mask)


@gluon_jit
def _multiply(
    scales, result, stages, num_tokens, GROUP: gl.constexpr, K: gl.constexpr, SEGMENTS8: gl.constexpr,
    SEGMENTS16: gl.constexpr, TILES8: gl.constexpr, TILES16: gl.constexpr, SPLITS8: gl.constexpr,
    SPLITS16: gl.constexpr, HAS_WIDE: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr, TAKES_TURNS: gl.constexpr,
):
    """What a group of warps does."""
    num_token_tiles = gl.cdiv(num_tokens, _TILE_TOKENS)
    stage, phase, turn = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1 - GROUP)
    for index in range(gl.program_id(0), num_token_tiles * (TILES8 + TILES16), gl.num_programs(0)):
        item, token_tile = item_of(index, TILES8 + TILES16, num_token_tiles, BAND)
        first_token = token_tile * _TILE_TOKENS + GROUP * _GROUP_TOKENS
        if TILES8 > 0 and item < TILES8:
            inside, num_cols, _, scale_row, is_wide, out_col = segment_of(item, SEGMENTS8)
            acc, stage, phase, turn = _fp8_tile(
                scales, stages, scale_row + inside, first_token, num_tokens, stage, phase, turn, GROUP, K, SPLITS8,
                STAGES, TAKES_TURNS,
            )
            _store_tile(
                acc, result, is_wide, out_col, inside * _OUTPUTS, num_cols, first_token, num_tokens, HAS_WIDE
            )
        if TILES16 > 0 and item >= TILES8:
            inside, num_cols, _, _, is_wide, out_col = segment_of(item - TILES8, SEGMENTS16)
            acc, stage, phase = _plain_tile(stages, stage, phase, GROUP, K, SPLITS16, STAGES)
            _store_tile(
                acc, result, is_wide, out_col, inside * _OUTPUTS, num_cols, first_token, num_tokens, HAS_WIDE
            )


@gluon_jit
def _copy_tiles(
    fp8, plain, stages, num_tokens, K: gl.constexpr, SEGMENTS8: gl.constexpr, SEGMENTS16: gl.constexpr,
    TILES8: gl.constexpr, TILES16: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
):
    """What the warp that copies does."""
    num_token_tiles = gl.cdiv(num_tokens, _TILE_TOKENS)
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for index in range(gl.program_id(0), num_token_tiles * (TILES8 + TILES16), gl.num_programs(0)):
        item, token_tile = item_of(index, TILES8 + TILES16, num_token_tiles, BAND)
        first_token = token_tile * _TILE_TOKENS
        if TILES8 > 0 and item < TILES8:
            inside, _, first_row, _, _, _ = segment_of(item, SEGMENTS8)
            stage, phase = _copy_tile(
                fp8, stages, first_row + inside * _OUTPUTS, first_token, stage, phase, K, _FP8_COLS, STAGES
            )
        if TILES16 > 0 and item >= TILES8:
            inside, _, first_row, _, _, _ = segment_of(item - TILES8, SEGMENTS16)
            stage, phase = _copy_tile(
                plain, _as_plain(stages, _TILE_TOKENS, STAGES), first_row + inside * _OUTPUTS, first_token, stage,
                phase, K, _PLAIN_COLS, STAGES,
            )


@gluon_jit(do_not_specialize=("num_tokens",))
def wide_linear_kernel(
    w8, x8, w16, x16, scales, result, num_tokens,
    K: gl.constexpr, SEGMENTS8: gl.constexpr, SEGMENTS16: gl.constexpr, TILES8: gl.constexpr, TILES16: gl.constexpr,
    SPLITS8: gl.constexpr, SPLITS16: gl.constexpr, HAS_WIDE: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    TAKES_TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):
    """`linear_kernel` with programs that stay. w8, x8, w16, x16: tensor descriptors, or any tensors where
    there is no such weight; scales: `WideScales`; result: `WideResult`."""
    pdl_trigger()
    stages = _allocate(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                scales, result, stages, num_tokens, 0, K, SEGMENTS8, SEGMENTS16, TILES8, TILES16,
                SPLITS8, SPLITS16, HAS_WIDE, BAND, STAGES, TAKES_TURNS,
            )),
            (_multiply, (
                scales, result, stages, num_tokens, 1, K, SEGMENTS8, SEGMENTS16, TILES8, TILES16,
                SPLITS8, SPLITS16, HAS_WIDE, BAND, STAGES, TAKES_TURNS,
            )),
            (_copy_tiles, (
                Operands(w8, x8), Operands(w16, x16), stages, num_tokens, K, SEGMENTS8, SEGMENTS16, TILES8, TILES16,
                BAND, STAGES,
            )),
        ],
        [4, 1], [REGISTERS, _COPY_REGISTERS],
    )
