"""The wide form of ops/moe: tiles of 32 token rows (at most half full: computed as 16); of a linear 128.

The products are those of kernel_gate_up.py, out^T = W x^T with W decoded in registers, and the same bits; but a tile's
rows are one product a step, [64, 128] x [128, R], which the compiler makes of wgmma, 64 x R x 16. Both instructions sum
16 columns at once, and the order inside the 16 does not matter; so they agree if they take the same 16. The wide form
walks columns in the order that makes them so (`in_product_order`): weights by a view of the decoded tile, which costs
nothing; x and hidden lie in memory in that order. Hopper only (`_is_wide` in plan.py).
"""

from __future__ import annotations

from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.fp4 import decode_tile, load_words
from dsv4.ops.lib.guard import INTERPRET, jit, tl
from dsv4.ops.lib.maths import in_product_order
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_hidden import store_hidden
from dsv4.ops.moe.kernel_parts import combine, store_parts
from dsv4.ops.moe.kernel_products import IN_PRODUCT, plus_each
from dsv4.ops.moe.kernel_rows import shared_rows, sorted_expert, sorted_num_rows, sorted_rows, with_item
from dsv4.ops.moe.plan import BLOCK, PAIR_BLOCK

_BLOCK, _PAIR = tl.constexpr(BLOCK), tl.constexpr(PAIR_BLOCK)  # weight rows of one product, and of a CTA of down

# ---- products ----


@jit
def _settled(number):
    """`number`, once all products have ended.

    Left alone, the compiler lets products whose first operand is in registers run on into the next step, where those
    registers are written again: wrong results, at some tiles. Waiting at the end of a step, and nowhere in it, lets the
    decode of a plane run beside the products of those before. (A use of the sums would make the compiler wait after
    every product.) What reads sums inside the loop must hang on the result.
    """
    if not INTERPRET:
        number = tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
    return number


@jit
def _never(number):
    """Nothing: `number` is not negative, which the compiler does not know. It puts what a branch hangs on, and so the
    wait, after the copies for the steps to come, which then run beside the last products.
    """
    if not INTERPRET:  # noqa: SIM102
        if number < 0:
            _settled(number)


@jit
def _zeros(num_outs: tl.constexpr, num_rows: tl.constexpr, NUM: tl.constexpr):
    """NUM accumulators [num_outs, num_rows]."""
    accs = ()
    for _ in tl.static_range(NUM):
        accs = with_item(accs, tl.zeros([num_outs, num_rows], dtype=tl.float32))
    return accs


@jit
def wide_products(
    x_ptr, rows, data_ptrs, scale_ptrs, first_outs,
    ROWS: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, RANGES: tl.constexpr,
):
    """ROWS weight rows of each matrix (one or two of one shape and format) times `rows` [R] of x -> a tuple of fp32
    [ROWS, R], one a matrix. x is in product order.

    K is cut into RANGES as in `product`. A predicate for every access of x would cost more than the access: `rows` are
    rows that exist, and the product of those that are not the tile's own is not stored.
    """
    K_TILES: tl.constexpr = K // 128
    PER_RANGE: tl.constexpr = K_TILES // RANGES
    R: tl.constexpr = rows.shape[0]
    accs = _zeros(ROWS, R, len(data_ptrs))
    totals = accs
    for k_tile in range(K_TILES):
        stored = ()
        for index in tl.static_range(len(data_ptrs)):
            data_ptr, scale_ptr = data_ptrs[index], scale_ptrs[index]
            words = load_words(data_ptr, scale_ptr, first_outs[index], k_tile, K_TILES, ROWS, FORMAT)
            stored = with_item(stored, words)
        cols = k_tile * 128 + tl.arange(0, 128)
        x = tl.load(x_ptr + ((rows * K)[:, None] + cols[None, :]))  # [R, 128]
        if QUANTISE:
            x = fake_quantize_e4m3(x)
        x = tl.trans(x)
        sums = ()
        for index in tl.static_range(len(data_ptrs)):
            words = stored[index]
            weight = in_product_order(decode_tile(words[0], words[1], words[2], FORMAT))  # [ROWS, 128]
            sums = with_item(sums, tl.dot(weight, x, accs[index]))
        accs = sums
        done = _settled(k_tile) + 1
        if RANGES > 1:
            if done % PER_RANGE == 0:
                totals, accs = plus_each(totals, accs), _zeros(ROWS, R, len(data_ptrs))
        else:
            _never(done)
    return totals if RANGES > 1 else accs


# ---- gate and up ----


