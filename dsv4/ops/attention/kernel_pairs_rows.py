"""The producer warp groups of attention in pairs of tiles (kernel_pairs.py): one gathers rows, one decodes them."""

from __future__ import annotations

from dsv4.ops.attention.kernel_rows import KEYS, count_tiles, decode_groups, key_entries, key_rows, scale_bits
from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pipeline import consumer_release, consumer_wait, next_stage, producer_acquire, producer_commit

HEADS = 64  # of a program
DIM = 512
RING = 2  # pairs of tiles that are looked up ahead
_HEADS, _KEYS, _PAIR, _RING = gl.constexpr(HEADS), gl.constexpr(KEYS), gl.constexpr(2 * KEYS), gl.constexpr(RING)
_GROUP, _GROUPS, _WORDS = gl.constexpr(64), gl.constexpr(DIM // 64), gl.constexpr(16)
_QUARTERS = gl.constexpr(4)
if hopper is not None:
    _copies = hopper.async_copy


@gluon_jit
def _tiles_of(tokens, token, HAS_ENTRIES: gl.constexpr, NUM_PICKS: gl.constexpr, RATIO: gl.constexpr,
              WINDOW: gl.constexpr):
    """A token's position, its slot, and how many tiles it has."""
    position = gl.load(tokens.positions + token).to(gl.int32)
    slot = gl.load(tokens.slots + token).to(gl.int32)
    return position, slot, count_tiles(position, slot, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)


@gluon_jit
def _copy_query(memory, queries, token, first_head, num_heads):
    """64 columns at a time, which is what there are registers for."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    parts = memory.q.reinterpret(gl.bfloat16, [_GROUPS, _HEADS, _GROUP], gl.NVMMASharedLayout(128, 16, 2))
    heads = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, _GROUP, gl.SliceLayout(0, LAYOUT))
    first = queries.data + token.to(gl.int64) * queries.token_stride
    offsets = gl.expand_dims(heads * queries.head_stride, 1) + gl.expand_dims(cols, 0)
    for group in range(_GROUPS):
        _copies.async_load(
            parts.index(group), first + group * _GROUP + offsets, mask=gl.expand_dims(heads < num_heads, 1)
        )
    _copies.commit_group()
    _copies.wait_group(0)


@gluon_jit
def _bits_of_warp(flags):
    """A bit for each lane's flag, in all lanes."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", [flags],
        dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon_jit
def producer_gather(
    memory, barriers, queries, num_heads, tokens, num_programs, rows, ring, ring_positions_ptr, stride_rps, pages,
    picks_ptr, stride_pt, block_table_ptr, stride_bs, HEAD_BLOCKS: gl.constexpr, HAS_ENTRIES: gl.constexpr,
    NUM_PICKS: gl.constexpr, RATIO: gl.constexpr, WINDOW: gl.constexpr, RING_LEN: gl.constexpr,
):
    """Waits on `places.free`, once a pair, and `query.free`, once a query; arrives at `places.full` and `query.full`.
    A thread takes a key of a pair of tiles. After a query's first pair comes the query."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places = memory.places.reinterpret(gl.int64, [_RING, _PAIR], VECTOR)
    scales = memory.scales.reinterpret(gl.int32, [_RING * _GROUPS, _PAIR], VECTOR)
    bits = memory.bits.reinterpret(gl.int32, [_RING, _PAIR], VECTOR)
    place, phase, q_phase = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1)
    for index in range(gl.program_id(0), num_programs, gl.num_programs(0)):
        token = index // HEAD_BLOCKS
        position, slot, num_tiles = _tiles_of(tokens, token, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
        chunk_start = gl.load(tokens.chunk_starts + token).to(gl.int32)
        num_keys = num_tiles * _KEYS
        key = gl.arange(0, _PAIR, LAYOUT)
        entry = key_entries(key, key < num_keys, token, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, WINDOW)
        for pair in range((num_tiles + 1) // 2):
            next_key = key + _PAIR
            # asked for a pair ahead
            next_entry = key_entries(
                next_key, next_key < num_keys, token, picks_ptr, stride_pt, HAS_ENTRIES, NUM_PICKS, WINDOW
            )
            address, codes = key_rows(
                key, entry, key < num_keys, token, position, slot, chunk_start, rows, ring, ring_positions_ptr,
                stride_rps, pages, block_table_ptr, stride_bs, HAS_ENTRIES, RATIO, WINDOW, RING_LEN,
            )
            key, entry = next_key, next_entry
            producer_acquire(barriers.places, place, phase)
            places.index(place).store(address)
            bits.index(place).store(_bits_of_warp((address != 0).to(gl.int32)))
            for group in gl.static_range(_GROUPS - 1):
                factor = scale_bits(((codes >> (8 * group)) & 0xFF).to(gl.int32))
                scales.index(place * _GROUPS + group).store(factor)
            producer_commit(barriers.places, place)
            place, phase = next_stage(place, phase, _RING)
            if pair == 0:
                producer_acquire(barriers.query, 0, q_phase)
                _copy_query(memory, queries, token, index % HEAD_BLOCKS * _HEADS, num_heads)
                producer_commit(barriers.query, 0)
                q_phase ^= 1


@gluon_jit
def _load_quarter(address, QUARTER: gl.constexpr, ROWS: gl.constexpr):
    """As `load_groups` of kernel_rows.py: the words of two groups, of which the last is the rope group."""
    words_ptr = gl.expand_dims(gl.multiple_of(address.to(gl.pointer_type(gl.int32), bitcast=True), 16), 1)
    word = gl.expand_dims(gl.arange(0, _WORDS, gl.SliceLayout(0, ROWS)), 0)
    exists = gl.expand_dims(address != 0, 1)
    first = gl.load(words_ptr + (word + QUARTER * 2 * _WORDS), mask=exists, other=0)
    if QUARTER == _QUARTERS - 1:
        rope_ptr = words_ptr + (word // 4 * 8 + word % 4 + (_GROUPS - 1) * _WORDS)
        return first, gl.load(rope_ptr, mask=exists, other=0), gl.load(rope_ptr + 4, mask=exists, other=0)
    else:
        return first, gl.load(words_ptr + (word + (QUARTER * 2 + 1) * _WORDS), mask=exists, other=0)


@gluon_jit
def _decode_tile(
    memory, barriers, address, words, following, place, phase, TILE: gl.constexpr, ROWS: gl.constexpr
):
    """Rows at `address` [KEYS], of which `words` [KEYS, 16] are the first quarter's; returns those of the tile that
    follows. Waits on `keys.free` and arrives at `keys.full`, quarter by quarter."""
    keys = memory.keys.reinterpret(gl.bfloat16, [2 * _GROUPS, _KEYS, _GROUP], gl.NVMMASharedLayout(128, 16, 2))
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    for quarter in gl.static_range(_QUARTERS):
        if quarter + 1 < _QUARTERS:
            next_words = _load_quarter(address, quarter + 1, ROWS)
        else:
            next_words = _load_quarter(following, 0, ROWS)
        first_scale = (place * _GROUPS + quarter * 2) * 2 + TILE
        scales = (memory.scales.index(first_scale).load(ROW), memory.scales.index(first_scale + 2).load(ROW))
        producer_acquire(barriers.keys, TILE * _QUARTERS + quarter, phase)
        if quarter == 0:
            memory.exists.index(TILE).store(memory.bits.index(place * 2 + TILE).load(ROW))
        for half in gl.static_range(2):
            values = decode_groups(words[half:], scales[half:], quarter * 2 + half, 1, _GROUPS - 1)
            keys.index(TILE * _GROUPS + quarter * 2 + half).store(values)
        producer_commit(barriers.keys, TILE * _QUARTERS + quarter)
        words = next_words
    return words


@gluon_jit
def producer_decode(
    memory, barriers, tokens, num_programs, HEAD_BLOCKS: gl.constexpr, HAS_ENTRIES: gl.constexpr,
    NUM_PICKS: gl.constexpr, RATIO: gl.constexpr, WINDOW: gl.constexpr,
):
    """Consumer of `places`, once a pair; producer of `keys`, tile by tile. Rows of the tile that follows are asked for
    before this one is decoded."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    place, place_phase = gl.to_tensor(0), gl.to_tensor(0)
    phase, second_phase = gl.to_tensor(1), gl.to_tensor(1)
    for index in range(gl.program_id(0), num_programs, gl.num_programs(0)):
        token = index // HEAD_BLOCKS
        _, _, num_tiles = _tiles_of(tokens, token, HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
        num_pairs = (num_tiles + 1) // 2
        if num_tiles > 0:
            consumer_wait(barriers.places, place, place_phase)
            address = memory.places.index(place * 2).load(ROW)
            words = _load_quarter(address, 0, ROWS)
            for pair in range(num_pairs):
                following = memory.places.index(place * 2 + 1).load(ROW)
                words = _decode_tile(memory, barriers, address, words, following, place, phase, 0, ROWS)
                phase ^= 1
                address = following
                next_place, next_phase = next_stage(place, place_phase, _RING)
                if pair + 1 < num_pairs:
                    consumer_wait(barriers.places, next_place, next_phase)
                # after the last tile of a query there is nothing to ask for
                following = gl.where(pair + 1 < num_pairs, memory.places.index(next_place * 2).load(ROW), 0)
                if pair * 2 + 1 < num_tiles:
                    words = _decode_tile(memory, barriers, address, words, following, place, second_phase, 1, ROWS)
                    second_phase ^= 1
                address = following
                consumer_release(barriers.places, place)
                place, place_phase = next_place, next_phase
