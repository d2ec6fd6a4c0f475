"""Kernels of ops/moe: rows prepared, gate and up with the activation, down with the combination; one FP4 linear.

Every product is out^T = W x^T: weights are decoded in registers (ops/lib/fp4.py) and are the first operand; token rows
are the second, through shared memory. A program has BLOCK rows of a weight and one group's tile of 8 or 16 tokens (the
narrow form), in sub-tiles of 8: each is a product of its own, [BLOCK, 128] x [128, 8], which the compiler makes of
mma.sync, 16 x 8 x 16. Column tiles are walked in order: neither the tile nor BLOCK changes a bit, nor does the wide
form, for many tokens (kernel_wide.py). Groups are the routed experts met, and the shared expert with all
tokens (first, since its programs are longest).

Columns may be cut into ranges, by the layer's shape alone: each has a sum of its own, and sums are added first range
first. Where tokens are few, a program has one range of one matrix (SPLIT), and the last to arrive adds up; else one
program does the same additions in the same order.

Behind a `join` the compiler has a thread read four neighbours of x where an MMA wants two, and moves registers until
they are the pairs it wants. So x and hidden lie in operand order (`in_order` in kernel_products.py) where a launch
before could write them so: same sums, a tenth fewer instructions.

The kernels are not launched early (`pdl_wait` in ops/lib/pdl.py): in a whole model that was slower for one token, and
it brings nothing for many. Programs of down let the next launch begin once their product is done, not before: programs
that start early wait on whatever multiprocessors have room, and are then spread unevenly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.codecs import fake_quantize_e4m3, fake_quantize_halves
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_products import (
    IN_NATURAL,
    in_order,
    plus_each,
    product,
    two_products,
    zeros,
)
from dsv4.ops.moe.kernel_rows import (
    SUB,
    another,
    direct_tile,
    num_rows_of,
    routed_expert,
    routed_sub_rows,
    shared_sub_rows,
    tokens_of,
    with_item,
)
from dsv4.ops.moe.sort import _expert_sort_kernel


class SplitSums(NamedTuple):
    """Where the programs of a SPLIT leave their sums, and how many of them have."""

    partials: Any
    counters: Any


@jit
def prepare_row(
    x_ptr, plain_ptr, rounded_ptr, row, K: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr,
    ROUNDED: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Row of x [K] -> the same with zeros up to a multiple of 128 columns: as it is, and rounded to E4M3, whichever is
    asked for, in the order ORDER.
    """
    NUM: tl.constexpr = (K + 127) // 128
    for start in range(0, NUM, GROUPS):
        groups = start + tl.arange(0, GROUPS)[:, None]
        cols = groups * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + row * K + cols, mask=cols < K, other=0.0)
        x = in_order(x, ORDER)
        if PLAIN:
            tl.store(plain_ptr + row * (NUM * 128) + cols, x, mask=groups < NUM)
        if ROUNDED:
            tl.store(rounded_ptr + row * (NUM * 128) + cols, fake_quantize_e4m3(x), mask=groups < NUM)


