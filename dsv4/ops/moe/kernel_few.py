"""Both products of ops/moe for few tokens: as kernel_gate_up.py and kernel_down.py form them, with the same bits.

No launch sorts the pairs: a CTA reads all expert ids and finds its rows. Every CTA has one range of the columns of one
matrix (split-K), and leaves fp32 partials; the last to arrive adds them up, first range first, and does the epilogue.
Of gate and up that is the activation. Where hidden is to be rounded to E4M3, in groups of 128 columns, the last to
arrive for two blocks of 64 does both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.codecs import fake_quantize_halves
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_hidden import hidden_row, store_hidden
from dsv4.ops.moe.kernel_parts import combine, store_parts
from dsv4.ops.moe.kernel_products import IN_NATURAL, plus_each, product, zeros
from dsv4.ops.moe.kernel_rows import SUB, direct_expert, direct_rows, direct_tile, shared_rows
from dsv4.ops.moe.plan import BLOCK

_BLOCK = tl.constexpr(BLOCK)  # weight rows of a CTA
_SUMS = tl.constexpr(BLOCK * 8)  # partials of a CTA: 64 weight rows x 8 token rows


class Partials(NamedTuple):
    """Where the CTAs of gate and up leave their partials [block, 2 * ranges, 64, 8], and how many have arrived for
    each block, or where blocks are rounded in pairs, for the first of two.
    """

    sums: Any
    counters: Any


# ---- gate and up ----


@jit
def _places():
    return tl.arange(0, _BLOCK)[:, None] * SUB + tl.arange(0, SUB)[None, :]  # [64, 8]


@jit
def _collect_sums(partials_ptr, RANGES: tl.constexpr):
    """The sums of all ranges [64, 8], first range first. Other multiprocessors wrote them: .cg reads from the cache
    they share.
    """
    places = _places()
    totals = zeros(_BLOCK, 1)
    for part in tl.static_range(RANGES):
        sums = (tl.load(partials_ptr + part * _SUMS + places, cache_modifier=".cg"),)
        totals = plus_each(totals, sums) if RANGES > 1 else sums
    return totals[0]


@jit
def _store_rounded_pair(
    partials_ptr, gate_scale, up_scale, rows, is_row, first_out, weights_ptr, hidden_ptr, limit,
    I: tl.constexpr, RANGES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):
    """Two neighbouring blocks of 64 columns of hidden, rounded to E4M3 as one group, from the partials of both."""
    MATRIX: tl.constexpr = RANGES * _SUMS  # of a block of one matrix
    gate, up = _collect_sums(partials_ptr, RANGES), _collect_sums(partials_ptr + MATRIX, RANGES)
    partials_ptr += 2 * MATRIX
    next_gate = _collect_sums(partials_ptr, RANGES)
    next_up = _collect_sums(partials_ptr + MATRIX, RANGES)
    outs = first_out + tl.arange(0, _BLOCK)
    left = hidden_row(gate, up, gate_scale, up_scale, rows, is_row, weights_ptr, limit, HAS_WEIGHTS)  # [8, 64]
    right = hidden_row(next_gate, next_up, gate_scale, up_scale, rows, is_row, weights_ptr, limit, HAS_WEIGHTS)
    left, right = fake_quantize_halves(left, right)
    target = hidden_ptr + (rows * I)[:, None] + outs[None, :]
    tl.store(target, left, mask=is_row[:, None])
    tl.store(target + _BLOCK, right, mask=is_row[:, None])


@jit
def _gate_up_range(
    x_ptr, x_rows, rows, is_row, data1_ptr, scale1_ptr, out1_ptr, data3_ptr, scale3_ptr, out3_ptr, first_out, part,
    partials_ptr, counter_ptr, weights_ptr, hidden_ptr, limit,
    D: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr, HAS_WEIGHTS: tl.constexpr, ROUNDED: tl.constexpr,
):
    """Range `part` of the columns: of gate from 0 on, of up from RANGES on. The last to arrive writes hidden, ROUNDED
    to E4M3 or not. QUANTISE: x is still to be rounded.
    """
    outs = first_out + tl.arange(0, _BLOCK)
    gate_scale, up_scale = tl.load(out1_ptr), tl.load(out3_ptr)  # asked for before the product, used after it
    data_ptr, scale_ptr = data1_ptr, scale1_ptr
    if part >= RANGES:
        data_ptr, scale_ptr = data3_ptr, scale3_ptr
    sums = product(
        x_ptr, (x_rows,), (is_row,), data_ptr, scale_ptr, first_out, part % RANGES,
        _BLOCK, D, FORMAT, QUANTISE, UNROLL, RANGES, True, False,
    )[0]  # [64, 8]
    tl.store(partials_ptr + part * _SUMS + _places(), sums)
    if ROUNDED:
        half = first_out // _BLOCK % 2
        partials_ptr -= half * (2 * RANGES * _SUMS)
        counter_ptr -= half
    tl.debug_barrier()  # all partials of this CTA are written before its arrival is
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == (1 + ROUNDED) * 2 * RANGES - 1:
        tl.debug_barrier()
        if ROUNDED:
            _store_rounded_pair(
                partials_ptr, gate_scale, up_scale, rows, is_row, first_out - half * _BLOCK, weights_ptr, hidden_ptr,
                limit, I, RANGES, HAS_WEIGHTS,
            )
        else:
            gate, up = _collect_sums(partials_ptr, RANGES), _collect_sums(partials_ptr + RANGES * _SUMS, RANGES)
            store_hidden(
                (gate,), (up,), gate_scale, up_scale, (rows,), (is_row,), outs, weights_ptr, hidden_ptr, limit,
                I, HAS_WEIGHTS, IN_NATURAL,
            )
        tl.store(counter_ptr, 0)


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _few_gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, experts_ptr, weights_ptr, matrices, partials, limit, num_tokens,
    num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, SPARSE: tl.constexpr,
    UNROLL: tl.constexpr, RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr, ROUND_X: tl.constexpr,
):
    """hidden bf16 [T k + T, I]: a row for each pair, then one for each token's shared expert. matrices:
    `GateUpMatrices`; partials: `Partials`. SPARSE: most pairs have no expert here. ROUND_X: x is not rounded yet.
    """
    N_TILES: tl.constexpr = I // _BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2  # twice the bytes: the same shared memory
    PARTS: tl.constexpr = 2 * RANGES
    SHARED_PARTS: tl.constexpr = 2 * SHARED_RANGES
    program = tl.program_id(0)
    num_shared_work = num_shared_tiles * N_TILES
    rounded_ptr = x_ptr if ROUND_X else quantised_ptr
    if program < num_shared_work * SHARED_PARTS:
        work, part = program // SHARED_PARTS, program % SHARED_PARTS
        first_out = (work % N_TILES) * _BLOCK
        shared_hidden_ptr = hidden_ptr + num_tokens * TOP_K * I
        gate, up = matrices.shared_gate, matrices.shared_up
        token, is_row = shared_rows(work // N_TILES, num_tokens, 0, SUB, SUB)
        _gate_up_range(
            rounded_ptr, token, token, is_row, gate.data, gate.scale, gate.out_scale,
            up.data, up.scale, up.out_scale, first_out, part,
            partials.sums + work.to(tl.int64) * (SHARED_PARTS * _SUMS), partials.counters + work,
            weights_ptr, shared_hidden_ptr, limit,
            D, I, SHARED_FORMAT, ROUND_X, SHARED_UNROLL, SHARED_RANGES, False, True,
        )
    else:
        program -= num_shared_work * SHARED_PARTS
        work, part = program // PARTS, program % PARTS
        tile = work // N_TILES
        first_out = (work % N_TILES) * _BLOCK
        num_pairs = num_tokens * TOP_K
        if SPARSE:
            tile = direct_tile(tile, experts_ptr, num_pairs, E)
        expert = direct_expert(tile, experts_ptr, num_pairs, E)
        if expert >= 0:
            source_ptr = x_ptr if FORMAT == 0 else rounded_ptr  # NVFP4 is weight-only
            sums_ptr = partials.sums + num_shared_work.to(tl.int64) * (SHARED_PARTS * _SUMS)
            sums_ptr += work.to(tl.int64) * (PARTS * _SUMS)
            counter_ptr = partials.counters + num_shared_work + work
            wide = expert.to(tl.int64)
            gate, up = matrices.gate, matrices.up
            data1_ptr, scale1_ptr = gate.data + wide * DATA_WORDS, gate.scale + wide * SCALE_WORDS
            data3_ptr, scale3_ptr = up.data + wide * DATA_WORDS, up.scale + wide * SCALE_WORDS
            pair, is_row = direct_rows(tile, expert, experts_ptr, num_pairs)
            _gate_up_range(
                source_ptr, pair // TOP_K, pair, is_row, data1_ptr, scale1_ptr, gate.out_scale + expert,
                data3_ptr, scale3_ptr, up.out_scale + expert, first_out, part, sums_ptr, counter_ptr,
                weights_ptr, hidden_ptr, limit,
                D, I, FORMAT, ROUND_X and FORMAT != 0, UNROLL, RANGES, True, FORMAT != 0,
            )


# ---- down ----


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _few_down_kernel(
    hidden_ptr, results, experts_ptr, down, shared, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, SPARSE: tl.constexpr,
    UNROLL: tl.constexpr, RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr, RANKS: tl.constexpr,
):
    """out [T, D]; parts bf16 [T k + T, D] by pair, then by token. `results`: `DownResults`; down, shared: `Matrix`.
    CTAs have one range each; of several, they leave fp32 partials [range, row, D].

    RANKS > 0: parts go to the ranks whose tokens they are of (`part_rows`), and nothing is summed here. The shared
    expert does not run.
    """
    N_TILES: tl.constexpr = D // _BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2
    program = tl.program_id(0)
    num_shared_programs = num_shared_tiles * N_TILES * SHARED_RANGES
    if RANKS == 0 and program < num_shared_programs:
        work, part = program // SHARED_RANGES, program % SHARED_RANGES
        tile, first_out = work // N_TILES, work % N_TILES * _BLOCK
        token, is_row = shared_rows(tile, num_tokens, 0, SUB, SUB)
        num_pairs = num_tokens * TOP_K
        shared_scale = tl.load(shared.out_scale)
        sums = product(
            hidden_ptr, (token + num_pairs,), (is_row,), shared.data, shared.scale, first_out, part,
            _BLOCK, I, SHARED_FORMAT, False, SHARED_UNROLL, SHARED_RANGES, SHARED_RANGES > 1, False,
        )
        pdl_trigger()
        outs = first_out + tl.arange(0, _BLOCK)
        if SHARED_RANGES > 1:
            first_sum = num_pairs * D * RANGES if RANGES > 1 else 0  # the routed experts' partials come first
            store_parts(sums, 1.0, (token,), (is_row,), outs, results.sums + first_sum + part * num_tokens * D, 0, D)
        else:
            store_parts(sums, shared_scale, (token + num_pairs,), (is_row,), outs, results.parts, 0, D)
        combine(
            token, is_row, first_out // _BLOCK, results, experts_ptr, down.out_scale, shared.out_scale, num_tokens,
            _BLOCK, D, E, TOP_K, RANGES, SHARED_RANGES,
        )
    else:
        program -= num_shared_programs
        work, part = program // RANGES, program % RANGES
        tile, n_tile = work // N_TILES, work % N_TILES
        num_pairs = num_tokens * TOP_K
        if SPARSE:
            tile = direct_tile(tile, experts_ptr, num_pairs, E)
        expert = direct_expert(tile, experts_ptr, num_pairs, E)
        if expert >= 0:
            wide = expert.to(tl.int64)
            data_ptr, scale_ptr = down.data + wide * DATA_WORDS, down.scale + wide * SCALE_WORDS
            pair, is_row = direct_rows(tile, expert, experts_ptr, num_pairs)
            out_scale = tl.load(down.out_scale + expert)
            sums = product(
                hidden_ptr, (pair,), (is_row,), data_ptr, scale_ptr, n_tile * _BLOCK, part,
                _BLOCK, I, FORMAT, False, UNROLL, RANGES, RANGES > 1, False,
            )
            pdl_trigger()
            outs = n_tile * _BLOCK + tl.arange(0, _BLOCK)
            if RANGES > 1:
                partials_ptr = results.sums + part * num_pairs * D
                store_parts(sums, 1.0, (pair,), (is_row,), outs, partials_ptr, num_pairs, D)
            else:
                store_parts(sums, out_scale, (pair,), (is_row,), outs, results.parts, num_pairs, D, RANKS)
            if RANKS == 0:
                pair, is_row = direct_rows(tile, expert, experts_ptr, num_pairs)  # again: not kept in registers
                combine(
                    pair // TOP_K, is_row, n_tile, results, experts_ptr, down.out_scale, shared.out_scale, num_tokens,
                    _BLOCK, D, E, TOP_K, RANGES, SHARED_RANGES,
                )
