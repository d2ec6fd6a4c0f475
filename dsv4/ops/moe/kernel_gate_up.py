"""The first product of ops/moe, the narrow form: gate and up of sorted pairs, and the activation.

Every product is out^T = W x^T: weights are decoded in registers (ops/lib/fp4.py) and are the first operand; token rows
are the second, through shared memory. A CTA has 64 rows of gate and of up, and one group's tile of 8 or 16 tokens, in
sub-tiles of 8: each is a product of its own, [64, 128] x [128, 8], which the compiler makes of mma.sync, 16 x 8 x 16.
Column tiles are walked in order, so no tile changes a bit, nor does another form (kernel_few.py, kernel_wide.py,
kernel_tiles.py). Groups are the routed experts met, and the shared expert with all tokens (first, since its CTAs are
longest).

Columns may be cut into ranges, by the layer's shape alone: each has a sum of its own, and sums are added first range
first.

Behind a `join` the compiler has a thread read four neighbours of x where an MMA wants two, and moves registers until
they are the pairs it wants. So x and hidden lie in operand order (`in_order` in kernel_products.py), where their writer
could write them so: same sums, a tenth fewer instructions.

The kernels are not launched early (`pdl_wait` in ops/lib/pdl.py): in a whole model that was slower for one token, and
it brings nothing for many. CTAs of down let the next launch begin once their product is done, not before: CTAs that
start early wait on whatever multiprocessors have room, and are then spread unevenly.
"""

from __future__ import annotations

from dsv4.ops.lib.codecs import fake_quantize_e4m3
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.moe.kernel_hidden import store_hidden
from dsv4.ops.moe.kernel_products import IN_NATURAL, IN_OPERAND, in_order, product, two_products
from dsv4.ops.moe.kernel_rows import (
    SUB,
    another,
    rows_in_tile,
    shared_sub_rows,
    sorted_expert,
    sorted_sub_rows,
    tokens_of,
)
from dsv4.ops.moe.plan import BLOCK

_BLOCK = tl.constexpr(BLOCK)  # weight rows of gate, and of up


@jit
def _gate_up_rows(
    x_ptr, x_rows, rows, is_row, data1_ptr, scale1_ptr, out1_ptr, data3_ptr, scale3_ptr, out3_ptr, first_out,
    weights_ptr, hidden_ptr, limit,
    D: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, UNROLL: tl.constexpr, RANGES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, ORDER: tl.constexpr,
):
    """64 columns of rows of hidden, in the order ORDER."""
    outs = first_out + tl.arange(0, _BLOCK)
    gate_scale, up_scale = tl.load(out1_ptr), tl.load(out3_ptr)  # asked for before the product, used after it
    # gate, up = x @ w1.T, x @ w3.T
    gates, ups = two_products(
        x_ptr, x_rows, is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, first_out,
        _BLOCK, D, FORMAT, UNROLL, RANGES,
    )  # of [64, 8] each
    # hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight
    store_hidden(
        gates, ups, gate_scale, up_scale, rows, is_row, outs, weights_ptr, hidden_ptr, limit, I, HAS_WEIGHTS, ORDER
    )


@jit
def _rounded_gate_up(
    x_ptr, tile, num_tokens, data1_ptr, scale1_ptr, out1_ptr, data3_ptr, scale3_ptr, out3_ptr, first_out, hidden_ptr,
    limit,
    D: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr,
):
    """128 columns of hidden, rounded: what a CTA of many tokens has of the shared expert. One matrix after the other,
    64 rows after 64, rounded at the end, and where rows lie found again for each: of 32 tokens registers hold no
    more. Hidden has rows for the whole of the last tile, where those of its last token are repeated.
    """
    for half in tl.range(0, 2, num_stages=1):
        first = first_out + half * 64
        tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS)
        gates = product(
            x_ptr, tokens, is_row, data1_ptr, scale1_ptr, first, 0,
            64, D, FORMAT, False, UNROLL, RANGES, False, True, False,
        )
        tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS)
        ups = product(
            x_ptr, tokens, is_row, data3_ptr, scale3_ptr, first, 0,
            64, D, FORMAT, False, UNROLL, RANGES, False, True, False,
        )
        tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS, True)
        store_hidden(
            gates, ups, tl.load(out1_ptr), tl.load(out3_ptr), tokens, is_row, first + tl.arange(0, 64), hidden_ptr,
            hidden_ptr, limit, I, False, IN_NATURAL,
        )
    tl.debug_barrier()  # columns that other threads of this CTA have written
    tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS, True)
    for sub in tl.static_range(len(tokens)):
        places = hidden_ptr + (tokens[sub] * I)[:, None] + (first_out + tl.arange(0, 128))[None, :]
        hidden = fake_quantize_e4m3(tl.load(places, mask=is_row[sub][:, None], other=0.0))  # [8, 128]
        tl.debug_barrier()  # all of a row is read before any of it is written
        tl.store(places, in_order(hidden, IN_OPERAND), mask=is_row[sub][:, None])


