"""The second product of ops/moe and the sum of a token's parts. See kernel_gate_up.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_products import product
from dsv4.ops.moe.kernel_rows import (
    SUB,
    another,
    direct_tile,
    num_rows_of,
    plus,
    routed_expert,
    routed_rows,
    routed_sub_rows,
    shared_rows,
    shared_sub_rows,
)

_SUMMED = tl.constexpr(2048)  # values that the narrow form sums at a time; 4,096 take 126 registers, not 96


class DownResults(NamedTuple):
    """What the second product writes: parts (ranks': where), sums of ranges, arrivals of parts, and their sum."""

    parts: Any
    sums: Any
    arrivals: Any
    out: Any


@jit
def part_rows(rows, is_row, parts_ptr, num_pairs, D: tl.constexpr, RANKS: tl.constexpr):
    """Where rows of `parts` begin. RANKS > 0: at `parts_ptr` are the addresses of as many buffers, which hold the pairs
    in equal shares, bf16.
    """
    if RANKS == 0:
        return parts_ptr + rows * D
    else:
        share = num_pairs // RANKS
        rank = rows // share
        base = tl.load(parts_ptr + rank, mask=is_row, other=0).to(tl.pointer_type(tl.bfloat16))
        return tl.multiple_of(base, [16]) + (rows - rank * share) * D


@jit
def store_parts(
    accs, scale, rows, is_row, outs, parts_ptr, num_pairs, D: tl.constexpr, RANKS: tl.constexpr = 0
):  # fmt: skip
    """bf16 rows of `parts`, complete; or fp32 ones, sums of one range before they are scaled."""
    for sub in tl.static_range(len(rows)):
        row_ptr = part_rows(rows[sub], is_row[sub], parts_ptr, num_pairs, D, RANKS)
        part = tl.trans((accs[sub] * scale).to(row_ptr.dtype.scalar.element_ty))
        tl.store(row_ptr[:, None] + outs[None, :], part, mask=is_row[sub][:, None])


@jit
def _store_halves(
    halves, scale, rows, is_row, first_out, parts_ptr, num_pairs,
    D: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of `parts`: sums, or two halves of them."""
    if PAIR:
        outs = first_out + tl.arange(0, BLOCK // 2)
        store_parts(halves[0], scale, rows, is_row, outs, parts_ptr, num_pairs, D, RANKS)
        store_parts(halves[1], scale, rows, is_row, outs + BLOCK // 2, parts_ptr, num_pairs, D, RANKS)
    else:
        store_parts(halves, scale, rows, is_row, first_out + tl.arange(0, BLOCK), parts_ptr, num_pairs, D, RANKS)


@jit
def _load_part(row, mask, scale, cols, parts_ptr, sums_ptr, num_rows, D: tl.constexpr, RANGES: tl.constexpr):
    """One row of `parts` for each token, as fp32. RANGES > 1: made here of the ranges' sums, first range first."""
    places = (row * D)[:, None] + cols
    if RANGES > 1:
        total = tl.zeros(places.shape, dtype=tl.float32)
        for part in tl.static_range(RANGES):
            source = sums_ptr + part * num_rows * D + places
            total += tl.load(source, mask=mask[:, None], other=0.0, cache_modifier=".cg")
        return (total * scale).to(tl.bfloat16).to(tl.float32)
    else:
        return tl.load(parts_ptr + places, mask=mask[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)


@jit
def sum_parts(
    tokens, is_last, first_col, parts_ptr, sums_ptr, experts_ptr, out_ptr, scale_ptr, shared_scale_ptr, num_tokens,
    COLS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RANGES: tl.constexpr,
    SHARED_RANGES: tl.constexpr,
):  # fmt: skip
    """COLS columns of out: the sum of all parts."""
    num_pairs = num_tokens * TOP_K
    cols = (first_col + tl.arange(0, COLS))[None, :]
    total = tl.zeros([tokens.shape[0], COLS], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_last, other=-1)
        is_part = is_last & (expert >= 0) & (expert < E)
        scale = 1.0
        if RANGES > 1:
            scale = tl.load(scale_ptr + expert, mask=is_part, other=0.0)[:, None]
        total += _load_part(tokens * TOP_K + place, is_part, scale, cols, parts_ptr, sums_ptr, num_pairs, D, RANGES)
    shared_scale = tl.load(shared_scale_ptr)
    if SHARED_RANGES > 1:
        # their sums lie behind the pairs'
        behind = num_pairs * D * RANGES if RANGES > 1 else 0
        total += _load_part(
            tokens, is_last, shared_scale, cols, parts_ptr, sums_ptr + behind, num_tokens, D, SHARED_RANGES
        )
    else:
        total += _load_part(num_pairs + tokens, is_last, 1.0, cols, parts_ptr, sums_ptr, num_tokens, D, 1)
    tl.store(out_ptr + (tokens * D)[:, None] + cols, total.to(tl.bfloat16), mask=is_last[:, None])


@jit
def combine(
    tokens, is_row, n_tile, parts_ptr, sums_ptr, arrivals_ptr, experts_ptr, out_ptr, scale_ptr,
    shared_scale_ptr, num_tokens,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RANGES: tl.constexpr,
    SHARED_RANGES: tl.constexpr, SHARED_PIECES: tl.constexpr = 1, VALUES: tl.constexpr = 4096,
):  # fmt: skip
    """For those of the tokens [R] of which this program has brought the last part: out = the sum of all parts.

    A token's part of a block arrives once for each range of each expert it uses and once for each of the shared one,
    which may bring the block in pieces.
    Who comes last is the GPU's choice; what is summed, and in which order, is not. The last one sets the counter back.
    """
    N_TILES: tl.constexpr = D // BLOCK
    first_out = n_tile * BLOCK
    last = tl.zeros_like(tokens) + (SHARED_RANGES * SHARED_PIECES - 1)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_row, other=-1)
        last += ((expert >= 0) & (expert < E)).to(tl.int32) * RANGES
    counters = arrivals_ptr + tokens * N_TILES + n_tile
    tl.debug_barrier()  # all parts of this program are written before one arrival is
    arrived = tl.atomic_add(counters, 1, mask=is_row, sem="acq_rel", scope="gpu")
    is_last = is_row & (arrived == last)
    if tl.max(is_last.to(tl.int32), 0) > 0:
        tl.debug_barrier()
        R: tl.constexpr = tokens.shape[0]
        COLS: tl.constexpr = min(BLOCK, max(32, VALUES // R))  # what registers hold
        if COLS == BLOCK:
            sum_parts(
                tokens, is_last, first_out, parts_ptr, sums_ptr, experts_ptr, out_ptr, scale_ptr, shared_scale_ptr,
                num_tokens, COLS, D, E, TOP_K, RANGES, SHARED_RANGES,
            )  # fmt: skip
        else:
            for first_col in tl.range(first_out, first_out + BLOCK, COLS, num_stages=1):
                sum_parts(
                    tokens, is_last, first_col, parts_ptr, sums_ptr, experts_ptr, out_ptr, scale_ptr, shared_scale_ptr,
                    num_tokens, COLS, D, E, TOP_K, RANGES, SHARED_RANGES,
                )  # fmt: skip
        tl.store(counters, tl.zeros([R], dtype=tl.int64), mask=is_last)


@jit
def _routed_down(
    tile, expert, n_tile, part, hidden_ptr, results, experts_ptr, order, down, shared_scale_ptr, num_tokens,
    BLOCK: tl.constexpr, D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, DIRECT: tl.constexpr,
    UNROLL: tl.constexpr, QUANTISE: tl.constexpr, RANGES: tl.constexpr, SHARED_PARTS: tl.constexpr,
    SPLIT: tl.constexpr, ORDERED: tl.constexpr, PAIR: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    IS_SPLIT: tl.constexpr = SPLIT and RANGES > 1
    num_pairs = num_tokens * TOP_K
    wide = expert.to(tl.int64)
    data_ptr, scale_ptr = down.data + wide * DATA_WORDS, down.scale + wide * SCALE_WORDS
    pairs, is_row = routed_sub_rows(tile, expert, experts_ptr, order, num_pairs, ROWS, DIRECT)
    out_scale = tl.load(down.out_scale + expert)
    halves = product(
        hidden_ptr, pairs, is_row, data_ptr, scale_ptr, n_tile * BLOCK, part,
        BLOCK // (1 + PAIR), I, FORMAT, QUANTISE and FORMAT != 0, UNROLL, RANGES, IS_SPLIT, ORDERED and FORMAT == 0,
        True, PAIR,
    )  # fmt: skip
    pdl_trigger()
    first_out = n_tile * BLOCK
    if IS_SPLIT:
        sums_ptr = results.sums + part * num_pairs * D
        _store_halves(halves, 1.0, pairs, is_row, first_out, sums_ptr, num_pairs, D, BLOCK, PAIR, 0)
    else:
        _store_halves(halves, out_scale, pairs, is_row, first_out, results.parts, num_pairs, D, BLOCK, PAIR, RANKS)
    if RANKS == 0:
        pair, has_row = routed_rows(tile, expert, experts_ptr, order, num_pairs, 0, ROWS, DIRECT)
        combine(
            pair // TOP_K, has_row, n_tile, results.parts, results.sums, results.arrivals, experts_ptr, results.out,
            down.out_scale, shared_scale_ptr, num_tokens,
            BLOCK, D, E, TOP_K, RANGES if IS_SPLIT else 1, SHARED_PARTS, 1 + PAIR, _SUMMED,
        )  # fmt: skip


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _down_kernel(
    hidden_ptr, results, experts_ptr, order, down, shared, num_tokens, num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, DIRECT: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr, SPLIT: tl.constexpr, QUANTISE: tl.constexpr,
    SHARED_QUANTISE: tl.constexpr, ORDERED: tl.constexpr, PAIR: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """out [T, D]; parts bf16 [T k + T, D] by pair, then by token. `results`: `DownResults`; order: `PairOrder`; down,
    shared: `Matrix`. QUANTISE, SHARED_QUANTISE: hidden is still to be rounded to E4M3. ORDERED: hidden is in operand
    order, but for what is rounded here.

    SPLIT: where a matrix has several ranges, programs have one each and leave fp32 sums [range, row, D].

    PAIR: a program of a routed expert has the halves of its rows one after the other in one loop, so that fewer
    programs begin and end; one of the shared expert, which reads more, has a half.

    RANKS > 0: parts go to the ranks whose tokens they are of (`part_rows`), and nobody sums here. The shared expert
    does not run.
    """
    N_TILES: tl.constexpr = D // BLOCK
    AT_ONCE: tl.constexpr = BLOCK // (1 + PAIR)
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2
    PARTS: tl.constexpr = RANGES if SPLIT else 1
    SHARED_PARTS: tl.constexpr = SHARED_RANGES if SPLIT else 1
    program = tl.program_id(0)
    num_shared_programs = num_shared_tiles * (D // AT_ONCE) * SHARED_PARTS
    if RANKS == 0 and program < num_shared_programs:
        work, part = program // SHARED_PARTS, program % SHARED_PARTS
        tile, first_out = work // (D // AT_ONCE), work % (D // AT_ONCE) * AT_ONCE
        IS_ORDERED: tl.constexpr = ORDERED and not SHARED_QUANTISE
        PADDED: tl.constexpr = IS_ORDERED and SHARED_PARTS == 1  # `hidden` and `parts` have rows for whole tiles
        tokens, is_row = shared_sub_rows(tile, num_tokens, SHARED_ROWS, PADDED)
        num_pairs = num_tokens * TOP_K
        rows = plus(tokens, num_pairs)
        shared_scale = tl.load(shared.out_scale)
        accs = product(
            hidden_ptr, rows, is_row, shared.data, shared.scale, first_out, part,
            AT_ONCE, I, SHARED_FORMAT, SHARED_QUANTISE, SHARED_UNROLL, SHARED_RANGES, SHARED_PARTS > 1,
            IS_ORDERED, not PADDED,
        )  # fmt: skip
        pdl_trigger()
        if PADDED:
            tokens, is_row = shared_sub_rows(another(tile), num_tokens, SHARED_ROWS, PADDED)
            rows = plus(tokens, num_pairs)
        outs = first_out + tl.arange(0, AT_ONCE)
        if SHARED_PARTS > 1:
            behind = num_pairs * D * PARTS if PARTS > 1 else 0
            store_parts(accs, 1.0, tokens, is_row, outs, results.sums + behind + part * num_tokens * D, 0, D)
        else:
            store_parts(accs, shared_scale, rows, is_row, outs, results.parts, 0, D)
        token, has_row = shared_rows(tile, num_tokens, 0, SHARED_ROWS, SHARED_ROWS)
        combine(
            token, has_row, first_out // BLOCK, results.parts, results.sums, results.arrivals, experts_ptr, results.out,
            down.out_scale, shared.out_scale, num_tokens,
            BLOCK, D, E, TOP_K, PARTS, SHARED_PARTS, 1 + PAIR, _SUMMED,
        )  # fmt: skip
    else:
        program -= num_shared_programs
        work, part = program // PARTS, program % PARTS
        tile, n_tile = work // N_TILES, work % N_TILES
        if SPARSE:
            tile = direct_tile(tile, experts_ptr, num_tokens * TOP_K, E)
        expert = routed_expert(tile, experts_ptr, order, num_tokens * TOP_K, E, ROWS, DIRECT)
        if expert >= 0:
            HALF: tl.constexpr = max(ROWS // 2, SUB)
            if num_rows_of(tile, expert, order, ROWS, DIRECT) > HALF:
                _routed_down(
                    tile, expert, n_tile, part, hidden_ptr, results, experts_ptr, order, down, shared.out_scale,
                    num_tokens,
                    BLOCK, D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, DIRECT, UNROLL, QUANTISE,
                    RANGES, SHARED_PARTS, SPLIT, ORDERED, PAIR, RANKS,
                )  # fmt: skip
            else:
                _routed_down(
                    tile, expert, n_tile, part, hidden_ptr, results, experts_ptr, order, down, shared.out_scale,
                    num_tokens,
                    BLOCK, D, I, E, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, HALF, DIRECT, UNROLL, QUANTISE,
                    RANGES, SHARED_PARTS, SPLIT, ORDERED, PAIR, RANKS,
                )  # fmt: skip
