"""The keys of a tile of ops/attention: which they are, where their rows lie, and their bytes as bf16.

A row has 64-wide groups: seven of E4M3 with a scale each, and the BF16 rope group. Rows wait in registers as words:
bytes would take a register each.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import INTERPRET, jit, tl

KEYS = 64  # of a tile
_KEYS = tl.constexpr(KEYS)
_GROUP = tl.constexpr(64)
_WORDS = tl.constexpr(16)  # of four codes in a group, or of two bf16 values in half of one
_BLOCK_TOKENS = tl.constexpr(128)
_TWO_120 = tl.constexpr(2.0**120)


@jit
def _num_entries(position, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr):
    """Keys after the window: as many as there are picks, or every entry the position may see."""
    count = (position + 1) // RATIO
    if NUM_PICKS > 0:
        count = count * 0 + NUM_PICKS
    return count.to(tl.int32)


@jit
def count_tiles(position, slot, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
               WINDOW: tl.constexpr):
    count = (WINDOW + _KEYS - 1) // _KEYS + slot.to(tl.int32) * 0
    if HAS_ENTRIES:
        count += (_num_entries(position, NUM_PICKS, RATIO) + _KEYS - 1) // _KEYS
    return tl.where(slot >= 0, count, 0)


@jit
def tile_ids(tile, num_tiles, token, position, picks_ptr, stride_pt, HAS_ENTRIES: tl.constexpr,
              NUM_PICKS: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr):
    """What a tile's keys are, [KEYS]: positions in a tile of the window, entries after it; -1 where there is none."""
    WINDOW_TILES: tl.constexpr = (WINDOW + _KEYS - 1) // _KEYS
    key = tile * _KEYS + tl.arange(0, _KEYS)
    age = WINDOW_TILES * _KEYS - 1 - key
    ids = tl.where((tile < num_tiles) & (age < WINDOW), tl.maximum(position - age, -1), -1)
    if HAS_ENTRIES:
        entry = key - WINDOW_TILES * _KEYS
        is_after = (tile >= WINDOW_TILES) & (tile < num_tiles)
        if NUM_PICKS > 0:
            mask = is_after & (entry < NUM_PICKS)
            entry = tl.load(picks_ptr + token.to(tl.int64) * stride_pt + entry, mask=mask, other=-1).to(tl.int32)
        is_seen = is_after & (entry >= 0) & (entry < (position + 1) // RATIO)
        ids = tl.where(tile < WINDOW_TILES, ids, tl.where(is_seen, entry, -1))
    return ids


@jit
def tile_links(tile, ids, slot, chunk_start, ring_positions_ptr, stride_rps, block_table_ptr, stride_bs,
                HAS_ENTRIES: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr,
                RING_LEN: tl.constexpr):
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
def _window_places(ids, is_fresh, token, position, slot, rows, ring, RING_LEN: tl.constexpr):
    """Where the rows of positions begin, and their scales: in the batch if they are fresh, or in the ring."""
    row = (token - (position - ids)).to(tl.int64)
    ring_slot = slot.to(tl.int64)
    ring_row = tl.maximum(ids, 0) % RING_LEN
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
    return data, scales


@jit
def tile_rows(
    tile, ids, links, token, position, slot, chunk_start, rows, ring, pages,
    HAS_ENTRIES: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr, RING_LEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Where a tile's rows begin, in words; the scales of a row in one word; and which keys exist, twice: for loads and,
    in int32, for logits.
    """
    PER_BLOCK: tl.constexpr = _BLOCK_TOKENS // RATIO
    id_ = tl.maximum(ids, 0)
    is_fresh = ids >= chunk_start
    exists = (ids >= 0) & (is_fresh | (links == ids))
    data, scales = _window_places(ids, is_fresh, token, position, slot, rows, ring, RING_LEN)
    if HAS_ENTRIES:
        is_window = tile < (WINDOW + _KEYS - 1) // _KEYS
        block = links.to(tl.int64)
        entry_row = id_ % PER_BLOCK
        data = tl.where(is_window, data, pages.data + block * pages.data_stride + entry_row * pages.data_row)
        scales = tl.where(is_window, scales, pages.scales + block * pages.scales_stride + entry_row * pages.scales_row)
        exists = tl.where(is_window, exists, ids >= 0)
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    # a maximum of equal values: without it the compiler finds all addresses again in the layout of the logits
    is_key = tl.max(tl.broadcast_to(exists.to(tl.int32)[:, None], [_KEYS, _WORDS]), axis=1)
    words_ptr = data.to(tl.pointer_type(tl.int32), bitcast=True)
    return words_ptr, tl.load(scales, mask=exists, other=0), exists, is_key


@jit
def key_entries(key, is_there, token, picks_ptr, stride_pt, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr,
                WINDOW: tl.constexpr):
    """What `key_rows` asks for: the entries of keys, as picked or as they come."""
    entry = key - (WINDOW + _KEYS - 1) // _KEYS * _KEYS
    if HAS_ENTRIES and NUM_PICKS > 0:
        mask = is_there & (entry >= 0) & (entry < NUM_PICKS)
        return tl.load(picks_ptr + token.to(tl.int64) * stride_pt + entry, mask=mask, other=-1)
    else:
        return entry


@jit
def key_rows(
    key, entry, is_there, token, position, slot, chunk_start, rows, ring, ring_positions_ptr, stride_rps, pages,
    block_table_ptr, stride_bs, HAS_ENTRIES: tl.constexpr, RATIO: tl.constexpr, WINDOW: tl.constexpr,
    RING_LEN: tl.constexpr,
):
    """The addresses of rows, by the numbers of their keys in a query's tiles, 0 where there is none; their scales."""
    PER_BLOCK: tl.constexpr = _BLOCK_TOKENS // RATIO
    WINDOW_KEYS: tl.constexpr = (WINDOW + _KEYS - 1) // _KEYS * _KEYS
    age = WINDOW_KEYS - 1 - key
    is_window = is_there & (key < WINDOW_KEYS) & (age < WINDOW)
    ids = tl.where(is_window, tl.maximum(position - age, -1), -1)
    links_ptr = ring_positions_ptr + slot.to(tl.int64) * stride_rps + tl.maximum(ids, 0) % RING_LEN
    has_link = (ids >= 0) & (ids < chunk_start)
    if HAS_ENTRIES:
        entry = entry.to(tl.int32)
        is_entry = is_there & (key >= WINDOW_KEYS) & (entry >= 0) & (entry < (position + 1) // RATIO)
        ids = tl.where(is_entry, entry, ids)
        links_ptr = tl.where(is_entry, block_table_ptr + slot.to(tl.int64) * stride_bs + ids // PER_BLOCK, links_ptr)
        has_link = has_link | is_entry
    links = tl.load(links_ptr, mask=has_link, other=-1)
    id_ = tl.maximum(ids, 0)
    is_fresh = ids >= chunk_start
    exists = is_window & (ids >= 0) & (is_fresh | (links == ids))
    data, scales = _window_places(ids, is_fresh, token, position, slot, rows, ring, RING_LEN)
    if HAS_ENTRIES:
        block = links.to(tl.int64)
        entry_row = id_ % PER_BLOCK
        data = tl.where(is_entry, pages.data + block * pages.data_stride + entry_row * pages.data_row, data)
        scales = tl.where(is_entry, pages.scales + block * pages.scales_stride + entry_row * pages.scales_row, scales)
        exists = exists | is_entry
    return tl.where(exists, data.to(tl.int64), 0), tl.load(scales, mask=exists, other=0)


@jit
def load_groups(words_ptr, exists, FIRST: tl.constexpr, LAST: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Groups FIRST .. LAST - 1 of a tile's rows in words [KEYS, 16]. The last two are the rope group: one has every
    other four words, one the rest, so that a thread gets the columns it has of other groups.
    """
    # all loads have one shape, so that one thread needs the address of one row
    word = tl.arange(0, _WORDS)
    groups = ()
    for group in tl.static_range(FIRST, LAST):
        words = words_ptr[:, None] + group * _WORDS + word[None, :]
        if group >= NUM_GROUPS:
            rope_word = word // 4 * 8 + word % 4 + 4 * (group - NUM_GROUPS)
            words = words_ptr[:, None] + NUM_GROUPS * _WORDS + rope_word[None, :]
        groups += (tl.load(words, mask=exists[:, None], other=0),)  # type: ignore[assignment]
    return groups


@jit
def _e4m3_byte(word, scale, BYTE: tl.constexpr):
    """One byte of every word as `_e4m3_word` decodes it."""
    code = (word >> (8 * BYTE)) & 0xFF
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 4)
    value = (bits << 16).to(tl.float32, bitcast=True) * _TWO_120
    return (value * (scale << 16).to(tl.float32, bitcast=True)).to(tl.bfloat16)


@jit
def _e4m3_word(word, scale):
    """int32 words of four E4M3 codes, times a bf16 given twice in a word -> four bf16, first byte first.

    A code at the bits 15 and 10 .. 4 of a bf16 is its value times 2^-120. Every product is exact but for what
    underflows, which is rounded once; the -0 added to it changes nothing (lib/fp4.py). Integer instructions, because
    conversions are slow. A code that is NaN gives 480: only a scale makes NaN here, and `encode_rows` makes a NaN
    scale where it makes a NaN code.
    """
    if INTERPRET:
        half = scale & 0xFFFF
        return (
            _e4m3_byte(word, half, 0), _e4m3_byte(word, half, 1), _e4m3_byte(word, half, 2), _e4m3_byte(word, half, 3),
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, factor, zero;
            prmt.b32 first, $4, $4, 0x9180;
            prmt.b32 second, $4, $4, 0xB3A2;
            shl.b32 first, first, 4;
            shl.b32 second, second, 4;
            and.b32 first, first, 0x87F087F0;
            and.b32 second, second, 0x87F087F0;
            mov.b32 factor, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 first, first, factor, zero;
            fma.rn.bf16x2 second, second, factor, zero;
            fma.rn.bf16x2 first, first, $5, zero;
            fma.rn.bf16x2 second, second, $5, zero;
            mov.b32 {$0, $1}, first;
            mov.b32 {$2, $3}, second;
            }""",
            constraints="=h,=h,=h,=h,r,r",
            args=[word, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )


@jit
def scale_bits(code):
    """An E8M0 code as the bits of a bf16: 2^-127 is a subnormal, 255 is NaN."""
    return tl.where(code == 0, 0x40, code << 7) | tl.where(code == 255, 0x40, 0)


@jit
def _decode(words, bits):
    """decode_rows of one group: words [KEYS, 16] of four codes and the rows' scales in bf16's bits -> bf16 [KEYS, 64],
    exact.
    """
    first, second, third, fourth = _e4m3_word(words, tl.broadcast_to((bits * 0x10001)[:, None], words.shape))
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [_KEYS, _GROUP])


@jit
def _bf16_pairs(words):
    """int32 words [KEYS, 16] of two bf16 values -> bf16 [KEYS, 4, 8]."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), [_KEYS, 4, 8])


@jit
def _rope_group(first, second):
    """The words of the rope group as `load_groups` gives them -> bf16 [KEYS, 64]."""
    eights = tl.join(_bf16_pairs(first), _bf16_pairs(second))
    return tl.reshape(tl.permute(eights, (0, 1, 3, 2)), [_KEYS, _GROUP])


@jit
def _side_by_side(left, right):
    """Two matrices [R, C] -> [R, 2 C]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@jit
def scales_of(scale_word, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Codes FIRST .. FIRST + COUNT - 1 of a word, as bits of bf16."""
    scales = ()
    for group in tl.static_range(FIRST, FIRST + COUNT):
        scales += (scale_bits(((scale_word >> (8 * group)) & 0xFF).to(tl.int32)),)  # type: ignore[assignment]
    return scales


@jit
def decode_groups(words, scales, FIRST: tl.constexpr, COUNT: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Groups FIRST .. FIRST + COUNT - 1, a power of two of them, side by side. `words` and `scales` (bits of bf16)
    begin with group FIRST.
    """
    if COUNT == 1:
        if FIRST == NUM_GROUPS:
            return _rope_group(words[0], words[1])
        else:
            return _decode(words[0], scales[0])
    else:
        HALF: tl.constexpr = COUNT // 2
        return _side_by_side(
            decode_groups(words, scales, FIRST, HALF, NUM_GROUPS),
            decode_groups(words[HALF:], scales[HALF:], FIRST + HALF, HALF, NUM_GROUPS),
        )
