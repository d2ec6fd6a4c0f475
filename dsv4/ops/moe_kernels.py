"""Kernels of ops/moe.py: rows prepared, gate and up with the activation, down with the combination; one FP4 linear.

Every product is out^T = W x^T: weights are decoded in registers (ops/tl_fp4.py) and are the first operand, 64 and more
rows of them; token rows are the second, through shared memory. A program has one group's tile of tokens and BLOCK rows
of the weight; columns are walked in order, so only the number of tokens in a tile changes with the batch, and no bit
does. Groups are the routed experts met, and the shared expert with all tokens (first, since its programs are longest).
"""

from __future__ import annotations

from dsv4.ops.expert_sort import _expert_sort_kernel
from dsv4.ops.tl_fp4 import load_weight_tile
from dsv4.ops.tl_utils import abs_bits, e4m3_scale, e8m0_reciprocal, e8m0_to_float, jit, tl


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
    TILES: tl.constexpr, HAS_ONE_CHUNK: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
    ARRIVALS: tl.constexpr, ARRIVALS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The sort's programs, then one for each token: x as the FP8 product takes it, and its arrivals set to zero."""
    program = tl.program_id(0)
    if program < num_sort_programs:
        _expert_sort_kernel(
            experts_ptr, experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr,
            tile_starts_ptr, num_pairs, num_chunks, num_tiles,
            TOP_K, E, E_BLOCK, CHUNK, TILE_ROWS, TILES, False, HAS_ONE_CHUNK,
        )  # fmt: skip
    else:
        token = (program - num_sort_programs).to(tl.int64)
        places = tl.arange(0, ARRIVALS_BLOCK)
        zeros = tl.zeros([ARRIVALS_BLOCK], dtype=tl.int32)
        tl.store(arrivals_ptr + token * ARRIVALS + places, zeros, mask=places < ARRIVALS)
        for start in range(0, D // 128, GROUPS):
            groups = start + tl.arange(0, GROUPS)[:, None]
            cols = groups * 128 + tl.arange(0, 128)[None, :]
            x = tl.load(x_ptr + token * D + cols, mask=groups < D // 128, other=0.0)
            tl.store(quantised_ptr + token * D + cols, fake_quantize_e4m3(x), mask=groups < D // 128)


@jit
def _quantize_rows_kernel(hidden_ptr, I: tl.constexpr, GROUPS: tl.constexpr):
    """Rows of hidden rounded to E4M3 groups, in place."""
    row = tl.program_id(0).to(tl.int64) * I
    for start in range(0, I // 128, GROUPS):
        groups = start + tl.arange(0, GROUPS)[:, None]
        places = hidden_ptr + row + groups * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(places, mask=groups < I // 128, other=0.0)
        tl.store(places, fake_quantize_e4m3(x), mask=groups < I // 128)


@jit
def _load_rows(x_ptr, rows, is_row, k_tile, K: tl.constexpr, QUANTISE: tl.constexpr):
    """Columns of tile `k_tile` of rows [R] -> bf16 [128, R].

    Where there is no row, a small tile holds zeros. In a large one a predicate for every access costs more than the
    access: `rows` is a row that exists there, and what comes of it is not stored.
    """
    cols = k_tile * 128 + tl.arange(0, 128)
    source = x_ptr + (rows * K)[:, None] + cols[None, :]
    if K % 128 != 0:
        x = tl.load(source, mask=is_row[:, None] & (cols < K)[None, :], other=0.0)
    elif rows.shape[0] < 64:
        x = tl.load(source, mask=is_row[:, None], other=0.0)
    else:
        x = tl.load(source)
    if QUANTISE:
        x = fake_quantize_e4m3(x)
    return tl.trans(x)


@jit
def _product(
    x_ptr, rows, is_row, data_ptr, scale_ptr, outs,
    K: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Rows `outs` [N] of one matrix times rows [R] of x -> fp32 [N, R]."""
    K_TILES: tl.constexpr = (K + 127) // 128
    STEP: tl.constexpr = UNROLL if K_TILES % UNROLL == 0 else 1
    acc = tl.zeros([outs.shape[0], rows.shape[0]], dtype=tl.float32)
    for first in range(0, K_TILES, STEP):
        for step in tl.static_range(STEP):
            x = _load_rows(x_ptr, rows, is_row, first + step, K, QUANTISE)
            acc = tl.dot(load_weight_tile(data_ptr, scale_ptr, outs, first + step, K_TILES, FORMAT), x, acc)
    return acc


@jit
def _two_products(
    x_ptr, rows, is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, outs,
    K: tl.constexpr, FORMAT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`_product` with two matrices of one shape and format, x read once."""
    K_TILES: tl.constexpr = K // 128
    STEP: tl.constexpr = UNROLL if K_TILES % UNROLL == 0 else 1
    gate = tl.zeros([outs.shape[0], rows.shape[0]], dtype=tl.float32)
    up = tl.zeros([outs.shape[0], rows.shape[0]], dtype=tl.float32)
    for first in range(0, K_TILES, STEP):
        for step in tl.static_range(STEP):
            x = _load_rows(x_ptr, rows, is_row, first + step, K, False)
            gate = tl.dot(load_weight_tile(data1_ptr, scale1_ptr, outs, first + step, K_TILES, FORMAT), x, gate)
            up = tl.dot(load_weight_tile(data3_ptr, scale3_ptr, outs, first + step, K_TILES, FORMAT), x, up)
    return gate, up


@jit
def _activate(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit); both rounded to bf16 first."""
    gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.bfloat16).to(tl.float32), -limit), limit)
    return tl.div_rn(gate, 1.0 + tl.exp(0.0 - gate)) * up


@jit
def _routed_tile(tile, pairs_ptr, offsets_ptr, tile_starts_ptr, expert, ROWS: tl.constexpr):
    """Places in the sort's order, their pairs, and which exist, [ROWS] each."""
    start = tl.load(tile_starts_ptr + tile)
    places = start + tl.arange(0, ROWS)
    is_row = places < tl.load(offsets_ptr + expert + 1)
    return tl.where(is_row, places, start), tl.load(pairs_ptr + places, mask=is_row, other=0), is_row


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, weights_ptr, pairs_ptr, offsets_ptr, tile_experts_ptr, tile_starts_ptr,
    w1_ptr, w1_scale_ptr, w1_out_ptr, w3_ptr, w3_scale_ptr, w3_out_ptr,
    shared1_ptr, shared1_scale_ptr, shared1_out_ptr, shared3_ptr, shared3_scale_ptr, shared3_out_ptr,
    limit, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [T k + T, I]: rows of pairs in the sort's order, then one row for each token's shared expert."""
    N_TILES: tl.constexpr = I // BLOCK
    tile = tl.program_id(0) // N_TILES
    outs = (tl.program_id(0) % N_TILES) * BLOCK + tl.arange(0, BLOCK)
    if tile < num_shared_tiles:
        tokens = tile * SHARED_ROWS + tl.arange(0, SHARED_ROWS)
        is_row = tokens < num_tokens
        tokens = tl.minimum(tokens, num_tokens - 1)
        gate, up = _two_products(
            quantised_ptr, tokens, is_row, shared1_ptr, shared1_scale_ptr, shared3_ptr, shared3_scale_ptr, outs,
            D, SHARED_FORMAT, UNROLL,
        )  # fmt: skip
        hidden = _activate(gate * tl.load(shared1_out_ptr), up * tl.load(shared3_out_ptr), limit)
        target = hidden_ptr + ((num_tokens * TOP_K + tokens) * I)[None, :] + outs[:, None]
        tl.store(target, hidden.to(tl.bfloat16), mask=is_row[None, :])
    else:
        expert = tl.load(tile_experts_ptr + tile - num_shared_tiles).to(tl.int64)
        if expert >= 0:
            places, pairs, is_row = _routed_tile(
                tile - num_shared_tiles, pairs_ptr, offsets_ptr, tile_starts_ptr, expert, ROWS
            )
            source = quantised_ptr
            if FORMAT == 0:  # weight-only
                source = x_ptr
            gate, up = _two_products(
                source, pairs // TOP_K, is_row, w1_ptr + expert * DATA_WORDS, w1_scale_ptr + expert * SCALE_WORDS,
                w3_ptr + expert * DATA_WORDS, w3_scale_ptr + expert * SCALE_WORDS, outs, D, FORMAT, UNROLL,
            )  # fmt: skip
            hidden = _activate(gate * tl.load(w1_out_ptr + expert), up * tl.load(w3_out_ptr + expert), limit)
            # hidden = hidden * weight.unsqueeze(-1)
            hidden = hidden * tl.load(weights_ptr + pairs, mask=is_row, other=0.0)[None, :]
            target = hidden_ptr + (places * I)[None, :] + outs[:, None]
            tl.store(target, hidden.to(tl.bfloat16), mask=is_row[None, :])


@jit
def _store_and_combine(
    out, rows, tokens, is_row, outs, n_tile, parts_ptr, arrivals_ptr, experts_ptr, out_ptr, num_tokens,
    D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, N_TILES: tl.constexpr,
):  # fmt: skip
    """Part [N, R] of `rows` of `parts`; then, for tokens of which it was the last, the sum of all parts.

    A token's part of `outs` arrives once for each expert it uses and once for the shared one. Who comes last is the
    GPU's choice; what is summed, and in which order, is not.
    """
    mask = is_row[None, :]
    tl.store(parts_ptr + (rows * D)[None, :] + outs[:, None], out.to(tl.bfloat16), mask=mask)
    num_parts = tl.zeros_like(rows)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_row, other=-1)
        num_parts += ((expert >= 0) & (expert < E)).to(tl.int32)
    tl.debug_barrier()  # all parts of this program are written before one arrival is
    arrived = tl.atomic_add(arrivals_ptr + tokens * N_TILES + n_tile, 1, mask=is_row, sem="acq_rel", scope="gpu")
    is_last = is_row & (arrived == num_parts)
    if tl.max(is_last.to(tl.int32), 0) > 0:
        tl.debug_barrier()
        total = tl.zeros(out.shape, dtype=tl.float32)
        for place in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_last, other=-1)
            is_part = is_last & (expert >= 0) & (expert < E)
            source = parts_ptr + ((tokens * TOP_K + place) * D)[None, :] + outs[:, None]
            total += tl.load(source, mask=is_part[None, :], other=0.0, cache_modifier=".cg").to(tl.float32)
        source = parts_ptr + ((num_tokens * TOP_K + tokens) * D)[None, :] + outs[:, None]
        total += tl.load(source, mask=is_last[None, :], other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out_ptr + (tokens * D)[None, :] + outs[:, None], total.to(tl.bfloat16), mask=is_last[None, :])


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _down_kernel(
    hidden_ptr, parts_ptr, arrivals_ptr, out_ptr, experts_ptr, pairs_ptr, offsets_ptr, tile_experts_ptr,
    tile_starts_ptr, w2_ptr, w2_scale_ptr, w2_out_ptr, shared2_ptr, shared2_scale_ptr, shared2_out_ptr,
    num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """out [T, D]; parts bf16 [T k + T, D] by pair, then by token. QUANTISE: hidden is still to be rounded to E4M3."""
    N_TILES: tl.constexpr = D // BLOCK
    tile = tl.program_id(0) // N_TILES
    n_tile = tl.program_id(0) % N_TILES
    outs = n_tile * BLOCK + tl.arange(0, BLOCK)
    if tile < num_shared_tiles:
        tokens = tile * SHARED_ROWS + tl.arange(0, SHARED_ROWS)
        is_row = tokens < num_tokens
        tokens = tl.minimum(tokens, num_tokens - 1)
        rows = num_tokens * TOP_K + tokens
        out = _product(
            hidden_ptr, rows, is_row, shared2_ptr, shared2_scale_ptr, outs, I, SHARED_FORMAT, QUANTISE, UNROLL
        ) * tl.load(shared2_out_ptr)  # fmt: skip
        _store_and_combine(
            out, rows, tokens, is_row, outs, n_tile, parts_ptr, arrivals_ptr, experts_ptr, out_ptr, num_tokens,
            D, E, TOP_K, N_TILES,
        )  # fmt: skip
    else:
        expert = tl.load(tile_experts_ptr + tile - num_shared_tiles).to(tl.int64)
        if expert >= 0:
            places, pairs, is_row = _routed_tile(
                tile - num_shared_tiles, pairs_ptr, offsets_ptr, tile_starts_ptr, expert, ROWS
            )
            out = _product(
                hidden_ptr, places, is_row, w2_ptr + expert * DATA_WORDS, w2_scale_ptr + expert * SCALE_WORDS, outs,
                I, FORMAT, QUANTISE and FORMAT != 0, UNROLL,
            ) * tl.load(w2_out_ptr + expert)  # fmt: skip
            _store_and_combine(
                out, pairs, pairs // TOP_K, is_row, outs, n_tile, parts_ptr, arrivals_ptr, experts_ptr, out_ptr,
                num_tokens, D, E, TOP_K, N_TILES,
            )  # fmt: skip


@jit(do_not_specialize=("num_rows",))
def _fp4_linear_kernel(
    x_ptr, data_ptr, scale_ptr, out_scale_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    rows = (tl.program_id(0) // N_TILES) * ROWS + tl.arange(0, ROWS)
    outs = (tl.program_id(0) % N_TILES) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    acc = _product(x_ptr, rows, is_row, data_ptr, scale_ptr, outs, K, FORMAT, FORMAT != 0, UNROLL)
    acc *= tl.load(out_scale_ptr)
    target = out_ptr + (rows * N)[None, :] + outs[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & (outs < N)[:, None])
