"""Products of weight rows with a tile's token rows: the narrow form, for up to 16 rows. How products are formed, and
why, is said in ops/moe_kernels.py.
"""

from __future__ import annotations

from dsv4.ops.moe_rows import SUB, with_item
from dsv4.ops.tl_fp4 import decode_tile, load_words
from dsv4.ops.tl_utils import abs_bits, e4m3_scale, e8m0_reciprocal, e8m0_to_float, jit, tl


@jit
def fake_quantize_e4m3(x):
    """bf16 [R, 128] -> the same rounded to E4M3 with one E8M0 scale a row, back in bf16: exact there."""
    wide = x.to(tl.float32)
    scale = e4m3_scale(tl.max(abs_bits(wide), axis=1))
    codes = (wide * e8m0_reciprocal(scale)[:, None]).to(tl.float8e4nv)
    return (codes.to(tl.float32) * e8m0_to_float(scale)[:, None]).to(tl.bfloat16)


# ---- products ----


@jit
def _load_rows(x_ptr, rows, is_row, first_col, K: tl.constexpr, QUANTISE: tl.constexpr):
    """Columns first_col .. first_col + 127 of rows [8] -> bf16 [128, 8], zeros where there is no row."""
    cols = first_col + tl.arange(0, 128)
    source = x_ptr + ((rows * K)[:, None] + cols[None, :])
    if K % 128 != 0:
        x = tl.load(source, mask=is_row[:, None] & (cols < K)[None, :], other=0.0)
    else:
        x = tl.load(source, mask=is_row[:, None], other=0.0)
    if QUANTISE:
        x = fake_quantize_e4m3(x)
    return tl.trans(x)


@jit
def zeros(num_outs: tl.constexpr, NUM: tl.constexpr):
    accs = ()
    for _ in tl.static_range(NUM):
        accs = with_item(accs, tl.zeros([num_outs, SUB], dtype=tl.float32))
    return accs


@jit
def plus_each(items, others):
    sums = ()
    for index in tl.static_range(len(items)):
        sums = with_item(sums, items[index] + others[index])
    return sums


@jit
def product(
    x_ptr, rows, is_row, data_ptr, scale_ptr, first_out, part,
    BLOCK: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of one matrix from `first_out` on times each [8] of the tuple `rows` of x -> tuple of fp32 [BLOCK, 8].

    K is cut into RANGES, each with a sum of its own; their sums are added first range first. SPLIT: of range `part`
    alone, not added to anything.
    """
    K_TILES: tl.constexpr = (K + 127) // 128
    PER_RANGE: tl.constexpr = K_TILES // RANGES
    STEP: tl.constexpr = UNROLL if PER_RANGE % UNROLL == 0 else 1
    NUM: tl.constexpr = len(rows)
    IS_SUMMED: tl.constexpr = RANGES > 1 and not SPLIT
    accs, totals = zeros(BLOCK, NUM), zeros(BLOCK, NUM)
    first_tile = part * PER_RANGE if SPLIT else 0
    for first in range(first_tile, first_tile + (PER_RANGE if SPLIT else K_TILES), STEP):
        for step in tl.static_range(STEP):
            words, low, high = load_words(data_ptr, scale_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            weight = decode_tile(words, low, high, FORMAT)
            sums = ()
            for sub in tl.static_range(NUM):
                x = _load_rows(x_ptr, rows[sub], is_row[sub], (first + step) * 128, K, QUANTISE)
                sums = with_item(sums, tl.dot(weight, x, accs[sub]))
            accs = sums
        if IS_SUMMED:  # noqa: SIM102
            if (first + STEP) % PER_RANGE == 0:
                totals, accs = plus_each(totals, accs), zeros(BLOCK, NUM)
    return totals if IS_SUMMED else accs


@jit
def two_products(
    x_ptr, rows, is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, first_out,
    BLOCK: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr,
):  # fmt: skip
    """`product` with two matrices of one shape and format, x read once."""
    K_TILES: tl.constexpr = K // 128
    PER_RANGE: tl.constexpr = K_TILES // RANGES
    STEP: tl.constexpr = UNROLL if PER_RANGE % UNROLL == 0 else 1
    NUM: tl.constexpr = len(rows)
    gates, ups = zeros(BLOCK, NUM), zeros(BLOCK, NUM)
    gate_totals, up_totals = gates, ups
    for first in range(0, K_TILES, STEP):
        for step in tl.static_range(STEP):
            words1, low1, high1 = load_words(data1_ptr, scale1_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            words3, low3, high3 = load_words(data3_ptr, scale3_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            weight1 = decode_tile(words1, low1, high1, FORMAT)
            tiles, new_gates, new_ups = (), (), ()
            for sub in tl.static_range(NUM):
                x = _load_rows(x_ptr, rows[sub], is_row[sub], (first + step) * 128, K, QUANTISE)
                tiles = with_item(tiles, x)
                new_gates = with_item(new_gates, tl.dot(weight1, x, gates[sub]))
            weight3 = decode_tile(words3, low3, high3, FORMAT)  # behind the first products: registers
            for sub in tl.static_range(NUM):
                new_ups = with_item(new_ups, tl.dot(weight3, tiles[sub], ups[sub]))
            gates, ups = new_gates, new_ups
        if RANGES > 1:  # noqa: SIM102
            if (first + STEP) % PER_RANGE == 0:
                gate_totals, up_totals = plus_each(gate_totals, gates), plus_each(up_totals, ups)
                gates, ups = zeros(BLOCK, NUM), zeros(BLOCK, NUM)
    if RANGES > 1:
        return gate_totals, up_totals
    else:
        return gates, ups
