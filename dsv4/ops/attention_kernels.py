"""The kernels of ops/attention.py: one tile of 64 keys at a time, folded from the first to the last.

A tile has its own highest logit, its own sum and its own product P V, which begins at zero. The state of a query is the
left fold of its tiles (`_fold`). So it does not matter to the bits whether one program takes all tiles of a query in
turn, or every tile is a program of its own and `_combine_kernel` folds what they stored. P V is folded one 64-wide
group at a time: a second set of accumulators would not fit the registers. The order of tiles is that of the keys:
window, oldest first, then entries.

Two things are written for the compiler (Triton 3.6). The products of a tile stand in branches that are always taken:
where the result of a product visibly reaches another product, both warpgroups are given all rows, and every product is
computed twice. And rows wait in registers as words: bytes would take a register each.

A row's 64-wide groups are separate matrices throughout: seven E4M3 groups with a scale each, and the BF16 rope group.
"""

from __future__ import annotations

from dsv4.ops.rope import rope_cos_sin, rotate_pairs
from dsv4.ops.tl_utils import INTERPRET, e8m0_to_float, jit, tl

KEYS = 64  # of a tile
HEADS = 64  # of a program: the smallest matrix a Hopper warpgroup multiplies
_KEYS, _HEADS = tl.constexpr(KEYS), tl.constexpr(HEADS)
_GROUP = tl.constexpr(64)
_WORDS = tl.constexpr(16)  # of four codes in a group, or of two bf16 values in half of one
_BLOCK_TOKENS = tl.constexpr(128)
_NONE = tl.constexpr(-1.0e30)  # the highest logit of no keys: finite, so that differences are never NaN
_LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def _num_entries(position, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr):
    """Keys behind the window: as many as there are picks, or every entry the position may see."""
    count = (position + 1) // RATIO
    if NUM_PICKS > 0:
        count = count * 0 + NUM_PICKS
    return count.to(tl.int32)


@jit
def _num_tiles(position, slot, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
               WINDOW: tl.constexpr):  # fmt: skip
    count = (WINDOW + _KEYS - 1) // _KEYS + slot.to(tl.int32) * 0
    if HAS_ENTRIES:
        count += (_num_entries(position, NUM_PICKS, RATIO) + _KEYS - 1) // _KEYS
    return tl.where(slot >= 0, count, 0)


