"""Kernels of ops/indexer.py: the query side in one launch, and scores of queries against paged keys.

Scores come from two kernels with the same product: a tile of keys, decoded to bf16, which holds FP4 and FP8 keys
exactly, times the heads of one token. Keys are its rows and heads its columns, so the sum over heads stays within a
warp, in an order that depends on nothing but the number of heads: a score has the same bits in every batch and chunk.

* `token_scores_kernel`: a program has one token, its heads stay in shared memory, and keys stream by: the bytes of the
  next tile are read before this one is decoded. For few tokens.
* `group_scores_kernel`: a program has neighbouring tokens; those of one request share every decoded tile of keys, and
  their heads stream by. For many.

In both a program takes neighbouring tiles, and a token whose visible entries all fit into TOP_K is not scored.
"""

from __future__ import annotations

from dsv4.formats.rows import INDEX_FP4_GROUP
from dsv4.ops.hadamard import hadamard_rows
from dsv4.ops.rope import rotate_pairs
from dsv4.ops.row_kernels import INDEX_FP4, row_offsets
from dsv4.ops.tl_math import ordered_bits
from dsv4.ops.tl_utils import (
    INTERPRET,
    abs_bits,
    cos_sin,
    e2m1_decode,
    e2m1_encode,
    e2m1_scale,
    e4m3_scale,
    e8m0_reciprocal,
    e8m0_to_float,
    jit,
    tl,
)
from dsv4.ops.topk_kernels import GROUP, group_maxima

MAX_GROUP = 64  # tokens of one program
_MAX_GROUP, _GROUP = tl.constexpr(MAX_GROUP), tl.constexpr(GROUP)
_INDEX_FP4, _FP4_GROUP = tl.constexpr(INDEX_FP4), tl.constexpr(INDEX_FP4_GROUP)
_EMPTY = tl.constexpr(-0x80000000)


