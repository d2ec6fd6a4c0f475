"""Attention by columns, in two launches: the probabilities of all keys, then P V, some columns of the values a CTA.

A tile's highest logit, sum and probabilities depend on the tile alone, so a CTA of `_qk_softmax_kernel` takes any tiles
of a query. `_pv_accumulate_kernel` needs no queries: it sums 128 columns, tile by tile, in the order of
kernel_attend.py, and so with the same bits. Nothing but probabilities is stored between, 8 KB a tile where a state of
kernel_attend.py has 128. Both launches decode the rows they read; for it neither holds all columns of the accumulator,
and several CTAs share a multiprocessor. Only queries of one run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.attention.kernel_attend import _empty, _fold, _probabilities, _store_result, load_query
from dsv4.ops.attention.kernel_rows import (
    KEYS,
    count_tiles,
    decode_groups,
    key_entries,
    key_rows,
    load_groups,
    scale_bits,
)
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait

_KEYS = tl.constexpr(KEYS)
_GROUP = tl.constexpr(64)
_WORDS = tl.constexpr(16)  # of a group
_AT_ONCE = tl.constexpr(512)  # keys that are looked up together: four a thread


class TileArguments(NamedTuple):
    """Of N tiles: weights [N, HEADS, KEYS] in bf16; highest logits and sums [N, HEADS]; where rows begin [N, KEYS],
    0 where there is none; their scales as eight bf16 in two words [N, KEYS, 2].
    """

    weights: Any
    highest: Any
    total: Any
    rows: Any
    scales: Any


@jit
def _load_rows(tiles, place, ALIGNED: tl.constexpr):
    """Where a tile's rows begin, in words, and which there are."""
    address = tl.load(tiles.rows + place * _KEYS + tl.arange(0, _KEYS))
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
    RING_LEN: tl.constexpr,
):
    """Where the rows of the tiles first .. stop - 1 begin, and their scales."""
    for start in range(first * _KEYS, stop * _KEYS, _AT_ONCE):
        key = start + tl.arange(0, _AT_ONCE)
        is_there = key < stop * _KEYS
        entry = key_entries(key, is_there, token, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, WINDOW)
        address, codes = key_rows(
            key, entry, is_there, token, position, slot, chunk_start, rows, ring, ring_positions_ptr, stride_rps,
            pages, block_table_ptr, stride_bs, HAS_ENTRIES, RATIO, WINDOW, RING_LEN,
        )
        places = first_place * _KEYS + key
        tl.store(tiles.rows + places, address, mask=is_there)
        tl.store(tiles.scales + places * 2, _four_scales(codes), mask=is_there)
        tl.store(tiles.scales + places * 2 + 1, _four_scales(codes >> 32), mask=is_there)


@jit
def _load_across(words_ptr, exists, next_ptr, next_exists, FIRST: tl.constexpr, COUNT: tl.constexpr,
                 NUM_GROUPS: tl.constexpr):
    """COUNT parts of a tile's rows from FIRST on, as `load_groups` counts them; after the last those of the next."""
    LAST: tl.constexpr = FIRST + COUNT
    PARTS: tl.constexpr = NUM_GROUPS + 2
    words = load_groups(words_ptr, exists, min(FIRST, PARTS), min(LAST, PARTS), NUM_GROUPS)
    return words + load_groups(next_ptr, next_exists, max(FIRST - PARTS, 0), max(LAST - PARTS, 0), NUM_GROUPS)


