"""Kernels of ops/indexer: the query side in one launch, and scores of queries against paged keys.

Scores come from two kernels with the same product: a tile of keys, decoded to bf16, which holds FP4 and FP8 keys
exactly, times the heads of one token. Keys are its rows and heads its columns, so the sum over heads stays within a
warp, in an order that depends on nothing but the number of heads: a score has the same bits in every batch and chunk.

* `token_scores_kernel`: a program has one token, its heads stay in shared memory, and keys stream by. For few tokens.
* `group_scores_kernel`: a program has neighbouring tokens; those of one request share every decoded tile of keys, which
  stays in registers, and their heads stream by. For many.

In both a program takes neighbouring tiles, and a token whose visible entries all fit into TOP_K is not scored.
"""

from __future__ import annotations

from dsv4.formats.rows import INDEX_FP4_GROUP
from dsv4.ops.lib.codecs import (
    abs_bits,
    e2m1_decode,
    e2m1_encode,
    e2m1_scale,
    e4m3_scale,
    e8m0_reciprocal,
    e8m0_to_float,
    round_e4m3,
)
from dsv4.ops.lib.fp4 import MINUS_ZEROS
from dsv4.ops.lib.guard import INTERPRET, jit, tl
from dsv4.ops.lib.hadamard import hadamard_rows
from dsv4.ops.lib.maths import cos_sin
from dsv4.ops.rows.kernel_rope import rotate_pairs
from dsv4.ops.rows.target import INDEX_FP4