@jit(do_not_specialize=("num_pairs", "num_chunks", "num_tiles", "num_sort_programs"))
def _moe_prepare_kernel(
    experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr, tile_starts_ptr,
    num_pairs, num_chunks, num_tiles, x_ptr, ordered_ptr, quantised_ptr, arrivals_ptr, num_sort_programs,
    TOP_K: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, ARRIVALS: tl.constexpr, ARRIVALS_BLOCK: tl.constexpr,
    COUNT_HERE: tl.constexpr, PLAIN: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """The sort's programs, then one for each token: x as the products take it, and its arrivals set to zero."""
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
        none_yet = tl.zeros([ARRIVALS_BLOCK], dtype=tl.int64)
        tl.store(arrivals_ptr + token * ARRIVALS + places, none_yet, mask=places < ARRIVALS)
        prepare_row(x_ptr, ordered_ptr, quantised_ptr, token, D, GROUPS, PLAIN, True, ORDER)


# ---- gate and up ----


@jit
def activate(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit); both rounded to bf16 first."""
    gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.bfloat16).to(tl.float32), -limit), limit)
    return tl.div_rn(gate, 1.0 + tl.exp(0.0 - gate)) * up


@jit
def _hidden_row(
    gate, up, gate_scale, up_scale, rows, is_row, weights_ptr, limit, HAS_WEIGHTS: tl.constexpr
):  # fmt: skip
    """Sums [outs, 8] -> hidden bf16 [8, outs]."""
    hidden = activate(gate * gate_scale, up * up_scale, limit)
    if HAS_WEIGHTS:
        # hidden = hidden * weight.unsqueeze(-1)
        hidden = hidden * tl.load(weights_ptr + rows, mask=is_row, other=0.0)[None, :]
    return tl.trans(hidden.to(tl.bfloat16))


@jit
def store_hidden(
    gates, ups, gate_scale, up_scale, rows, is_row, outs, weights_ptr, hidden_ptr, limit,
    I: tl.constexpr, HAS_WEIGHTS: tl.constexpr, QUANTISE: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Rows of hidden, in the order ORDER. QUANTISE: `outs` is one group of 128, and the rows are rounded to E4M3."""
    for sub in tl.static_range(len(rows)):
        hidden = _hidden_row(
            gates[sub], ups[sub], gate_scale, up_scale, rows[sub], is_row[sub], weights_ptr, limit, HAS_WEIGHTS
        )
        if QUANTISE:
            hidden = fake_quantize_e4m3(hidden)
        target = hidden_ptr + (rows[sub] * I)[:, None] + outs[None, :]
        tl.store(target, in_order(hidden, ORDER), mask=is_row[sub][:, None])


@jit
def _leave_sums(accs, partials_ptr):
    """A program's sums where the last to arrive finds them."""
    BLOCK: tl.constexpr = accs[0].shape[0]
    places = tl.arange(0, BLOCK)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    for sub in tl.static_range(len(accs)):
        tl.store(partials_ptr + sub * (BLOCK * SUB) + places, accs[sub])


@jit
def _collect_sums(partials_ptr, NUM: tl.constexpr, BLOCK: tl.constexpr, RANGES: tl.constexpr):
    """The sums of all ranges, first range first. Other multiprocessors wrote them: .cg reads from the cache they
    share.
    """
    places = tl.arange(0, BLOCK)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    totals = zeros(BLOCK, NUM)
    for part in tl.static_range(RANGES):
        sums = ()
        for sub in tl.static_range(NUM):
            source = partials_ptr + (part * NUM + sub) * (BLOCK * SUB) + places
            sums = with_item(sums, tl.load(source, cache_modifier=".cg"))
        totals = plus_each(totals, sums) if RANGES > 1 else sums
    return totals


@jit
def _store_rounded_pair(
    partials_ptr, gate_scale, up_scale, rows, is_row, first_out, weights_ptr, hidden_ptr, limit,
    BLOCK: tl.constexpr, I: tl.constexpr, RANGES: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Two neighbouring blocks of 64 columns of hidden, rounded to E4M3 as one group, from the sums of both."""
    NUM: tl.constexpr = len(rows)
    SUMS: tl.constexpr = RANGES * NUM * BLOCK * SUB  # of a block of one matrix
    gates, ups = _collect_sums(partials_ptr, NUM, BLOCK, RANGES), _collect_sums(partials_ptr + SUMS, NUM, BLOCK, RANGES)
    partials_ptr += 2 * SUMS
    next_gates = _collect_sums(partials_ptr, NUM, BLOCK, RANGES)
    next_ups = _collect_sums(partials_ptr + SUMS, NUM, BLOCK, RANGES)
    outs = first_out + tl.arange(0, BLOCK)
    for sub in tl.static_range(NUM):
        left = _hidden_row(
            gates[sub], ups[sub], gate_scale, up_scale, rows[sub], is_row[sub], weights_ptr, limit, HAS_WEIGHTS
        )
        right = _hidden_row(
            next_gates[sub], next_ups[sub], gate_scale, up_scale, rows[sub], is_row[sub], weights_ptr, limit,
            HAS_WEIGHTS,
        )  # fmt: skip
        left, right = fake_quantize_halves(left, right)
        target = hidden_ptr + (rows[sub] * I)[:, None] + outs[None, :]
        tl.store(target, left, mask=is_row[sub][:, None])
        tl.store(target + BLOCK, right, mask=is_row[sub][:, None])


@jit
def _gate_up_rows(
    x_ptr, x_rows, rows, is_row, data1_ptr, scale1_ptr, out1_ptr, data3_ptr, scale3_ptr, out3_ptr, first_out, part,
    partials_ptr, counter_ptr, weights_ptr, hidden_ptr, limit,
    BLOCK: tl.constexpr, D: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, QUANTISE: tl.constexpr,
    UNROLL: tl.constexpr, RANGES: tl.constexpr, SPLIT: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    ROUNDED: tl.constexpr, ORDERED: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Rows of hidden of one tile. SPLIT: this program has one range of one matrix; the last to arrive does the rest.
    ROUNDED: hidden is to be rounded to E4M3, in groups of 128 columns. A block of 64 is half of one: with SPLIT the
    last to arrive for two blocks does both, without it hidden stays as it is. ORDERED: x is in operand order; ORDER:
    hidden's.
    """
    NUM: tl.constexpr = len(rows)
    outs = first_out + tl.arange(0, BLOCK)
    gate_scale, up_scale = tl.load(out1_ptr), tl.load(out3_ptr)  # asked for before the product, used behind it
    if SPLIT:
        data_ptr, scale_ptr = data1_ptr, scale1_ptr
        if part >= RANGES:
            data_ptr, scale_ptr = data3_ptr, scale3_ptr
        accs = product(
            x_ptr, x_rows, is_row, data_ptr, scale_ptr, first_out, part % RANGES,
            BLOCK, D, FORMAT, QUANTISE, UNROLL, RANGES, True, ORDERED,
        )  # fmt: skip
        _leave_sums(accs, partials_ptr + part * (NUM * BLOCK * SUB))
        IN_PAIRS: tl.constexpr = ROUNDED and BLOCK == 64
        if IN_PAIRS:
            half = first_out // BLOCK % 2
            partials_ptr -= half * (2 * RANGES * NUM * BLOCK * SUB)
            counter_ptr -= half
        tl.debug_barrier()  # all sums of this program are written before its arrival is
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == (1 + IN_PAIRS) * 2 * RANGES - 1:
            tl.debug_barrier()
            if IN_PAIRS:
                _store_rounded_pair(
                    partials_ptr, gate_scale, up_scale, rows, is_row, first_out - half * BLOCK, weights_ptr, hidden_ptr,
                    limit, BLOCK, I, RANGES, HAS_WEIGHTS,
                )  # fmt: skip
            else:
                gates = _collect_sums(partials_ptr, NUM, BLOCK, RANGES)
                ups = _collect_sums(partials_ptr + RANGES * (NUM * BLOCK * SUB), NUM, BLOCK, RANGES)
                store_hidden(
                    gates, ups, gate_scale, up_scale, rows, is_row, outs, weights_ptr, hidden_ptr, limit,
                    I, HAS_WEIGHTS, ROUNDED and BLOCK == 128, ORDER,
                )  # fmt: skip
            tl.store(counter_ptr, 0)
    else:
        gates, ups = two_products(
            x_ptr, x_rows, is_row, data1_ptr, scale1_ptr, data3_ptr, scale3_ptr, first_out,
            BLOCK, D, FORMAT, QUANTISE, UNROLL, RANGES, ORDERED,
        )  # fmt: skip
        store_hidden(
            gates, ups, gate_scale, up_scale, rows, is_row, outs, weights_ptr, hidden_ptr, limit,
            I, HAS_WEIGHTS, ROUNDED and BLOCK == 128, ORDER,
        )  # fmt: skip


@jit
def _rounded_gate_up(
    x_ptr, tile, num_tokens, data1_ptr, scale1_ptr, out1_ptr, data3_ptr, scale3_ptr, out3_ptr, first_out, hidden_ptr,
    limit,
    D: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr, ORDERED: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """128 columns of hidden, rounded: what a program of many tokens has of the shared expert. One matrix after the
    other, 64 rows after 64, rounded at the end, and where rows lie found again for each: of so many tokens registers
    hold no more. Hidden has rows for the whole of the last tile, where those of its last token are repeated.
    """
    for half in tl.range(0, 2, num_stages=1):
        first = first_out + half * 64
        tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS)
        gates = product(
            x_ptr, tokens, is_row, data1_ptr, scale1_ptr, first, 0,
            64, D, FORMAT, False, UNROLL, RANGES, False, ORDERED, False,
        )  # fmt: skip
        tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS)
        ups = product(
            x_ptr, tokens, is_row, data3_ptr, scale3_ptr, first, 0,
            64, D, FORMAT, False, UNROLL, RANGES, False, ORDERED, False,
        )  # fmt: skip
        tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS, True)
        store_hidden(
            gates, ups, tl.load(out1_ptr), tl.load(out3_ptr), tokens, is_row, first + tl.arange(0, 64), hidden_ptr,
            hidden_ptr, limit, I, False, False, IN_NATURAL,
        )  # fmt: skip
    tl.debug_barrier()  # columns that other threads of this program have written
    tokens, is_row = shared_sub_rows(another(tile), num_tokens, ROWS, True)
    for sub in tl.static_range(len(tokens)):
        places = hidden_ptr + (tokens[sub] * I)[:, None] + (first_out + tl.arange(0, 128))[None, :]
        hidden = fake_quantize_e4m3(tl.load(places, mask=is_row[sub][:, None], other=0.0))
        tl.debug_barrier()  # all of a row is read before any of it is written
        tl.store(places, in_order(hidden, ORDER), mask=is_row[sub][:, None])


