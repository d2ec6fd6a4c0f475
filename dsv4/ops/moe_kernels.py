"""Kernels of ops/moe.py: rows prepared, gate and up with the activation, down with the combination; one FP4 linear.

Every product is out^T = W x^T: weights are decoded in registers (ops/tl_fp4.py) and are the first operand; token rows
are the second, through shared memory. A program has BLOCK rows of a weight and one group's tile of tokens, in
sub-tiles of 8: each is a product of its own, [BLOCK, 128] x [128, 8], so that the compiler takes the same instruction
(mma.sync, 16 x 8 x 16) whatever the number of tokens. Columns are walked in order: neither the tile nor BLOCK changes
a bit. Groups are the routed experts met, and the shared expert with all tokens (first, since its programs are longest).

The launches overlap (`pdl_wait` in tl_utils): the down kernel's programs start as gate-up's last ones run, and fetch
their weights into L2 before they wait.
"""

from __future__ import annotations

from dsv4.ops.expert_sort import _expert_sort_kernel
from dsv4.ops.tl_fp4 import load_weight_tile, prefetch_weight_tiles
from dsv4.ops.tl_utils import (
    abs_bits,
    e4m3_scale,
    e8m0_reciprocal,
    e8m0_to_float,
    jit,
    pdl_trigger,
    pdl_wait,
    tl,
)

SUB = tl.constexpr(8)  # token rows of one product
DIRECT_PAIRS = tl.constexpr(128)  # up to this many (token, choice) pairs programs find their rows without a sort


@jit
def fake_quantize_e4m3(x):
    """bf16 [R, 128] -> the same rounded to E4M3 with one E8M0 scale a row, back in bf16: exact there."""
    wide = x.to(tl.float32)
    scale = e4m3_scale(tl.max(abs_bits(wide), axis=1))
    codes = (wide * e8m0_reciprocal(scale)[:, None]).to(tl.float8e4nv)
    return (codes.to(tl.float32) * e8m0_to_float(scale)[:, None]).to(tl.bfloat16)


