"""Kernels of ops/linear.py, apart from their contracts because the two together would be too long for one file.

`linear_kernel` multiplies one input by the tiles of one FP8 and one bf16 matrix, either of which may be absent and
either of which may be several weights end to end (segments). `grouped_linear_kernel` is the output projection's first
half. Both are made of the same parts:

* A K range of a tile: `_fp8_range` and `_plain_range` walk it in steps, weights and input through pipelined loads (the
  tensor copy engine where strides allow it). FP8: the product of 128 codes on the tensor cores, then one fused
  multiply-add with both scales in fp32. bf16: plain accumulation.
* K is cut into splits by the layer's shape alone. For few rows every split is a program; it leaves an fp32 partial
  tile, and the program that arrives last adds the partials up, first split first. For many rows one program walks the
  splits and adds the same partial sums in the same order. So both give the same bits.
* Only the tile may vary with the number of rows: which of the two operands comes first (`TOKENS_FIRST`), and how many
  rows of each. An output is a sum over K of exact products whatever its place in the tile.

Rows past the end are not masked but taken from the last row: their results are never stored.
"""

from __future__ import annotations

from dsv4.ops.tl_utils import INTERPRET, e8m0_to_float, jit, quantize_e4m3, tl

FP8_STEP = 128  # the scale groups of both operands
PLAIN_STEP = 64
SEGMENT_FIELDS = 6  # first tile, rows, first row, first scale row, has fp32 output, first output column

_FP8_STEP = tl.constexpr(FP8_STEP)
_PLAIN_STEP = tl.constexpr(PLAIN_STEP)
_FIELDS = tl.constexpr(SEGMENT_FIELDS)


# ---- tiles ----


@jit
def _load_tile(
    source, first_row, col, num_rows, stride, last_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, IS_EVEN: tl.constexpr, HAS_DESC: tl.constexpr,
):  # fmt: skip
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
def _zeros(BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """An accumulator: [tokens, outputs] or [outputs, tokens]."""
    return tl.zeros([BT, BM] if TOKENS_FIRST else [BM, BT], tl.float32)


@jit
def _dot(w, x, acc, TOKENS_FIRST: tl.constexpr):
    """w [BM, step], x [BT, step]."""
    return tl.dot(x, tl.trans(w), acc) if TOKENS_FIRST else tl.dot(w, tl.trans(x), acc)


@jit
def _as_float(scale):
    """Scales as stored (E8M0 codes or fp32) -> fp32."""
    return e8m0_to_float(scale) if scale.dtype == tl.uint8 else scale


@jit
def _scaled_bf16(codes, scale):
    """E4M3 codes times a power of two (bf16) -> bf16, exact; NaN codes, which no weight has, become 480.

    Sign, exponent and mantissa put at bf16's places are the value * 2^-120: six cheap instructions for two codes, where
    the compiler's conversion goes through fp16 and takes three slow ones.
    """
    if INTERPRET:
        values = codes.to(tl.bfloat16) * scale
    else:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 a, a, 0x80008000, c, 0xea;
            lop3.b32 b, b, 0x80008000, d, 0xea;
            mov.b32 c, 0x7b807b80;
            mul.rn.bf16x2 a, a, c;
            mul.rn.bf16x2 b, b, c;
            mul.rn.bf16x2 $0, a, $2;
            mul.rn.bf16x2 $1, b, $3;
            }""",
            "=&r,=&r,r,r,r", [tl.broadcast_to(scale, codes.shape), codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return values


# ---- K ranges ----


@jit
def _fp8_range(
    w, w_scale_ptr, x, x_scale_ptrs, first_row, num_rows, first_token, num_tokens, stride_x, first_block, last_block,
    K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, QUANTIZE: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks [first_block, last_block) of 128 columns. w_scale_ptr: the scales of these rows, one a block;
    x_scale_ptrs [BT]: those of the tokens. With QUANTIZE x is bf16, and its codes and scales are made here.
    """
    acc = _zeros(BM, BT, TOKENS_FIRST)
    # scales are asked for one step ahead: such small loads are not pipelined by the compiler
    w_scale = tl.load(w_scale_ptr + first_block)
    if not QUANTIZE:
        x_scale = tl.load(x_scale_ptrs + first_block)
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        col = block * _FP8_STEP
        codes = _load_tile(w, first_row, col, num_rows, K, K, BM, _FP8_STEP, True, W_DESC)
        x_tile = _load_tile(x, first_token, col, num_tokens, stride_x, K, BT, _FP8_STEP, True, X_DESC)
        following = tl.minimum(block + 1, last_block - 1)
        next_w_scale = tl.load(w_scale_ptr + following)
        if QUANTIZE:
            # codes, scale = fp8_quantize(x, 128)
            x_tile, x_scale = quantize_e4m3(x_tile.to(tl.float32))
            next_x_scale = x_scale
        else:
            next_x_scale = tl.load(x_scale_ptrs + following)
        partial = _dot(codes, x_tile, _zeros(BM, BT, TOKENS_FIRST), TOKENS_FIRST)
        scale = e8m0_to_float(x_scale) * _as_float(w_scale)
        scale = scale[:, None] if TOKENS_FIRST else scale[None, :]
        acc = tl.fma(partial, tl.broadcast_to(scale, acc.shape), acc)
        w_scale = next_w_scale
        if not QUANTIZE:
            x_scale = next_x_scale
    return acc