@jit
def _tile_ids(tile, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES: tl.constexpr,
              NUM_PICKS: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """What a tile's keys are, [KEYS]: positions in a tile of the window, entries behind it; -1 where there is none."""
    WINDOW_TILES: tl.constexpr = (WINDOW + _KEYS - 1) // _KEYS
    key = tile * _KEYS + tl.arange(0, _KEYS)
    age = WINDOW_TILES * _KEYS - 1 - key
    ids = tl.where((tile < num_tiles) & (age < WINDOW), tl.maximum(position - age, -1), -1)
    if HAS_ENTRIES:
        entry = key - WINDOW_TILES * _KEYS
        is_behind = (tile >= WINDOW_TILES) & (tile < num_tiles)
        if NUM_PICKS > 0:
            mask = is_behind & (entry < NUM_PICKS)
            entry = tl.load(picks_ptr + token.to(tl.int64) * stride_pt + entry, mask=mask, other=-1).to(tl.int32)
        is_seen = is_behind & (entry >= 0) & (entry < (position + 1) // RATIO)
        ids = tl.where(tile < WINDOW_TILES, ids, tl.where(is_seen, entry, -1))
    return ids


@jit
def _tile_links(tile, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs,
                HAS_ENTRIES: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr,
                RING_LEN: tl.constexpr):  # fmt: skip
    """The position the ring holds where a key should be, or the block of an entry."""
    PER_BLOCK: tl.constexpr = _BLOCK_TOKENS // RATIO
    id_ = tl.maximum(ids, 0)
    links_ptr = ring_positions_ptr + slot.to(tl.int64) * stride_rps + id_ % RING_LEN
    mask = (ids >= 0) & (ids < chunk_start)
    if HAS_ENTRIES:
        is_window = tile < (WINDOW + _KEYS - 1) // _KEYS
        links_ptr = tl.where(is_window, links_ptr, block_table_ptr + slot.to(tl.int64) * stride_bs + id_ // PER_BLOCK)
        mask = (ids >= 0) & ((ids < chunk_start) | (is_window == 0))
    return tl.load(links_ptr, mask=mask, other=-1)


@jit
def _load_tile(
    tile, ids, links, token, position, slot, chunk_start, rows, ring, pages,
    HAS_ENTRIES: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr, RING_LEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The bytes of a tile in words [KEYS, 16]: codes of every group, then the two halves of the rope group; the scales
    of a row in one word; and which keys exist.
    """
    PER_BLOCK: tl.constexpr = _BLOCK_TOKENS // RATIO
    id_ = tl.maximum(ids, 0)
    is_fresh = ids >= chunk_start
    exists = (ids >= 0) & (is_fresh | (links == ids))
    row = (token - (position - ids)).to(tl.int64)
    ring_slot = slot.to(tl.int64)
    ring_row = id_ % RING_LEN
    data = tl.where(
        is_fresh,
        rows.data + row * rows.data_stride,
        ring.data + ring_slot * ring.data_stride + ring_row * ring.data_row,
    )
    scales = tl.where(
        is_fresh,
        rows.scales + row * rows.scales_stride,
        ring.scales + ring_slot * ring.scales_stride + ring_row * ring.scales_row,
    )
    if HAS_ENTRIES:
        is_window = tile < (WINDOW + _KEYS - 1) // _KEYS
        block = links.to(tl.int64)
        entry_row = id_ % PER_BLOCK
        data = tl.where(is_window, data, pages.data + block * pages.data_stride + entry_row * pages.data_row)
        scales = tl.where(is_window, scales, pages.scales + block * pages.scales_stride + entry_row * pages.scales_row)
        exists = tl.where(is_window, exists, ids >= 0)
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    # all loads have one shape, so that one thread needs the address of one row
    words = data.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + tl.arange(0, _WORDS)[None, :]
    groups = ()
    for group in tl.static_range(NUM_GROUPS + 2):
        groups += (tl.load(words + group * _WORDS, mask=exists[:, None], other=0),)  # type: ignore[assignment]
    # a maximum of equal values: without it the compiler finds all addresses again in the layout of the logits
    is_key = tl.max(tl.broadcast_to(exists.to(tl.int32)[:, None], [_KEYS, _WORDS]), axis=1)
    return groups, tl.load(scales, mask=exists, other=0), is_key


@jit
def _e4m3_word(word):
    """int32 words of four E4M3 codes -> their values in fp32, first byte first: the cast of a GPU, on whole words."""
    if INTERPRET:
        return (
            (word & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
            ((word >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
            ((word >> 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
            ((word >> 24) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            constraints="=f,=f,=f,=f,r",
            args=[word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@jit
def _decode(words, scale_word, GROUP: tl.constexpr):
    """decode_rows of one group: words [KEYS, 16] of four codes and the row's scales -> bf16 [KEYS, 64], exact."""
    scale = e8m0_to_float(((scale_word >> (8 * GROUP)) & 0xFF).to(tl.int32))[:, None]
    # through fp32: a GPU converts fp16 to bf16 at a quarter of that speed
    first, second, third, fourth = _e4m3_word(words)
    even = tl.join((first * scale).to(tl.bfloat16), (third * scale).to(tl.bfloat16))
    odd = tl.join((second * scale).to(tl.bfloat16), (fourth * scale).to(tl.bfloat16))
    return tl.reshape(tl.join(even, odd), [_KEYS, _GROUP])


@jit
def _bf16_pairs(words):
    """int32 words of two bf16 values -> bf16, twice as wide."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]])


@jit
def _rope_group(first, second):
    """The two halves of the rope group, words [KEYS, 16] -> bf16 [KEYS, 64]."""
    halves = tl.join(_bf16_pairs(first), _bf16_pairs(second))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), [_KEYS, _GROUP])


@jit
def _probabilities(logits, exists):
    """Logits (base 2) [H, KEYS] -> their highest; 2^(l - highest); its sum."""
    logits = tl.where((exists != 0)[None, :], logits, float("-inf"))
    highest = tl.maximum(tl.max(logits, axis=1), _NONE)
    weight = tl.exp2(logits - highest[:, None])  # a NaN stays one
    return highest, weight, tl.sum(weight, axis=1)


@jit
def _fold(out, shrink, part, share):
    """out * shrink + part * share, in two roundings everywhere."""
    return tl.fma(out, tl.broadcast_to(shrink[:, None], out.shape), part * share[:, None])


@jit
def _finish(out, column_ptr, stride_oh, total, head_mask, position, freqs_ptr, INVERSE_ROPE: tl.constexpr):
    """out / total in bf16, rotated back if asked for, stored."""
    cols = tl.arange(0, out.shape[1])
    out = (out * total[:, None]).to(tl.bfloat16)
    if INVERSE_ROPE:
        # rope_ref(out, positions, freqs, inverse=True)
        cos, sin = rope_cos_sin(position, freqs_ptr, out.shape[1] // 2)
        out = rotate_pairs(out.to(tl.float32), cos, sin * -1.0).to(tl.bfloat16)
    tl.store(column_ptr + tl.arange(0, out.shape[0])[:, None] * stride_oh + cols[None, :], out, mask=head_mask[:, None])


@jit
def _one_over_total(highest, total, heads, head_mask, sink_ptr):
    """1 / (sum + e^(sink - highest)), or 0 without keys: the highest of them weighs more than 1/2."""
    sink = tl.load(sink_ptr + heads, mask=head_mask, other=0.0).to(tl.float32)
    inverse = tl.div_rn(total * 0.0 + 1.0, total + tl.exp2(sink * _LOG2_E - highest))
    return tl.where(total == 0.0, 0.0, inverse)


@jit(do_not_specialize=("stride_rps", "stride_pt", "stride_bs", "num_heads", "num_slices"))
def _attend_kernel(
    q_ptr, stride_qt, stride_qh, out_ptr, num_heads, scale, sink_ptr, freqs_ptr, positions_ptr, slots_ptr,
    chunk_starts_ptr, rows, ring, ring_positions_ptr, stride_rps, pages, picks_ptr, stride_pt, block_table_ptr,
    stride_bs, part_ptr, highest_ptr, total_ptr, num_slices,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, RING_LEN: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INVERSE_ROPE: tl.constexpr,
    ALIGNED: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) // HEAD_BLOCKS
    heads = tl.program_id(0) % HEAD_BLOCKS * _HEADS + tl.arange(0, _HEADS)
    head_mask = heads < num_heads
    position = tl.load(positions_ptr + token).to(tl.int32)
    slot = tl.load(slots_ptr + token).to(tl.int32)
    chunk_start = tl.load(chunk_starts_ptr + token).to(tl.int32)
    num_tiles = _num_tiles(position, slot, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    first, last = num_tiles * 0, num_tiles
    if IS_SPLIT:
        first = tl.program_id(1)
        last = first + 1
        if first >= num_tiles:
            return
    DIM: tl.constexpr = (NUM_GROUPS + 1) * _GROUP
    cols = tl.arange(0, _GROUP)
    q = ()
    for group in tl.static_range(NUM_GROUPS + 1):
        q_ptrs = q_ptr + token.to(tl.int64) * stride_qt + heads[:, None] * stride_qh + group * _GROUP + cols[None, :]
        q += (tl.load(q_ptrs, mask=head_mask[:, None], other=0.0),)  # type: ignore[assignment]

    highest = tl.full([_HEADS], _NONE, tl.float32)
    total = tl.zeros([_HEADS], tl.float32)
    out = ()
    for _ in tl.static_range(NUM_GROUPS + 1):
        out += (tl.zeros([_HEADS, _GROUP], tl.float32),)  # type: ignore[assignment]
    ids = _tile_ids(first, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    links = _tile_links(
        first, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs, HAS_ENTRIES, RATIO,
        WINDOW, RING_LEN,
    )  # fmt: skip
    ahead = _load_tile(
        first, ids, links, token, position, slot, chunk_start, rows, ring, pages, HAS_ENTRIES, RATIO, WINDOW, RING_LEN,
        NUM_GROUPS, ALIGNED,
    )  # fmt: skip
    if not IS_SPLIT:
        # every load is issued a tile before its result is needed: picks three tiles ahead, links two, rows one
        tile = first + 1
        ids = _tile_ids(tile, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
        links = _tile_links(
            tile, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs, HAS_ENTRIES,
            RATIO, WINDOW, RING_LEN,
        )  # fmt: skip
        tile = first + 2
        next_ids = _tile_ids(
            tile, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW
        )
    for step in range(first, last):
        tile = num_tiles * 0 + step
        words, scale_word, exists = ahead
        keys = ()
        for group in tl.static_range(NUM_GROUPS):
            keys += (_decode(words[group], scale_word, group),)  # type: ignore[assignment]
        keys += (_rope_group(words[NUM_GROUPS], words[NUM_GROUPS + 1]),)  # type: ignore[assignment]
        if not IS_SPLIT:
            ahead = _load_tile(
                tile + 1, ids, links, token, position, slot, chunk_start, rows, ring, pages, HAS_ENTRIES, RATIO, WINDOW,
                RING_LEN, NUM_GROUPS, ALIGNED,
            )  # fmt: skip
            ids = next_ids
            links = _tile_links(
                tile + 2, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs,
                HAS_ENTRIES, RATIO, WINDOW, RING_LEN,
            )  # fmt: skip
            next_ids = _tile_ids(
                tile + 3, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW
            )
        weight = tl.zeros([_HEADS, _KEYS], tl.bfloat16)
        shrink = tl.zeros([_HEADS], tl.float32)
        share = shrink
        if num_tiles > 0:
            # logit = (q @ k.T) * scale
            logits = tl.zeros([_HEADS, _KEYS], tl.float32)
            for group in tl.static_range(NUM_GROUPS + 1):
                if num_tiles > -1 - group:
                    logits = tl.dot(q[group], tl.trans(keys[group]), logits)
            tile_highest, wide_weight, tile_total = _probabilities(logits * scale, exists)
            new_highest = tl.maximum(highest, tile_highest)
            shrink = tl.exp2(highest - new_highest)
            share = tl.exp2(tile_highest - new_highest)
            highest = new_highest
            total = total * shrink + tile_total * share
            weight = wide_weight.to(tl.bfloat16)
        folded = ()
        for group in tl.static_range(NUM_GROUPS + 1):
            folded += (_fold(out[group], shrink, tl.dot(weight, keys[group]), share),)  # type: ignore[assignment]
        out = folded

    if IS_SPLIT:
        # one tile: highest, total and out are its own
        row = (tl.program_id(0).to(tl.int64) * num_slices + first) * _HEADS + tl.arange(0, _HEADS)
        tl.store(highest_ptr + row, highest)
        tl.store(total_ptr + row, total)
        for group in tl.static_range(NUM_GROUPS + 1):
            tl.store(part_ptr + row[:, None] * DIM + group * _GROUP + cols[None, :], out[group])
    else:
        inverse = _one_over_total(highest, total, heads, head_mask, sink_ptr)
        first_out = out_ptr + (token.to(tl.int64) * num_heads + tl.program_id(0) % HEAD_BLOCKS * _HEADS) * DIM
        for group in tl.static_range(NUM_GROUPS + 1):
            _finish(
                out[group], first_out + group * _GROUP, DIM, inverse, head_mask, position, freqs_ptr,
                INVERSE_ROPE and group == NUM_GROUPS,
            )  # fmt: skip


@jit(do_not_specialize=("num_heads", "num_slices"))
def _combine_kernel(
    part_ptr, highest_ptr, total_ptr, num_slices, out_ptr, num_heads, sink_ptr, freqs_ptr, positions_ptr, slots_ptr,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INVERSE_ROPE: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Folds the tiles that `_attend_kernel` stored, for ROWS heads and one part of the columns: the same fold."""
    block = tl.program_id(0).to(tl.int64)
    token = block // HEAD_BLOCKS
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    heads = block % HEAD_BLOCKS * _HEADS + rows
    head_mask = heads < num_heads
    position = tl.load(positions_ptr + token)
    num_tiles = _num_tiles(position, tl.load(slots_ptr + token), HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    DIM: tl.constexpr = (NUM_GROUPS + 1) * _GROUP
    cols = tl.program_id(2) * _GROUP + tl.arange(0, _GROUP)
    highest = tl.full([ROWS], _NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, _GROUP], tl.float32)
    for start in range(0, num_tiles, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            tile = start + step
            row = (block * num_slices + tile) * _HEADS + rows
            exists = (row * 0 + tile) < num_tiles
            tile_highest = tl.load(highest_ptr + row, mask=exists, other=_NONE)
            tile_total = tl.load(total_ptr + row, mask=exists, other=0.0)
            part = tl.load(part_ptr + row[:, None] * DIM + cols[None, :], mask=exists[:, None], other=0.0)
            new_highest = tl.maximum(highest, tile_highest)
            shrink = tl.exp2(highest - new_highest)
            share = tl.exp2(tile_highest - new_highest)
            # a tile behind the last changes nothing: not even the sign of a zero
            highest = tl.where(exists, new_highest, highest)
            total = tl.where(exists, total * shrink + tile_total * share, total)
            out = tl.where(exists[:, None], _fold(out, shrink, part, share), out)
    inverse = _one_over_total(highest, total, heads, head_mask, sink_ptr)
    column_ptr = out_ptr + (token * num_heads + block % HEAD_BLOCKS * _HEADS + tl.program_id(1) * ROWS) * DIM
    if tl.program_id(2) == NUM_GROUPS:
        _finish(
            out, column_ptr + NUM_GROUPS * _GROUP, DIM, inverse, head_mask, position, freqs_ptr, INVERSE_ROPE,
        )  # fmt: skip
    else:
        _finish(out, column_ptr + tl.program_id(2) * _GROUP, DIM, inverse, head_mask, position, freqs_ptr, False)
