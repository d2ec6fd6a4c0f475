"""The kernels of ops/attention: one tile of 64 keys at a time, folded from the first to the last.

A tile has its own highest logit, its own sum and its own product P V, which begins at zero. A run of RUN tiles has the
left fold of its tiles (`_fold`), and a query that of its runs. So it does not matter to the bits what a program takes:
a query of one run; or a run, or a tile, and `_combine_kernel` folds what they stored. P V is folded some columns at a
time. The order of tiles is that of the keys: window, oldest first, then entries.

Four things are written for the compiler (Triton 3.6). The products q K^T stand in branches that are always taken:
where the result of a product visibly reaches another product, both warpgroups are given all rows, and every product is
computed twice. The bound of the loop implies their condition: with a branch left in the machine code the next tile's
rows are loaded before the products, whose fences then wait for them. Rows wait in registers as words
(kernel_rows.py). And only the first AHEAD groups of a row are fetched a tile ahead; the others are on their way
while those are decoded and multiplied. Decoded groups lie side by side in matrices of WIDE groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.attention.kernel_rows import (
    KEYS,
    count_tiles,
    decode_groups,
    load_groups,
    scales_of,
    tile_ids,
    tile_links,
    tile_rows,
)
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import cos_sin
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait
from dsv4.ops.rows.kernel_rope import rotate_pairs

RUN = 18  # tiles folded before runs are: a window of 128 and 1,024 entries, so that no query with picks has two runs
# a program takes a query of one run, a run, a tile; or (kernel_columns.py) columns of a query of one run; or
# (kernel_pairs.py) query after query, two tiles at a time
WHOLE, BY_RUN, BY_TILE, BY_COLUMNS, IN_PAIRS = range(5)
_KEYS = tl.constexpr(KEYS)
_BY_RUN, _BY_TILE = tl.constexpr(BY_RUN), tl.constexpr(BY_TILE)
_GROUP = tl.constexpr(64)
_NONE = tl.constexpr(-1.0e30)  # the highest logit of no keys: finite, so that differences are never NaN
_LOG2_E = tl.constexpr(1.4426950408889634)


class QueryArguments(NamedTuple):
    """Queries [T, H, d] with contiguous columns."""

    data: Any
    token_stride: int
    head_stride: int


class TableArguments(NamedTuple):
    """The sink of every head, and rope frequencies."""

    sink: Any
    freqs: Any


class TokenArguments(NamedTuple):
    """Of a `TokenBatch`."""

    positions: Any
    slots: Any
    chunk_starts: Any


class StateArguments(NamedTuple):
    """States that programs store, [N, HEADS] each: P V (of d columns), highest logit, sum."""

    part: Any
    highest: Any
    total: Any


@jit
def _probabilities(logits, exists):
    """Logits (base 2) [H, KEYS] -> their highest; 2^(l - highest); its sum, that of each half of the keys first."""
    logits = tl.where((exists != 0)[None, :], logits, float("-inf"))
    highest = tl.maximum(tl.max(logits, axis=1), _NONE)
    weight = tl.exp2(logits - highest[:, None])  # a NaN stays one
    halves = tl.sum(tl.reshape(weight, [weight.shape[0], 2, _KEYS // 2]), axis=2)
    return highest, weight, tl.sum(halves, axis=1)


@jit
def _fold(out, shrink, part, share):
    """out * shrink + part * share, in two roundings everywhere."""
    return tl.fma(out, tl.broadcast_to(shrink[:, None], out.shape), part * share[:, None])


@jit
def _finish(out, column_ptr, stride_oh, total, head_mask, position, freqs_ptr, INVERSE_ROPE: tl.constexpr):
    """out / total in bf16, its last 64 columns rotated back if asked for, stored."""
    cols = tl.arange(0, out.shape[1])
    # out = (summed / total).to(bf16)
    out = (out * total[:, None]).to(tl.bfloat16)
    if INVERSE_ROPE:
        # rope_ref(out, positions, freqs, inverse=True)
        pairs = tl.arange(0, out.shape[1] // 2) - (out.shape[1] - _GROUP) // 2
        cos, sin = cos_sin(position.to(tl.float32) * tl.load(freqs_ptr + pairs, mask=pairs >= 0, other=0.0))
        rotated = rotate_pairs(out.to(tl.float32), cos, sin * -1.0).to(tl.bfloat16)
        out = tl.where((cols >= out.shape[1] - _GROUP)[None, :], rotated, out)
    tl.store(column_ptr + tl.arange(0, out.shape[0])[:, None] * stride_oh + cols[None, :], out, mask=head_mask[:, None])


@jit
def _one_over_total(highest, total, heads, head_mask, sink_ptr):
    """1 / (sum + e^(sink - highest)), or 0 without keys: the highest of them has a weight above 1/2."""
    sink = tl.load(sink_ptr + heads, mask=head_mask, other=0.0).to(tl.float32)
    # inverse = 1 / (total + exp(sink - highest))
    inverse = tl.div_rn(total * 0.0 + 1.0, total + tl.exp2(sink * _LOG2_E - highest))
    return tl.where(total == 0.0, 0.0, inverse)


@jit
def _store_part(states, first_row, highest, total, out):
    """The state of a tile or a run."""
    COLS: tl.constexpr = out[0].shape[1]
    rows = first_row + tl.arange(0, out[0].shape[0])
    cols = tl.arange(0, COLS)
    tl.store(states.highest + rows, highest)
    tl.store(states.total + rows, total)
    for matrix in tl.static_range(len(out)):
        tl.store(states.part + rows[:, None] * (len(out) * COLS) + matrix * COLS + cols[None, :], out[matrix])


@jit
def _store_result(first_out, stride_oh, highest, total, out, heads, head_mask, sink_ptr, position, freqs_ptr,
                  INVERSE_ROPE: tl.constexpr):
    COLS: tl.constexpr = out[0].shape[1]
    inverse = _one_over_total(highest, total, heads, head_mask, sink_ptr)
    for matrix in tl.static_range(len(out)):
        _finish(
            out[matrix], first_out + matrix * COLS, stride_oh, inverse, head_mask, position, freqs_ptr,
            INVERSE_ROPE and matrix == len(out) - 1,
        )


@jit
def _empty(MATRICES: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr):
    """The state of no keys: highest, total, out."""
    out = ()
    for _ in tl.static_range(MATRICES):
        out += (tl.zeros([HEADS, COLS], tl.float32),)  # type: ignore[assignment]
    return tl.full([HEADS], _NONE, tl.float32), tl.zeros([HEADS], tl.float32), out


@jit
def load_query(queries, token, heads, head_mask, cols, MATRICES: tl.constexpr):
    """q[token, heads], in MATRICES of [HEADS, COLS], whose columns are `cols` of each."""
    q = ()
    for matrix in tl.static_range(MATRICES):
        q_rows = queries.data + token.to(tl.int64) * queries.token_stride + heads[:, None] * queries.head_stride
        q_ptrs = q_rows + matrix * cols.shape[0] + cols[None, :]
        q += (tl.load(q_ptrs, mask=head_mask[:, None], other=0.0),)  # type: ignore[assignment]
    return q


@jit
def _decode_keys(words, scale_word, MATRICES: tl.constexpr, WIDE: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Rows of a tile as bf16, in MATRICES of [KEYS, COLS]."""
    keys = ()
    for matrix in tl.static_range(MATRICES):
        some = words[matrix * WIDE :]
        scales = scales_of(scale_word, matrix * WIDE, WIDE)
        keys += (decode_groups(some, scales, matrix * WIDE, WIDE, NUM_GROUPS),)  # type: ignore[assignment]
    return keys


