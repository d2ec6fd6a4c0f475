"""Rows that are normed, roped, encoded and stored in one go.

Apart from the ops because the window and both compressors end in it: `store_rows` is the only code that writes a cached
row, so a token's bytes cannot depend on which of them, or which form of them, wrote it. Its norm has the tile of
`rms_norm` (each row within one warp, 16 bytes a thread): fused and unfused agree in every bit.
"""

from __future__ import annotations

from dsv4.formats.rows import ENTRY_GROUP, INDEX_FP4_GROUP
from dsv4.ops.lib.codecs import (
    abs_bits,
    e4m3_codes,
    e4m3_scale,
    e8m0_reciprocal,
    e8m0_to_float,
    quantize_e2m1,
    quantize_e4m3,
)
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.hadamard import hadamard_rows
from dsv4.ops.lib.maths import cos_sin
from dsv4.ops.norm.kernel_norm import inverse_rms
from dsv4.ops.rows.target import ENTRY_FP8, INDEX_FP4

_ENTRY_FP8, _INDEX_FP4 = tl.constexpr(ENTRY_FP8), tl.constexpr(INDEX_FP4)
_ENTRY_GROUP, _INDEX_GROUP = tl.constexpr(ENTRY_GROUP), tl.constexpr(INDEX_FP4_GROUP)


@jit
def row_offsets(target, first, second):
    """Where rows [R] at the two leading indices begin, in elements of data, wide, scales and factor."""
    first = first.to(tl.int64)
    second = second.to(tl.int64)
    return (
        first * target.data_stride + second * target.data_row,
        first * target.wide_stride + second * target.wide_row,
        first * target.scales_stride + second * target.scales_row,
        first * target.factor_stride + second * target.factor_row,
    )


@jit
def _rotate(x, cos, sin):
    """fp32 [R, 2 P] of interleaved pairs, cos and sin [R, P] -> rotated [R, 2 P]: `rotate_pairs` with a position per
    row.
    """
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    rotated_even = even * cos - odd * sin
    rotated_odd = even * sin + odd * cos
    return tl.reshape(tl.join(rotated_even, rotated_odd), [x.shape[0], x.shape[1]])


@jit
def _spread(rows, NUM: tl.constexpr, STEP: tl.constexpr):
    """Values of R rows [R] -> [R * NUM]: NUM places in each, STEP apart."""
    return tl.reshape(rows[:, None] + (tl.arange(0, NUM) * STEP)[None, :], [rows.shape[0] * NUM])


@jit
def _store_groups(target, offsets, row_mask, codes, scales, NUM: tl.constexpr, NUM_STORED: tl.constexpr):
    """Codes [R * NUM, bytes] and their scales [R * NUM]; of NUM groups a row has the first NUM_STORED. Stored as
    groups, not as rows: a byte store in the shape of the load would change the load's layout, and with it the order of
    the norm's sum.
    """
    BYTES: tl.constexpr = codes.shape[1]
    group = _spread(tl.zeros([row_mask.shape[0]], tl.int32), NUM, 1)
    mask = (_spread(row_mask.to(tl.int32), NUM, 0) != 0) & (group < NUM_STORED)
    places = _spread(offsets[0], NUM, BYTES)
    tl.store(target.data + places[:, None] + tl.arange(0, BYTES)[None, :], codes, mask=mask[:, None])
    tl.store(target.scales + _spread(offsets[2], NUM, 1), scales, mask=mask)


