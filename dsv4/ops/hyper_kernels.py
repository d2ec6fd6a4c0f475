"""Kernels of ops/hyper.py, apart from their contracts because the two together would be too long for one file.

A launch is (hc_post | expansion | nothing) + hc_pre or hc_head + RMSNorm + FP8 codes. The fp32 matrix fn [24, 4 D] is
far larger than one token's streams, and one program would need too long to read it, so the columns are split over many
programs:

1. Program (split, tile) owns SPLIT columns of every stream and TILE tokens. It makes the new streams, rounds and
   stores them, and leaves 24 partial dots and a partial sum of squares per token in memory.
2. The programs of a tile that arrive last become its workers, wait for the few still missing and share the tile's
   tokens: they sum a token's partials and finish it: sigmoid, Sinkhorn, collapse, norm. The counters of arrivals only
   grow, by the number of splits a launch, so that no launch has to reset them and a CUDA graph can be replayed.

Nothing depends on who waits for whom: the partials, the order of their sum and every step after it are fixed by the
layer's shape. Waiting cannot hang: a program waits for programs of its own tile, which a GPU starts before those of
later tiles, and a tile has fewer waiting programs than a GPU has room for. In the interpreter, where programs run one
after another, the last one of a tile does all the work.

The dots run on tensor cores without losing fp32: a stream is bf16 already, and fn is taken apart into three bf16 parts
that add up to it exactly; their products are exact, and each part has its own fp32 accumulator. All products have 16
rows, whatever the tile, so that a token's bits do not depend on the number of tokens.
"""

from __future__ import annotations

from dsv4.ops.arrivals import arrive_and_share, wait_for_all
from dsv4.ops.norm import inverse_rms
from dsv4.ops.tl_math import exp_fp32, to_bf16
from dsv4.ops.tl_utils import INTERPRET, jit, pdl_trigger, pdl_wait, quantize_e4m3, tl

NUM_STREAMS = 4
MIX_COLS = 32  # columns of a row of partials: 24 dots (4 in a head), then the sum of squares
SUB_ROWS = 16  # rows of one matrix product

# where the streams come from
FROM_STREAMS, FROM_EMBEDDING, FROM_SUBLAYER = 0, 1, 2

_MIX_COLS = tl.constexpr(MIX_COLS)
_SUB_ROWS = tl.constexpr(SUB_ROWS)
_FROM_STREAMS, _FROM_EMBEDDING = tl.constexpr(FROM_STREAMS), tl.constexpr(FROM_EMBEDDING)
_FROM_SUBLAYER = tl.constexpr(FROM_SUBLAYER)


# ---- streams ----


@jit
def _load_four(ptr, mask):
    """Four neighbours of every pointer; 1 where masked."""
    return (
        tl.load(ptr, mask=mask, other=1.0, cache_modifier=".cg"),
        tl.load(ptr + 1, mask=mask, other=1.0, cache_modifier=".cg"),
        tl.load(ptr + 2, mask=mask, other=1.0, cache_modifier=".cg"),
        tl.load(ptr + 3, mask=mask, other=1.0, cache_modifier=".cg"),
    )


@jit
def _new_stream(out, x0, x1, x2, x3, post, c0, c1, c2, c3):
    """post[k] o + sum_j comb[j, k] X[j], rounded; weights [rows], the rest [rows, cols]."""
    mixed = c0[:, None] * x0.to(tl.float32)
    mixed = mixed + c1[:, None] * x1.to(tl.float32)
    mixed = mixed + c2[:, None] * x2.to(tl.float32)
    mixed = mixed + c3[:, None] * x3.to(tl.float32)
    return to_bf16(post[:, None] * out.to(tl.float32) + mixed)