@jit
def _routed_gate_up(
    tile, expert, first_out, part, x_ptr, hidden_ptr, experts_ptr, weights_ptr, order, gate, up, partials_ptr,
    counter_ptr, limit, num_pairs,
    BLOCK: tl.constexpr, D: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr, DIRECT: tl.constexpr,
    UNROLL: tl.constexpr, RANGES: tl.constexpr, SPLIT: tl.constexpr, ORDERED: tl.constexpr, ORDER: tl.constexpr,
    ROUND_X: tl.constexpr,
):  # fmt: skip
    """A tile of a routed expert of which the first ROWS rows hold all there are."""
    wide = expert.to(tl.int64)
    data1_ptr, scale1_ptr = gate.data + wide * DATA_WORDS, gate.scale + wide * SCALE_WORDS
    data3_ptr, scale3_ptr = up.data + wide * DATA_WORDS, up.scale + wide * SCALE_WORDS
    pairs, is_row = routed_sub_rows(tile, expert, experts_ptr, order, num_pairs, ROWS, DIRECT)
    _gate_up_rows(
        x_ptr, tokens_of(pairs, TOP_K), pairs, is_row, data1_ptr, scale1_ptr, gate.out_scale + expert,
        data3_ptr, scale3_ptr, up.out_scale + expert, first_out, part, partials_ptr, counter_ptr,
        weights_ptr, hidden_ptr, limit,
        BLOCK, D, I, FORMAT, ROUND_X and FORMAT != 0, UNROLL, RANGES, SPLIT, True, FORMAT != 0, ORDERED, ORDER,
    )  # fmt: skip


