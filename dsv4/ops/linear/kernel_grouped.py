"""Kernels of `grouped_linear` (ops/linear): group g of the input times rows [g R, (g + 1) R) of the weight.

`grouped_shuffled_kernel` reads an FP8 weight in the order of the tensor core's registers (formats/layouts.py): a tile
of 64 rows and 128 columns is 8 KB in one piece, and the tiles of a program's K range follow each other. Codes become
bf16 in the registers from which the product takes them. For many rows that would be done again for every tile of
tokens: `widen_kernel` writes the weight as bf16 once, and `grouped_plain_kernel` is an ordinary product of two bf16
matrices. Both take K 16 columns at a time, in order, and cut it alike (kernel_linear.py): the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.formats.layouts import TILE_COLS, TILE_ROWS
from dsv4.ops.lib.codecs import e4m3_codes, e8m0_reciprocal, scale_of_halves
from dsv4.ops.lib.fp4 import fp8_tile
from dsv4.ops.lib.guard import INTERPRET, jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.linear.kernel_linear import dot, item_of, load_tile, zeros
from dsv4.ops.linear.kernel_splits import store_tile, sum_of_splits

GROUPED_STEP = 64  # columns of a step of the plain form

_STEP = tl.constexpr(GROUPED_STEP)
_ROWS = tl.constexpr(TILE_ROWS)
_COLS = tl.constexpr(TILE_COLS)
_WORDS = tl.constexpr(TILE_ROWS * TILE_COLS // 4)  # of a tile


class GroupedCodes(NamedTuple):
    """E4M3 codes [T, G R] and their scales [T, G R / 128]."""

    codes: Any
    scale: Any


@jit
def _settled(acc):
    """The accumulator, after its product has ended.

    Left alone, the compiler lets products whose first operand is in registers run on into the next step (Triton 3.6:
    up to seven of the eight), where those registers are written again: wrong results, at some tiles. A use of the sum
    in the same step makes it wait. The move itself costs nothing.
    """
    if not INTERPRET:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@jit
def _load_weights(data_ptr, scale_ptr, tile, BM: tl.constexpr, BLOCKS: tl.constexpr):
    """Tile number `tile` (and, below it, that of the next 64 rows, BLOCKS tiles on) -> bf16 [BM, 128].

    The multiplier is loaded once for each row: only where everything comes from loads of vectors does the compiler
    decode in the layout of the operand, without a way through shared memory.
    """
    rows = tl.arange(0, BM)
    tiles = rows // _ROWS * BLOCKS
    places = (tiles * _WORDS + rows % _ROWS * (_COLS // 4))[:, None] + tl.arange(0, _COLS // 4)[None, :]
    words = tl.load(data_ptr + tile.to(tl.int64) * _WORDS + places)
    return fp8_tile(words, tl.load(scale_ptr + tile + tiles))


@jit
def _shuffled_range(
    data_ptr, scale_ptr, x, first_tile, first_col, first_token, num_tokens, stride_x, num_blocks,
    BM: tl.constexpr, BT: tl.constexpr, BLOCKS: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):
    """`num_blocks` tiles from first_tile on, times columns of x from first_col on: [BM, BT]."""
    acc = tl.zeros([BM, BT], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        weights = _load_weights(data_ptr, scale_ptr, first_tile + block, BM, BLOCKS)
        x_tile = load_tile(
            x, first_token, first_col + block * _COLS, num_tokens, stride_x, 0, BT, _COLS, True, X_DESC
        )
        acc = _settled(tl.dot(weights, tl.trans(x_tile), acc))
    return acc


@jit
def _total(tile_ptrs, mask, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of a tile's splits, as `sum_of_splits` forms it; other multiprocessors wrote them."""
    total = tl.load(tile_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    if SPLITS > 1:
        total = tl.zeros_like(total) + total
        for index in tl.static_range(1, SPLITS):
            total += tl.load(tile_ptrs + index * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@jit
def _store_codes(
    acc, factor, out, partial_ptr, counter_ptr, tile, split, group, col, num_tokens,
    RANK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
):
    """Leave a partial tile of 64 outputs; the last of two neighbouring tiles adds both up and stores their codes: 128
    outputs are one group. `out`: `GroupedCodes`. The last one sets the counter back.
    """
    BM: tl.constexpr = acc.shape[0]
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    outs, tokens = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    mask = tl.broadcast_to(tokens < num_tokens, acc.shape)
    half = tile % 2
    first_ptrs = partial_ptr + (tile - half) * (SPLITS * SIZE) + tokens * BM + outs
    tl.store(first_ptrs + (half * SPLITS + split) * SIZE, acc, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(counter_ptr + tile // 2, 1, sem="acq_rel") == 2 * SPLITS - 1:
        tl.debug_barrier()
        left, right = _total(first_ptrs, mask, SPLITS, SIZE), _total(first_ptrs + SPLITS * SIZE, mask, SPLITS, SIZE)
        # QuantActivation.of(out)
        left = tl.trans((left * factor).to(tl.bfloat16).to(tl.float32))
        right = tl.trans((right * factor).to(tl.bfloat16).to(tl.float32))
        scale = scale_of_halves(left, right)
        rows = tl.arange(0, acc.shape[1]).to(tl.int64)
        first_col = group * RANK + col - half * BM
        places = out.codes + (rows * (GROUPS * RANK))[:, None] + (first_col + tl.arange(0, BM))[None, :]
        has_row = rows < num_tokens
        tl.store(places, e4m3_codes(left * e8m0_reciprocal(scale)[:, None]), mask=has_row[:, None])
        tl.store(places + BM, e4m3_codes(right * e8m0_reciprocal(scale)[:, None]), mask=has_row[:, None])
        scale_places = out.scale + rows * (GROUPS * RANK // (2 * BM)) + first_col // (2 * BM)
        tl.store(scale_places, scale.to(tl.uint8), mask=has_row)
        tl.store(counter_ptr + tile // 2, 0)


@jit(do_not_specialize=("num_tokens",))
def grouped_shuffled_kernel(
    data_ptr, scale_ptr, out_scale_ptr, x, out_ptr, partial_ptr, counter_ptr, num_tokens, stride_x,
    K: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BAND: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr, CODES: tl.constexpr,
):
    """A program: BM (64 or 128) outputs, BT tokens, one split of K. CODES (64 outputs, one tile of tokens): out_ptr is
    `GroupedCodes`, and what is stored the codes of the result.
    """
    GROUP_TILES: tl.constexpr = RANK // BM
    BLOCKS: tl.constexpr = K // _COLS
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    pdl_trigger()
    num_token_tiles = tl.cdiv(num_tokens, BT)
    item, token_tile = item_of(tl.program_id(0), GROUPS * GROUP_TILES * SPLITS, num_token_tiles, BAND)
    tile, split = item // SPLITS, item % SPLITS
    group, col = tile // GROUP_TILES, (tile % GROUP_TILES) * BM
    first_block = split * PER_SPLIT
    num_blocks = tl.minimum(first_block + PER_SPLIT, BLOCKS) - first_block
    first_tile = tile * (BM // _ROWS) * BLOCKS + first_block
    first_col, first_token = group * K + first_block * _COLS, token_tile * BT
    acc = _shuffled_range(
        data_ptr, scale_ptr, x, first_tile, first_col, first_token, num_tokens, stride_x, num_blocks,
        BM, BT, BLOCKS, X_DESC, STAGES,
    )
    out_scale = tl.load(out_scale_ptr)
    if CODES:
        _store_codes(
            acc, out_scale, out_ptr, partial_ptr, counter_ptr, tile, split, group, col, num_tokens,
            RANK, GROUPS, SPLITS,
        )
    elif SPLITS > 1:
        acc, is_last = sum_of_splits(
            acc, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, num_tokens - first_token,
            SPLITS, False,
        )
        if is_last:
            acc, out_ptr = acc * out_scale, out_ptr + group * RANK
            store_tile(acc, out_ptr, GROUPS * RANK, col, RANK, first_token, num_tokens, BM, BT, False)
    else:
        acc, out_ptr = acc * out_scale, out_ptr + group * RANK
        store_tile(acc, out_ptr, GROUPS * RANK, col, RANK, first_token, num_tokens, BM, BT, False)


@jit
def widen_kernel(data_ptr, scale_ptr, out_scale_ptr, out_ptr, K: tl.constexpr):
    """A shuffled FP8 weight -> bf16 [N, K], N and K multiples of the tile; a program has one tile."""
    BLOCKS: tl.constexpr = K // _COLS
    pdl_trigger()
    tile = tl.program_id(0)
    weights = _load_weights(data_ptr, scale_ptr, tile, _ROWS, BLOCKS)
    factor = tl.load(out_scale_ptr)
    rows = (tile // BLOCKS).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    cols = (tile % BLOCKS) * _COLS + tl.arange(0, _COLS)
    values = weights.to(tl.float32) * factor
    tl.store(out_ptr + rows[:, None] * K + cols[None, :], values.to(tl.bfloat16))


@jit
def _range_of_group(
    w, x, first_row, num_rows, first_col, first_token, num_tokens, stride_x, first_step, last_step,
    K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):
    """Steps of GROUPED_STEP columns of two bf16 matrices; those of x begin at first_col."""
    IS_EVEN: tl.constexpr = K // _STEP * _STEP == K
    acc = zeros(BM, BT, TOKENS_FIRST)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        col = step * _STEP
        w_tile = load_tile(w, first_row, col, num_rows, K, K, BM, _STEP, IS_EVEN, W_DESC)
        x_tile = load_tile(
            x, first_token, first_col + col, num_tokens, stride_x, first_col + K, BT, _STEP, IS_EVEN, X_DESC
        )
        acc = dot(w_tile, x_tile, acc, TOKENS_FIRST)
    return acc


@jit(do_not_specialize=("num_tokens",))
def grouped_plain_kernel(
    w, x, out_ptr, partial_ptr, counter_ptr, num_tokens, stride_x,
    K: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BAND: tl.constexpr, TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):
    GROUP_TILES: tl.constexpr = (RANK + BM - 1) // BM
    STEPS: tl.constexpr = (K + _STEP - 1) // _STEP
    # in whole tiles of the shuffled form, so that both are cut at the same columns
    BLOCKS: tl.constexpr = (K + _COLS - 1) // _COLS
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS * (_COLS // _STEP)
    WALKS: tl.constexpr = SPLITS > 1 and not IS_SPLIT
    pdl_trigger()
    num_token_tiles = tl.cdiv(num_tokens, BT)
    items = GROUPS * GROUP_TILES * (SPLITS if IS_SPLIT else 1)
    item, token_tile = item_of(tl.program_id(0), items, num_token_tiles, BAND)
    tile = item // SPLITS if IS_SPLIT else item
    split = item % SPLITS if IS_SPLIT else item * 0
    group, col = tile // GROUP_TILES, (tile % GROUP_TILES) * BM
    first_row, first_token = group * RANK + col, token_tile * BT
    if WALKS:
        acc = zeros(BM, BT, TOKENS_FIRST)
        for index in tl.range(0, SPLITS, num_stages=1):
            acc += _range_of_group(
                w, x, first_row, GROUPS * RANK, group * K, first_token, num_tokens, stride_x,
                index * PER_SPLIT, tl.minimum(index * PER_SPLIT + PER_SPLIT, STEPS),
                K, BM, BT, TOKENS_FIRST, W_DESC, X_DESC, STAGES,
            )
    else:
        acc = _range_of_group(
            w, x, first_row, GROUPS * RANK, group * K, first_token, num_tokens, stride_x,
            split * PER_SPLIT, tl.minimum(split * PER_SPLIT + PER_SPLIT, STEPS),
            K, BM, BT, TOKENS_FIRST, W_DESC, X_DESC, STAGES,
        )
    out_ptr += group * RANK
    if IS_SPLIT and SPLITS > 1:
        acc, is_last = sum_of_splits(
            acc, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, num_tokens - first_token,
            SPLITS, TOKENS_FIRST,
        )
        if is_last:
            store_tile(acc, out_ptr, GROUPS * RANK, col, RANK, first_token, num_tokens, BM, BT, TOKENS_FIRST)
    else:
        store_tile(acc, out_ptr, GROUPS * RANK, col, RANK, first_token, num_tokens, BM, BT, TOKENS_FIRST)
