"""Attention of many queries, in two launches: what every key of a tile weighs, and the values summed by these weights.

A tile's highest logit, sum and weights (bf16) depend on the tile alone, so a program may take any tiles of a query.
With them go the places of the tile's rows. The second launch needs no queries: a program sums some columns of the
values, tile by tile and run by run, in the order of `kernel_attend.py`. Both launches decode the rows they read; for
it neither holds all 512 columns of accumulators, so that several programs share a multiprocessor, and decode of one
goes on beside products of another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.attention.kernel_attend import (
    _empty,
    _finish,
    _fold,
    _one_over_total,
)
from dsv4.ops.attention.kernel_rows import (
    KEYS,
    count_tiles,
    decode_groups,
    key_rows,
    load_groups,
    scale_bits,
)
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait

_KEYS = tl.constexpr(KEYS)
_GROUP = tl.constexpr(64)
_WORDS = tl.constexpr(16)
_NONE = tl.constexpr(-1.0e30)


class TileArguments(NamedTuple):
    """Of N tiles: weights [N, H, KEYS] in bf16, highest logit and sum [N, H], where rows begin and their scales
    [N, KEYS] in int64; 0 where there is no row.
    """

    weights: Any
    highest: Any
    total: Any
    rows: Any
    scales: Any


@jit
def _weigh(logits, exists):
    """Logits (base 2) [H, KEYS] -> their highest; 2^(l - highest); its sum, by halves as two warp groups sum it."""
    H: tl.constexpr = logits.shape[0]
    logits = tl.where((exists != 0)[None, :], logits, float("-inf"))
    highest = tl.maximum(tl.max(logits, axis=1), _NONE)
    weight = tl.exp2(logits - highest[:, None])  # a NaN stays one
    halves = tl.sum(tl.reshape(weight, [H, 2, _KEYS // 2]), axis=2)
    return highest, weight, tl.sum(halves, axis=1)


@jit
def _load_places(tiles, place, ALIGNED: tl.constexpr):
    """Where a tile's rows begin, in words, and which there are."""
    lanes = place * _KEYS + tl.arange(0, _KEYS)
    address = tl.load(tiles.rows + lanes)
    words_ptr = address.to(tl.pointer_type(tl.int32), bitcast=True)
    if ALIGNED:
        words_ptr = tl.multiple_of(words_ptr, 16)
    return words_ptr, address != 0


@jit
def _four_scales(codes):
    """The low four of eight codes as bf16, in one word."""
    word = codes * 0
    for group in tl.static_range(4):
        word |= scale_bits((codes >> (8 * group)) & 0xFF) << (16 * group)
    return word