@jit(do_not_specialize=("num_tokens", "num_shared_tiles"))
def _gate_up_kernel(
    x_ptr, quantised_ptr, hidden_ptr, experts_ptr, weights_ptr, order, matrices, split, limit, num_tokens,
    num_shared_tiles,
    D: tl.constexpr, I: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    SHARED_FORMAT: tl.constexpr, DATA_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, DIRECT: tl.constexpr, SPARSE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    RANGES: tl.constexpr, SHARED_RANGES: tl.constexpr, SPLIT: tl.constexpr, SHARED_BLOCK: tl.constexpr,
    ORDERED_X: tl.constexpr, ORDER: tl.constexpr, ROUND_X: tl.constexpr,
):  # fmt: skip
    """hidden bf16 [T k + T, I]: a row for each pair, then one for each token's shared expert. `order`: `PairOrder`;
    matrices: `GateUpMatrices`; split: `SplitSums`.

    DIRECT: no launch has sorted the pairs. SPARSE: most of them have no expert here. ROUND_X: no launch has rounded x.
    SPLIT: programs have one matrix and one of its ranges. Where hidden is to be rounded, it is here with SPLIT or in
    blocks of 128 (SHARED_BLOCK: the shared expert's), else by its reader.
    ORDERED_X: x is in operand order. ORDER: of NVFP4 experts' hidden, and of the shared one's where it is rounded here.
    """
    N_TILES: tl.constexpr = I // BLOCK
    SHARED_UNROLL: tl.constexpr = (UNROLL + 1) // 2  # twice the bytes: the same shared memory
    PARTS: tl.constexpr = 2 * RANGES if SPLIT else 1
    SHARED_PARTS: tl.constexpr = 2 * SHARED_RANGES if SPLIT else 1
    SHARED_TILES: tl.constexpr = I // SHARED_BLOCK
    program = tl.program_id(0)
    num_shared_work = num_shared_tiles * SHARED_TILES
    rounded_ptr = x_ptr if ROUND_X else quantised_ptr
    if program < num_shared_work * SHARED_PARTS:
        work, part = program // SHARED_PARTS, program % SHARED_PARTS
        first_out = (work % SHARED_TILES) * SHARED_BLOCK
        shared_hidden_ptr = hidden_ptr + num_tokens * TOP_K * I
        gate, up = matrices.shared_gate, matrices.shared_up
        if SHARED_BLOCK > BLOCK:
            _rounded_gate_up(
                rounded_ptr, work // SHARED_TILES, num_tokens, gate.data, gate.scale, gate.out_scale,
                up.data, up.scale, up.out_scale, first_out, shared_hidden_ptr, limit,
                D, I, SHARED_FORMAT, SHARED_ROWS, SHARED_UNROLL, SHARED_RANGES, ORDERED_X, ORDER,
            )  # fmt: skip
        else:
            tokens, is_row = shared_sub_rows(work // SHARED_TILES, num_tokens, SHARED_ROWS)
            _gate_up_rows(
                rounded_ptr, tokens, tokens, is_row, gate.data, gate.scale, gate.out_scale,
                up.data, up.scale, up.out_scale, first_out, part,
                split.partials + work.to(tl.int64) * (2 * SHARED_RANGES * SHARED_ROWS * BLOCK), split.counters + work,
                weights_ptr, shared_hidden_ptr, limit,
                BLOCK, D, I, SHARED_FORMAT, ROUND_X, SHARED_UNROLL, SHARED_RANGES, SPLIT, False, True,
                ORDERED_X, ORDER if BLOCK == 128 else IN_NATURAL,
            )  # fmt: skip
    else:
        program -= num_shared_work * SHARED_PARTS
        work, part = program // PARTS, program % PARTS
        tile = work // N_TILES
        first_out = (work % N_TILES) * BLOCK
        num_pairs = num_tokens * TOP_K
        if SPARSE:
            tile = direct_tile(tile, experts_ptr, num_pairs, E)
        expert = routed_expert(tile, experts_ptr, order, num_pairs, E, ROWS, DIRECT)
        if expert >= 0:
            source_ptr = x_ptr if FORMAT == 0 else rounded_ptr  # NVFP4 is weight-only
            sums_ptr = split.partials + num_shared_work.to(tl.int64) * (2 * SHARED_RANGES * SHARED_ROWS * BLOCK)
            sums_ptr += work.to(tl.int64) * (2 * RANGES * ROWS * BLOCK)
            counter_ptr = split.counters + num_shared_work + work
            HALF: tl.constexpr = max(ROWS // 2, SUB)
            if num_rows_of(tile, expert, order, ROWS, DIRECT) > HALF:
                _routed_gate_up(
                    tile, expert, first_out, part, source_ptr, hidden_ptr, experts_ptr, weights_ptr, order,
                    matrices.gate, matrices.up, sums_ptr, counter_ptr, limit, num_pairs,
                    BLOCK, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, ROWS, DIRECT, UNROLL, RANGES, SPLIT,
                    ORDERED_X, ORDER if FORMAT == 0 else IN_NATURAL, ROUND_X,
                )  # fmt: skip
            else:
                _routed_gate_up(
                    tile, expert, first_out, part, source_ptr, hidden_ptr, experts_ptr, weights_ptr, order,
                    matrices.gate, matrices.up, sums_ptr, counter_ptr, limit, num_pairs,
                    BLOCK, D, I, TOP_K, FORMAT, DATA_WORDS, SCALE_WORDS, HALF, DIRECT, UNROLL, RANGES, SPLIT,
                    ORDERED_X, ORDER if FORMAT == 0 else IN_NATURAL, ROUND_X,
                )  # fmt: skip


# ---- one linear ----


@jit(do_not_specialize=("num_rows",))
def _fp4_linear_kernel(
    x_ptr, data_ptr, scale_ptr, out_scale_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    N_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    rows, is_row = shared_sub_rows(tl.program_id(0) // N_TILES, num_rows, ROWS)
    first_out = (tl.program_id(0) % N_TILES) * BLOCK
    pdl_trigger()
    accs = product(
        x_ptr, rows, is_row, data_ptr, scale_ptr, first_out, 0, BLOCK, K, FORMAT, FORMAT != 0, UNROLL, 1, False, False
    )
    factor = tl.load(out_scale_ptr)
    outs = first_out + tl.arange(0, BLOCK)
    for sub in tl.static_range(len(rows)):
        target = out_ptr + (rows[sub] * N)[None, :] + outs[:, None]
        mask = is_row[sub][None, :] & (outs < N)[:, None]
        tl.store(target, (accs[sub] * factor).to(out_ptr.dtype.element_ty), mask=mask)
