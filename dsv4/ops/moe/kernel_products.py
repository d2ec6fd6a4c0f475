"""Products of weight rows with a tile's token rows: in sub-tiles of 8, by mma.sync. How products are formed, and
why, is said in kernel_gate_up.py.
"""

from __future__ import annotations

from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.fp4 import decode_tile, load_words
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import in_product_order
from dsv4.ops.moe.kernel_rows import SUB, with_item
from dsv4.ops.moe.plan import NATURAL, OPERAND, PRODUCT

IN_NATURAL, IN_PRODUCT, IN_OPERAND = tl.constexpr(NATURAL), tl.constexpr(PRODUCT), tl.constexpr(OPERAND)


# ---- products ----


@jit
def in_order(x, ORDER: tl.constexpr):
    """[R, C] with its columns in another order: PRODUCT, OPERAND, or as they are."""
    if ORDER == IN_PRODUCT:
        return in_product_order(x)
    elif ORDER == IN_OPERAND:
        return _in_operand_order(x)
    else:
        return x


@jit
def _in_operand_order(x):
    """[R, C] -> the same columns, of which 8 neighbours are what a thread needs for two MMAs of an operand after a
    join (`in_product_order`), in the order of its registers: of a column's number inside 32, bit 4 comes second.
    """
    split = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 4, 2, 2])
    return tl.reshape(tl.permute(split, [0, 1, 3, 4, 2, 5]), [x.shape[0], x.shape[1]])


@jit
def _load_ordered_rows(x_ptr, rows, is_row, first_col, K: tl.constexpr, MASKED: tl.constexpr):
    """`_load_rows` of x in operand order: the tile in natural order is a view, which costs nothing. Not MASKED: all
    rows can be read, and the product of those that are not the tile's own is not used.

    The 128 columns are four rows of 32, each with all token rows: so that in shared memory, where the compiler knows no
    swizzle for this order, two token rows are neighbours and are read without bank conflicts.
    """
    R: tl.constexpr = rows.shape[0]
    row = tl.reshape(tl.broadcast_to(rows[None, :], [4, R]), [4 * R])
    places = row * K + tl.arange(0, 4 * R) // R * 32  # products after the reshape, which hides what divides them
    source = x_ptr + (places[:, None] + (first_col + tl.arange(0, 32))[None, :])
    if MASKED:
        has_row = tl.reshape(tl.broadcast_to(is_row[None, :], [4, R]), [4 * R])
        x = tl.load(source, mask=has_row[:, None], other=0.0)
    else:
        x = tl.load(source)
    # [piece, row, bits 3 and 2, bit 1, bit 4, bit 0] -> [piece, bit 4, bits 3 and 2, bit 1, bit 0, row]
    x = tl.permute(tl.reshape(x, [4, R, 4, 2, 2, 2]), [0, 4, 2, 3, 5, 1])
    return tl.reshape(x, [128, R])


@jit
def _load_rows(
    x_ptr, rows, is_row, first_col, K: tl.constexpr, QUANTISE: tl.constexpr, ORDERED: tl.constexpr, MASKED: tl.constexpr
):
    """Columns first_col .. first_col + 127 of rows [8] -> bf16 [128, 8], zeros where there is no row."""
    if ORDERED:
        return _load_ordered_rows(x_ptr, rows, is_row, first_col, K, MASKED)
    else:
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
    RANGES: tl.constexpr, SPLIT: tl.constexpr, ORDERED: tl.constexpr, MASKED: tl.constexpr = True,
    TWICE: tl.constexpr = False,
):
    """BLOCK rows of one matrix from `first_out` on times each [8] of the tuple `rows` of x -> tuple of fp32 [BLOCK, 8].

    K is cut into RANGES, each with a sum of its own; their sums are added first range first. SPLIT: of range `part`
    alone, not added to anything. ORDERED: x is in operand order. TWICE (whole tiles of rows, not SPLIT): in the same
    loop, of the BLOCK rows after them too, whose words lie after theirs -> two such tuples.
    """
    K_TILES: tl.constexpr = (K + 127) // 128
    PER_RANGE: tl.constexpr = K_TILES // RANGES
    STEP: tl.constexpr = UNROLL if PER_RANGE % UNROLL == 0 else 1
    NUM: tl.constexpr = len(rows)
    IS_SUMMED: tl.constexpr = RANGES > 1 and not SPLIT
    accs, totals, firsts = zeros(BLOCK, NUM), zeros(BLOCK, NUM), zeros(BLOCK, NUM)
    first_tile = part * PER_RANGE if SPLIT else 0
    num_tiles = PER_RANGE if SPLIT else K_TILES * (1 + TWICE)
    for first in range(first_tile, first_tile + num_tiles, STEP):
        for step in tl.static_range(STEP):
            words, low, high = load_words(data_ptr, scale_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            weight = decode_tile(words, low, high, FORMAT)  # [BLOCK, 128]
            k_tile = (first + step) % K_TILES if TWICE else first + step
            sums = ()
            for sub in tl.static_range(NUM):
                x = _load_rows(x_ptr, rows[sub], is_row[sub], k_tile * 128, K, QUANTISE, ORDERED, MASKED)  # [128, 8]
                sums = with_item(sums, tl.dot(weight, x, accs[sub]))
            accs = sums
        if IS_SUMMED:  # noqa: SIM102
            if (first + STEP) % PER_RANGE == 0:
                totals, accs = plus_each(totals, accs), zeros(BLOCK, NUM)
        if TWICE:  # noqa: SIM102
            if first + STEP == K_TILES:
                if IS_SUMMED:
                    firsts, totals = totals, zeros(BLOCK, NUM)
                else:
                    firsts, accs = accs, zeros(BLOCK, NUM)
    lasts = totals if IS_SUMMED else accs
    if TWICE:
        return firsts, lasts
    else:
        return lasts


@jit
def two_products(
    x_ptr, rows, is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, first_out,
    BLOCK: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, UNROLL: tl.constexpr, RANGES: tl.constexpr,
):
    """`product` with two matrices of one shape and format, x in operand order and read once."""
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
                x = _load_ordered_rows(x_ptr, rows[sub], is_row[sub], (first + step) * 128, K, True)  # [128, 8]
                tiles = with_item(tiles, x)
                new_gates = with_item(new_gates, tl.dot(weight1, x, gates[sub]))
            weight3 = decode_tile(words3, low3, high3, FORMAT)  # after the first products: registers
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