@jit
def _routed_gate_up(
    tile, expert, first_out, x_ptr, hidden_ptr, weights_ptr, order, gate, up, limit,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, RANGES: tl.constexpr,
):
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    wide = expert.to(tl.int64)
    datas = (gate.data + wide * DATA_WORDS, up.data + wide * DATA_WORDS)
    scales = (gate.scale + wide * SCALE_WORDS, up.scale + wide * SCALE_WORDS)
    pairs, is_row = sorted_rows(tile, expert, order, 0, ROWS)  # [R]
    # gate, up = x @ w1.T, x @ w3.T
    sums = wide_products(x_ptr, pairs // TOP_K, datas, scales, (first_out, first_out), _BLOCK, D, FORMAT, False, RANGES)
    pairs, is_row = sorted_rows(tile, expert, order, 0, ROWS, True)
    store_hidden(
        (sums[0],), (sums[1],), tl.load(gate.out_scale + expert), tl.load(up.out_scale + expert), (pairs,), (is_row,),
        first_out + tl.arange(0, _BLOCK), weights_ptr, hidden_ptr, limit, I, True, IN_PRODUCT,
    )


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _wide_gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, weights_ptr, order, matrices, limit, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr,
):
    """`_gate_up_kernel` with x, x rounded and hidden in product order; hidden is rounded by its reader. A tile that is
    at most half full is computed as one of half the size.
    """
    N_TILES: tl.constexpr = I // _BLOCK
    HALF: tl.constexpr = max(ROWS // 2, 16)
    program = tl.program_id(0)
    num_shared_work = num_shared_tiles * N_TILES
    if program < num_shared_work:
        first_out = (program % N_TILES) * _BLOCK
        tokens, is_row = shared_rows(program // N_TILES, num_tokens, 0, SHARED_ROWS, SHARED_ROWS)  # [R]
        gate, up = matrices.shared_gate, matrices.shared_up
        sums = wide_products(
            quantised_ptr, tokens, (gate.data, up.data), (gate.scale, up.scale),
            (first_out, first_out), _BLOCK, D, SHARED_FORMAT, False, SHARED_RANGES,
        )
        store_hidden(
            (sums[0],), (sums[1],), tl.load(gate.out_scale), tl.load(up.out_scale), (tokens,), (is_row,),
            first_out + tl.arange(0, _BLOCK), weights_ptr, hidden_ptr + num_tokens * TOP_K * I, limit,
            I, False, IN_PRODUCT,
        )
    else:
        program -= num_shared_work
        tile, first_out = program // N_TILES, (program % N_TILES) * _BLOCK
        expert = sorted_expert(tile, order)
        if expert >= 0:
            source_ptr = x_ptr if FORMAT == 0 else quantised_ptr  # NVFP4 is weight-only
            if sorted_num_rows(tile, expert, order) <= HALF:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate, matrices.up,
                    limit, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, HALF, RANGES,
                )
            else:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate, matrices.up,
                    limit, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, RANGES,
                )


# ---- down ----


@jit
def _down_products(
    hidden_ptr, rows, data_ptr, scale_ptr, first_out,
    I: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, RANGES: tl.constexpr,
):
    """Two neighbouring blocks of 64 weight rows, each a product of its own."""
    # part = hidden @ w2.T
    return wide_products(
        hidden_ptr, rows, (data_ptr, data_ptr), (scale_ptr, scale_ptr), (first_out, first_out + _BLOCK),
        _BLOCK, I, FORMAT, QUANTISE, RANGES,
    )


@jit
def _store_products(
    sums, scale, rows, is_row, first_out, parts_ptr, num_pairs, D: tl.constexpr, RANKS: tl.constexpr = 0
):
    for index in tl.static_range(2):
        outs = first_out + index * _BLOCK + tl.arange(0, _BLOCK)
        store_parts((sums[index],), scale, (rows,), (is_row,), outs, parts_ptr, num_pairs, D, RANKS)


@jit
def _routed_down(
    tile, expert, n_tile, hidden_ptr, results, experts_ptr, order, down, shared_scale_ptr, num_tokens,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, RANGES: tl.constexpr,
    RANKS: tl.constexpr,
):
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    wide = expert.to(tl.int64)
    pairs, is_row = sorted_rows(tile, expert, order, 0, ROWS)  # [R]
    sums = _down_products(
        hidden_ptr, pairs, down.data + wide * DATA_WORDS, down.scale + wide * SCALE_WORDS, n_tile * _PAIR,
        I, FORMAT, FORMAT != 0, RANGES,
    )
    pdl_trigger()
    pairs, is_row = sorted_rows(tile, expert, order, 0, ROWS, True)
    out_scale, num_pairs = tl.load(down.out_scale + expert), num_tokens * TOP_K
    _store_products(sums, out_scale, pairs, is_row, n_tile * _PAIR, results.parts, num_pairs, D, RANKS)
    if RANKS == 0:
        combine(
            pairs // TOP_K, is_row, n_tile, results, experts_ptr, down.out_scale, shared_scale_ptr, num_tokens,
            _PAIR, D, E, TOP_K, 1, 1, 1, 4096,
        )


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _wide_down_kernel(
    hidden_ptr, results, experts_ptr, order, down, shared, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr, RANKS: tl.constexpr,
):
    """`_down_kernel` with hidden in product order, still to be rounded to E4M3 but for NVFP4 experts."""
    N_TILES: tl.constexpr = D // _PAIR
    HALF: tl.constexpr = max(ROWS // 2, 16)
    program = tl.program_id(0)
    num_shared_programs = num_shared_tiles * N_TILES
    if RANKS == 0 and program < num_shared_programs:
        n_tile = program % N_TILES
        tokens, is_row = shared_rows(program // N_TILES, num_tokens, 0, SHARED_ROWS, SHARED_ROWS)  # [R]
        rows = tokens + num_tokens * TOP_K
        sums = _down_products(
            hidden_ptr, rows, shared.data, shared.scale, n_tile * _PAIR, I, SHARED_FORMAT, True, SHARED_RANGES
        )
        pdl_trigger()
        _store_products(sums, tl.load(shared.out_scale), rows, is_row, n_tile * _PAIR, results.parts, 0, D)
        combine(
            tokens, is_row, n_tile, results, experts_ptr, down.out_scale, shared.out_scale, num_tokens,
            _PAIR, D, E, TOP_K, 1, 1, 1, 4096,
        )
    else:
        program -= num_shared_programs
        tile, n_tile = program // N_TILES, program % N_TILES
        expert = sorted_expert(tile, order)
        if expert >= 0:
            if sorted_num_rows(tile, expert, order) <= HALF:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, results, experts_ptr, order, down, shared.out_scale, num_tokens,
                    D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, HALF, RANGES, RANKS,
                )
            else:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, results, experts_ptr, order, down, shared.out_scale, num_tokens,
                    D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, RANGES, RANKS,
                )
