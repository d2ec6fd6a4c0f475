"""What the kernels of ops/moe.py are made of: products of weight rows with a tile's token rows, and which rows a tile
has. How the products are formed, and why, is said in ops/moe_kernels.py.
"""

from __future__ import annotations

from dsv4.ops.tl_fp4 import decode_half, decode_tile, load_words
from dsv4.ops.tl_utils import abs_bits, e4m3_scale, e8m0_reciprocal, e8m0_to_float, jit, tl

DIRECT_PAIRS = 128  # up to this many (token, choice) pairs programs find their rows without a sort
SUB = tl.constexpr(8)  # token rows of one product
_DIRECT_PAIRS = tl.constexpr(DIRECT_PAIRS)


@jit
def fake_quantize_e4m3(x):
    """bf16 [R, 128] -> the same rounded to E4M3 with one E8M0 scale a row, back in bf16: exact there."""
    wide = x.to(tl.float32)
    scale = e4m3_scale(tl.max(abs_bits(wide), axis=1))
    codes = (wide * e8m0_reciprocal(scale)[:, None]).to(tl.float8e4nv)
    return (codes.to(tl.float32) * e8m0_to_float(scale)[:, None]).to(tl.bfloat16)


# ---- products ----


@jit
def with_item(items, item):
    """A tuple and one more: the compiler knows no unpacking."""
    return items + (item,)  # noqa: RUF005


