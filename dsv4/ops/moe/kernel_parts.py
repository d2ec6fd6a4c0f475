"""Parts of ops/moe: what each expert adds to a token, and their sum."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import jit, tl


class DownResults(NamedTuple):
    """What the second product writes: parts (or addresses of ranks' buffers), split-K partials, arrivals, and out."""

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
def store_parts(accs, scale, rows, is_row, outs, parts_ptr, num_pairs, D: tl.constexpr, RANKS: tl.constexpr = 0):
    """bf16 rows of `parts`, complete; or fp32 ones, sums of one range before they are scaled."""
    for sub in tl.static_range(len(rows)):
        row_ptr = part_rows(rows[sub], is_row[sub], parts_ptr, num_pairs, D, RANKS)
        part = tl.trans((accs[sub] * scale).to(row_ptr.dtype.scalar.element_ty))
        tl.store(row_ptr[:, None] + outs[None, :], part, mask=is_row[sub][:, None])


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
):
    """COLS columns of out: the sum of all parts, in the order of experts, the shared one last."""
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
        # their sums lie after the pairs'
        first_sum = num_pairs * D * RANGES if RANGES > 1 else 0
        total += _load_part(
            tokens, is_last, shared_scale, cols, parts_ptr, sums_ptr + first_sum, num_tokens, D, SHARED_RANGES
        )
    else:
        total += _load_part(num_pairs + tokens, is_last, 1.0, cols, parts_ptr, sums_ptr, num_tokens, D, 1)
    tl.store(out_ptr + (tokens * D)[:, None] + cols, total.to(tl.bfloat16), mask=is_last[:, None])


@jit
def combine(
    tokens, is_row, n_tile, results, experts_ptr, scale_ptr, shared_scale_ptr, num_tokens,
    BLOCK: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RANGES: tl.constexpr,
    SHARED_RANGES: tl.constexpr, SHARED_PIECES: tl.constexpr = 1, VALUES: tl.constexpr = 2048,
):
    """Where this CTA has brought the last part of tokens [R]: out = the sum of all parts, VALUES at a time.

    A token's part of a block arrives once for each range of each expert it uses and once for each of the shared one,
    which may bring the block in pieces. Which CTA comes last is the GPU's choice; what is summed, and in which order,
    is not. The last one sets the counter back.
    """
    N_TILES: tl.constexpr = D // BLOCK
    first_out = n_tile * BLOCK
    last = tl.zeros_like(tokens) + (SHARED_RANGES * SHARED_PIECES - 1)
    for place in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + place, mask=is_row, other=-1)
        last += ((expert >= 0) & (expert < E)).to(tl.int32) * RANGES
    counters = results.arrivals + tokens * N_TILES + n_tile
    tl.debug_barrier()  # all parts of this CTA are written before one arrival is
    arrived = tl.atomic_add(counters, 1, mask=is_row, sem="acq_rel", scope="gpu")
    is_last = is_row & (arrived == last)
    if tl.max(is_last.to(tl.int32), 0) > 0:
        tl.debug_barrier()
        R: tl.constexpr = tokens.shape[0]
        COLS: tl.constexpr = min(BLOCK, max(32, VALUES // R))  # what registers hold
        if COLS == BLOCK:
            sum_parts(
                tokens, is_last, first_out, results.parts, results.sums, experts_ptr, results.out, scale_ptr,
                shared_scale_ptr, num_tokens, COLS, D, E, TOP_K, RANGES, SHARED_RANGES,
            )
        else:
            for first_col in tl.range(first_out, first_out + BLOCK, COLS, num_stages=1):
                sum_parts(
                    tokens, is_last, first_col, results.parts, results.sums, experts_ptr, results.out, scale_ptr,
                    shared_scale_ptr, num_tokens, COLS, D, E, TOP_K, RANGES, SHARED_RANGES,
                )
        tl.store(counters, tl.zeros([R], dtype=tl.int64), mask=is_last)


@jit(do_not_specialize=("num_tokens",))
def _sum_parts_kernel(
    parts_ptr, experts_ptr, out_ptr, num_tokens,
    D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """`sum_parts` as a launch of its own: out [T, D] of parts by pair, then by token, of the shared expert. Parts of
    pairs without an expert are not read.
    """
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sum_parts(
        tokens, tokens < num_tokens, tl.program_id(1) * COLS, parts_ptr, parts_ptr, experts_ptr, out_ptr, parts_ptr,
        parts_ptr, num_tokens, COLS, D, E, TOP_K, 1, 1,
    )


@jit
def _fold_parts_kernel(parts_ptr, shared_ptr, out_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_col = cols < D
    # (ordered_sum(parts.float(), 1) + shared.float()).to(bf16), as `sum_parts` in kernel_down.py adds
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + place) * D + cols, mask=is_col, other=0.0).to(tl.float32)
    total += tl.load(shared_ptr + token * D + cols, mask=is_col, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + cols, total.to(tl.bfloat16), mask=is_col)