@jit(do_not_specialize=("num_heads",))
def index_queries_kernel(
    q_ptr, out_ptr, positions_ptr, freqs_ptr, num_heads, stride_qt, stride_qh,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A token's HEADS heads: roped, rotated, quantised and decoded again."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, DIM)
    mask = (heads < num_heads)[:, None]
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
        codes = (values * e8m0_reciprocal(scale)).to(tl.float8e4nv)
        values = codes.to(tl.float32) * e8m0_to_float(scale)
    places = (token * num_heads + heads[:, None]) * DIM + cols[None, :]
    tl.store(out_ptr + places, values.to(tl.bfloat16).to(x.dtype), mask=mask)


# ---- keys ----

# four bytes -> their low and their high nibbles as bf16, times factor. Sign, exponent and mantissa at bf16's places are
# the value * 2^-126; 0x7E80 is 2^126. Every element depends on its own byte alone.
_DECODE_ASM = tl.constexpr("""
{
.reg .b32 pair, sign, mag, big;
mov.b32 big, 0x7E807E80;
prmt.b32 pair, $4, 0, 0x4140;
shl.b32 mag, pair, 6;
shl.b32 sign, pair, 12;
and.b32 mag, mag, 0x01C001C0;
lop3.b32 mag, sign, 0x80008000, mag, 0xEA;
mul.bf16x2 mag, mag, big;
mul.bf16x2 $0, mag, $5;
shl.b32 mag, pair, 2;
shl.b32 sign, pair, 8;
and.b32 mag, mag, 0x01C001C0;
lop3.b32 mag, sign, 0x80008000, mag, 0xEA;
mul.bf16x2 mag, mag, big;
mul.bf16x2 $2, mag, $5;
prmt.b32 pair, $4, 0, 0x4342;
shl.b32 mag, pair, 6;
shl.b32 sign, pair, 12;
and.b32 mag, mag, 0x01C001C0;
lop3.b32 mag, sign, 0x80008000, mag, 0xEA;
mul.bf16x2 mag, mag, big;
mul.bf16x2 $1, mag, $6;
shl.b32 mag, pair, 2;
shl.b32 sign, pair, 8;
and.b32 mag, mag, 0x01C001C0;
lop3.b32 mag, sign, 0x80008000, mag, 0xEA;
mul.bf16x2 mag, mag, big;
mul.bf16x2 $3, mag, $6;
}
""")


@jit
def _decode_nibbles(packed, factor, PACKED: tl.constexpr):
    """Bytes and fp32 factors of one shape -> bf16 of the low nibbles, and of the high ones; exact."""
    if PACKED and not INTERPRET:
        low, high = tl.inline_asm_elementwise(
            _DECODE_ASM, "=&r,=&r,=&r,=&r,r,r,r", [packed, factor.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (e2m1_decode(packed & 15) * factor).to(tl.bfloat16)
        high = (e2m1_decode(packed >> 4) * factor).to(tl.bfloat16)
    return low, high


@jit
def _load_keys(keys, table_ptr, entries, end, KIND: tl.constexpr, DIM: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Stored bytes and scales of the entries [N] of one request; from `end` on nothing is read."""
    mask = entries < end
    blocks = tl.load(table_ptr + entries // PER_BLOCK, mask=mask, other=0)
    offsets = row_offsets(keys, blocks, entries % PER_BLOCK)
    if KIND == _INDEX_FP4:
        cols = tl.arange(0, DIM // 2)[None, :]
        groups = tl.arange(0, DIM // _FP4_GROUP)[None, :]
        scales = tl.load(keys.scales + offsets[2][:, None] + groups, mask=mask[:, None], other=0)
    else:
        cols = tl.arange(0, DIM)[None, :]
        scales = tl.load(keys.factor + offsets[3], mask=mask, other=0.0)
    return tl.load(keys.data + offsets[0][:, None] + cols, mask=mask[:, None], other=0), scales


@jit
def _decode_keys(data, scales, KIND: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr):
    """decode_rows: bf16 [N, DIM]."""
    N: tl.constexpr = data.shape[0]
    if KIND == _INDEX_FP4:
        NUM: tl.constexpr = DIM // _FP4_GROUP
        data = tl.reshape(data, [N, NUM, _FP4_GROUP // 2])  # a thread's 16 bytes share a scale
        factor = tl.broadcast_to(e8m0_to_float(scales)[:, :, None], [N, NUM, _FP4_GROUP // 2])
        low, high = _decode_nibbles(data, factor, PACKED)
        values = tl.reshape(tl.join(low, high), [N, DIM])
    else:
        values = (data.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, None]).to(tl.bfloat16)
    return values


# ---- scores ----


@jit
def _store_scores(
    scores_ptr, maxima_ptr, key_tile, q, weights, start, limit, TILE: tl.constexpr, HAS_MAXIMA: tl.constexpr
):
    """Scores of one token against TILE entries from `start` on, stored where it sees them, and their maxima."""
    # ordered_sum(weights * dots.relu(), heads), in an order of its own
    dots = tl.dot(key_tile, tl.trans(q))  # [TILE, HEADS]
    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    scores = tl.sum(dots * weights[None, :], axis=1)
    entries = start + tl.arange(0, TILE)
    tl.store(scores_ptr + entries, scores, mask=entries < limit)
    if HAS_MAXIMA:
        maxima = group_maxima(tl.where(entries < limit, ordered_bits(scores), _EMPTY))
        lanes = start // _GROUP + tl.arange(0, TILE // _GROUP)
        tl.store(maxima_ptr + lanes, maxima, mask=lanes * _GROUP < limit)


@jit
def _own_tiles(limit, TILE: tl.constexpr):
    """First entry of this program's tiles, and the one behind the last: an even share of `limit` entries."""
    num_tiles = (limit + TILE - 1) // TILE
    share = (num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0) * TILE
    start = tl.program_id(0) * share
    return start, tl.minimum(start + share, limit)


@jit(do_not_specialize=("capacity", "num_maxima"))
def token_scores_kernel(
    q_ptr, weights_ptr, keys, table_ptr, positions_ptr, slots_ptr, scores_ptr, maxima_ptr, lengths_ptr, arrivals_ptr,
    capacity, num_maxima, stride_qt, stride_qh, stride_wt, stride_ts, stride_st,
    KIND: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PER_BLOCK: tl.constexpr,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, HAS_MAXIMA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    # num_visible(positions, ratio).masked_fill(slots < 0, 0)
    limit = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, capacity).to(tl.int32)
    limit = tl.where(slot >= 0, limit, 0)
    if tl.program_id(0) == 0:
        tl.store(lengths_ptr + token, limit)
        if HAS_MAXIMA:
            tl.store(arrivals_ptr + token, 0)
    start, end = _own_tiles(limit, TILE)
    if (limit > TOP_K) & (start < end):
        heads = tl.arange(0, HEADS)
        head_mask = heads < NUM_HEADS
        table_ptr += slot * stride_ts
        lanes = tl.arange(0, TILE)
        data, scales = _load_keys(keys, table_ptr, start + lanes, end, KIND, DIM, PER_BLOCK)
        q_tile = heads[:, None] * stride_qh + tl.arange(0, DIM)[None, :]
        q = tl.load(q_ptr + token * stride_qt + q_tile, mask=head_mask[:, None], other=0.0)
        weights = tl.load(weights_ptr + token * stride_wt + heads, mask=head_mask, other=0.0)
        for tile in range(start, end, TILE):
            key_tile = _decode_keys(data, scales, KIND, DIM, PACKED)
            data, scales = _load_keys(keys, table_ptr, tile + TILE + lanes, end, KIND, DIM, PER_BLOCK)
            _store_scores(
                scores_ptr + token * stride_st, maxima_ptr + token * num_maxima, key_tile, q, weights, tile, limit,
                TILE, HAS_MAXIMA,
            )  # fmt: skip


@jit(do_not_specialize=("num_tokens", "capacity", "num_maxima", "group"))
def group_scores_kernel(
    q_ptr, weights_ptr, keys, table_ptr, positions_ptr, slots_ptr, scores_ptr, maxima_ptr, lengths_ptr, arrivals_ptr,
    num_tokens, capacity, num_maxima, group, stride_qt, stride_qh, stride_wt, stride_ts, stride_st,
    KIND: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PER_BLOCK: tl.constexpr,
    RATIO: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr, HAS_MAXIMA: tl.constexpr, PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * group
    stop = tl.minimum(first + group, num_tokens)
    tokens = first + tl.arange(0, _MAX_GROUP)
    slots = tl.load(slots_ptr + tokens, mask=tokens < stop, other=-1)
    limits = (tl.load(positions_ptr + tokens, mask=tokens < stop, other=0) + 1) // RATIO
    limits = tl.where(slots >= 0, tl.minimum(limits, capacity), 0).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(lengths_ptr + tokens, limits, mask=tokens < stop)
        if HAS_MAXIMA:
            tl.store(arrivals_ptr + tokens, tl.zeros([_MAX_GROUP], tl.int32), mask=tokens < stop)
    heads = tl.arange(0, HEADS)
    head_mask = heads < NUM_HEADS
    q_tile = heads[:, None] * stride_qh + tl.arange(0, DIM)[None, :]
    lanes = tl.arange(0, TILE)
    begin = first
    while begin < stop:
        # a run: neighbouring tokens of one request
        slot = tl.load(slots_ptr + begin)
        is_later = (tokens >= begin) & (tokens < stop) & (slots != slot)
        behind = tl.min(tl.where(is_later, tokens, stop), 0)
        is_run = (tokens >= begin) & (tokens < behind)
        run_limit = tl.max(tl.where(is_run, limits, 0), 0)
        run_limit = tl.where(run_limit > TOP_K, run_limit, 0)
        run_table_ptr = table_ptr + slot * stride_ts
        start, end = _own_tiles(run_limit, TILE)
        for tile in range(start, end, TILE):
            data, scales = _load_keys(keys, run_table_ptr, tile + lanes, end, KIND, DIM, PER_BLOCK)
            key_tile = _decode_keys(data, scales, KIND, DIM, PACKED)
            # positions ascend: the tokens that see nothing of this tile, or are not scored, come first
            num_blind = tl.sum((is_run & (limits <= tl.maximum(tile, TOP_K))).to(tl.int32), 0)
            for token in tl.range(begin + num_blind, behind, num_stages=STAGES):
                wide = tl.full([], 0, tl.int64) + token
                q = tl.load(q_ptr + wide * stride_qt + q_tile, mask=head_mask[:, None], other=0.0)
                weights = tl.load(weights_ptr + wide * stride_wt + heads, mask=head_mask, other=0.0)
                limit = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, capacity).to(tl.int32)
                _store_scores(
                    scores_ptr + wide * stride_st, maxima_ptr + wide * num_maxima, key_tile, q, weights, tile, limit,
                    TILE, HAS_MAXIMA,
                )  # fmt: skip
        begin = behind