@jit(do_not_specialize=("stride_rps", "stride_pt", "stride_bs", "num_heads", "num_slices", "share"))
def _qk_softmax_kernel(
    queries, num_heads, scale, tokens, rows, ring, ring_positions_ptr, stride_rps, pages, picks_ptr, stride_pt,
    block_table_ptr, stride_bs, tiles, num_slices, share,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, RING_LEN: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
):
    """`share` tiles of a query and HEADS heads. queries: `QueryArguments`; tokens: `TokenArguments`; rows, ring, pages:
    `RowTarget`; tiles: `TileArguments`.
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
    first = tl.program_id(1) * share
    stop = tl.minimum(first + share, num_tiles)
    if first >= stop:
        return
    MATRICES: tl.constexpr = (NUM_GROUPS + 1) // WIDE
    COLS: tl.constexpr = WIDE * _GROUP
    first_place = tl.program_id(0).to(tl.int64) * num_slices

    q = load_query(queries, token, heads, head_mask, tl.arange(0, COLS), MATRICES)  # MATRICES of [HEADS, COLS]
    _store_places(
        tiles, first_place, first, stop, token, position, slot, chunk_start, rows, ring, ring_positions_ptr,
        stride_rps, pages, picks_ptr, stride_pt, block_table_ptr, stride_bs, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW,
        RING_LEN,
    )
    tl.debug_barrier()  # what other threads stored is there
    words_ptr, exists = _load_rows(tiles, first_place + first, ALIGNED)
    words = load_groups(words_ptr, exists, 0, AHEAD, NUM_GROUPS)  # of [KEYS, 16] each
    for tile in range(first, stop):
        place = first_place + tile
        scale_places = tiles.scales + (place * _KEYS + tl.arange(0, _KEYS)) * 2
        low, high = tl.load(scale_places), tl.load(scale_places + 1)
        scales = ()
        for group in tl.static_range(NUM_GROUPS + 1):
            scale_word = low if group < 4 else high
            scales += ((scale_word >> (16 * (group % 4))).to(tl.int32) & 0xFFFF,)  # type: ignore[assignment]
        next_ptr, next_exists = _load_rows(tiles, tl.minimum(place + 1, first_place + stop - 1), ALIGNED)
        # a maximum of equal values: it takes them to the layout of the logits, by one exchange
        is_key = tl.max(tl.broadcast_to(exists.to(tl.int32)[:, None], [_KEYS, _WORDS]), axis=1)
        # logit = (q @ k.T) * scale
        logits = tl.zeros([HEADS, _KEYS], tl.float32)  # [HEADS, KEYS]
        for matrix in tl.static_range(MATRICES):
            words += _load_across(
                words_ptr, exists, next_ptr, next_exists, matrix * WIDE + AHEAD, WIDE + (matrix == MATRICES - 1),
                NUM_GROUPS,
            )
            keys = decode_groups(words, scales[matrix * WIDE :], matrix * WIDE, WIDE, NUM_GROUPS)  # [KEYS, COLS]
            words = words[WIDE + (matrix == MATRICES - 1) :]
            logits = tl.dot(q[matrix], tl.trans(keys), logits)
        words_ptr, exists = next_ptr, next_exists
        # weight = exp2(logit - logit.amax(-1)); total = weight.sum(-1)
        highest, weight, total = _probabilities(logits * scale, is_key)
        places = place * HEADS + tl.arange(0, HEADS)
        tl.store(tiles.highest + places, highest)
        tl.store(tiles.total + places, total)
        tl.store(tiles.weights + places[:, None] * _KEYS + tl.arange(0, _KEYS)[None, :], weight.to(tl.bfloat16))


@jit
def _load_scales(tiles, place, first_group, COUNT: tl.constexpr):
    """Bits of COUNT bf16 scales of a tile's rows."""
    scales_ptr = tiles.scales.to(tl.pointer_type(tl.int16), bitcast=True) + first_group
    scales = ()
    for group in tl.static_range(COUNT):
        scale = tl.load(scales_ptr + (place * _KEYS + tl.arange(0, _KEYS)) * 8 + group)
        scales += (scale.to(tl.int32) & 0xFFFF,)  # type: ignore[assignment]
    return scales


