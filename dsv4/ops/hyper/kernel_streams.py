"""Step 1 of the hyper-connections' kernels (kernel_few.py): new streams, and what their product with fn is made of.
`hc_post`, which makes new streams and nothing else, is here too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import INTERPRET, jit, tl
from dsv4.ops.lib.maths import to_bf16
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait

NUM_STREAMS = 4
MIX_COLS = 32  # columns of a row of partials: 24 dots (4 in a head), then the sum of squares

# where the streams come from
FROM_STREAMS, FROM_EMBEDDING, FROM_SUBLAYER = 0, 1, 2

_MIX_COLS = tl.constexpr(MIX_COLS)
_FROM_STREAMS, _FROM_EMBEDDING = tl.constexpr(FROM_STREAMS), tl.constexpr(FROM_EMBEDDING)
_FROM_SUBLAYER = tl.constexpr(FROM_SUBLAYER)


# ---- streams ----


class HyperResult(NamedTuple):
    """The tensors of a `HyperInput` (op.py); codes and their scales repeat `hidden` where they are not asked for."""

    streams: Any
    hidden: Any
    codes: Any
    code_scale: Any
    post: Any
    comb: Any


@jit
def load_four(ptr, mask):
    """Four neighbours of every pointer; 1 where masked. From L2."""
    return (
        tl.load(ptr, mask=mask, other=1.0, cache_modifier=".cg"),
        tl.load(ptr + 1, mask=mask, other=1.0, cache_modifier=".cg"),
        tl.load(ptr + 2, mask=mask, other=1.0, cache_modifier=".cg"),
        tl.load(ptr + 3, mask=mask, other=1.0, cache_modifier=".cg"),
    )


@jit
def _load_four_at_once(ptr):
    """Four neighbours of every pointer, which is a multiple of 16 bytes, in one load. Through L1, for numbers that many
    programs ask for."""
    if INTERPRET:
        return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3)
    return tl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [ptr.to(tl.int64)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )


@jit
def _load_weights(ptr, rows, row_mask, last_row, STRIDE: tl.constexpr, IS_MANY: tl.constexpr):
    """Four weights of every row. Of many tokens those of a row that is not there are some other row's."""
    if IS_MANY:
        return _load_four_at_once(ptr + tl.minimum(rows, last_row) * STRIDE)
    return load_four(ptr + rows * STRIDE, row_mask)


@jit
def _new_stream(before, STREAM: tl.constexpr):
    """post[k] o + sum_j comb[j, k] X[j], rounded; weights [rows], the rest [rows, cols]."""
    x, out, post, comb = before
    mixed = comb[0][STREAM][:, None] * x[0].to(tl.float32)
    mixed = mixed + comb[1][STREAM][:, None] * x[1].to(tl.float32)
    mixed = mixed + comb[2][STREAM][:, None] * x[2].to(tl.float32)
    mixed = mixed + comb[3][STREAM][:, None] * x[3].to(tl.float32)
    return to_bf16(post[STREAM][:, None] * out.to(tl.float32) + mixed)


