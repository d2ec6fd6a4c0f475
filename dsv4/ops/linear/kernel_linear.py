"""Kernels of ops/linear, apart from their contracts because the two together would be too long for one file.

`linear_kernel` multiplies one input by the tiles of one FP8 and one bf16 matrix, either of which may be absent and
either of which may be several weights end to end (segments). The output projection's first half (kernel_grouped.py)
is made of the same parts:

* A K range of a tile: `_fp8_range` and `_plain_range` walk it in steps, weights and input through pipelined loads (the
  tensor copy engine where strides allow it). FP8: the product of 128 codes on the tensor cores, then one fused
  multiply-add with both scales in fp32. bf16: the product of 128 columns, added to the range's sum; the compiler makes
  one chain of products of that, so the tensor cores add, and cut off what they add (their FP8 sums have 14 bits).
* K is cut into splits by the layer's shape alone. For few rows every split is a program; it leaves an fp32 partial
  tile, and the program that arrives last adds the partials up, first split first. For many rows one program walks the
  splits and adds the same partial sums in the same order. So both give the same bits.
* Only the tile may vary with the number of rows: which of the two operands comes first (`TOKENS_FIRST`), and how many
  rows of each. An output is a sum over K of exact products whatever its place in the tile.

Rows past the end are not masked but taken from the last row: their results are never stored.

The kernels are not launched early (`pdl_wait` in ops/lib/pdl.py): in a whole model that was slower, and weights fetched
ahead into L2 gained nothing. But what follows them may begin early, so `pdl_trigger` comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.codecs import e4m3_values, e8m0_to_float, quantize_e4m3
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.linear.kernel_splits import store_tile, sum_of_splits

FP8_STEP = 128  # the scale groups of both operands
PLAIN_STEP = 128

_FP8_STEP = tl.constexpr(FP8_STEP)
_PLAIN_STEP = tl.constexpr(PLAIN_STEP)
# of a segment: first tile, rows, first row, first scale row, has fp32 output, first output column
_FIELDS = tl.constexpr(6)


# ---- tiles ----


class LinearResult(NamedTuple):
    """Outputs in bf16 and in fp32, and what the programs of a split share: partial tiles and counters."""

    out: Any
    wide: Any
    partial: Any
    counter: Any


class LinearSizes(NamedTuple):
    """Rows of the FP8 and of the bf16 matrix; strides of a token in the codes, their scales and the bf16 input."""

    rows8: int
    rows16: int
    x8: int
    x8_scale: int
    x16: int


@jit
def load_tile(
    source, first_row, col, num_rows, stride, last_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, IS_EVEN: tl.constexpr, HAS_DESC: tl.constexpr,
):
    """[ROWS, COLS] of a matrix with contiguous columns, zero from `last_col` on; `source` is a pointer or a tensor
    descriptor.
    """
    if HAS_DESC:
        tile = source.load([first_row, col])
    else:
        rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        cols = col + tl.arange(0, COLS)
        pointers = source + rows[:, None] * stride + cols[None, :]
        tile = tl.load(pointers) if IS_EVEN else tl.load(pointers, mask=(cols < last_col)[None, :], other=0.0)
    return tile


@jit
def zeros(BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """An accumulator: [tokens, outputs] or [outputs, tokens]."""
    return tl.zeros([BT, BM] if TOKENS_FIRST else [BM, BT], tl.float32)


@jit
def dot(w, x, acc, TOKENS_FIRST: tl.constexpr):
    """w [BM, step], x [BT, step]."""
    return tl.dot(x, tl.trans(w), acc) if TOKENS_FIRST else tl.dot(w, tl.trans(x), acc)


@jit
def _operand(tile):
    """E4M3 codes as the tensor cores take them: as they are, or in bf16 where they come as bytes."""
    if tile.dtype == tl.uint8:
        return e4m3_values(tile).to(tl.bfloat16)
    else:
        return tile


@jit
def as_float(scale):
    """Scales as stored (E8M0 codes or fp32) -> fp32."""
    return e8m0_to_float(scale) if scale.dtype == tl.uint8 else scale


# ---- K ranges ----


@jit
def _fp8_range(
    w, w_scale_ptr, x, x_scale_ptrs, first_row, num_rows, first_token, num_tokens, stride_x, first_block, last_block,
    K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, QUANTISE: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr, PER_SPLIT: tl.constexpr,
):
    """Blocks [first_block, last_block) of 128 columns. w_scale_ptr: the scales of these rows, one a block;
    x_scale_ptrs [BT]: those of the tokens. With QUANTISE x is bf16, and its codes and scales are made here.

    PER_SPLIT: if not 0, the range is all of K, and the sum of this many blocks goes into a total: the same sums in the
    same order as of programs with a split each, in one loop whose loads never pause.
    """
    acc = zeros(BM, BT, TOKENS_FIRST)
    total = acc
    # scales are asked for one step ahead: such small loads are not pipelined by the compiler
    w_scale = tl.load(w_scale_ptr + first_block)
    if not QUANTISE:
        x_scale = tl.load(x_scale_ptrs + first_block)
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        col = block * _FP8_STEP
        codes = _operand(load_tile(w, first_row, col, num_rows, K, K, BM, _FP8_STEP, True, W_DESC))
        x_tile = load_tile(x, first_token, col, num_tokens, stride_x, K, BT, _FP8_STEP, True, X_DESC)
        following = tl.minimum(block + 1, last_block - 1)
        next_w_scale = tl.load(w_scale_ptr + following)
        if QUANTISE:
            # codes, scale = fp8_quantize(x, 128)
            x_tile, x_scale = quantize_e4m3(x_tile.to(tl.float32))
        else:
            next_x_scale = tl.load(x_scale_ptrs + following)
        partial = dot(codes, _operand(x_tile), zeros(BM, BT, TOKENS_FIRST), TOKENS_FIRST)
        scale = e8m0_to_float(x_scale) * as_float(w_scale)
        scale = scale[:, None] if TOKENS_FIRST else scale[None, :]
        acc = tl.fma(partial, tl.broadcast_to(scale, acc.shape), acc)
        if PER_SPLIT > 0:
            end = tl.minimum(block + 1, last_block)
            if end % PER_SPLIT == 0 or end == last_block:
                total += acc
                acc = zeros(BM, BT, TOKENS_FIRST)
        w_scale = next_w_scale
        if not QUANTISE:
            x_scale = next_x_scale
    return total if PER_SPLIT > 0 else acc


@jit
def _plain_range(
    w, x, first_row, num_rows, first_token, num_tokens, stride_x, first_step, last_step,
    K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr, PER_SPLIT: tl.constexpr,
):
    """Steps [first_step, last_step) of PLAIN_STEP columns of two bf16 matrices; PER_SPLIT as above."""
    IS_EVEN: tl.constexpr = K // _PLAIN_STEP * _PLAIN_STEP == K
    acc = zeros(BM, BT, TOKENS_FIRST)
    total = acc
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        col = step * _PLAIN_STEP
        w_tile = load_tile(w, first_row, col, num_rows, K, K, BM, _PLAIN_STEP, IS_EVEN, W_DESC)
        x_tile = load_tile(x, first_token, col, num_tokens, stride_x, K, BT, _PLAIN_STEP, IS_EVEN, X_DESC)
        acc += dot(w_tile, x_tile, zeros(BM, BT, TOKENS_FIRST), TOKENS_FIRST)
        if PER_SPLIT > 0:
            end = tl.minimum(step + 1, last_step)
            if end % PER_SPLIT == 0 or end == last_step:
                total += acc
                acc = zeros(BM, BT, TOKENS_FIRST)
    return total if PER_SPLIT > 0 else acc


# ---- results ----


# ---- the launches ----


@jit
def item_of(pid, num_items, num_token_tiles, BAND: tl.constexpr):
    """Program -> item of the weights and tile of tokens. BAND token tiles take turns at one item, so that programs
    that run together share weights and input in the cache.
    """
    band_size = BAND * num_items
    first = (pid // band_size) * BAND
    width = tl.minimum(num_token_tiles - first, BAND)
    inside = pid % band_size
    return inside // width, first + inside % width


@jit
def segment_of(tile, SEGMENTS: tl.constexpr):
    """The fields of the segment that a tile lies in; its first tile comes back as the tile's number in it."""
    inside, num_rows, first_row = tile, SEGMENTS[1], SEGMENTS[2]
    scale_row, is_wide, out_col = SEGMENTS[3], SEGMENTS[4], SEGMENTS[5]
    for i in tl.static_range(1, len(SEGMENTS) // _FIELDS):
        is_here = tile >= SEGMENTS[i * _FIELDS]
        inside = tl.where(is_here, tile - SEGMENTS[i * _FIELDS], inside)
        num_rows = tl.where(is_here, SEGMENTS[i * _FIELDS + 1], num_rows)
        first_row = tl.where(is_here, SEGMENTS[i * _FIELDS + 2], first_row)
        scale_row = tl.where(is_here, SEGMENTS[i * _FIELDS + 3], scale_row)
        is_wide = tl.where(is_here, SEGMENTS[i * _FIELDS + 4], is_wide)
        out_col = tl.where(is_here, SEGMENTS[i * _FIELDS + 5], out_col)
    return inside, num_rows, first_row, scale_row, is_wide, out_col


@jit
def _store_segment(
    acc, out_ptr, wide_ptr, is_wide, out_col, col, num_cols, first_token, num_tokens,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):
    """A segment's output is a matrix [T, num_cols] of its own, behind those of the segments before it."""
    start = out_col * num_tokens.to(tl.int64)
    if is_wide == 1:
        store_tile(
            acc, wide_ptr + start, num_cols, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
        )
    else:
        store_tile(
            acc, out_ptr + start, num_cols, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
        )


@jit
def _finish_item(
    acc, out_ptr, wide_ptr, partial_ptr, counter_ptr, tile, split, is_wide, out_col, col, num_cols, first_token,
    num_tokens, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Store a tile, or its partial; then whoever is last stores the sum."""
    if IS_SPLIT and SPLITS > 1:
        acc, is_last = sum_of_splits(
            acc, partial_ptr, counter_ptr, tile, split, num_tokens - first_token, SPLITS, TOKENS_FIRST
        )
        if is_last:
            _store_segment(
                acc, out_ptr, wide_ptr, is_wide, out_col, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
            )
    else:
        _store_segment(
            acc, out_ptr, wide_ptr, is_wide, out_col, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
        )


@jit
def _fp8_item(
    w, w_scale_ptr, x, x_scale_ptr, out_ptr, wide_ptr, partial_ptr, counter_ptr, item, token_tile,
    num_token_tiles, num_rows, num_tokens, stride_x, stride_xs,
    K: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr, QUANTISE: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = K // _FP8_STEP
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    WALKS: tl.constexpr = SPLITS > 1 and not IS_SPLIT
    tile = item // SPLITS if IS_SPLIT else item
    split = item % SPLITS if IS_SPLIT else item * 0
    inside, num_cols, segment_row, scale_row, is_wide, out_col = segment_of(tile, SEGMENTS)
    col = inside * BM
    first_row, first_token, first_block = segment_row + col, token_tile * BT, split * PER_SPLIT
    w_scale_ptr += (scale_row + col // _FP8_STEP) * BLOCKS
    tokens = tl.minimum(first_token + tl.arange(0, BT), num_tokens - 1).to(tl.int64)
    acc = _fp8_range(
        w, w_scale_ptr, x, x_scale_ptr + tokens * stride_xs, first_row, num_rows, first_token, num_tokens, stride_x,
        first_block, BLOCKS if WALKS else tl.minimum(first_block + PER_SPLIT, BLOCKS),
        K, BM, BT, TOKENS_FIRST, QUANTISE, W_DESC, X_DESC, STAGES, PER_SPLIT if WALKS else 0,
    )
    _finish_item(
        acc, out_ptr, wide_ptr, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, is_wide, out_col,
        col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST, SPLITS, IS_SPLIT,
    )


@jit
def _plain_item(
    w, x, out_ptr, wide_ptr, partial_ptr, counter_ptr, item, token_tile, num_token_tiles,
    num_rows, num_tokens, stride_x, K: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):
    STEPS: tl.constexpr = (K + _PLAIN_STEP - 1) // _PLAIN_STEP
    PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    WALKS: tl.constexpr = SPLITS > 1 and not IS_SPLIT
    tile = item // SPLITS if IS_SPLIT else item
    split = item % SPLITS if IS_SPLIT else item * 0
    inside, num_cols, segment_row, _, is_wide, out_col = segment_of(tile, SEGMENTS)
    col = inside * BM
    first_row, first_token, first_step = segment_row + col, token_tile * BT, split * PER_SPLIT
    acc = _plain_range(
        w, x, first_row, num_rows, first_token, num_tokens, stride_x,
        first_step, STEPS if WALKS else tl.minimum(first_step + PER_SPLIT, STEPS),
        K, BM, BT, TOKENS_FIRST, W_DESC, X_DESC, STAGES, PER_SPLIT if WALKS else 0,
    )
    _finish_item(
        acc, out_ptr, wide_ptr, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, is_wide, out_col,
        col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST, SPLITS, IS_SPLIT,
    )


@jit(do_not_specialize=("num_tokens",))
def linear_kernel(
    w8, w8_scale_ptr, w16, x8, x8_scale_ptr, x16, result, num_tokens, sizes,
    K: tl.constexpr, SEGMENTS8: tl.constexpr, SEGMENTS16: tl.constexpr, TILES8: tl.constexpr, TILES16: tl.constexpr,
    SPLITS8: tl.constexpr, SPLITS16: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BAND: tl.constexpr,
    TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr, QUANTISE: tl.constexpr,
    W_DESC: tl.constexpr, X8_DESC: tl.constexpr, X16_DESC: tl.constexpr,
    STAGES8: tl.constexpr, STAGES16: tl.constexpr,
):
    """Items: the FP8 tiles (times their splits, where splits are programs), then the bf16 tiles. With QUANTISE x8 is
    the bf16 input. w8, w16, x8, x16: descriptors or pointers; result: `LinearResult`; sizes: `LinearSizes`.
    """
    pdl_trigger()
    ITEMS8: tl.constexpr = TILES8 * SPLITS8 if IS_SPLIT else TILES8
    ITEMS16: tl.constexpr = TILES16 * SPLITS16 if IS_SPLIT else TILES16
    num_token_tiles = tl.cdiv(num_tokens, BT)
    item, token_tile = item_of(tl.program_id(0), ITEMS8 + ITEMS16, num_token_tiles, BAND)
    # partial tiles and counters of the bf16 part follow those of the FP8 part
    partial16_ptr = result.partial + num_token_tiles.to(tl.int64) * (TILES8 * SPLITS8 * BM * BT)
    counter16_ptr = result.counter + num_token_tiles * TILES8
    if TILES16 == 0:
        _fp8_item(
            w8, w8_scale_ptr, x8, x8_scale_ptr, result.out, result.wide, result.partial, result.counter, item,
            token_tile, num_token_tiles, sizes.rows8, num_tokens, sizes.x8, sizes.x8_scale, K, SEGMENTS8, SPLITS8,
            BM, BT, TOKENS_FIRST, IS_SPLIT, QUANTISE, W_DESC, X8_DESC, STAGES8,
        )
    elif TILES8 == 0:
        _plain_item(
            w16, x16, result.out, result.wide, partial16_ptr, counter16_ptr, item, token_tile,
            num_token_tiles, sizes.rows16, num_tokens, sizes.x16, K, SEGMENTS16, SPLITS16,
            BM, BT, TOKENS_FIRST, IS_SPLIT, W_DESC, X16_DESC, STAGES16,
        )
    elif item < ITEMS8:
        _fp8_item(
            w8, w8_scale_ptr, x8, x8_scale_ptr, result.out, result.wide, result.partial, result.counter, item,
            token_tile, num_token_tiles, sizes.rows8, num_tokens, sizes.x8, sizes.x8_scale, K, SEGMENTS8, SPLITS8,
            BM, BT, TOKENS_FIRST, IS_SPLIT, QUANTISE, W_DESC, X8_DESC, STAGES8,
        )
    else:
        _plain_item(
            w16, x16, result.out, result.wide, partial16_ptr, counter16_ptr, item - ITEMS8, token_tile,
            num_token_tiles, sizes.rows16, num_tokens, sizes.x16, K, SEGMENTS16, SPLITS16,
            BM, BT, TOKENS_FIRST, IS_SPLIT, W_DESC, X16_DESC, STAGES16,
        )


@jit(do_not_specialize=("num_groups",))
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, num_groups, stride_x, ROW_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """x [T, K] -> codes [T, K] and scales [T, K / GROUP]; TILE groups a program."""
    pdl_trigger()
    groups = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.arange(0, GROUP)[None, :]
    mask = groups < num_groups
    starts = (groups // ROW_GROUPS) * stride_x + (groups % ROW_GROUPS) * GROUP
    x = tl.load(x_ptr + starts[:, None] + cols, mask=mask[:, None], other=0.0)
    # codes, scale = fp8_quantize(x, GROUP)
    codes, scale = quantize_e4m3(x.to(tl.float32))
    tl.store(codes_ptr + groups[:, None] * GROUP + cols, codes, mask=mask[:, None])
    tl.store(scale_ptr + groups, scale, mask=mask)