@jit
def _load_rows(
    x_ptr, rows, is_row, first_col, COLS: tl.constexpr, K: tl.constexpr, QUANTISE: tl.constexpr, MASK: tl.constexpr
):
    """Columns first_col .. first_col + COLS - 1 of rows [8] -> bf16 [COLS, 8].

    Where there is no row, a small tile holds zeros. In a large one a predicate for every access costs more than the
    access: `rows` is a row that exists there, and what comes of it is not stored.
    """
    cols = first_col + tl.arange(0, COLS)
    source = x_ptr + ((rows * K)[:, None] + cols[None, :])
    if K % 128 != 0:
        x = tl.load(source, mask=is_row[:, None] & (cols < K)[None, :], other=0.0)
    elif MASK:
        x = tl.load(source, mask=is_row[:, None], other=0.0)
    else:
        x = tl.load(source)
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
    HALVES: tl.constexpr = NUM > 2 and not QUANTISE and K % 128 == 0
    IS_SUMMED: tl.constexpr = RANGES > 1 and not SPLIT
    accs, totals = zeros(BLOCK, NUM), zeros(BLOCK, NUM)
    first_tile = part * PER_RANGE if SPLIT else 0
    for first in range(first_tile, first_tile + (PER_RANGE if SPLIT else K_TILES), STEP):
        for step in tl.static_range(STEP):
            words, low, high = load_words(data_ptr, scale_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            col = (first + step) * 128
            if HALVES:
                for half in tl.static_range(2):
                    weight = decode_half(words, low, high, FORMAT, half)
                    sums = ()
                    for sub in tl.static_range(NUM):
                        x = _load_rows(x_ptr, rows[sub], is_row[sub], col + 64 * half, 64, K, False, False)
                        sums = with_item(sums, tl.dot(weight, x, accs[sub]))
                    accs = sums
            else:
                weight = decode_tile(words, low, high, FORMAT)
                sums = ()
                for sub in tl.static_range(NUM):
                    x = _load_rows(x_ptr, rows[sub], is_row[sub], col, 128, K, QUANTISE, NUM <= 2)
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
    HALVES: tl.constexpr = NUM > 2 and not QUANTISE
    gates, ups = zeros(BLOCK, NUM), zeros(BLOCK, NUM)
    gate_totals, up_totals = gates, ups
    for first in range(0, K_TILES, STEP):
        for step in tl.static_range(STEP):
            words1, low1, high1 = load_words(data1_ptr, scale1_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            words3, low3, high3 = load_words(data3_ptr, scale3_ptr, first_out, first + step, K_TILES, BLOCK, FORMAT)
            col = (first + step) * 128
            # registers: many rows wait for halves of both decoded weights, few rows for the second weight's decode
            if HALVES:
                for half in tl.static_range(2):
                    weight1 = decode_half(words1, low1, high1, FORMAT, half)
                    weight3 = decode_half(words3, low3, high3, FORMAT, half)
                    new_gates, new_ups = (), ()
                    for sub in tl.static_range(NUM):
                        x = _load_rows(x_ptr, rows[sub], is_row[sub], col + 64 * half, 64, K, False, False)
                        new_gates = with_item(new_gates, tl.dot(weight1, x, gates[sub]))
                        new_ups = with_item(new_ups, tl.dot(weight3, x, ups[sub]))
                    gates, ups = new_gates, new_ups
            else:
                weight1 = decode_tile(words1, low1, high1, FORMAT)
                tiles, new_gates, new_ups = (), (), ()
                for sub in tl.static_range(NUM):
                    tiles = with_item(tiles, _load_rows(x_ptr, rows[sub], is_row[sub], col, 128, K, QUANTISE, True))
                    new_gates = with_item(new_gates, tl.dot(weight1, tiles[sub], gates[sub]))
                weight3 = decode_tile(words3, low3, high3, FORMAT)
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


# ---- which rows a program has ----


@jit
def shared_rows(tile, num_tokens, FIRST: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Tokens of a tile of the shared expert from its row FIRST on, and which exist: [SIZE]."""
    token = tile * ROWS + FIRST + tl.arange(0, SIZE)
    return tl.minimum(token, num_tokens - 1), token < num_tokens


@jit
def shared_sub_rows(tile, num_tokens, ROWS: tl.constexpr):
    """The same for every sub-tile: tuples of [8]."""
    tokens, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        token, has_row = shared_rows(tile, num_tokens, sub * SUB, SUB, ROWS)
        tokens, is_row = with_item(tokens, token), with_item(is_row, has_row)
    return tokens, is_row


@jit
def routed_expert(tile, experts_ptr, tile_experts_ptr, num_pairs, E: tl.constexpr, ROWS: tl.constexpr,
                   DIRECT: tl.constexpr):  # fmt: skip
    """Expert of a tile, -1 where the tile is not used.

    DIRECT: tile t belongs to pair t, and is used if among the pairs of its expert the pair is the first, or the first
    of another ROWS.
    """
    if DIRECT:
        expert = tl.load(experts_ptr + tile, cache_modifier=".cg").to(tl.int32)
        others = tl.arange(0, _DIRECT_PAIRS)
        ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1, cache_modifier=".cg").to(tl.int32)
        before = tl.sum(((ids == expert) & (others < tile)).to(tl.int32), 0)
        return tl.where((expert < E) & (before % ROWS == 0), expert, -1)
    else:
        return tl.load(tile_experts_ptr + tile, cache_modifier=".cg")


@jit
def routed_rows(
    tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, FIRST: tl.constexpr,
    SIZE: tl.constexpr, DIRECT: tl.constexpr, AGAIN: tl.constexpr = False,
):  # fmt: skip
    """Pairs of a tile from its row FIRST on, and which exist: [SIZE]. Where there is none, a pair of the same tile.
    AGAIN: loads that the compiler takes for others than the first ones, which it would keep in registers.
    """
    if DIRECT:
        others = tl.arange(0, _DIRECT_PAIRS)
        ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1).to(tl.int32)
        is_equal = (ids == expert) & (others >= tile)
        place = tl.where(is_equal, tl.cumsum(is_equal.to(tl.int32), 0) - 1, -1)
        is_own = place[None, :] == (tl.arange(0, SIZE) + FIRST)[:, None]
        pair = tl.max(tl.where(is_own, others[None, :], -1), 1)
        return tl.where(pair >= 0, pair, tile), pair >= 0
    else:
        CACHE: tl.constexpr = ".cg" if AGAIN else ".ca"
        end = tl.load(offsets_ptr + expert + 1, cache_modifier=CACHE)
        places = tl.load(tile_starts_ptr + tile, cache_modifier=CACHE) + FIRST + tl.arange(0, SIZE)
        return tl.load(pairs_ptr + tl.minimum(places, end - 1), cache_modifier=CACHE), places < end


@jit
def routed_sub_rows(
    tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, ROWS: tl.constexpr,
    DIRECT: tl.constexpr, AGAIN: tl.constexpr = False,
):  # fmt: skip
    """The same for every sub-tile: tuples of [8]."""
    pairs, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        pair, has_row = routed_rows(
            tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, sub * SUB, SUB, DIRECT, AGAIN
        )
        pairs, is_row = with_item(pairs, pair), with_item(is_row, has_row)
    return pairs, is_row


@jit
def num_rows_of(tile, expert, offsets_ptr, tile_starts_ptr, ROWS: tl.constexpr, DIRECT: tl.constexpr):
    """Rows of a tile: what is left of its expert's (its first ROWS are the tile's own). Not asked for where all tiles
    are small.
    """
    if ROWS == SUB:
        return 0
    elif DIRECT:
        return ROWS
    else:
        return tl.load(offsets_ptr + expert + 1) - tl.load(tile_starts_ptr + tile)


@jit
def tokens_of(pairs, TOP_K: tl.constexpr):
    tokens = ()
    for sub in tl.static_range(len(pairs)):
        tokens = with_item(tokens, pairs[sub] // TOP_K)
    return tokens