@jit
def load_before(
    out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, last_row, D: tl.constexpr, SOURCE: tl.constexpr,
    IS_MANY: tl.constexpr,
):
    """What `mix_streams` makes the four streams [rows, cols] of: streams, and of a sublayer its output, post, comb."""
    if SOURCE == _FROM_EMBEDDING:
        x0 = tl.load(x_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
        return x0, x0, x0, x0
    else:
        # streams of many tokens that will be replaced make room in L2 for the new ones, which are read again
        EVICTION: tl.constexpr = "evict_first" if IS_MANY and SOURCE == _FROM_SUBLAYER else ""
        row_ptr = x_ptr + rows[:, None] * (4 * D) + cols[None, :]
        x0 = tl.load(row_ptr, mask=mask, other=0.0, eviction_policy=EVICTION)
        x1 = tl.load(row_ptr + D, mask=mask, other=0.0, eviction_policy=EVICTION)
        x2 = tl.load(row_ptr + 2 * D, mask=mask, other=0.0, eviction_policy=EVICTION)
        x3 = tl.load(row_ptr + 3 * D, mask=mask, other=0.0, eviction_policy=EVICTION)
        if SOURCE == _FROM_STREAMS:
            return x0, x1, x2, x3
        else:
            out = tl.load(out_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0, eviction_policy=EVICTION)
            post = _load_weights(post_ptr, rows, row_mask, last_row, 4, IS_MANY)
            comb0 = _load_weights(comb_ptr, rows, row_mask, last_row, 16, IS_MANY)
            comb1 = _load_weights(comb_ptr + 4, rows, row_mask, last_row, 16, IS_MANY)
            comb2 = _load_weights(comb_ptr + 8, rows, row_mask, last_row, 16, IS_MANY)
            comb3 = _load_weights(comb_ptr + 12, rows, row_mask, last_row, 16, IS_MANY)
            return (x0, x1, x2, x3), out, post, (comb0, comb1, comb2, comb3)


@jit
def mix_streams(before, SOURCE: tl.constexpr):
    """The four streams, wherever they come from."""
    if SOURCE != _FROM_SUBLAYER:
        return before
    else:
        return _new_stream(before, 0), _new_stream(before, 1), _new_stream(before, 2), _new_stream(before, 3)


@jit
def store_streams(streams_ptr, x, rows, cols, mask, D: tl.constexpr):
    offsets = rows[:, None] * (4 * D) + cols[None, :]
    tl.store(streams_ptr + offsets, x[0], mask=mask)
    for stream in tl.static_range(1, 4):
        tl.store(streams_ptr + offsets + stream * D, x[stream], mask=mask)


@jit(do_not_specialize=("num_tokens",))
def hc_post_kernel(
    out_ptr, x_ptr, post_ptr, comb_ptr, streams_ptr, num_tokens,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    pdl_wait()
    pdl_trigger()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    row_mask = rows < num_tokens
    mask = row_mask[:, None] & (cols < D)[None, :]
    before = load_before(
        out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, num_tokens - 1, D, _FROM_SUBLAYER, False
    )
    store_streams(streams_ptr, mix_streams(before, _FROM_SUBLAYER), rows, cols, mask, D)


# ---- partial dots ----


@jit
def _load_fn_of(fn_ptr, cols, STREAM: tl.constexpr, D: tl.constexpr, NUM_MIXES: tl.constexpr):
    """fn's columns of one stream, transposed: fp32 [cols, MIX_COLS]."""
    mixes = tl.arange(0, _MIX_COLS)
    mask = (cols < D)[:, None] & (mixes < NUM_MIXES)[None, :]
    return tl.load(fn_ptr + mixes[None, :] * (4 * D) + STREAM * D + cols[:, None], mask=mask, other=0.0)


@jit
def load_fn(fn_ptr, cols, D: tl.constexpr, NUM_MIXES: tl.constexpr):
    """fn's columns of every stream, transposed: four of fp32 [cols, MIX_COLS]."""
    return (
        _load_fn_of(fn_ptr, cols, 0, D, NUM_MIXES),
        _load_fn_of(fn_ptr, cols, 1, D, NUM_MIXES),
        _load_fn_of(fn_ptr, cols, 2, D, NUM_MIXES),
        _load_fn_of(fn_ptr, cols, 3, D, NUM_MIXES),
    )


@jit
def _three_parts(x):
    """fp32 -> three of bf16 that add up to it: 24 bits of mantissa are three times eight."""
    high = to_bf16(x)
    rest = x - high.to(tl.float32)
    middle = to_bf16(rest)
    return high, middle, to_bf16(rest - middle.to(tl.float32))


@jit
def pairs_of_parts(x):
    """fp32 [..., ...] -> bf16 [..., ..., 2, 2]: high, middle, low, zero."""
    high, middle, low = _three_parts(x)
    return tl.join(tl.join(high, low), tl.join(middle, tl.zeros_like(high)))


@jit
def sum_of_parts(x):
    """fp32 [R, 4 MIX_COLS] or [R, MIX_COLS, 4], accumulators of the parts -> their sum [R, MIX_COLS], the small ones
    first."""
    high_low, middle_zero = tl.split(tl.reshape(x, [x.shape[0], _MIX_COLS, 2, 2]))
    high, low = tl.split(high_low)
    middle, _ = tl.split(middle_zero)
    return high + (middle + low)


@jit
def keep_layout(x):
    """x itself. The compiler does not look through it: else it would compute new streams in the layout of a matrix
    operand, once in every warp, which takes four times the registers."""
    if INTERPRET:
        return x
    PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@jit
def keep_layouts(x):
    """Of four."""
    return keep_layout(x[0]), keep_layout(x[1]), keep_layout(x[2]), keep_layout(x[3])


@jit
def _square_sum(x):
    """Of x [R, K]: fours first, then every other four, then the two halves: the order a thread of four neighbours and a
    thread of eight have in common."""
    wide = x.to(tl.float32)
    fours = tl.sum(tl.reshape(wide * wide, [x.shape[0], x.shape[1] // 8, 2, 4]), axis=3)
    return tl.sum(tl.sum(fours, axis=1), axis=1)


@jit
def join_partial(dots, x, NUM_MIXES: tl.constexpr):
    """Rows of partials [rows, MIX_COLS]: the dots of a split's columns and, behind them, the sum of their squares."""
    squares = ((_square_sum(x[0]) + _square_sum(x[1])) + _square_sum(x[2])) + _square_sum(x[3])
    return tl.where((tl.arange(0, _MIX_COLS) == NUM_MIXES)[None, :], squares[:, None], dots)