@jit
def _store_places(
    tiles, first_place, first, stop, token, position, slot, chunk_start, rows, ring, ring_positions_ptr, stride_rps,
    pages, picks_ptr, stride_pt, block_table_ptr, stride_bs,
    HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr,
    RING_LEN: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Addresses and scales of the rows of the tiles first .. stop - 1, a key a thread."""
    for start in range(first * _KEYS, stop * _KEYS, AT_ONCE):
        key = start + tl.arange(0, AT_ONCE)
        is_there = key < stop * _KEYS
        data, scales = key_rows(
            key, is_there, token, position, slot, chunk_start, rows, ring, ring_positions_ptr, stride_rps, pages,
            picks_ptr, stride_pt, block_table_ptr, stride_bs, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW, RING_LEN,
        )  # fmt: skip
        tl.store(tiles.rows + first_place * _KEYS + key, data, mask=is_there)
        places = (first_place * _KEYS + key) * 2
        tl.store(tiles.scales + places, _four_scales(scales), mask=is_there)
        tl.store(tiles.scales + places + 1, _four_scales(scales >> 32), mask=is_there)


@jit
def _load_behind(words_ptr, exists, next_ptr, next_exists, FIRST: tl.constexpr, COUNT: tl.constexpr,
                 NUM_GROUPS: tl.constexpr):  # fmt: skip
    """COUNT parts of a tile's rows from FIRST on, as `load_groups` counts them; those of the next behind the last."""
    LAST: tl.constexpr = FIRST + COUNT
    PARTS: tl.constexpr = NUM_GROUPS + 2
    words = load_groups(words_ptr, exists, min(FIRST, PARTS), min(LAST, PARTS), NUM_GROUPS)
    return words + load_groups(next_ptr, next_exists, max(FIRST - PARTS, 0), max(LAST - PARTS, 0), NUM_GROUPS)


@jit(do_not_specialize=("stride_rps", "stride_pt", "stride_bs", "num_heads", "num_slices", "share"))
def _weights_kernel(
    queries, num_heads, scale, tokens, rows, ring, ring_positions_ptr, stride_rps, pages, picks_ptr,
    stride_pt, block_table_ptr, stride_bs, tiles, num_slices, share,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, RING_LEN: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    pdl_trigger()
    block = tl.program_id(0)
    token = block // HEAD_BLOCKS
    heads = block % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    head_mask = heads < num_heads
    position = tl.load(tokens.positions + token).to(tl.int32)
    slot = tl.load(tokens.slots + token).to(tl.int32)
    chunk_start = tl.load(tokens.chunk_starts + token).to(tl.int32)
    num_tiles = count_tiles(position, slot, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    first = tl.program_id(1) * share
    stop = tl.minimum(first + share, num_tiles)
    if first >= stop:
        return
    MATRICES: tl.constexpr = (NUM_GROUPS + 1) // WIDE
    COLS: tl.constexpr = WIDE * _GROUP
    first_place = block.to(tl.int64) * num_slices

    q = ()
    for matrix in tl.static_range(MATRICES):
        q_rows = queries.data + token.to(tl.int64) * queries.token_stride + heads[:, None] * queries.head_stride
        q_ptrs = q_rows + matrix * COLS + tl.arange(0, COLS)[None, :]
        q += (tl.load(q_ptrs, mask=head_mask[:, None], other=0.0),)  # type: ignore[assignment]
    _store_places(
        tiles, first_place, first, stop, token, position, slot, chunk_start, rows, ring, ring_positions_ptr,
        stride_rps, pages, picks_ptr, stride_pt, block_table_ptr, stride_bs, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW,
        RING_LEN, 512,
    )  # fmt: skip
    tl.debug_barrier()  # what other threads stored is there
    words_ptr, exists = _load_places(tiles, first_place + first, ALIGNED)
    words = load_groups(words_ptr, exists, 0, AHEAD if AHEAD > 0 else NUM_GROUPS + 2, NUM_GROUPS)
    for tile in range(first, stop):
        place = first_place + tile
        scale_places = tiles.scales + (place * _KEYS + tl.arange(0, _KEYS)) * 2
        low, high = tl.load(scale_places), tl.load(scale_places + 1)
        scales = ()
        for group in tl.static_range(NUM_GROUPS + 1):
            word = low if group < 4 else high
            scales += ((word >> (16 * (group % 4))).to(tl.int32) & 0xFFFF,)
        next_ptr, next_exists = _load_places(
            tiles, tl.minimum(place + 1, first_place + stop - 1), ALIGNED
        )
        is_key = tl.max(tl.broadcast_to(exists.to(tl.int32)[:, None], [_KEYS, _WORDS]), axis=1)
        # logit = (q @ k.T) * scale
        logits = tl.zeros([HEADS, _KEYS], tl.float32)
        for matrix in tl.static_range(MATRICES):
            if AHEAD > 0:
                words += _load_behind(
                    words_ptr, exists, next_ptr, next_exists, matrix * WIDE + AHEAD,
                    WIDE + (matrix == MATRICES - 1), NUM_GROUPS,
                )  # fmt: skip
            keys = decode_groups(words, scales[matrix * WIDE :], matrix * WIDE, WIDE, NUM_GROUPS)
            words = words[WIDE + (matrix == MATRICES - 1) :]
            logits = tl.dot(q[matrix], tl.trans(keys), logits)
        words_ptr, exists = next_ptr, next_exists
        if AHEAD == 0:
            words = load_groups(words_ptr, exists, 0, NUM_GROUPS + 2, NUM_GROUPS)
        highest, weight, total = _weigh(logits * scale, is_key)
        places = place * HEADS + tl.arange(0, HEADS)
        tl.store(tiles.highest + places, highest)
        tl.store(tiles.total + places, total)
        tl.store(tiles.weights + places[:, None] * _KEYS + tl.arange(0, _KEYS)[None, :], weight.to(tl.bfloat16))


@jit
def _load_scales(tiles, place, first_group, COUNT: tl.constexpr):
    """bf16's bits of some scales of a tile's rows."""
    scales_ptr = tiles.scales.to(tl.pointer_type(tl.int16), bitcast=True) + first_group
    places = (place * _KEYS + tl.arange(0, _KEYS)) * 8
    scales = ()
    for group in tl.static_range(COUNT):
        scales += (tl.load(scales_ptr + places + group).to(tl.int32) & 0xFFFF,)
    return scales


@jit
def _sum_values(
    tiles, first_place, num_tiles, first_group, column_ptr, states, part, is_part, stride_oh, heads, head_mask, tables, position,
    NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, RUN: tl.constexpr, HAS_RUNS: tl.constexpr, ALIGNED: tl.constexpr,
    SLICE: tl.constexpr, WIDE: tl.constexpr, HAS_ROPE: tl.constexpr, INVERSE_ROPE: tl.constexpr, EARLY: tl.constexpr,
    BY_RUN: tl.constexpr,
):  # fmt: skip
    """SLICE groups of columns from `first_group` on: left folds of tiles in runs, and of runs; stored."""
    COLS: tl.constexpr = WIDE * _GROUP
    MATRICES: tl.constexpr = SLICE // WIDE
    # the groups as the functions of rows count them: from the pointer on, and the rope group where it is
    ROPE: tl.constexpr = NUM_GROUPS if HAS_ROPE else SLICE
    FIRST: tl.constexpr = NUM_GROUPS + 1 - SLICE if HAS_ROPE else 0
    LAST: tl.constexpr = NUM_GROUPS + 2 if HAS_ROPE else SLICE
    shift = 0 if HAS_ROPE else first_group
    rows = tl.arange(0, HEADS)
    weight_places = rows[:, None] * _KEYS + tl.arange(0, _KEYS)[None, :]
    highest, total, out = _empty(MATRICES, HEADS, COLS)
    if HAS_RUNS:
        all_highest, all_total, all_out = _empty(MATRICES, HEADS, COLS)
    last_place = first_place + tl.maximum(num_tiles - 1, 0)
    words_ptr, exists = _load_places(tiles, first_place, ALIGNED)
    exists = exists & (num_tiles > 0)
    words = load_groups(words_ptr + shift * _WORDS, exists, FIRST, LAST, ROPE)
    words_ptr, exists = _load_places(tiles, tl.minimum(first_place + 1, last_place), ALIGNED)
    scales = _load_scales(tiles, first_place, first_group, SLICE)
    weight = tl.load(tiles.weights + first_place * (HEADS * _KEYS) + weight_places)
    tile_highest = tl.load(tiles.highest + first_place * HEADS + rows)
    tile_total = tl.load(tiles.total + first_place * HEADS + rows)
    for tile in range(0, num_tiles):
        place = first_place + tile
        if not EARLY:
            weight = tl.load(tiles.weights + place * (HEADS * _KEYS) + weight_places)
        values = ()
        for matrix in tl.static_range(MATRICES):
            some = words[matrix * WIDE :]
            values += (decode_groups(some, scales[matrix * WIDE :], FIRST + matrix * WIDE, WIDE, ROPE),)
        parts = ()
        for matrix in tl.static_range(MATRICES):
            parts += (tl.dot(weight, values[matrix]),)
        words = load_groups(words_ptr + shift * _WORDS, exists, FIRST, LAST, ROPE)
        after = tl.minimum(place + 1, last_place)
        scales = _load_scales(tiles, after, first_group, SLICE)
        if EARLY:
            weight = tl.load(tiles.weights + after * (HEADS * _KEYS) + weight_places)
        words_ptr, exists = _load_places(tiles, tl.minimum(place + 2, last_place), ALIGNED)
        new_highest = tl.maximum(highest, tile_highest)
        shrink = tl.exp2(highest - new_highest)
        share = tl.exp2(tile_highest - new_highest)
        highest = new_highest
        total = total * shrink + tile_total * share
        tile_highest = tl.load(tiles.highest + after * HEADS + rows)
        tile_total = tl.load(tiles.total + after * HEADS + rows)
        folded = ()
        for matrix in tl.static_range(MATRICES):
            folded += (_fold(out[matrix], shrink, parts[matrix], share),)  # type: ignore[assignment]
        out = folded
        if HAS_RUNS:  # noqa: SIM102
            if ((tile + 1) % RUN == 0) | (tile + 1 == num_tiles):
                is_first = tile < RUN
                new_highest = tl.maximum(all_highest, highest)
                shrink = tl.exp2(all_highest - new_highest)
                share = tl.exp2(highest - new_highest)
                all_total = tl.where(is_first, total, all_total * shrink + total * share)
                all_highest = tl.where(is_first, highest, new_highest)
                folded = ()
                for matrix in tl.static_range(MATRICES):
                    folded += (
                        tl.where(is_first, out[matrix], _fold(all_out[matrix], shrink, out[matrix], share)),
                    )
                all_out = folded
                highest, total, out = _empty(MATRICES, HEADS, COLS)
    if HAS_RUNS:
        highest, total, out = all_highest, all_total, all_out
    if BY_RUN:
        is_last = is_part == 0
    else:
        is_last = True
    if is_last:
        inverse = _one_over_total(highest, total, heads, head_mask, tables.sink)
        for matrix in tl.static_range(MATRICES):
            _finish(
                out[matrix], column_ptr + matrix * COLS, stride_oh, inverse, head_mask, position, tables.freqs,
                INVERSE_ROPE and matrix == MATRICES - 1,
            )  # fmt: skip
    else:
        part_rows = part * HEADS + rows
        tl.store(states.highest + part_rows, highest)
        tl.store(states.total + part_rows, total)
        for matrix in tl.static_range(MATRICES):
            places = first_group * _GROUP + matrix * COLS + tl.arange(0, COLS)
            tl.store(states.part + part_rows[:, None] * stride_oh + places[None, :], out[matrix])


@jit(do_not_specialize=("num_heads", "num_slices"))
def _values_kernel(
    tiles, num_slices, out_ptr, num_heads, tables, positions_ptr, slots_ptr, states,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INVERSE_ROPE: tl.constexpr,
    RUN: tl.constexpr, HAS_RUNS: tl.constexpr, ALIGNED: tl.constexpr, SLICE: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr, BY_RUN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = block // HEAD_BLOCKS
    heads = block % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    head_mask = heads < num_heads
    position = tl.load(positions_ptr + token)
    num_tiles = count_tiles(position, tl.load(slots_ptr + token), HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    run = tl.program_id(2)
    is_part = num_tiles > RUN
    if BY_RUN:
        num_tiles = tl.minimum(num_tiles - run * RUN, RUN)
        if (num_tiles <= 0) & (run > 0):
            return
    first_place = block * num_slices
    state = block * tl.num_programs(2) + run
    DIM: tl.constexpr = (NUM_GROUPS + 1) * _GROUP
    SLICES: tl.constexpr = (NUM_GROUPS + 1) // SLICE
    first_out = out_ptr + (token * num_heads + block % HEAD_BLOCKS * HEADS) * DIM + part * (SLICE * _GROUP)
    pdl_wait()
    if part == SLICES - 1:
        _sum_values(
            tiles, first_place + run * RUN, num_tiles, part * SLICE, first_out, states, state, is_part, DIM, heads, head_mask, tables, position,
            NUM_GROUPS, HEADS, RUN, HAS_RUNS, ALIGNED, SLICE, WIDE, True, INVERSE_ROPE, EARLY, BY_RUN,
        )  # fmt: skip
    else:
        _sum_values(
            tiles, first_place + run * RUN, num_tiles, part * SLICE, first_out, states, state, is_part, DIM, heads, head_mask, tables, position,
            NUM_GROUPS, HEADS, RUN, HAS_RUNS, ALIGNED, SLICE, WIDE, False, False, EARLY, BY_RUN,
        )  # fmt: skip