@jit
def _pv_accumulate(out, weight, keys, shrink, share):
    """out = out * shrink + (weight @ v) * share, matrix by matrix."""
    folded = ()
    for matrix in tl.static_range(len(out)):
        folded += (_fold(out[matrix], shrink, tl.dot(weight, keys[matrix]), share),)  # type: ignore[assignment]
    return folded


@jit(do_not_specialize=("stride_rps", "stride_pt", "stride_bs", "num_heads", "num_slices"))
def _attend_kernel(
    queries, out_ptr, num_heads, scale, tables, tokens, rows, ring, ring_positions_ptr, stride_rps, pages, picks_ptr,
    stride_pt, block_table_ptr, stride_bs, states, num_slices,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, RING_LEN: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    INVERSE_ROPE: tl.constexpr, RUN: tl.constexpr, CUT: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A query's, a run's or a tile's keys (CUT), for HEADS heads. queries: `QueryArguments`; tables: `TableArguments`;
    tokens: `TokenArguments`; rows, ring, pages: `RowTarget`; states: `StateArguments`, where parts go.
    """
    pdl_wait()
    pdl_trigger()
    token = tl.program_id(0) // HEAD_BLOCKS
    heads = tl.program_id(0) % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    head_mask = heads < num_heads
    position = tl.load(tokens.positions + token).to(tl.int32)
    slot = tl.load(tokens.slots + token).to(tl.int32)
    chunk_start = tl.load(tokens.chunk_starts + token).to(tl.int32)
    num_tiles = count_tiles(position, slot, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    base, start, stop = num_tiles * 0, num_tiles * 0, num_tiles
    work = num_tiles  # more than zero in the loop
    if CUT == _BY_TILE:
        start = tl.program_id(1)
        stop = start + 1
        if start >= num_tiles:
            return
    if CUT == _BY_RUN:
        base = tl.program_id(1) * RUN
        num_tiles = tl.minimum(num_tiles, base + RUN)  # of this run and those before
        stop = num_tiles - base
        work = stop
        if (stop <= 0) & (base > 0):
            return
    first = base + start
    DIM: tl.constexpr = (NUM_GROUPS + 1) * _GROUP
    MATRICES: tl.constexpr = (NUM_GROUPS + 1) // WIDE
    COLS: tl.constexpr = WIDE * _GROUP
    AHEAD_GROUPS: tl.constexpr = NUM_GROUPS + 2 if CUT == _BY_TILE else AHEAD
    cols = tl.arange(0, COLS)

    ids = tile_ids(first, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    q = load_query(queries, token, heads, head_mask, cols, MATRICES)  # MATRICES of [HEADS, COLS]
    highest, total, out = _empty(MATRICES, HEADS, COLS)  # [HEADS], [HEADS], MATRICES of [HEADS, COLS]
    links = tile_links(
        first, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs, HAS_ENTRIES, RATIO,
        WINDOW, RING_LEN,
    )
    words_ptr, scale_word, exists, is_key = tile_rows(
        first, ids, links, token, position, slot, chunk_start, rows, ring, pages, HAS_ENTRIES, RATIO, WINDOW, RING_LEN,
        ALIGNED,
    )
    ahead = load_groups(words_ptr, exists, 0, AHEAD_GROUPS, NUM_GROUPS)  # of [KEYS, 16] each
    if CUT != _BY_TILE:
        # every load is issued a tile before its result is needed: picks three tiles ahead, links two, rows one
        tile = first + 1
        ids = tile_ids(tile, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
        links = tile_links(
            tile, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs, HAS_ENTRIES,
            RATIO, WINDOW, RING_LEN,
        )
        tile = first + 2
        next_ids = tile_ids(
            tile, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW
        )
    for step in range(start, stop):
        tile = base + step
        if CUT != _BY_TILE:
            # loaded again, so that nothing made of them waits in a register
            position = tl.load(tokens.positions + token, volatile=True).to(tl.int32)
            slot = tl.load(tokens.slots + token, volatile=True).to(tl.int32)
            chunk_start = tl.load(tokens.chunk_starts + token, volatile=True).to(tl.int32)
        words = ahead + load_groups(words_ptr, exists, AHEAD_GROUPS, NUM_GROUPS + 2, NUM_GROUPS)
        keys = _decode_keys(words, scale_word, MATRICES, WIDE, NUM_GROUPS)  # MATRICES of [KEYS, COLS]
        weight = tl.zeros([HEADS, _KEYS], tl.bfloat16)
        shrink = tl.zeros([HEADS], tl.float32)
        share = shrink
        is_now = is_key
        if CUT != _BY_TILE:
            words_ptr, scale_word, exists, is_key = tile_rows(
                tile + 1, ids, links, token, position, slot, chunk_start, rows, ring, pages, HAS_ENTRIES, RATIO, WINDOW,
                RING_LEN, ALIGNED,
            )
            ahead = load_groups(words_ptr, exists, 0, AHEAD_GROUPS, NUM_GROUPS)
            ids = next_ids
            links = tile_links(
                tile + 2, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs,
                HAS_ENTRIES, RATIO, WINDOW, RING_LEN,
            )
            next_ids = tile_ids(
                tile + 3, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW
            )
        if work > 0:
            # logit = (q @ k.T) * scale
            logits = tl.zeros([HEADS, _KEYS], tl.float32)  # [HEADS, KEYS]
            for matrix in tl.static_range(MATRICES):
                if work > -1 - matrix:
                    logits = tl.dot(q[matrix], tl.trans(keys[matrix]), logits)
            # weight = exp2(logit - logit.amax(-1)); total = weight.sum(-1)
            tile_highest, wide_weight, tile_total = _probabilities(logits * scale, is_now)
            new_highest = tl.maximum(highest, tile_highest)
            shrink = tl.exp2(highest - new_highest)
            share = tl.exp2(tile_highest - new_highest)
            highest = new_highest
            total = total * shrink + tile_total * share
            weight = wide_weight.to(tl.bfloat16)
        # part = weight @ v; out = out * shrink + part * share
        out = _pv_accumulate(out, weight, keys, shrink, share)

    part = (tl.program_id(0).to(tl.int64) * num_slices + tl.program_id(1)) * HEADS
    first_out = out_ptr + (token.to(tl.int64) * num_heads + tl.program_id(0) % HEAD_BLOCKS * HEADS) * DIM
    if CUT == _BY_TILE:
        _store_part(states, part, highest, total, out)
        return
    if CUT == _BY_RUN:  # noqa: SIM102
        # from the position again, so that the query's number of tiles need not wait in a register
        if count_tiles(position, slot, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW) > RUN:
            _store_part(states, part, highest, total, out)
            return
    _store_result(
        first_out, DIM, highest, total, out, heads, head_mask, tables.sink, position, tables.freqs, INVERSE_ROPE
    )


