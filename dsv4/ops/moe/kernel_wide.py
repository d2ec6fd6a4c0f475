"""The kernels of ops/moe for many tokens: the wide form, tiles of 16 to 128 token rows.

The products are those of kernel_gate_up.py, out^T = W x^T with W decoded in registers, and the same bits; but a tile's
rows are one product (or two) a step, [BLOCK, 128] x [128, R], which the compiler makes of wgmma, 64 x R x 16. Both
instructions sum 16 columns at once, and the order inside the 16 does not matter; so they agree if they take the same
16. The wide form walks columns in the order that makes them so (`in_product_order`): weights by a view of the decoded
tile, which costs nothing; x and hidden lie in memory in that order. Hopper only (`_is_wide` in config.py).
"""

from __future__ import annotations

from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.fp4 import decode_tile, load_words
from dsv4.ops.lib.guard import INTERPRET, jit, tl
from dsv4.ops.lib.order import in_product_order
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_down import combine, store_parts
from dsv4.ops.moe.kernel_gate_up import prepare_row, store_hidden
from dsv4.ops.moe.kernel_products import IN_PRODUCT, plus_each
from dsv4.ops.moe.kernel_rows import plus, sorted_num_rows, tokens_of, wide_routed_rows, wide_shared_rows, with_item

# ---- products ----


@jit
def _settled(number):
    """`number`, once all products have ended.

    Left alone, the compiler lets products whose first operand is in registers run on into the next step, where those
    registers are written again: wrong results, at some tiles. Waiting at the end of a step, and nowhere in it, lets the
    decode of a plane run beside the products of those before. (A use of the sums would make the compiler wait behind
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
    wait, behind the copies for the steps to come, which then run beside the last products.
    """
    if not INTERPRET:  # noqa: SIM102
        if number < 0:
            _settled(number)


@jit
def _zeros(num_outs: tl.constexpr, rows, NUM: tl.constexpr):
    """For each of NUM matrices and each [R] of the tuple `rows` zeros [num_outs, R], in one tuple."""
    accs = ()
    for _ in tl.static_range(NUM):
        for sub in tl.static_range(len(rows)):
            accs = with_item(accs, tl.zeros([num_outs, rows[sub].shape[0]], dtype=tl.float32))
    return accs


@jit
def _of(items, index: tl.constexpr, NUM: tl.constexpr):
    """Matrix `index`'s NUM of a tuple that `_zeros` makes."""
    part = ()
    for sub in tl.static_range(NUM):
        part = with_item(part, items[index * NUM + sub])
    return part


@jit
def _small_parts(accs):
    """Sums [BLOCK, 128] as two halves, which costs nothing: what follows then takes half the registers."""
    parts = ()
    for index in tl.static_range(len(accs)):
        acc = accs[index]
        if acc.shape[1] == 128:
            first, second = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, 64]), [0, 2, 1]))
            parts = with_item(with_item(parts, first), second)
        else:
            parts = with_item(parts, acc)
    return parts