@jit
def _store_entries(
    target, offsets, row_mask, codes, scales, roped, DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Codes [R * NUM, 64] and scales [R * NUM] of all groups, of which the rope group's are not stored; roped
    [R, ROPE_DIM].
    """
    NUM: tl.constexpr = DIM // _ENTRY_GROUP
    NUM_STORED: tl.constexpr = (DIM - ROPE_DIM) // _ENTRY_GROUP
    _store_groups(target, offsets, row_mask, codes, scales, NUM, NUM_STORED)
    # the scales are padded with zeros
    pad = tl.arange(0, SCALE_BYTES)[None, :]
    zeros = tl.zeros([row_mask.shape[0], SCALE_BYTES], tl.uint8)
    tl.store(target.scales + offsets[2][:, None] + pad, zeros, mask=row_mask[:, None] & (pad >= NUM_STORED))
    wide_cols = (DIM - ROPE_DIM) // 2 + tl.arange(0, ROPE_DIM)
    tl.store(target.wide + offsets[1][:, None] + wide_cols[None, :], roped, mask=row_mask[:, None])


@jit
def store_rows(
    x_ptr, x_offsets, row_mask, weight_ptr, positions, freqs_ptr, eps, target, offsets, ring, ring_offsets, ring_mask,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_RING: tl.constexpr,
):
    """encode_rows(hadamard(rope(rms_norm(x)))) of the rows [R] at x_offsets, into `target` and, where `ring_mask`,
    `ring`.

    Rope at positions [R]; the Hadamard rotation for index keys only. Rows outside the mask are neither read nor
    written.
    """
    R: tl.constexpr = x_offsets.shape[0]
    PAIRS: tl.constexpr = ROPE_DIM // 2
    cols = tl.arange(0, DIM)
    x = tl.load(x_ptr + x_offsets[:, None] + cols[None, :], mask=row_mask[:, None], other=0.0)  # [R, DIM]
    # rms_norm_ref(x, weight, eps): rounded before it is rotated
    wide = x.to(tl.float32)
    inverse = inverse_rms(wide, DIM, eps)[:, None]
    normed = (wide * inverse * tl.load(weight_ptr + cols).to(tl.float32)[None, :]).to(x.dtype)
    angle = positions.to(tl.float32)[:, None]
    if KIND == _ENTRY_FP8:
        # the rope half is read again, from the nearest cache: registers cannot be sliced
        rope_cols = DIM - ROPE_DIM + tl.arange(0, ROPE_DIM)
        # pairs [R, ROPE_DIM]
        pairs = tl.load(x_ptr + x_offsets[:, None] + rope_cols[None, :], mask=row_mask[:, None], other=0.0)
        rope_weight = tl.load(weight_ptr + rope_cols).to(tl.float32)[None, :]
        pairs = (pairs.to(tl.float32) * inverse * rope_weight).to(x.dtype)
        cos, sin = cos_sin(angle * tl.load(freqs_ptr + tl.arange(0, PAIRS))[None, :])
        roped = _rotate(pairs.to(tl.float32), cos, sin).to(x.dtype).to(tl.bfloat16)  # [R, ROPE_DIM]
        # encode_rows(rows, ENTRY_FP8): a scale for 64 columns, the last 64 in bf16
        codes, scales = quantize_e4m3(tl.reshape(normed.to(tl.float32), [R * (DIM // _ENTRY_GROUP), _ENTRY_GROUP]))
        codes = codes.to(tl.uint8, bitcast=True)
        _store_entries(target, offsets, row_mask, codes, scales, roped, DIM, ROPE_DIM, SCALE_BYTES)
        if HAS_RING:
            _store_entries(ring, ring_offsets, ring_mask, codes, scales, roped, DIM, ROPE_DIM, SCALE_BYTES)
    else:
        # rope over the whole row, at frequency 0 where there is none: the Hadamard rotation mixes both parts
        pair = tl.arange(0, DIM // 2) - (DIM // 2 - PAIRS)
        cos, sin = cos_sin(angle * tl.load(freqs_ptr + pair, mask=pair >= 0, other=0.0)[None, :])
        # hadamard_ref(rope_ref(normed))
        rotated = _rotate(normed.to(tl.float32), cos, sin).to(x.dtype)  # [R, DIM]
        values = tl.where((cols >= DIM - ROPE_DIM)[None, :], rotated, normed)
        values = hadamard_rows(values.to(tl.float32), LOG2_DIM).to(x.dtype).to(tl.float32)
        if KIND == _INDEX_FP4:
            NUM: tl.constexpr = DIM // _INDEX_GROUP
            codes, scales = quantize_e2m1(tl.reshape(values, [R * NUM, _INDEX_GROUP]))
            _store_groups(target, offsets, row_mask, codes, scales, NUM, NUM)
        else:
            # _fp8_row_quantize: one scale a row, in fp32
            code = e4m3_scale(tl.max(abs_bits(values), axis=1))
            codes = e4m3_codes(values * e8m0_reciprocal(code)[:, None]).to(tl.uint8, bitcast=True)
            tl.store(target.data + offsets[0][:, None] + cols[None, :], codes, mask=row_mask[:, None])
            tl.store(target.factor + offsets[3], e8m0_to_float(code), mask=row_mask)