@jit(do_not_specialize=("num_pairs", "num_chunks", "num_tiles", "num_sort_programs"))
def _moe_prepare_kernel(
    experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr, tile_starts_ptr,
    num_pairs, num_chunks, num_tiles, x_ptr, quantised_ptr, arrivals_ptr, num_sort_programs,
    TOP_K: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, ARRIVALS: tl.constexpr, ARRIVALS_BLOCK: tl.constexpr,
    COUNT_HERE: tl.constexpr,
):  # fmt: skip
    """The sort's programs, then one for each token: x as the FP8 product takes it, and its arrivals set to zero."""
    pdl_wait()
    pdl_trigger()
    program = tl.program_id(0)
    if program < num_sort_programs:
        _expert_sort_kernel(
            experts_ptr, experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr,
            tile_starts_ptr, num_pairs, num_chunks, num_tiles,
            TOP_K, E, E_BLOCK, CHUNK, TILE_ROWS, TILES, False, False, COUNT_HERE,
        )  # fmt: skip
    else:
        token = (program - num_sort_programs).to(tl.int64)
        places = tl.arange(0, ARRIVALS_BLOCK)
        zeros = tl.zeros([ARRIVALS_BLOCK], dtype=tl.int64)
        tl.store(arrivals_ptr + token * ARRIVALS + places, zeros, mask=places < ARRIVALS)
        for start in range(0, D // 128, GROUPS):
            groups = start + tl.arange(0, GROUPS)[:, None]
            cols = groups * 128 + tl.arange(0, 128)[None, :]
            x = tl.load(x_ptr + token * D + cols, mask=groups < D // 128, other=0.0)
            tl.store(quantised_ptr + token * D + cols, fake_quantize_e4m3(x), mask=groups < D // 128)


# ---- products ----


@jit
def _with(items, item):
    """A tuple and one more: the compiler knows no unpacking."""
    return items + (item,)  # noqa: RUF005


@jit
def _load_rows(x_ptr, rows, is_row, k_tile, K: tl.constexpr, QUANTISE: tl.constexpr, MASK: tl.constexpr):
    """Columns of tile `k_tile` of rows [8] -> bf16 [128, 8].

    Where there is no row, a small tile holds zeros. In a large one a predicate for every access costs more than the
    access: `rows` is a row that exists there, and what comes of it is not stored.
    """
    cols = k_tile * 128 + tl.arange(0, 128)
    source = x_ptr + (rows * K)[:, None] + cols[None, :]
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
def _zeros(num_outs: tl.constexpr, NUM: tl.constexpr):
    accs = ()
    for _ in tl.static_range(NUM):
        accs = _with(accs, tl.zeros([num_outs, SUB], dtype=tl.float32))
    return accs


@jit
def _product(
    x_ptr, rows, is_row, data_ptr, scale_ptr, outs,
    K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Rows `outs` [N] of one matrix times each [8] of the tuple `rows` of x -> a tuple of fp32 [N, 8]."""
    K_TILES: tl.constexpr = (K + 127) // 128
    STEP: tl.constexpr = UNROLL if K_TILES % UNROLL == 0 else 1
    NUM: tl.constexpr = len(rows)
    accs = _zeros(outs.shape[0], NUM)
    for first in range(0, K_TILES, STEP):
        for step in tl.static_range(STEP):
            weight = load_weight_tile(data_ptr, scale_ptr, outs, first + step, K_TILES, FORMAT)
            sums = ()
            for sub in tl.static_range(NUM):
                x = _load_rows(x_ptr, rows[sub], is_row[sub], first + step, K, QUANTISE, NUM <= 2)
                sums = _with(sums, tl.dot(weight, x, accs[sub]))
            accs = sums
    return accs


@jit
def _two_products(
    x_ptr, rows, is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, outs,
    K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`_product` with two matrices of one shape and format, x read once."""
    K_TILES: tl.constexpr = K // 128
    STEP: tl.constexpr = UNROLL if K_TILES % UNROLL == 0 else 1
    NUM: tl.constexpr = len(rows)
    gates, ups = _zeros(outs.shape[0], NUM), _zeros(outs.shape[0], NUM)
    for first in range(0, K_TILES, STEP):
        for step in tl.static_range(STEP):
            weight1 = load_weight_tile(data1_ptr, scale1_ptr, outs, first + step, K_TILES, FORMAT)
            if NUM > 2:
                weight3 = load_weight_tile(data3_ptr, scale3_ptr, outs, first + step, K_TILES, FORMAT)
            tiles, new_gates, new_ups = (), (), ()
            # registers: few rows wait for the second weight's decode, or both decoded weights for many rows
            for sub in tl.static_range(NUM):
                tiles = _with(tiles, _load_rows(x_ptr, rows[sub], is_row[sub], first + step, K, QUANTISE, NUM <= 2))
                new_gates = _with(new_gates, tl.dot(weight1, tiles[sub], gates[sub]))
                if NUM > 2:
                    new_ups = _with(new_ups, tl.dot(weight3, tiles[sub], ups[sub]))
            if NUM <= 2:
                weight3 = load_weight_tile(data3_ptr, scale3_ptr, outs, first + step, K_TILES, FORMAT)
                for sub in tl.static_range(NUM):
                    new_ups = _with(new_ups, tl.dot(weight3, tiles[sub], ups[sub]))
            gates, ups = new_gates, new_ups
    return gates, ups


@jit
def _activate(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit); both rounded to bf16 first."""
    gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.bfloat16).to(tl.float32), -limit), limit)
    return tl.div_rn(gate, 1.0 + tl.exp(0.0 - gate)) * up


# ---- which rows a program has ----


@jit
def _shared_rows(tile, num_tokens, FIRST: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Tokens of a tile of the shared expert from its row FIRST on, and which exist: [SIZE]."""
    token = tile * ROWS + FIRST + tl.arange(0, SIZE)
    return tl.minimum(token, num_tokens - 1), token < num_tokens


@jit
def _shared_sub_rows(tile, num_tokens, ROWS: tl.constexpr):
    """The same for every sub-tile: tuples of [8]."""
    tokens, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        token, has_row = _shared_rows(tile, num_tokens, sub * SUB, SUB, ROWS)
        tokens, is_row = _with(tokens, token), _with(is_row, has_row)
    return tokens, is_row


@jit
def _routed_expert(tile, experts_ptr, tile_experts_ptr, num_pairs, E: tl.constexpr, ROWS: tl.constexpr,
                   DIRECT: tl.constexpr):  # fmt: skip
    """Expert of a tile, -1 where the tile is not used.

    DIRECT: tile t belongs to pair t, and is used if among the pairs of its expert the pair is the first, or the first
    of another ROWS.
    """
    if DIRECT:
        expert = tl.load(experts_ptr + tile, cache_modifier=".cg").to(tl.int32)
        others = tl.arange(0, DIRECT_PAIRS)
        ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1, cache_modifier=".cg").to(tl.int32)
        before = tl.sum(((ids == expert) & (others < tile)).to(tl.int32), 0)
        return tl.where((expert < E) & (before % ROWS == 0), expert, -1)
    else:
        return tl.load(tile_experts_ptr + tile, cache_modifier=".cg")


@jit
def _routed_rows(
    tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, FIRST: tl.constexpr,
    SIZE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Pairs of a tile from its row FIRST on, and which exist: [SIZE]. Where there is none, a pair of the same tile."""
    if DIRECT:
        others = tl.arange(0, DIRECT_PAIRS)
        ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1).to(tl.int32)
        is_equal = (ids == expert) & (others >= tile)
        place = tl.where(is_equal, tl.cumsum(is_equal.to(tl.int32), 0) - 1, -1)
        is_own = place[None, :] == (tl.arange(0, SIZE) + FIRST)[:, None]
        pair = tl.max(tl.where(is_own, others[None, :], -1), 1)
        return tl.where(pair >= 0, pair, tile), pair >= 0
    else:
        end = tl.load(offsets_ptr + expert + 1)
        places = tl.load(tile_starts_ptr + tile) + FIRST + tl.arange(0, SIZE)
        return tl.load(pairs_ptr + tl.minimum(places, end - 1)), places < end


@jit
def _routed_sub_rows(
    tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, ROWS: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """The same for every sub-tile: tuples of [8]."""
    pairs, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        pair, has_row = _routed_rows(
            tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, sub * SUB, SUB, DIRECT
        )
        pairs, is_row = _with(pairs, pair), _with(is_row, has_row)
    return pairs, is_row


# ---- gate and up ----


@jit
def _store_hidden(
    gates, ups, gate_scale, up_scale, rows, is_row, outs, weights_ptr, hidden_ptr, limit,
    I: tl.constexpr, HAS_WEIGHTS: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Rows of hidden. QUANTISE: `outs` is one group of 128, and the rows are rounded to E4M3."""
    for sub in tl.static_range(len(rows)):
        hidden = _activate(gates[sub] * gate_scale, ups[sub] * up_scale, limit)
        if HAS_WEIGHTS:
            # hidden = hidden * weight.unsqueeze(-1)
            hidden = hidden * tl.load(weights_ptr + rows[sub], mask=is_row[sub], other=0.0)[None, :]
        hidden = tl.trans(hidden.to(tl.bfloat16))
        if QUANTISE:
            hidden = fake_quantize_e4m3(hidden)
        target = hidden_ptr + (rows[sub] * I)[:, None] + outs[None, :]
        tl.store(target, hidden, mask=is_row[sub][:, None])


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, experts_ptr, weights_ptr, pairs_ptr, offsets_ptr, tile_experts_ptr,
    tile_starts_ptr, w1_ptr, w1_scale_ptr, w1_out_ptr, w3_ptr, w3_scale_ptr, w3_out_ptr,
    shared1_ptr, shared1_scale_ptr, shared1_out_ptr, shared3_ptr, shared3_scale_ptr, shared3_out_ptr,
    limit, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, DIRECT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [T k + T, I]: a row for each pair, then one for each token's shared expert.

    DIRECT: no launch has rounded x or sorted the pairs. With BLOCK = 128 hidden is rounded here, else by its reader.
    """
    N_TILES: tl.constexpr = I // BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2  # twice the bytes: the same shared memory
    tile = tl.program_id(0) // N_TILES
    first_out = (tl.program_id(0) % N_TILES) * BLOCK
    outs = first_out + tl.arange(0, BLOCK)
    rounded_ptr = quantised_ptr
    if DIRECT:
        rounded_ptr = x_ptr
    if tile < num_shared_tiles:
        prefetch_weight_tiles(shared1_ptr, shared1_scale_ptr, first_out, D // 128, SHARED_FORMAT, BLOCK, PREFETCH)
        prefetch_weight_tiles(shared3_ptr, shared3_scale_ptr, first_out, D // 128, SHARED_FORMAT, BLOCK, PREFETCH)
        pdl_wait()
        pdl_trigger()
        tokens, is_row = _shared_sub_rows(tile, num_tokens, SHARED_ROWS)
        gates, ups = _two_products(
            rounded_ptr, tokens, is_row, shared1_ptr, shared1_scale_ptr, shared3_ptr, shared3_scale_ptr, outs,
            D, SHARED_FORMAT, DIRECT, SHARED_UNROLL,
        )  # fmt: skip
        _store_hidden(
            gates, ups, tl.load(shared1_out_ptr), tl.load(shared3_out_ptr), tokens, is_row, outs,
            weights_ptr, hidden_ptr + num_tokens * TOP_K * I, limit, I, False, BLOCK == 128,
        )  # fmt: skip
    else:
        pdl_wait()
        pdl_trigger()
        tile -= num_shared_tiles
        num_pairs = num_tokens * TOP_K
        expert = _routed_expert(tile, experts_ptr, tile_experts_ptr, num_pairs, E, ROWS, DIRECT)
        if expert >= 0:
            wide = expert.to(tl.int64)
            data1_ptr, scale1_ptr = w1_ptr + wide * DATA_WORDS, w1_scale_ptr + wide * SCALE_WORDS
            data3_ptr, scale3_ptr = w3_ptr + wide * DATA_WORDS, w3_scale_ptr + wide * SCALE_WORDS
            prefetch_weight_tiles(data1_ptr, scale1_ptr, first_out, D // 128, FORMAT, BLOCK, PREFETCH)
            prefetch_weight_tiles(data3_ptr, scale3_ptr, first_out, D // 128, FORMAT, BLOCK, PREFETCH)
            pairs, is_row = _routed_sub_rows(
                tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, ROWS, DIRECT
            )
            source = rounded_ptr
            if FORMAT == 0:  # weight-only
                source = x_ptr
            gates, ups = _two_products(
                source, _tokens_of(pairs, TOP_K), is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, outs,
                D, FORMAT, DIRECT and FORMAT != 0, UNROLL,
            )  # fmt: skip
            _store_hidden(
                gates, ups, tl.load(w1_out_ptr + expert), tl.load(w3_out_ptr + expert), pairs, is_row, outs,
                weights_ptr, hidden_ptr, limit, I, True, BLOCK == 128 and FORMAT != 0,
            )  # fmt: skip


@jit
def _tokens_of(pairs, TOP_K: tl.constexpr):
    tokens = ()
    for sub in tl.static_range(len(pairs)):
        tokens = _with(tokens, pairs[sub] // TOP_K)
    return tokens


# ---- down, and the sum of a token's parts ----


@jit
def _store_parts(accs, scale, rows, is_row, outs, parts_ptr, D: tl.constexpr):
    for sub in tl.static_range(len(rows)):
        part = tl.trans((accs[sub] * scale).to(tl.bfloat16))
        tl.store(parts_ptr + (rows[sub] * D)[:, None] + outs[None, :], part, mask=is_row[sub][:, None])


@jit
def _combine(
    tokens, is_row, outs, n_tile, parts_ptr, arrivals_ptr, experts_ptr, out_ptr, num_tokens,
    D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, N_TILES: tl.constexpr,
):  # fmt: skip
    """For those of the tokens [R] of which this program has brought the last part: out = the sum of all parts.

    A token's part of `outs` arrives once for each expert it uses and once for the shared one. Who comes last is the
    GPU's choice; what is summed, and in which order, is not. The last one sets the counter back.
    """
    num_parts = tl.zeros_like(tokens)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_row, other=-1)
        num_parts += ((expert >= 0) & (expert < E)).to(tl.int32)
    counters = arrivals_ptr + tokens * N_TILES + n_tile
    tl.debug_barrier()  # all parts of this program are written before one arrival is
    arrived = tl.atomic_add(counters, 1, mask=is_row, sem="acq_rel", scope="gpu")
    is_last = is_row & (arrived == num_parts)
    if tl.max(is_last.to(tl.int32), 0) > 0:
        tl.debug_barrier()
        cols = outs[None, :]
        total = tl.zeros([tokens.shape[0], outs.shape[0]], dtype=tl.float32)
        for place in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_last, other=-1)
            is_part = is_last & (expert >= 0) & (expert < E)
            source = parts_ptr + ((tokens * TOP_K + place) * D)[:, None] + cols
            total += tl.load(source, mask=is_part[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
        source = parts_ptr + ((num_tokens * TOP_K + tokens) * D)[:, None] + cols
        total += tl.load(source, mask=is_last[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out_ptr + (tokens * D)[:, None] + cols, total.to(tl.bfloat16), mask=is_last[:, None])
        tl.store(counters, tl.zeros([tokens.shape[0]], dtype=tl.int64), mask=is_last)


@jit
def _plus(rows, first):
    moved = ()
    for sub in tl.static_range(len(rows)):
        moved = _with(moved, rows[sub] + first)
    return moved


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _down_kernel(
    hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, pairs_ptr, offsets_ptr, tile_experts_ptr,
    tile_starts_ptr, w2_ptr, w2_scale_ptr, w2_out_ptr, shared2_ptr, shared2_scale_ptr, shared2_out_ptr,
    num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, DIRECT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """out [T, D]; parts bf16 [T k + T, D] by pair, then by token. QUANTISE: hidden is still to be rounded to E4M3.

    What tells the tiles (the router's or the sort's) was complete before gate-up passed its `pdl_wait`.
    """
    N_TILES: tl.constexpr = D // BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2
    tile = tl.program_id(0) // N_TILES
    n_tile = tl.program_id(0) % N_TILES
    first_out = n_tile * BLOCK
    outs = first_out + tl.arange(0, BLOCK)
    if tile < num_shared_tiles:
        prefetch_weight_tiles(shared2_ptr, shared2_scale_ptr, first_out, I // 128, SHARED_FORMAT, BLOCK, PREFETCH)
        tokens, is_row = _shared_sub_rows(tile, num_tokens, SHARED_ROWS)
        rows = _plus(tokens, num_tokens * TOP_K)
        pdl_wait()
        pdl_trigger()
        accs = _product(
            hidden_ptr, rows, is_row, shared2_ptr, shared2_scale_ptr, outs, I, SHARED_FORMAT, QUANTISE, SHARED_UNROLL
        )
        _store_parts(accs, tl.load(shared2_out_ptr), rows, is_row, outs, parts_ptr, D)
        token, has_row = _shared_rows(tile, num_tokens, 0, SHARED_ROWS, SHARED_ROWS)
        _combine(
            token, has_row, outs, n_tile, parts_ptr, arrivals_ptr, experts_ptr, out_ptr, num_tokens,
            D, E, TOP_K, N_TILES,
        )  # fmt: skip
    else:
        tile -= num_shared_tiles
        num_pairs = num_tokens * TOP_K
        expert = _routed_expert(tile, experts_ptr, tile_experts_ptr, num_pairs, E, ROWS, DIRECT)
        if expert >= 0:
            wide = expert.to(tl.int64)
            data_ptr, scale_ptr = w2_ptr + wide * DATA_WORDS, w2_scale_ptr + wide * SCALE_WORDS
            prefetch_weight_tiles(data_ptr, scale_ptr, first_out, I // 128, FORMAT, BLOCK, PREFETCH)
            pairs, is_row = _routed_sub_rows(
                tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, ROWS, DIRECT
            )
            pdl_wait()
            pdl_trigger()
            accs = _product(
                hidden_ptr, pairs, is_row, data_ptr, scale_ptr, outs, I, FORMAT, QUANTISE and FORMAT != 0, UNROLL
            )
            _store_parts(accs, tl.load(w2_out_ptr + expert), pairs, is_row, outs, parts_ptr, D)
            pair, has_row = _routed_rows(
                tile, expert, experts_ptr, pairs_ptr, offsets_ptr, tile_starts_ptr, num_pairs, 0, ROWS, DIRECT
            )
            _combine(
                pair // TOP_K, has_row, outs, n_tile, parts_ptr, arrivals_ptr, experts_ptr, out_ptr, num_tokens,
                D, E, TOP_K, N_TILES,
            )  # fmt: skip


@jit(do_not_specialize=("num_rows",))
def _fp4_linear_kernel(
    x_ptr, data_ptr, scale_ptr, out_scale_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    first_out = (tl.program_id(0) % N_TILES) * BLOCK
    prefetch_weight_tiles(data_ptr, scale_ptr, first_out, (K + 127) // 128, FORMAT, BLOCK, PREFETCH)
    rows, is_row = _shared_sub_rows(tl.program_id(0) // N_TILES, num_rows, ROWS)
    outs = first_out + tl.arange(0, BLOCK)
    pdl_wait()
    pdl_trigger()
    accs = _product(x_ptr, rows, is_row, data_ptr, scale_ptr, outs, K, FORMAT, FORMAT != 0, UNROLL)
    factor = tl.load(out_scale_ptr)
    for sub in tl.static_range(len(rows)):
        target = out_ptr + (rows[sub] * N)[None, :] + outs[:, None]
        mask = is_row[sub][None, :] & (outs < N)[:, None]
        tl.store(target, (accs[sub] * factor).to(out_ptr.dtype.element_ty), mask=mask)