@jit
def streams_after(
    out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, D: tl.constexpr, SOURCE: tl.constexpr
):  # fmt: skip
    """The four streams [rows, cols], wherever they come from."""
    if SOURCE == _FROM_EMBEDDING:
        x0 = tl.load(x_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
        return x0, x0, x0, x0
    row_ptr = x_ptr + rows[:, None] * (4 * D) + cols[None, :]
    x0 = tl.load(row_ptr, mask=mask, other=0.0)
    x1 = tl.load(row_ptr + D, mask=mask, other=0.0)
    x2 = tl.load(row_ptr + 2 * D, mask=mask, other=0.0)
    x3 = tl.load(row_ptr + 3 * D, mask=mask, other=0.0)
    if SOURCE == _FROM_STREAMS:
        return x0, x1, x2, x3
    out = tl.load(out_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    post0, post1, post2, post3 = _load_four(post_ptr + rows * 4, row_mask)
    c00, c01, c02, c03 = _load_four(comb_ptr + rows * 16, row_mask)
    c10, c11, c12, c13 = _load_four(comb_ptr + rows * 16 + 4, row_mask)
    c20, c21, c22, c23 = _load_four(comb_ptr + rows * 16 + 8, row_mask)
    c30, c31, c32, c33 = _load_four(comb_ptr + rows * 16 + 12, row_mask)
    return (
        _new_stream(out, x0, x1, x2, x3, post0, c00, c10, c20, c30),
        _new_stream(out, x0, x1, x2, x3, post1, c01, c11, c21, c31),
        _new_stream(out, x0, x1, x2, x3, post2, c02, c12, c22, c32),
        _new_stream(out, x0, x1, x2, x3, post3, c03, c13, c23, c33),
    )


@jit
def _store_streams(streams_ptr, x0, x1, x2, x3, rows, cols, mask, D: tl.constexpr):
    offsets = rows[:, None] * (4 * D) + cols[None, :]
    tl.store(streams_ptr + offsets, x0, mask=mask)
    tl.store(streams_ptr + offsets + D, x1, mask=mask)
    tl.store(streams_ptr + offsets + 2 * D, x2, mask=mask)
    tl.store(streams_ptr + offsets + 3 * D, x3, mask=mask)


@jit(do_not_specialize=("num_tokens",))
def hc_post_kernel(
    out_ptr, x_ptr, post_ptr, comb_ptr, streams_ptr, num_tokens,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    pdl_trigger()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row_mask = rows < num_tokens
    mask = row_mask[:, None] & (cols < D)[None, :]
    x0, x1, x2, x3 = streams_after(
        out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, D, _FROM_SUBLAYER
    )  # fmt: skip
    _store_streams(streams_ptr, x0, x1, x2, x3, rows, cols, mask, D)


# ---- partial dots ----


@jit
def _load_fn(fn_ptr, cols, STREAM: tl.constexpr, D: tl.constexpr, NUM_MIXES: tl.constexpr):
    """fn's columns of one stream, transposed: fp32 [cols, MIX_COLS]."""
    mixes = tl.arange(0, _MIX_COLS)
    mask = (cols < D)[:, None] & (mixes < NUM_MIXES)[None, :]
    return tl.load(fn_ptr + mixes[None, :] * (4 * D) + STREAM * D + cols[:, None], mask=mask, other=0.0)


@jit
def _three_parts(x):
    """fp32 [K, MIX_COLS] -> bf16 [K, 4 MIX_COLS]: three parts that add up to x (24 bits of mantissa are three times
    eight) and a zero, side by side. One wide matrix per stream passes through shared memory faster than three."""
    high = to_bf16(x)
    rest = x - high.to(tl.float32)
    middle = to_bf16(rest)
    low = to_bf16(rest - middle.to(tl.float32))
    pairs = tl.join(tl.join(high, low), tl.join(middle, tl.zeros_like(high)))  # [K, MIX_COLS, 2, 2]
    return tl.reshape(pairs, [x.shape[0], 4 * _MIX_COLS])


@jit
def _sum_of_parts(x):
    """fp32 [R, 4 MIX_COLS], accumulators of the parts -> their sum [R, MIX_COLS], the small ones first."""
    high_low, middle_zero = tl.split(tl.reshape(x, [x.shape[0], _MIX_COLS, 2, 2]))
    high, low = tl.split(high_low)
    middle, _ = tl.split(middle_zero)
    return high + (middle + low)


@jit
def _keep_layout(x):
    """x itself. The compiler does not look through it: else it would compute new streams in the layout of a matrix
    operand, once in every warp, which takes four times the registers."""
    if INTERPRET:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@jit
def _square_sum(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


# ---- finishing a token ----


@jit
def partial_places(ptr, row, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr):
    """Pointers to the partials [splits, MIX_COLS] of a tile's row. The hint makes a lane take one mix and a warp whole
    rows, whatever the width of a partial: the order of the sum is the same in both kernels."""
    splits = tl.arange(0, SPLIT_BLOCK).to(tl.int64)[:, None]
    offsets = splits * _MIX_COLS + tl.arange(0, _MIX_COLS).to(tl.int64)[None, :]
    return ptr + row * (NUM_SPLITS * _MIX_COLS) + tl.multiple_of(offsets, [1, 1])


@jit
def token_weights(partial, base, scale, norm_eps, hc_eps, D: tl.constexpr, NUM_MIXES: tl.constexpr):
    """Sum a token's partials -> its 4 pre weights, 4 post weights and 16 exponentials, side by side [MIX_COLS]."""
    mixes = tl.arange(0, _MIX_COLS)
    sums = tl.sum(partial, axis=0)
    # rows_matmul(wide.flatten(1), fn) * rsqrt(mean_square + norm_eps)
    mean_square = tl.div_rn(tl.sum(tl.where(mixes == NUM_MIXES, sums, 0.0), axis=0), 4.0 * D)
    logits = sums * tl.div_rn(1.0, tl.sqrt_rn(mean_square + norm_eps)) * scale + base
    # sigmoid(z) for pre and post, from exp(-|z|); exp(z - max of its row) for comb: one exp serves all
    rows_of_four = tl.reshape(logits, [_MIX_COLS // 4, 4])
    row_max = tl.broadcast_to(tl.max(rows_of_four, axis=1)[:, None], [_MIX_COLS // 4, 4])
    is_gate = mixes < 8
    power = exp_fp32(tl.where(is_gate, tl.abs(logits) * -1.0, logits - tl.reshape(row_max, [_MIX_COLS])))
    gate = tl.div_rn(tl.where(logits < 0.0, power, 1.0), 1.0 + power)
    gate = tl.where(mixes < 4, gate + hc_eps, gate * 2.0)
    return tl.where(is_gate, gate, power)


@jit
def _pick(values, INDEX: tl.constexpr):
    """One of values [MIX_COLS] in every lane: a shuffle."""
    return tl.gather(values, tl.full([_MIX_COLS], INDEX, tl.int32), 0)


@jit
def _scalar(values, INDEX: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, _MIX_COLS) == INDEX, values, 0.0), axis=0)


@jit
def _load_rows(x_ptr, token, cols, mask, D: tl.constexpr, IS_SHARED: tl.constexpr):
    """A token's four streams, each whole: [1, BLOCK]. `IS_SHARED`: x is [T, D], the same row for every stream."""
    STEP: tl.constexpr = 0 if IS_SHARED else D
    row_ptr = x_ptr + token * (D if IS_SHARED else 4 * D) + cols
    return (
        tl.load(row_ptr, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(row_ptr + STEP, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(row_ptr + 2 * STEP, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(row_ptr + 3 * STEP, mask=mask, other=0.0, cache_modifier=".cg"),
    )


@jit
def _collapse(x0, x1, x2, x3, values):
    """y = sum_j pre[j] X[j], rounded."""
    y = _scalar(values, 0) * x0.to(tl.float32)
    y = y + _scalar(values, 1) * x1.to(tl.float32)
    y = y + _scalar(values, 2) * x2.to(tl.float32)
    y = y + _scalar(values, 3) * x3.to(tl.float32)
    return to_bf16(y)


@jit
def _store_codes(codes_ptr, scale_ptr, hidden, token, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """FP8 codes of a row [1, BLOCK], as `_rms_norm_kernel` of ops/norm.py writes them."""
    groups = tl.arange(0, BLOCK // GROUP)
    codes, scale = quantize_e4m3(tl.reshape(hidden.to(tl.float32), [BLOCK // GROUP, GROUP]))
    group_mask = groups < D // GROUP
    code_offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes_ptr + token * D + code_offsets, codes, mask=group_mask[:, None])
    tl.store(scale_ptr + token * (D // GROUP) + groups, scale, mask=group_mask)


@jit
def _reciprocal(x):
    """1 / x for x between 1e-6 and 8: an approximation and one Newton step, without the slow path of a division."""
    if INTERPRET:
        return 1.0 / x
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    return tl.fma(tl.fma(-x, guess, 1.0), guess, guess)


@jit
def _normalise(a, b, c, d, eps):
    """Four numbers over their sum plus eps."""
    inverse = _reciprocal((((a + b) + c) + d) + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@jit
def _softmax_row(a, b, c, d, eps):
    """Four exponentials over their sum, plus eps."""
    inverse = _reciprocal(((a + b) + c) + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@jit
def _iterate(
    c00, c01, c02, c03,
    c10, c11, c12, c13,
    c20, c21, c22, c23,
    c30, c31, c32, c33, eps, NUM_ITERS: tl.constexpr,
):  # fmt: skip
    """Exponentials -> comb. The 4 x 4 matrix is sixteen variables, so that no step leaves a thread."""
    # comb = comb / ordered_sum(comb, -1).unsqueeze(-1) + eps
    c00, c01, c02, c03 = _softmax_row(c00, c01, c02, c03, eps)
    c10, c11, c12, c13 = _softmax_row(c10, c11, c12, c13, eps)
    c20, c21, c22, c23 = _softmax_row(c20, c21, c22, c23, eps)
    c30, c31, c32, c33 = _softmax_row(c30, c31, c32, c33, eps)
    # comb = comb / (ordered_sum(comb, -2).unsqueeze(-2) + eps)
    c00, c10, c20, c30 = _normalise(c00, c10, c20, c30, eps)
    c01, c11, c21, c31 = _normalise(c01, c11, c21, c31, eps)
    c02, c12, c22, c32 = _normalise(c02, c12, c22, c32, eps)
    c03, c13, c23, c33 = _normalise(c03, c13, c23, c33, eps)
    for _ in range(NUM_ITERS - 1):
        # comb = comb / (ordered_sum(comb, -1).unsqueeze(-1) + eps)
        c00, c01, c02, c03 = _normalise(c00, c01, c02, c03, eps)
        c10, c11, c12, c13 = _normalise(c10, c11, c12, c13, eps)
        c20, c21, c22, c23 = _normalise(c20, c21, c22, c23, eps)
        c30, c31, c32, c33 = _normalise(c30, c31, c32, c33, eps)
        # comb = comb / (ordered_sum(comb, -2).unsqueeze(-2) + eps)
        c00, c10, c20, c30 = _normalise(c00, c10, c20, c30, eps)
        c01, c11, c21, c31 = _normalise(c01, c11, c21, c31, eps)
        c02, c12, c22, c32 = _normalise(c02, c12, c22, c32, eps)
        c03, c13, c23, c33 = _normalise(c03, c13, c23, c33, eps)
    return (
        c00, c01, c02, c03,
        c10, c11, c12, c13,
        c20, c21, c22, c23,
        c30, c31, c32, c33,
    )  # fmt: skip


@jit
def sinkhorn(values, comb_ptr, token, eps, NUM_ITERS: tl.constexpr):
    """One token whose weights are in registers: every lane computes all of it, and each of sixteen stores a value."""
    (
        c00, c01, c02, c03,
        c10, c11, c12, c13,
        c20, c21, c22, c23,
        c30, c31, c32, c33,
    ) = _iterate(
        _pick(values, 8), _pick(values, 9), _pick(values, 10), _pick(values, 11),
        _pick(values, 12), _pick(values, 13), _pick(values, 14), _pick(values, 15),
        _pick(values, 16), _pick(values, 17), _pick(values, 18), _pick(values, 19),
        _pick(values, 20), _pick(values, 21), _pick(values, 22), _pick(values, 23),
        eps, NUM_ITERS,
    )  # fmt: skip
    mixes = tl.arange(0, _MIX_COLS)
    comb = c00
    comb = tl.where(mixes == 9, c01, comb)
    comb = tl.where(mixes == 10, c02, comb)
    comb = tl.where(mixes == 11, c03, comb)
    comb = tl.where(mixes == 12, c10, comb)
    comb = tl.where(mixes == 13, c11, comb)
    comb = tl.where(mixes == 14, c12, comb)
    comb = tl.where(mixes == 15, c13, comb)
    comb = tl.where(mixes == 16, c20, comb)
    comb = tl.where(mixes == 17, c21, comb)
    comb = tl.where(mixes == 18, c22, comb)
    comb = tl.where(mixes == 19, c23, comb)
    comb = tl.where(mixes == 20, c30, comb)
    comb = tl.where(mixes == 21, c31, comb)
    comb = tl.where(mixes == 22, c32, comb)
    comb = tl.where(mixes == 23, c33, comb)
    tl.store(comb_ptr + token * 16 + mixes - 8, comb, mask=(mixes >= 8) & (mixes < 24))


# ---- the launch ----


@jit
def partial_dots(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, streams_ptr, partial_ptr, tile, split, num_tokens,
    D: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr, NUM_MIXES: tl.constexpr,
    SOURCE: tl.constexpr,
):  # fmt: skip
    """Step 1 of a program: new streams, their partial dots with fn and their partial squares into the tile's partials
    [TILE, splits, MIX_COLS]."""
    cols = split * SPLIT + tl.arange(0, SPLIT)
    mixes = tl.arange(0, _MIX_COLS)
    # weights are asked for before the launch that makes the streams has ended
    fn0 = _load_fn(fn_ptr, cols, 0, D, NUM_MIXES)
    fn1 = _load_fn(fn_ptr, cols, 1, D, NUM_MIXES)
    fn2 = _load_fn(fn_ptr, cols, 2, D, NUM_MIXES)
    fn3 = _load_fn(fn_ptr, cols, 3, D, NUM_MIXES)
    pdl_trigger()
    pdl_wait()
    for sub in range(TILE // _SUB_ROWS):
        tile_rows = sub * _SUB_ROWS + tl.arange(0, _SUB_ROWS)
        rows = tile.to(tl.int64) * TILE + tile_rows
        row_mask = rows < num_tokens
        mask = row_mask[:, None] & (cols < D)[None, :]
        x0, x1, x2, x3 = streams_after(
            out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, D, SOURCE
        )  # fmt: skip
        if SOURCE != _FROM_STREAMS:
            _store_streams(streams_ptr, x0, x1, x2, x3, rows, cols, mask, D)
        x0, x1, x2, x3 = _keep_layout(x0), _keep_layout(x1), _keep_layout(x2), _keep_layout(x3)
        parts = tl.dot(x0, _three_parts(fn0))
        parts = tl.dot(x1, _three_parts(fn1), parts)
        parts = tl.dot(x2, _three_parts(fn2), parts)
        parts = tl.dot(x3, _three_parts(fn3), parts)
        squares = ((_square_sum(x0) + _square_sum(x1)) + _square_sum(x2)) + _square_sum(x3)
        partial = tl.where((mixes == NUM_MIXES)[None, :], squares[:, None], _sum_of_parts(parts))
        place = (tile_rows * NUM_SPLITS + split)[:, None] * _MIX_COLS + mixes[None, :]
        is_part = row_mask[:, None] & (mixes <= NUM_MIXES)[None, :]
        tl.store(partial_ptr + place, partial, mask=is_part)


@jit
def load_scales(base_ptr, scale_ptr, NUM_MIXES: tl.constexpr):
    """base and scale of every mix [MIX_COLS]."""
    mixes = tl.arange(0, _MIX_COLS)
    scale_idx = tl.minimum(mixes // 4, 2) if NUM_MIXES > 4 else mixes * 0
    return (
        tl.load(base_ptr + mixes, mask=mixes < NUM_MIXES, other=0.0),
        tl.load(scale_ptr + scale_idx, mask=mixes < NUM_MIXES, other=0.0),
    )


@jit
def store_post(new_post_ptr, values, token):
    mixes = tl.arange(0, _MIX_COLS)
    tl.store(new_post_ptr + token * 4 + mixes - 4, values, mask=(mixes >= 4) & (mixes < 8))


@jit
def store_hidden(
    x0, x1, x2, x3, values, norm_weight, norm_eps, hidden_ptr, codes_ptr, code_scale_ptr, token, cols, mask,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """Collapse a token's streams [1, BLOCK], norm and encode the result, store both."""
    hidden = _collapse(x0, x1, x2, x3, values)
    if HAS_NORM:
        # rms_norm_ref(hidden, norm_weight, norm_eps)
        wide = hidden.to(tl.float32)
        normed = wide * inverse_rms(wide, D, norm_eps)[:, None] * norm_weight.to(tl.float32)
        hidden = to_bf16(normed)
    tl.store(hidden_ptr + token * D + cols, hidden, mask=mask)
    if HAS_CODES:
        _store_codes(codes_ptr, code_scale_ptr, hidden, token, D, BLOCK, GROUP)


@jit(do_not_specialize=("num_tokens",))
def hyper_kernel(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, base_ptr, scale_ptr, norm_ptr,
    streams_ptr, hidden_ptr, codes_ptr, code_scale_ptr, new_post_ptr, new_comb_ptr,
    partial_ptr, counter_ptr, num_tokens, norm_eps, hc_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_WORKERS: tl.constexpr, NUM_MIXES: tl.constexpr,
    NUM_ITERS: tl.constexpr, SOURCE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tl.program_id(1)
    base, scale = load_scales(base_ptr, scale_ptr, NUM_MIXES)
    tile_partial_ptr = partial_ptr + tile.to(tl.int64) * (NUM_SPLITS * TILE * _MIX_COLS)
    partial_dots(
        out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, streams_ptr, tile_partial_ptr, tile, split, num_tokens,
        D, SPLIT, NUM_SPLITS, TILE, NUM_MIXES, SOURCE,
    )  # fmt: skip
    tile_tokens = tl.minimum(num_tokens - tile * TILE, TILE)
    worker, num_workers, complete = arrive_and_share(counter_ptr + tile, tile_tokens, NUM_SPLITS, NUM_WORKERS)
    if worker >= 0:
        cols = tl.arange(0, BLOCK)[None, :]
        mask = cols < D
        norm_weight = mask
        if HAS_NORM:
            norm_weight = tl.load(norm_ptr + cols, mask=mask, other=0.0)
        wait_for_all(counter_ptr + tile, complete)
        source_ptr = streams_ptr if SOURCE == _FROM_SUBLAYER else x_ptr
        for row in range(worker, tile_tokens, num_workers):
            token = tile.to(tl.int64) * TILE + row
            # other multiprocessors wrote the partials: .cg reads from the cache they share
            places = partial_places(tile_partial_ptr, row, NUM_SPLITS, SPLIT_BLOCK)
            is_split, is_mix = tl.arange(0, SPLIT_BLOCK) < NUM_SPLITS, tl.arange(0, _MIX_COLS) <= NUM_MIXES
            is_part = is_split[:, None] & is_mix[None, :]
            partial = tl.load(places, mask=is_part, other=0.0, cache_modifier=".cg")
            values = token_weights(partial, base, scale, norm_eps, hc_eps, D, NUM_MIXES)
            if NUM_MIXES > 4:
                store_post(new_post_ptr, values, token)
                sinkhorn(values, new_comb_ptr, token, hc_eps, NUM_ITERS)
            x0, x1, x2, x3 = _load_rows(source_ptr, token, cols, mask, D, SOURCE == _FROM_EMBEDDING)
            store_hidden(
                x0, x1, x2, x3, values, norm_weight, norm_eps, hidden_ptr, codes_ptr, code_scale_ptr, token, cols, mask,
                D, BLOCK, GROUP, HAS_NORM, HAS_CODES,
            )  # fmt: skip