MAX_GROUP = 64  # tokens of one program
_MAX_GROUP = tl.constexpr(MAX_GROUP)
_INDEX_FP4, _FP4_GROUP = tl.constexpr(INDEX_FP4), tl.constexpr(INDEX_FP4_GROUP)
_UPPER_BITS = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@jit
def encode_queries(
    q_ptr, out_ptr, positions_ptr, freqs_ptr, token, first_head, num_heads, stride_qt, stride_qh,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, HEADS: tl.constexpr,
):
    """HEADS heads of a token from `first_head` on: roped, rotated, quantised and decoded again."""
    heads = first_head + tl.arange(0, HEADS)
    cols = tl.arange(0, DIM)
    mask = (heads < num_heads)[:, None]
    # x [HEADS, Di]
    x = tl.load(q_ptr + token * stride_qt + heads[:, None] * stride_qh + cols[None, :], mask=mask, other=0.0)
    # rope over the whole head, at frequency 0 where there is none: the Hadamard rotation mixes both parts
    pair = tl.arange(0, DIM // 2) - (DIM // 2 - ROPE_DIM // 2)
    freqs = tl.load(freqs_ptr + pair, mask=pair >= 0, other=0.0)
    cos, sin = cos_sin(tl.load(positions_ptr + token).to(tl.float32) * freqs)
    rotated = rotate_pairs(x.to(tl.float32), cos, sin).to(x.dtype)
    values = tl.where((cols >= DIM - ROPE_DIM)[None, :], rotated, x)
    # hadamard_ref(q)
    values = hadamard_rows(values.to(tl.float32), LOG2_DIM).to(x.dtype).to(tl.float32)
    # decode_rows(encode_rows(q, key_format))
    if KIND == _INDEX_FP4:
        groups = tl.reshape(values, [HEADS * (DIM // _FP4_GROUP), _FP4_GROUP])
        scale = e2m1_scale(tl.max(abs_bits(groups), axis=1))[:, None]
        groups = e2m1_decode(e2m1_encode(groups * e8m0_reciprocal(scale))) * e8m0_to_float(scale)
        values = tl.reshape(groups, [HEADS, DIM])
    else:
        scale = e4m3_scale(tl.max(abs_bits(values), axis=1))[:, None]
        values = round_e4m3(values * e8m0_reciprocal(scale)) * e8m0_to_float(scale)
    places = (token * num_heads + heads[:, None]) * DIM + cols[None, :]
    tl.store(out_ptr + places, values.to(tl.bfloat16).to(x.dtype), mask=mask)


# ---- keys ----

# A word of FP4 has 8 codes: code i of word j is dimension 8 j + i of the key. Plane i, the i-th codes of the words, is
# decoded from pairs of words, and the planes are joined one after the other: the words of a row in the layout of an
# MMA operand with K = 16 are then, plane by plane, the operand with K = 128, and nothing moves between threads. The
# words stand in such an order that a thread has one of every four that share a scale. Queries come in the same order of
# dimensions (`_in_planes`). FP8 has 4 codes a word.
#
# A permute puts a byte into the low half of 16 bits and copies its sign into all of the upper half: one shift and one
# mask leave sign, exponent and mantissa at bf16's places. That is an E2M1 value times 2^-126 and an E4M3 value times
# 2^-120. Every element depends on its own word alone: any layout of registers is right.
_PERMUTES = ("0xC480", "0xD591", "0xE6A2", "0xF7B3")
_SHIFTED = 63  # FP4 keys come out times 2^-63, so that one multiplication takes scales from 2^-69 to 2^64
_SCALE_OFFSET = 126 - _SHIFTED  # to the exponent of a factor
_SCALE_OFFSETS = tl.constexpr(_SCALE_OFFSET * 0x800080)
_WEIGHT_SCALE = tl.constexpr(2.0**_SHIFTED)


def _fp4_ptx() -> str:
    """Outputs $0 .. $7, words $8 and $9, the factors of both in the halves of $10 (and of $11, the same)."""
    lines = ["{ .reg .b32 t, w, v, z;", f"mov.b32 z, {MINUS_ZEROS};", "shl.b32 w, $8, 4;", "shl.b32 v, $9, 4;"]
    for index, select in enumerate(_PERMUTES):
        for plane, words in ((2 * index, "w, v"), (2 * index + 1, "$8, $9")):
            lines += [f"prmt.b32 t, {words}, {select};", "shl.b32 t, t, 2;", "and.b32 t, t, 0x81C081C0;"]
            lines += [f"fma.rn.bf16x2 ${plane}, t, $10, z;"]
    return "\n".join([*lines, "}"])


def _fp8_ptx() -> str:
    """Outputs $0 .. $3, words $4 and $5. 0x7B80 is 2^120."""
    lines = ["{ .reg .b32 t, f, z;", "mov.b32 f, 0x7B807B80;", f"mov.b32 z, {MINUS_ZEROS};"]
    for plane, select in enumerate(_PERMUTES):
        lines += [f"prmt.b32 t, $4, $5, {select};", "shl.b32 t, t, 4;", "and.b32 t, t, 0x87F087F0;"]
        lines += [f"fma.rn.bf16x2 ${plane}, t, f, z;"]
    return "\n".join([*lines, "}"])


_FP4_PTX, _FP8_PTX = tl.constexpr(_fp4_ptx()), tl.constexpr(_fp8_ptx())
# four scale codes -> bf16 factors of the first two, of the last two
_SCALES_PTX = tl.constexpr(
    f"{{ .reg .b32 t; prmt.b32 t, $2, 0, 0x4140; mad.lo.u32 $0, t, 128, {_SCALE_OFFSET * 0x800080};"
    f" prmt.b32 t, $2, 0, 0x4342; mad.lo.u32 $1, t, 128, {_SCALE_OFFSET * 0x800080}; }}"
)
_FP4_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
_FP8_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))


@jit
def _bf16(bits):
    return (bits << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)


@jit
def _fp4_plane(words, factor, PLANE: tl.constexpr):
    code = (words >> (4 * PLANE)) & 15
    return _bf16(((code & 8) << 12) | ((code & 7) << 6)) * factor


@jit
def _fp8_plane(words, PLANE: tl.constexpr):
    code = (words >> (8 * PLANE)) & 255
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.bfloat16)  # 2^120


@jit
def _join4(p0, p1, p2, p3):
    """[N, W] -> [N, W, 2 (bit 1 of the plane), 2 (bit 0)]."""
    return tl.join(tl.join(p0, p2), tl.join(p1, p3))


@jit
def decode_keys(words, scales, KIND: tl.constexpr):
    """Words int32 [N, W] of N keys, and what `_load_keys` gives as scales [N] -> bf16 [N, DIM], planes one after the
    other. FP4: times 2^-63. FP8: not scaled yet.
    """
    N: tl.constexpr = words.shape[0]
    if KIND == _INDEX_FP4:
        tl.static_assert(words.shape[1] == 16)
        words = tl.reshape(tl.permute(tl.reshape(words, [N, 2, 2, 4]), [0, 1, 3, 2]), [N, 16])
        if INTERPRET:
            low = (((scales & 0xFF) | ((scales & 0xFF00) << 8)) << 7) + _SCALE_OFFSETS
            high = ((((scales >> 16) & 0xFF) | ((scales >> 8) & 0xFF0000)) << 7) + _SCALE_OFFSETS
        else:
            low, high = tl.inline_asm_elementwise(
                _SCALES_PTX, "=&r,=&r,r", [scales], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        factors = tl.reshape(tl.broadcast_to(tl.join(low, high)[:, :, None], [N, 2, 8]), [N, 16])
        if INTERPRET:
            is_odd = (tl.arange(0, 16) % 2)[None, :]
            factor = _bf16((factors >> (16 * is_odd)) & 0xFFFF)
            p0, p1 = _fp4_plane(words, factor, 0), _fp4_plane(words, factor, 1)
            p2, p3 = _fp4_plane(words, factor, 2), _fp4_plane(words, factor, 3)
            p4, p5 = _fp4_plane(words, factor, 4), _fp4_plane(words, factor, 5)
            p6, p7 = _fp4_plane(words, factor, 6), _fp4_plane(words, factor, 7)
        else:
            p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
                _FP4_PTX, _FP4_CONSTRAINTS, [words, factors], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
            )
        joined = tl.join(_join4(p0, p2, p4, p6), _join4(p1, p3, p5, p7))
        return tl.reshape(tl.permute(joined, [0, 2, 3, 4, 1]), [N, 8 * words.shape[1]])
    else:
        if INTERPRET:
            p0, p1, p2, p3 = _fp8_plane(words, 0), _fp8_plane(words, 1), _fp8_plane(words, 2), _fp8_plane(words, 3)
        else:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _FP8_PTX, _FP8_CONSTRAINTS, [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        return tl.reshape(tl.permute(_join4(p0, p1, p2, p3), [0, 2, 3, 1]), [N, 4 * words.shape[1]])


@jit
def _in_planes(q, KIND: tl.constexpr):
    """Queries [H, DIM] in the order of decoded keys."""
    H: tl.constexpr = q.shape[0]
    if KIND == _INDEX_FP4:
        q = tl.permute(tl.reshape(q, [H, 2, 2, 4, 8]), [0, 4, 1, 3, 2])
        return tl.reshape(q, [H, 128])
    else:
        return tl.reshape(tl.permute(tl.reshape(q, [H, q.shape[1] // 4, 4]), [0, 2, 1]), [H, q.shape[1]])


@jit
def _load_blocks(table_ptr, start, end, TILE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The up to four blocks of a tile's entries, those from `end` on left out: numbers, not a tensor."""
    NUM: tl.constexpr = max(TILE // PER_BLOCK, 1)
    tl.static_assert(NUM <= 4)
    first, last = start // PER_BLOCK, tl.maximum(end - 1, 0) // PER_BLOCK
    block0 = tl.load(table_ptr + tl.minimum(first, last))
    block1, block2, block3 = block0, block0, block0
    if NUM > 1:
        block1 = tl.load(table_ptr + tl.minimum(first + 1, last))
    if NUM > 2:
        block2 = tl.load(table_ptr + tl.minimum(first + 2, last))
        block3 = tl.load(table_ptr + tl.minimum(first + 3, last))
    return block0, block1, block2, block3


@jit
def _load_keys(keys, blocks, start, TILE: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Stored words [TILE, WORDS] and scales [TILE] (FP4: 4 codes in a word; FP8: fp32) of the entries from `start` on,
    in `blocks`. Those after the last come from the same blocks and mean nothing.
    """
    lanes = tl.arange(0, TILE)
    block0, block1, block2, block3 = blocks
    block = block0 + tl.zeros([TILE], tl.int32)
    if TILE > PER_BLOCK:
        block = tl.where((lanes // PER_BLOCK & 1) == 1, block1, block0)
    if TILE > 2 * PER_BLOCK:
        upper = tl.where((lanes // PER_BLOCK & 1) == 1, block3, block2)
        block = tl.where(lanes // PER_BLOCK >= 2, upper, block)
    block = block.to(tl.int64)
    places = lanes % PER_BLOCK if TILE >= PER_BLOCK else start % PER_BLOCK + lanes
    rows = block * keys.words_stride + places * keys.words_row
    words = tl.load(keys.words + rows[:, None] + tl.arange(0, WORDS)[None, :])
    return words, tl.load(keys.scales + block * keys.scales_stride + places * keys.scales_row)


# ---- scores ----


@jit(do_not_specialize=("num_heads",))
def plane_queries_kernel(
    q_ptr, out_ptr, num_heads, stride_qt, stride_qh, KIND: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr
):
    """A token's heads in the order of decoded keys: [T, num_heads, DIM], contiguous."""
    token = tl.program_id(0).to(tl.int64)
    heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    q = tl.load(q_ptr + token * stride_qt + heads * stride_qh + cols, mask=heads < num_heads, other=0.0)
    places = (token * num_heads + heads) * DIM + cols
    tl.store(out_ptr + places, _in_planes(q, KIND), mask=heads < num_heads)


@jit
def _store_scores(scores_ptr, key_tile, scales, q, weights, start, limit, KIND: tl.constexpr, TILE: tl.constexpr):
    """Scores of one token against TILE entries from `start` on, stored where it sees them."""
    # ordered_sum(weights * dots.relu(), heads), in an order of its own
    dots = tl.dot(key_tile, tl.trans(q))  # [TILE, HEADS]
    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    scores = tl.sum(dots * weights[None, :], axis=1)  # [TILE]
    if KIND == _INDEX_FP4:
        # a code of 192 or more, both upper bits set: 255 is NaN, the others overflow
        scores = tl.where((scales & (scales << 1) & _UPPER_BITS) != 0, float("nan"), scores)
    else:
        scores = scores * scales
    entries = start + tl.arange(0, TILE)
    tl.store(scores_ptr + entries, scores, mask=entries < limit)


@jit
def _load_weights(weights_ptr, scale, heads, NUM_HEADS: tl.constexpr, KIND: tl.constexpr):
    # weights.to(fp32) * scale: the power of two first, it is the same rounding
    factor = scale * _WEIGHT_SCALE if KIND == _INDEX_FP4 else scale
    return tl.load(weights_ptr + heads, mask=heads < NUM_HEADS, other=0.0).to(tl.float32) * factor


@jit
def _own_tiles(limit, TILE: tl.constexpr):
    """First entry of this program's tiles, and the one after the last: an even share of `limit` entries."""
    num_tiles = (limit + TILE - 1) // TILE
    share = (num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0) * TILE
    start = tl.program_id(0) * share
    return start, tl.minimum(start + share, limit)


@jit(do_not_specialize=("capacity",))
def token_scores_kernel(
    q_ptr, weights_ptr, keys, table_ptr, positions_ptr, slots_ptr, scores_ptr, lengths_ptr, scale,
    capacity, stride_qt, stride_qh, stride_wt, stride_ts, stride_st,
    KIND: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WORDS: tl.constexpr,
    PER_BLOCK: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    # num_visible(positions, ratio).masked_fill(slots < 0, 0)
    limit = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, capacity).to(tl.int32)
    limit = tl.where(slot >= 0, limit, 0)
    if tl.program_id(0) == 0:
        tl.store(lengths_ptr + token, limit)
    start, end = _own_tiles(limit, TILE)
    if (limit > TOP_K) & (start < end):
        heads = tl.arange(0, HEADS)
        table_ptr += slot * stride_ts
        q_tile = heads[:, None] * stride_qh + tl.arange(0, DIM)[None, :]
        q = tl.load(q_ptr + token * stride_qt + q_tile, mask=heads[:, None] < NUM_HEADS, other=0.0)
        q = _in_planes(q, KIND)  # [HEADS, Di]
        weights = _load_weights(weights_ptr + token * stride_wt, scale, heads, NUM_HEADS, KIND)  # [HEADS]
        blocks = _load_blocks(table_ptr, start, end, TILE, PER_BLOCK)
        for tile in tl.range(start, end, TILE, num_stages=STAGES):
            words, scales = _load_keys(keys, blocks, tile, TILE, WORDS, PER_BLOCK)  # [TILE, WORDS], [TILE]
            blocks = _load_blocks(table_ptr, tile + TILE, end, TILE, PER_BLOCK)
            _store_scores(
                scores_ptr + token * stride_st, decode_keys(words, scales, KIND), scales, q, weights, tile, limit,
                KIND, TILE,
            )


@jit
def _score_token(
    q_ptr, weights_ptr, scale, positions_ptr, scores_ptr, key_tile, scales, token, start, capacity,
    stride_qt, stride_qh, stride_wt, stride_st,
    KIND: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr,
    TILE: tl.constexpr,
):
    heads = tl.arange(0, HEADS)
    q_tile = heads[:, None] * stride_qh + tl.arange(0, DIM)[None, :]
    wide = tl.full([], 0, tl.int64) + token
    q = tl.load(q_ptr + wide * stride_qt + q_tile, mask=heads[:, None] < NUM_HEADS, other=0.0)
    weights = _load_weights(weights_ptr + wide * stride_wt, scale, heads, NUM_HEADS, KIND)
    limit = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, capacity).to(tl.int32)
    _store_scores(scores_ptr + wide * stride_st, key_tile, scales, q, weights, start, limit, KIND, TILE)


@jit(do_not_specialize=("num_tokens", "capacity", "group"))
def group_scores_kernel(
    q_ptr, weights_ptr, keys, table_ptr, positions_ptr, slots_ptr, scores_ptr, lengths_ptr, scale,
    num_tokens, capacity, group, stride_qt, stride_qh, stride_wt, stride_ts, stride_st,
    KIND: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WORDS: tl.constexpr,
    PER_BLOCK: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):
    """Queries in planes."""
    first = tl.program_id(1) * group
    stop = tl.minimum(first + group, num_tokens)
    tokens = first + tl.arange(0, _MAX_GROUP)
    slots = tl.load(slots_ptr + tokens, mask=tokens < stop, other=-1)  # [MAX_GROUP]
    limits = (tl.load(positions_ptr + tokens, mask=tokens < stop, other=0) + 1) // RATIO
    limits = tl.where(slots >= 0, tl.minimum(limits, capacity), 0).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(lengths_ptr + tokens, limits, mask=tokens < stop)
    begin = first
    while begin < stop:
        # a run: neighbouring tokens of one request
        slot = tl.load(slots_ptr + begin)
        is_later = (tokens >= begin) & (tokens < stop) & (slots != slot)
        run_stop = tl.min(tl.where(is_later, tokens, stop), 0)
        is_run = (tokens >= begin) & (tokens < run_stop)
        run_limit = tl.max(tl.where(is_run, limits, 0), 0)
        run_limit = tl.where(run_limit > TOP_K, run_limit, 0)
        run_table_ptr = table_ptr + slot * stride_ts
        start, end = _own_tiles(run_limit, TILE)
        for tile in range(start, end, TILE):
            blocks = _load_blocks(run_table_ptr, tile, end, TILE, PER_BLOCK)
            words, scales = _load_keys(keys, blocks, tile, TILE, WORDS, PER_BLOCK)  # [TILE, WORDS], [TILE]
            key_tile = decode_keys(words, scales, KIND)  # [TILE, Di]
            # positions ascend: the tokens that see nothing of this tile, or are not scored, come first
            num_blind = tl.sum((is_run & (limits <= tl.maximum(tile, TOP_K))).to(tl.int32), 0)
            # one token before the others: the compiler then has the keys decoded in the registers that feed the product
            visible = tl.minimum(begin + num_blind, run_stop - 1)
            _score_token(
                q_ptr, weights_ptr, scale, positions_ptr, scores_ptr, key_tile, scales, visible, tile,
                capacity, stride_qt, stride_qh, stride_wt, stride_st,
                KIND, NUM_HEADS, HEADS, DIM, RATIO, TILE,
            )
            for token in tl.range(visible + 1, run_stop, num_stages=STAGES):
                _score_token(
                    q_ptr, weights_ptr, scale, positions_ptr, scores_ptr, key_tile, scales, token, tile,
                    capacity, stride_qt, stride_qh, stride_wt, stride_st,
                    KIND, NUM_HEADS, HEADS, DIM, RATIO, TILE,
                )
        begin = run_stop