@jit
def wide_products(
    x_ptr, rows, data_ptrs, scale_ptrs, first_outs,
    BLOCK: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of each matrix (one or two of one shape and format) times each [R] of the tuple `rows` of x -> a tuple
    of fp32 [BLOCK, R], matrix by matrix. x is in product order.

    K is cut into RANGES as in `product`. A predicate for every access of x would cost more than the access: `rows` are
    rows that exist, and what comes of those that are not the tile's own is not stored.
    """
    K_TILES: tl.constexpr = K // 128
    PER_RANGE: tl.constexpr = K_TILES // RANGES
    NUM: tl.constexpr = len(rows)
    accs = _zeros(BLOCK, rows, len(data_ptrs))
    totals = accs
    for k_tile in range(K_TILES):
        stored = ()
        for index in tl.static_range(len(data_ptrs)):
            data_ptr, scale_ptr = data_ptrs[index], scale_ptrs[index]
            words = load_words(data_ptr, scale_ptr, first_outs[index], k_tile, K_TILES, BLOCK, FORMAT)
            stored = with_item(stored, words)
        tiles = ()
        for sub in tl.static_range(NUM):
            cols = k_tile * 128 + tl.arange(0, 128)
            x = tl.load(x_ptr + ((rows[sub] * K)[:, None] + cols[None, :]))
            if QUANTISE:
                x = fake_quantize_e4m3(x)
            tiles = with_item(tiles, tl.trans(x))
        sums = ()
        for index in tl.static_range(len(data_ptrs)):
            words = stored[index]
            weight = in_product_order(decode_tile(words[0], words[1], words[2], FORMAT))
            for sub in tl.static_range(NUM):
                sums = with_item(sums, tl.dot(weight, tiles[sub], accs[index * NUM + sub]))
        accs = sums
        done = _settled(k_tile) + 1
        if RANGES > 1:
            if done % PER_RANGE == 0:
                totals, accs = plus_each(totals, accs), _zeros(BLOCK, rows, len(data_ptrs))
        else:
            _never(done)
    return totals if RANGES > 1 else accs


# ---- gate and up ----


@jit
def _routed_gate_up(
    tile, expert, first_out, x_ptr, hidden_ptr, weights_ptr, order, gate, up, limit,
    BLOCK: tl.constexpr, D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    wide = expert.to(tl.int64)
    datas = (gate.data + wide * DATA_WORDS, up.data + wide * DATA_WORDS)
    scales = (gate.scale + wide * SCALE_WORDS, up.scale + wide * SCALE_WORDS)
    pairs, is_row = wide_routed_rows(tile, expert, order, ROWS)
    accs = wide_products(
        x_ptr, tokens_of(pairs, TOP_K), datas, scales, (first_out, first_out), BLOCK, D, FORMAT, False, RANGES
    )
    accs = _small_parts(accs)
    pairs, is_row = wide_routed_rows(tile, expert, order, ROWS, True)
    NUM: tl.constexpr = len(pairs)
    store_hidden(
        _of(accs, 0, NUM), _of(accs, 1, NUM), tl.load(gate.out_scale + expert), tl.load(up.out_scale + expert), pairs,
        is_row, first_out + tl.arange(0, BLOCK), weights_ptr, hidden_ptr, limit,
        I, True, BLOCK == 128 and FORMAT != 0, IN_PRODUCT,
    )  # fmt: skip


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _wide_gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, weights_ptr, order, matrices, limit, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, MIDDLE: tl.constexpr,
    SMALL: tl.constexpr, SHARED_ROWS: tl.constexpr, BLOCK: tl.constexpr, RANGES: tl.constexpr,
    SHARED_RANGES: tl.constexpr,
):  # fmt: skip
    """`_gate_up_kernel` with x, x rounded and hidden in product order. A tile of ROWS that has at most MIDDLE or SMALL
    rows is computed as one of that size.
    """
    N_TILES: tl.constexpr = I // BLOCK
    program = tl.program_id(0)
    num_shared_work = num_shared_tiles * N_TILES
    if program < num_shared_work:
        first_out = (program % N_TILES) * BLOCK
        tokens, is_row = wide_shared_rows(program // N_TILES, num_tokens, SHARED_ROWS)
        NUM: tl.constexpr = len(tokens)
        gate, up = matrices.shared_gate, matrices.shared_up
        accs = wide_products(
            quantised_ptr, tokens, (gate.data, up.data), (gate.scale, up.scale),
            (first_out, first_out), BLOCK, D, SHARED_FORMAT, False, SHARED_RANGES,
        )  # fmt: skip
        store_hidden(
            _of(accs, 0, NUM), _of(accs, 1, NUM), tl.load(gate.out_scale), tl.load(up.out_scale), tokens, is_row,
            first_out + tl.arange(0, BLOCK), weights_ptr, hidden_ptr + num_tokens * TOP_K * I, limit,
            I, False, BLOCK == 128, IN_PRODUCT,
        )  # fmt: skip
    else:
        program -= num_shared_work
        tile, first_out = program // N_TILES, (program % N_TILES) * BLOCK
        expert = tl.load(order.tile_experts + tile, cache_modifier=".cg")
        if expert >= 0:
            source_ptr = x_ptr if FORMAT == 0 else quantised_ptr  # NVFP4 is weight-only
            num_rows = sorted_num_rows(tile, expert, order)
            if num_rows <= SMALL:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate,
                    matrices.up, limit,
                    BLOCK, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, SMALL, RANGES,
                )  # fmt: skip
            elif MIDDLE == ROWS or num_rows > MIDDLE:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate,
                    matrices.up, limit,
                    BLOCK, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, RANGES,
                )  # fmt: skip
            else:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate,
                    matrices.up, limit,
                    BLOCK, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, MIDDLE, RANGES,
                )  # fmt: skip


# ---- down ----


@jit
def _down_products(
    hidden_ptr, rows, data_ptr, scale_ptr, first_out,
    BLOCK: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, RANGES: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """`wide_products` with BLOCK rows; PAIR: with two halves of them, each a product of its own."""
    if PAIR:
        return wide_products(
            hidden_ptr, rows, (data_ptr, data_ptr), (scale_ptr, scale_ptr), (first_out, first_out + BLOCK // 2),
            BLOCK // 2, I, FORMAT, QUANTISE, RANGES,
        )  # fmt: skip
    else:
        return wide_products(
            hidden_ptr, rows, (data_ptr,), (scale_ptr,), (first_out,), BLOCK, I, FORMAT, QUANTISE, RANGES
        )


@jit
def _store_products(
    accs, scale, rows, is_row, first_out, parts_ptr, num_pairs, D: tl.constexpr, PAIR: tl.constexpr,
    RANKS: tl.constexpr = 0,
):  # fmt: skip
    SIZE: tl.constexpr = accs[0].shape[0]
    NUM: tl.constexpr = len(rows)
    for index in tl.static_range(2 if PAIR else 1):
        outs = first_out + index * SIZE + tl.arange(0, SIZE)
        store_parts(_of(accs, index, NUM), scale, rows, is_row, outs, parts_ptr, num_pairs, D, RANKS)


@jit
def _routed_down(
    tile, expert, n_tile, hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, order, down, shared_scale_ptr,
    num_tokens,
    BLOCK: tl.constexpr, D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, QUANTISE: tl.constexpr,
    RANGES: tl.constexpr, PAIR: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    wide = expert.to(tl.int64)
    pairs, is_row = wide_routed_rows(tile, expert, order, ROWS)
    accs = _down_products(
        hidden_ptr, pairs, down.data + wide * DATA_WORDS, down.scale + wide * SCALE_WORDS, n_tile * BLOCK,
        BLOCK, I, FORMAT, QUANTISE and FORMAT != 0, RANGES, PAIR,
    )  # fmt: skip
    pdl_trigger()
    accs = _small_parts(accs)
    pairs, is_row = wide_routed_rows(tile, expert, order, ROWS, True)
    out_scale, num_pairs = tl.load(down.out_scale + expert), num_tokens * TOP_K
    _store_products(accs, out_scale, pairs, is_row, n_tile * BLOCK, parts_ptr, num_pairs, D, PAIR, RANKS)
    if RANKS == 0:
        for index in tl.static_range(len(pairs)):
            combine(
                pairs[index] // TOP_K, is_row[index], n_tile, parts_ptr, parts_ptr, arrivals_ptr, experts_ptr, out_ptr,
                down.out_scale, shared_scale_ptr, num_tokens, BLOCK, D, E, TOP_K, 1, 1,
            )  # fmt: skip


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _wide_down_kernel(
    hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, order, down, shared, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    MIDDLE: tl.constexpr, SMALL: tl.constexpr, SHARED_ROWS: tl.constexpr, BLOCK: tl.constexpr, RANGES: tl.constexpr,
    SHARED_RANGES: tl.constexpr, QUANTISE: tl.constexpr, PAIR: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """`_down_kernel` with hidden in product order. PAIR: the BLOCK rows of a program are two products."""
    N_TILES: tl.constexpr = D // BLOCK
    program = tl.program_id(0)
    num_shared_programs = num_shared_tiles * N_TILES
    if RANKS == 0 and program < num_shared_programs:
        n_tile = program % N_TILES
        tokens, is_row = wide_shared_rows(program // N_TILES, num_tokens, SHARED_ROWS)
        rows = plus(tokens, num_tokens * TOP_K)
        accs = _down_products(
            hidden_ptr, rows, shared.data, shared.scale, n_tile * BLOCK,
            BLOCK, I, SHARED_FORMAT, QUANTISE, SHARED_RANGES, PAIR,
        )  # fmt: skip
        pdl_trigger()
        _store_products(accs, tl.load(shared.out_scale), rows, is_row, n_tile * BLOCK, parts_ptr, 0, D, PAIR)
        for index in tl.static_range(len(tokens)):
            combine(
                tokens[index], is_row[index], n_tile, parts_ptr, parts_ptr, arrivals_ptr, experts_ptr, out_ptr,
                down.out_scale, shared.out_scale, num_tokens, BLOCK, D, E, TOP_K, 1, 1,
            )  # fmt: skip
    else:
        program -= num_shared_programs
        tile, n_tile = program // N_TILES, program % N_TILES
        expert = tl.load(order.tile_experts + tile, cache_modifier=".cg")
        if expert >= 0:
            num_rows = sorted_num_rows(tile, expert, order)
            if num_rows <= SMALL:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, order,
                    down, shared.out_scale, num_tokens,
                    BLOCK, D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, SMALL, QUANTISE, RANGES, PAIR, RANKS,
                )  # fmt: skip
            elif MIDDLE == ROWS or num_rows > MIDDLE:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, order,
                    down, shared.out_scale, num_tokens,
                    BLOCK, D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, QUANTISE, RANGES, PAIR, RANKS,
                )  # fmt: skip
            else:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, order,
                    down, shared.out_scale, num_tokens,
                    BLOCK, D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, MIDDLE, QUANTISE, RANGES, PAIR, RANKS,
                )  # fmt: skip


# ---- one linear ----


@jit
def _prepare_rows_kernel(x_ptr, prepared_ptr, K: tl.constexpr, GROUPS: tl.constexpr, QUANTISE: tl.constexpr):
    """Rows of x as `_wide_linear_kernel` takes them, one for each program."""
    row = tl.program_id(0).to(tl.int64)
    prepare_row(x_ptr, prepared_ptr, prepared_ptr, row, K, GROUPS, not QUANTISE, QUANTISE, IN_PRODUCT)


@jit(do_not_specialize=("num_rows",))
def _wide_linear_kernel(
    x_ptr, data_ptr, scale_ptr, out_scale_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    first_out = (tl.program_id(0) % N_TILES) * BLOCK
    rows, is_row = wide_shared_rows(tl.program_id(0) // N_TILES, num_rows, ROWS)
    pdl_trigger()
    accs = wide_products(x_ptr, rows, (data_ptr,), (scale_ptr,), (first_out,), BLOCK, K, FORMAT, False, 1)
    factor = tl.load(out_scale_ptr)
    outs = first_out + tl.arange(0, BLOCK)
    for sub in tl.static_range(len(rows)):
        target = out_ptr + (rows[sub] * N)[:, None] + outs[None, :]
        mask = is_row[sub][:, None] & (outs < N)[None, :]
        tl.store(target, tl.trans(accs[sub] * factor).to(out_ptr.dtype.element_ty), mask=mask)