@jit
def _routed_gate_up(
    tile, expert, first_out, x_ptr, hidden_ptr, weights_ptr, order, gate, up, limit,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, RANGES: tl.constexpr,
):
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    wide = expert.to(tl.int64)
    data1_ptr, scale1_ptr = gate.data + wide * DATA_WORDS, gate.scale + wide * SCALE_WORDS
    data3_ptr, scale3_ptr = up.data + wide * DATA_WORDS, up.scale + wide * SCALE_WORDS
    pairs, is_row = sorted_sub_rows(tile, expert, order, ROWS)  # of [8] each
    _gate_up_rows(
        x_ptr, tokens_of(pairs, TOP_K), pairs, is_row, data1_ptr, scale1_ptr, gate.out_scale + expert,
        data3_ptr, scale3_ptr, up.out_scale + expert, first_out, weights_ptr, hidden_ptr, limit,
        D, I, FORMAT, UNROLL, RANGES, True, IN_OPERAND if FORMAT == 0 else IN_NATURAL,
    )


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, weights_ptr, order, matrices, limit, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, SHARED_FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    UNROLL: tl.constexpr, RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr, ROUNDS_SHARED: tl.constexpr,
):
    """hidden bf16 [T k + T, I]: a row for each pair, then one for each token's shared expert. x, quantised [T, D] in
    operand order; order: `PairOrder`; matrices: `GateUpMatrices`.

    Hidden of NVFP4 experts is in operand order. That of MXFP4 experts is rounded by its reader, and so in natural
    order; so is the shared expert's, but ROUNDS_SHARED rounds it here and leaves it in operand order.
    """
    N_TILES: tl.constexpr = I // _BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2  # twice the bytes: the same shared memory
    SHARED_TILES: tl.constexpr = I // 128 if ROUNDS_SHARED else N_TILES
    program = tl.program_id(0)
    num_shared_work = num_shared_tiles * SHARED_TILES
    if program < num_shared_work:
        first_out = (program % SHARED_TILES) * (128 if ROUNDS_SHARED else _BLOCK)
        shared_hidden_ptr = hidden_ptr + num_tokens * TOP_K * I
        tile = program // SHARED_TILES
        gate, up = matrices.shared_gate, matrices.shared_up
        if ROUNDS_SHARED:
            _rounded_gate_up(
                quantised_ptr, tile, num_tokens, gate.data, gate.scale, gate.out_scale,
                up.data, up.scale, up.out_scale, first_out, shared_hidden_ptr, limit,
                D, I, SHARED_FORMAT, SHARED_ROWS, SHARED_UNROLL, SHARED_RANGES,
            )
        else:
            tokens, is_row = shared_sub_rows(tile, num_tokens, SHARED_ROWS)  # of [8] each
            _gate_up_rows(
                quantised_ptr, tokens, tokens, is_row, gate.data, gate.scale, gate.out_scale,
                up.data, up.scale, up.out_scale, first_out, weights_ptr, shared_hidden_ptr, limit,
                D, I, SHARED_FORMAT, SHARED_UNROLL, SHARED_RANGES, False, IN_NATURAL,
            )
    else:
        program -= num_shared_work
        tile = program // N_TILES
        first_out = (program % N_TILES) * _BLOCK
        expert = sorted_expert(tile, order)
        if expert >= 0:
            source_ptr = x_ptr if FORMAT == 0 else quantised_ptr  # NVFP4 is weight-only
            HALF: tl.constexpr = max(ROWS // 2, SUB)
            if rows_in_tile(tile, expert, order, ROWS) > HALF:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate, matrices.up,
                    limit, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, UNROLL, RANGES,
                )
            else:
                _routed_gate_up(
                    tile, expert, first_out, source_ptr, hidden_ptr, weights_ptr, order, matrices.gate, matrices.up,
                    limit, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, HALF, UNROLL, RANGES,
                )