@jit
def _plain_range(
    w, x, first_row, num_rows, first_token, num_tokens, stride_x, first_step, last_step,
    K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Steps [first_step, last_step) of PLAIN_STEP columns of two bf16 matrices."""
    IS_EVEN: tl.constexpr = K // _PLAIN_STEP * _PLAIN_STEP == K
    acc = _zeros(BM, BT, TOKENS_FIRST)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        col = step * _PLAIN_STEP
        w_tile = _load_tile(w, first_row, col, num_rows, K, K, BM, _PLAIN_STEP, IS_EVEN, W_DESC)
        x_tile = _load_tile(x, first_token, col, num_tokens, stride_x, K, BT, _PLAIN_STEP, IS_EVEN, X_DESC)
        acc = _dot(w_tile, x_tile, acc, TOKENS_FIRST)
    return acc


@jit
def _widened_range(
    w, w_scale_ptr, x, first_row, num_rows, first_col, first_token, num_tokens, stride_x, first_block, last_block,
    K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, IS_FP8: tl.constexpr, HAS_ONE_SCALE: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks of 128 columns of a weight taken as bf16, times bf16 columns of x from first_col on: [BM, BT].

    HAS_ONE_SCALE: no tile crosses a scale block. Else every row looks up its own.
    """
    IS_EVEN: tl.constexpr = K // _FP8_STEP * _FP8_STEP == K
    SCALE_COLS: tl.constexpr = (K + _FP8_STEP - 1) // _FP8_STEP
    acc = tl.zeros([BM, BT], tl.float32)
    if IS_FP8:
        if HAS_ONE_SCALE:
            scale_ptrs = w_scale_ptr + (first_row // _FP8_STEP) * SCALE_COLS
        else:
            scale_rows = tl.minimum(first_row + tl.arange(0, BM), num_rows - 1) // _FP8_STEP
            scale_ptrs = w_scale_ptr + scale_rows * SCALE_COLS
        scale = tl.load(scale_ptrs + first_block)
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        col = block * _FP8_STEP
        w_tile = _load_tile(w, first_row, col, num_rows, K, K, BM, _FP8_STEP, IS_EVEN, W_DESC)
        x_tile = _load_tile(
            x, first_token, first_col + col, num_tokens, stride_x, first_col + K, BT, _FP8_STEP, IS_EVEN, X_DESC
        )  # fmt: skip
        if IS_FP8:
            # dequantize(weight, bf16): a power of two is exact in bf16, an fp32 scale is not
            next_scale = tl.load(scale_ptrs + tl.minimum(block + 1, last_block - 1))
            factor = _as_float(scale) if HAS_ONE_SCALE else _as_float(scale)[:, None]
            if scale.dtype == tl.uint8:
                w_tile = _scaled_bf16(w_tile, factor.to(tl.bfloat16))
            else:
                w_tile = (w_tile.to(tl.float32) * factor).to(tl.bfloat16)
            scale = next_scale
        acc = tl.dot(w_tile, tl.trans(x_tile), acc)
    return acc


# ---- results ----


@jit
def _store_tile(
    acc, out_ptr, stride_out, col, num_cols, first_token, num_tokens,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):  # fmt: skip
    """Columns [col, col + BM) of the tile's tokens, those below num_cols, rounded to the output's dtype."""
    tokens = first_token + tl.arange(0, BT)
    cols = col + tl.arange(0, BM)
    values = acc.to(out_ptr.dtype.element_ty)
    token_mask, col_mask = tokens < num_tokens, cols < num_cols
    token_offsets = tokens.to(tl.int64) * stride_out
    if TOKENS_FIRST:
        tl.store(out_ptr + token_offsets[:, None] + cols[None, :], values, mask=token_mask[:, None] & col_mask[None, :])
    else:
        tl.store(out_ptr + token_offsets[None, :] + cols[:, None], values, mask=token_mask[None, :] & col_mask[:, None])


@jit
def _sum_of_splits(acc, partial_ptr, counter_ptr, tile, split, SPLITS: tl.constexpr):
    """Leave a partial tile; the last of its tile adds all up, first split first. Returns the sum and whether it is
    one. The last one sets the counter back, so that a graph can be replayed.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    offsets = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    tile_ptr = partial_ptr + tile.to(tl.int64) * (SPLITS * SIZE)
    tl.store(tile_ptr + split * SIZE + offsets, acc)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    total = tl.zeros_like(acc)
    if is_last:
        tl.debug_barrier()
        for index in range(SPLITS):
            # other multiprocessors wrote them: .cg reads from the cache they share
            total += tl.load(tile_ptr + index * SIZE + offsets, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return total, is_last


# ---- the launches ----


@jit
def _item_of(pid, num_items, num_token_tiles, BAND: tl.constexpr):
    """Program -> item of the weights and tile of tokens. BAND token tiles take turns at one item, so that programs
    that run together share weights and input in the cache.
    """
    band_size = BAND * num_items
    first = (pid // band_size) * BAND
    width = tl.minimum(num_token_tiles - first, BAND)
    inside = pid % band_size
    return inside // width, first + inside % width


@jit
def _segment_of(tile, SEGMENTS: tl.constexpr):
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
):  # fmt: skip
    """A segment's output is a matrix [T, num_cols] of its own, behind those of the segments before it."""
    start = out_col * num_tokens.to(tl.int64)
    if is_wide == 1:
        _store_tile(
            acc, wide_ptr + start, num_cols, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
        )  # fmt: skip
    else:
        _store_tile(
            acc, out_ptr + start, num_cols, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
        )  # fmt: skip


@jit
def _finish_item(
    acc, out_ptr, wide_ptr, partial_ptr, counter_ptr, tile, split, is_wide, out_col, col, num_cols, first_token,
    num_tokens, BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a tile, or its partial; then whoever is last stores the sum."""
    if IS_SPLIT and SPLITS > 1:
        acc, is_last = _sum_of_splits(acc, partial_ptr, counter_ptr, tile, split, SPLITS)
        if is_last:
            _store_segment(
                acc, out_ptr, wide_ptr, is_wide, out_col, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
            )  # fmt: skip
    else:
        _store_segment(
            acc, out_ptr, wide_ptr, is_wide, out_col, col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST
        )  # fmt: skip


@jit
def _fp8_item(
    w, w_scale_ptr, x, x_scale_ptr, out_ptr, wide_ptr, partial_ptr, counter_ptr, item, token_tile, num_token_tiles,
    num_rows, num_tokens, stride_x, stride_xs, K: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr, QUANTIZE: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // _FP8_STEP
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    WALKS: tl.constexpr = SPLITS > 1 and not IS_SPLIT
    tile = item // SPLITS if IS_SPLIT else item
    split = item % SPLITS if IS_SPLIT else item * 0
    inside, num_cols, segment_row, scale_row, is_wide, out_col = _segment_of(tile, SEGMENTS)
    col = inside * BM
    first_row, first_token = segment_row + col, token_tile * BT
    w_scale_ptr += (scale_row + col // _FP8_STEP) * BLOCKS
    tokens = tl.minimum(first_token + tl.arange(0, BT), num_tokens - 1).to(tl.int64)
    x_scale_ptrs = x_scale_ptr + tokens * stride_xs
    if WALKS:
        acc = _zeros(BM, BT, TOKENS_FIRST)
        for index in tl.range(0, SPLITS, num_stages=1):
            acc += _fp8_range(
                w, w_scale_ptr, x, x_scale_ptrs, first_row, num_rows, first_token, num_tokens, stride_x,
                index * PER_SPLIT, tl.minimum(index * PER_SPLIT + PER_SPLIT, BLOCKS),
                K, BM, BT, TOKENS_FIRST, QUANTIZE, W_DESC, X_DESC, STAGES,
            )  # fmt: skip
    else:
        acc = _fp8_range(
            w, w_scale_ptr, x, x_scale_ptrs, first_row, num_rows, first_token, num_tokens, stride_x,
            split * PER_SPLIT, tl.minimum(split * PER_SPLIT + PER_SPLIT, BLOCKS),
            K, BM, BT, TOKENS_FIRST, QUANTIZE, W_DESC, X_DESC, STAGES,
        )  # fmt: skip
    _finish_item(
        acc, out_ptr, wide_ptr, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, is_wide, out_col,
        col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST, SPLITS, IS_SPLIT,
    )  # fmt: skip


@jit
def _plain_item(
    w, x, out_ptr, wide_ptr, partial_ptr, counter_ptr, item, token_tile, num_token_tiles,
    num_rows, num_tokens, stride_x, K: tl.constexpr, SEGMENTS: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + _PLAIN_STEP - 1) // _PLAIN_STEP
    PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    WALKS: tl.constexpr = SPLITS > 1 and not IS_SPLIT
    tile = item // SPLITS if IS_SPLIT else item
    split = item % SPLITS if IS_SPLIT else item * 0
    inside, num_cols, segment_row, _, is_wide, out_col = _segment_of(tile, SEGMENTS)
    col = inside * BM
    first_row, first_token = segment_row + col, token_tile * BT
    if WALKS:
        acc = _zeros(BM, BT, TOKENS_FIRST)
        for index in tl.range(0, SPLITS, num_stages=1):
            acc += _plain_range(
                w, x, first_row, num_rows, first_token, num_tokens, stride_x,
                index * PER_SPLIT, tl.minimum(index * PER_SPLIT + PER_SPLIT, STEPS),
                K, BM, BT, TOKENS_FIRST, W_DESC, X_DESC, STAGES,
            )  # fmt: skip
    else:
        acc = _plain_range(
            w, x, first_row, num_rows, first_token, num_tokens, stride_x,
            split * PER_SPLIT, tl.minimum(split * PER_SPLIT + PER_SPLIT, STEPS),
            K, BM, BT, TOKENS_FIRST, W_DESC, X_DESC, STAGES,
        )  # fmt: skip
    _finish_item(
        acc, out_ptr, wide_ptr, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, is_wide, out_col,
        col, num_cols, first_token, num_tokens, BM, BT, TOKENS_FIRST, SPLITS, IS_SPLIT,
    )  # fmt: skip


@jit(do_not_specialize=("num_tokens",))
def linear_kernel(
    w8, w8_scale_ptr, w16, x8, x8_scale_ptr, x16, out_ptr, wide_ptr, partial_ptr, counter_ptr, num_tokens,
    num_rows8, num_rows16, stride_x8, stride_xs, stride_x16,
    K: tl.constexpr, SEGMENTS8: tl.constexpr, SEGMENTS16: tl.constexpr, TILES8: tl.constexpr, TILES16: tl.constexpr,
    SPLITS8: tl.constexpr, SPLITS16: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BAND: tl.constexpr,
    TOKENS_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr, QUANTIZE: tl.constexpr,
    W_DESC: tl.constexpr, X8_DESC: tl.constexpr, X16_DESC: tl.constexpr,
    STAGES8: tl.constexpr, STAGES16: tl.constexpr,
):  # fmt: skip
    """Items: the FP8 tiles (times their splits, where splits are programs), then the bf16 tiles. With QUANTIZE x8 is
    the bf16 input.
    """
    ITEMS8: tl.constexpr = TILES8 * SPLITS8 if IS_SPLIT else TILES8
    ITEMS16: tl.constexpr = TILES16 * SPLITS16 if IS_SPLIT else TILES16
    num_token_tiles = tl.cdiv(num_tokens, BT)
    item, token_tile = _item_of(tl.program_id(0), ITEMS8 + ITEMS16, num_token_tiles, BAND)
    # partial tiles and counters of the bf16 part follow those of the FP8 part
    partial16_ptr = partial_ptr + num_token_tiles.to(tl.int64) * (TILES8 * SPLITS8 * BM * BT)
    counter16_ptr = counter_ptr + num_token_tiles * TILES8
    if TILES16 == 0:
        _fp8_item(
            w8, w8_scale_ptr, x8, x8_scale_ptr, out_ptr, wide_ptr, partial_ptr, counter_ptr, item, token_tile,
            num_token_tiles, num_rows8, num_tokens, stride_x8, stride_xs, K, SEGMENTS8, SPLITS8,
            BM, BT, TOKENS_FIRST, IS_SPLIT, QUANTIZE, W_DESC, X8_DESC, STAGES8,
        )  # fmt: skip
    elif TILES8 == 0:
        _plain_item(
            w16, x16, out_ptr, wide_ptr, partial16_ptr, counter16_ptr, item, token_tile,
            num_token_tiles, num_rows16, num_tokens, stride_x16, K, SEGMENTS16, SPLITS16,
            BM, BT, TOKENS_FIRST, IS_SPLIT, W_DESC, X16_DESC, STAGES16,
        )  # fmt: skip
    elif item < ITEMS8:
        _fp8_item(
            w8, w8_scale_ptr, x8, x8_scale_ptr, out_ptr, wide_ptr, partial_ptr, counter_ptr, item, token_tile,
            num_token_tiles, num_rows8, num_tokens, stride_x8, stride_xs, K, SEGMENTS8, SPLITS8,
            BM, BT, TOKENS_FIRST, IS_SPLIT, QUANTIZE, W_DESC, X8_DESC, STAGES8,
        )  # fmt: skip
    else:
        _plain_item(
            w16, x16, out_ptr, wide_ptr, partial16_ptr, counter16_ptr, item - ITEMS8, token_tile,
            num_token_tiles, num_rows16, num_tokens, stride_x16, K, SEGMENTS16, SPLITS16,
            BM, BT, TOKENS_FIRST, IS_SPLIT, W_DESC, X16_DESC, STAGES16,
        )  # fmt: skip


@jit(do_not_specialize=("num_tokens",))
def grouped_linear_kernel(
    w, w_scale_ptr, x, out_ptr, partial_ptr, counter_ptr, num_tokens, stride_x,
    K: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BAND: tl.constexpr, IS_SPLIT: tl.constexpr, IS_FP8: tl.constexpr,
    W_DESC: tl.constexpr, X_DESC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUP_TILES: tl.constexpr = (RANK + BM - 1) // BM
    BLOCKS: tl.constexpr = (K + _FP8_STEP - 1) // _FP8_STEP
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    HAS_ONE_SCALE: tl.constexpr = RANK % BM == 0
    WALKS: tl.constexpr = SPLITS > 1 and not IS_SPLIT
    ITEMS: tl.constexpr = GROUPS * GROUP_TILES * (SPLITS if IS_SPLIT else 1)
    num_token_tiles = tl.cdiv(num_tokens, BT)
    item, token_tile = _item_of(tl.program_id(0), ITEMS, num_token_tiles, BAND)
    tile = item // SPLITS if IS_SPLIT else item
    split = item % SPLITS if IS_SPLIT else item * 0
    group, col = tile // GROUP_TILES, (tile % GROUP_TILES) * BM
    first_row, first_token = group * RANK + col, token_tile * BT
    if WALKS:
        acc = tl.zeros([BM, BT], tl.float32)
        for index in tl.range(0, SPLITS, num_stages=1):
            acc += _widened_range(
                w, w_scale_ptr, x, first_row, GROUPS * RANK, group * K, first_token, num_tokens, stride_x,
                index * PER_SPLIT, tl.minimum(index * PER_SPLIT + PER_SPLIT, BLOCKS),
                K, BM, BT, IS_FP8, HAS_ONE_SCALE, W_DESC, X_DESC, STAGES,
            )  # fmt: skip
    else:
        acc = _widened_range(
            w, w_scale_ptr, x, first_row, GROUPS * RANK, group * K, first_token, num_tokens, stride_x,
            split * PER_SPLIT, tl.minimum(split * PER_SPLIT + PER_SPLIT, BLOCKS),
            K, BM, BT, IS_FP8, HAS_ONE_SCALE, W_DESC, X_DESC, STAGES,
        )  # fmt: skip
    out_ptr += group * RANK
    if IS_SPLIT and SPLITS > 1:
        acc, is_last = _sum_of_splits(acc, partial_ptr, counter_ptr, tile * num_token_tiles + token_tile, split, SPLITS)
        if is_last:
            _store_tile(acc, out_ptr, GROUPS * RANK, col, RANK, first_token, num_tokens, BM, BT, False)
    else:
        _store_tile(acc, out_ptr, GROUPS * RANK, col, RANK, first_token, num_tokens, BM, BT, False)


@jit(do_not_specialize=("num_groups",))
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, num_groups, stride_x, ROW_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """x [T, K] -> codes [T, K] and scales [T, K / GROUP]; TILE groups a program."""
    groups = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tl.arange(0, GROUP)[None, :]
    mask = groups < num_groups
    starts = (groups // ROW_GROUPS) * stride_x + (groups % ROW_GROUPS) * GROUP
    x = tl.load(x_ptr + starts[:, None] + cols, mask=mask[:, None], other=0.0)
    # codes, scale = fp8_quantize(x, GROUP)
    codes, scale = quantize_e4m3(x.to(tl.float32))
    tl.store(codes_ptr + groups[:, None] * GROUP + cols, codes, mask=mask[:, None])
    tl.store(scale_ptr + groups, scale, mask=mask)
