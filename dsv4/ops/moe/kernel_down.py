"""The second product of ops/moe, the narrow form: down of sorted pairs, and the sum of a token's parts. See
kernel_gate_up.py.

A CTA of a routed expert has two blocks of 64 weight rows one after the other in one loop, so that fewer CTAs begin and
end; one of the shared expert, which reads more, has one of them.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_parts import combine, store_parts
from dsv4.ops.moe.kernel_products import product
from dsv4.ops.moe.kernel_rows import (
    SUB,
    another,
    plus,
    rows_in_tile,
    shared_rows,
    shared_sub_rows,
    sorted_expert,
    sorted_rows,
    sorted_sub_rows,
)
from dsv4.ops.moe.plan import BLOCK, PAIR_BLOCK

_BLOCK, _PAIR = tl.constexpr(BLOCK), tl.constexpr(PAIR_BLOCK)  # weight rows of one product, and of a routed CTA


@jit
def _routed_down(
    tile, expert, n_tile, hidden_ptr, results, experts_ptr, order, down, shared_scale_ptr, num_tokens,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr, RANKS: tl.constexpr,
):
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    num_pairs = num_tokens * TOP_K
    wide = expert.to(tl.int64)
    data_ptr, scale_ptr = down.data + wide * DATA_WORDS, down.scale + wide * SCALE_WORDS
    pairs, is_row = sorted_sub_rows(tile, expert, order, ROWS)  # of [8] each
    out_scale = tl.load(down.out_scale + expert)
    # part = hidden @ w2.T
    halves = product(
        hidden_ptr, pairs, is_row, data_ptr, scale_ptr, n_tile * _PAIR, 0,
        _BLOCK, I, FORMAT, FORMAT != 0, UNROLL, RANGES, False, FORMAT == 0, True, True,
    )  # two tuples of [64, 8]
    pdl_trigger()
    outs = n_tile * _PAIR + tl.arange(0, _BLOCK)
    store_parts(halves[0], out_scale, pairs, is_row, outs, results.parts, num_pairs, D, RANKS)
    store_parts(halves[1], out_scale, pairs, is_row, outs + _BLOCK, results.parts, num_pairs, D, RANKS)
    if RANKS == 0:
        pair, has_row = sorted_rows(tile, expert, order, 0, ROWS)
        combine(
            pair // TOP_K, has_row, n_tile, results, experts_ptr, down.out_scale, shared_scale_ptr, num_tokens,
            _PAIR, D, E, TOP_K, 1, 1, 2,
        )


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _down_kernel(
    hidden_ptr, results, experts_ptr, order, down, shared, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, UNROLL: tl.constexpr, RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr,
    SHARED_QUANTISE: tl.constexpr, RANKS: tl.constexpr,
):
    """out [T, D]; parts bf16 [T k + T, D] by pair, then by token. `results`: `DownResults`; order: `PairOrder`; down,
    shared: `Matrix`. SHARED_QUANTISE: the shared expert's hidden is still to be rounded to E4M3, and in natural order.

    RANKS > 0: parts go to the ranks whose tokens they are of (`part_rows`), and nothing is summed here. The shared
    expert does not run.
    """
    N_TILES: tl.constexpr = D // _PAIR
    SHARED_TILES: tl.constexpr = D // _BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2
    program = tl.program_id(0)
    num_shared_programs = num_shared_tiles * SHARED_TILES
    if RANKS == 0 and program < num_shared_programs:
        tile, first_out = program // SHARED_TILES, program % SHARED_TILES * _BLOCK
        PADDED: tl.constexpr = not SHARED_QUANTISE  # `hidden` and `parts` have rows for whole tiles
        tokens, is_row = shared_sub_rows(tile, num_tokens, SHARED_ROWS, PADDED)
        num_pairs = num_tokens * TOP_K
        rows = plus(tokens, num_pairs)
        shared_scale = tl.load(shared.out_scale)
        # part = hidden @ shared_w2.T
        sums = product(
            hidden_ptr, rows, is_row, shared.data, shared.scale, first_out, 0,
            _BLOCK, I, SHARED_FORMAT, SHARED_QUANTISE, SHARED_UNROLL, SHARED_RANGES, False, PADDED, not PADDED,
        )  # of [64, 8] each
        pdl_trigger()
        if PADDED:
            tokens, is_row = shared_sub_rows(another(tile), num_tokens, SHARED_ROWS, PADDED)
            rows = plus(tokens, num_pairs)
        outs = first_out + tl.arange(0, _BLOCK)
        store_parts(sums, shared_scale, rows, is_row, outs, results.parts, 0, D)
        token, has_row = shared_rows(tile, num_tokens, 0, SHARED_ROWS, SHARED_ROWS)
        combine(
            token, has_row, first_out // _PAIR, results, experts_ptr, down.out_scale, shared.out_scale, num_tokens,
            _PAIR, D, E, TOP_K, 1, 1, 2,
        )
    else:
        program -= num_shared_programs
        tile, n_tile = program // N_TILES, program % N_TILES
        expert = sorted_expert(tile, order)
        if expert >= 0:
            HALF: tl.constexpr = max(ROWS // 2, SUB)
            if rows_in_tile(tile, expert, order, ROWS) > HALF:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, results, experts_ptr, order, down, shared.out_scale, num_tokens,
                    D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, UNROLL, RANGES, RANKS,
                )
            else:
                _routed_down(
                    tile, expert, n_tile, hidden_ptr, results, experts_ptr, order, down, shared.out_scale, num_tokens,
                    D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, HALF, UNROLL, RANGES, RANKS,
                )