@jit
def _pv_accumulate(
    tiles, first_place, num_tiles, first_group, NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, ALIGNED: tl.constexpr,
    SLICE: tl.constexpr, HAS_ROPE: tl.constexpr,
):
    """SLICE groups of columns from `first_group` on, the left fold of all tiles: highest, total, out."""
    # groups as the functions of rows count them: from the pointer on, and where among them the rope group is
    ROPE: tl.constexpr = NUM_GROUPS if HAS_ROPE else SLICE
    FIRST: tl.constexpr = NUM_GROUPS + 1 - SLICE if HAS_ROPE else 0
    LAST: tl.constexpr = NUM_GROUPS + 2 if HAS_ROPE else SLICE
    shift = 0 if HAS_ROPE else first_group * _WORDS
    rows = tl.arange(0, HEADS)
    weight_places = rows[:, None] * _KEYS + tl.arange(0, _KEYS)[None, :]
    highest, total, out = _empty(1, HEADS, SLICE * _GROUP)
    out = out[0]
    last_place = first_place + tl.maximum(num_tiles - 1, 0)
    words_ptr, exists = _load_rows(tiles, first_place, ALIGNED)
    words = load_groups(words_ptr + shift, exists & (num_tiles > 0), FIRST, LAST, ROPE)
    words_ptr, exists = _load_rows(tiles, tl.minimum(first_place + 1, last_place), ALIGNED)
    scales = _load_scales(tiles, first_place, first_group, SLICE)
    weight = tl.load(tiles.weights + first_place * (HEADS * _KEYS) + weight_places)
    tile_highest = tl.load(tiles.highest + first_place * HEADS + rows)
    tile_total = tl.load(tiles.total + first_place * HEADS + rows)
    for tile in range(0, num_tiles):
        place = first_place + tile
        # part = weight @ v; out = out * shrink + part * share
        part = tl.dot(weight, decode_groups(words, scales, FIRST, SLICE, ROPE))  # [HEADS, SLICE * 64]
        # after the product: a fence in front of it would wait for these
        after = tl.minimum(place + 1, last_place)
        words = load_groups(words_ptr + shift, exists, FIRST, LAST, ROPE)
        scales = _load_scales(tiles, after, first_group, SLICE)
        weight = tl.load(tiles.weights + after * (HEADS * _KEYS) + weight_places)
        words_ptr, exists = _load_rows(tiles, tl.minimum(place + 2, last_place), ALIGNED)
        new_highest = tl.maximum(highest, tile_highest)
        shrink = tl.exp2(highest - new_highest)
        share = tl.exp2(tile_highest - new_highest)
        highest = new_highest
        total = total * shrink + tile_total * share
        tile_highest = tl.load(tiles.highest + after * HEADS + rows)
        tile_total = tl.load(tiles.total + after * HEADS + rows)
        out = _fold(out, shrink, part, share)
    return highest, total, (out,)


@jit(do_not_specialize=("num_heads", "num_slices"))
def _pv_accumulate_kernel(
    tiles, num_slices, out_ptr, num_heads, tables, positions_ptr, slots_ptr,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INVERSE_ROPE: tl.constexpr,
    ALIGNED: tl.constexpr, SLICE: tl.constexpr,
):
    """SLICE groups of columns of a query and HEADS heads. Programs that read the same rows are neighbours."""
    block = tl.program_id(1).to(tl.int64)
    token = block // HEAD_BLOCKS
    heads = block % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    head_mask = heads < num_heads
    position = tl.load(positions_ptr + token)
    num_tiles = count_tiles(position, tl.load(slots_ptr + token), HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    DIM: tl.constexpr = (NUM_GROUPS + 1) * _GROUP
    first_group = tl.program_id(0) * SLICE
    first_out = out_ptr + (token * num_heads + block % HEAD_BLOCKS * HEADS) * DIM + first_group * _GROUP
    pdl_wait()
    if first_group == NUM_GROUPS + 1 - SLICE:
        highest, total, out = _pv_accumulate(
            tiles, block * num_slices, num_tiles, first_group, NUM_GROUPS, HEADS, ALIGNED, SLICE, True
        )
        _store_result(
            first_out, DIM, highest, total, out, heads, head_mask, tables.sink, position, tables.freqs, INVERSE_ROPE
        )
    else:
        highest, total, out = _pv_accumulate(
            tiles, block * num_slices, num_tiles, first_group, NUM_GROUPS, HEADS, ALIGNED, SLICE, False
        )
        _store_result(first_out, DIM, highest, total, out, heads, head_mask, tables.sink, position, tables.freqs, False)
