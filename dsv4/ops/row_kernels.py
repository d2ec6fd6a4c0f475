"""The kernel side of formats/row_store.py: rows that are normed, roped, encoded and stored in one go.

Apart from the ops because the window and both compressors end in it: `store_rows` is the only code that writes a cached
row, so a token's bytes cannot depend on which of them, or which form of them, wrote it. Its norm has the tile of
`rms_norm` (each row within one warp, 16 bytes a thread): fused and unfused agree in every bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import ENTRY_GROUP, INDEX_FP4_GROUP, RowFormat, RowKind
from dsv4.ops.hadamard import hadamard_rows
from dsv4.ops.norm import KERNEL_DTYPES, ROW_CONFIGS, inverse_rms
from dsv4.ops.tl_utils import (
    KernelInputError,
    abs_bits,
    cos_sin,
    e4m3_scale,
    e8m0_reciprocal,
    e8m0_to_float,
    jit,
    next_power_of_2,
    pick_config,
    quantize_e2m1,
    quantize_e4m3,
    tl,
)

ENTRY_FP8, INDEX_FP4, INDEX_FP8 = 0, 1, 2
_KINDS = {RowKind.ENTRY_FP8: ENTRY_FP8, RowKind.INDEX_FP4: INDEX_FP4, RowKind.INDEX_FP8: INDEX_FP8}
_ENTRY_FP8, _INDEX_FP4 = tl.constexpr(ENTRY_FP8), tl.constexpr(INDEX_FP4)
_ENTRY_GROUP, _INDEX_GROUP = tl.constexpr(ENTRY_GROUP), tl.constexpr(INDEX_FP4_GROUP)


class RowTarget(NamedTuple):
    """Rows [A, B] of a `RowStore` for a kernel: pointers, and strides of both leading indices in elements of each.

    `wide` is the data as bf16 (the rope half of an entry), `factor` the scales as fp32 (index keys in FP8); where a
    format has no such part they repeat `data` and `scales`.
    """

    data: Any
    data_stride: int
    data_row: int
    wide: Any
    wide_stride: int
    wide_row: int
    scales: Any
    scales_stride: int
    scales_row: int
    factor: Any
    factor_stride: int
    factor_row: int


def row_kind(row_format: RowFormat) -> int:
    """The kernels' number of a quantised format. Plain rows belong to the oracles."""
    if row_format.kind not in _KINDS:
        raise KernelInputError(f"expected quantised rows, found {row_format.kind}; the TORCH op set stores plain rows")
    if row_format.dim != next_power_of_2(row_format.dim) or row_format.dim > max(ROW_CONFIGS):
        raise KernelInputError(
            f"expected rows of a power of two values up to {max(ROW_CONFIGS)}, found {row_format.dim}"
        )
    return _KINDS[row_format.kind]


def row_target(rows: RowStore) -> RowTarget:
    """Rows [A, B] as a kernel sees them; the bytes of a row must be contiguous and aligned to their widest part."""
    row_kind(rows.format)
    data, scales = rows.data, rows.scales
    assert scales is not None, rows.format
    if data.dim() != 3 or data.stride(2) != 1 or scales.stride(2) != 1:
        raise KernelInputError(
            f"expected rows [A, B] with contiguous bytes, found shape {tuple(data.shape)} with strides {data.stride()} "
            f"and {scales.stride()}"
        )
    is_entry, is_index_fp8 = rows.format.kind is RowKind.ENTRY_FP8, rows.format.kind is RowKind.INDEX_FP8
    wide = _as_dtype(data, torch.bfloat16) if is_entry else data
    factor = _as_dtype(scales, torch.float32) if is_index_fp8 else scales
    return RowTarget(
        data=data,
        data_stride=data.stride(0),
        data_row=data.stride(1),
        wide=wide,
        wide_stride=wide.stride(0),
        wide_row=wide.stride(1),
        scales=scales,
        scales_stride=scales.stride(0),
        scales_row=scales.stride(1),
        factor=factor,
        factor_stride=factor.stride(0),
        factor_row=factor.stride(1),
    )


def _as_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    if data.storage_offset() % size or any(stride % size for stride in data.stride()[:2]):
        raise KernelInputError(f"expected rows aligned to {size} bytes, found strides {data.stride()}")
    return data.view(dtype)


def new_rows(num_rows: int, row_format: RowFormat, device: torch.device) -> RowStore:
    """Rows [num_rows] that a kernel will fill: `RowStore.allocate` without the zeros."""
    row_kind(row_format)
    return RowStore(
        torch.empty(num_rows, row_format.data_bytes, dtype=torch.uint8, device=device),
        torch.empty(num_rows, row_format.scale_bytes, dtype=torch.uint8, device=device),
        row_format,
    )


def row_shape(row_format: RowFormat, freqs: Tensor) -> dict[str, int]:
    """The constexpr arguments of `store_rows`."""
    rope_dim = 2 * freqs.shape[0]
    if (
        freqs.dtype != torch.float32
        or rope_dim < 2
        or rope_dim != next_power_of_2(rope_dim)
        or rope_dim > row_format.dim
    ):
        raise KernelInputError(
            f"expected fp32 frequencies of a power of two dims up to {row_format.dim}, found {freqs.dtype}, {rope_dim}"
        )
    if row_format.kind is RowKind.ENTRY_FP8 and rope_dim != row_format.rope_dim:
        raise KernelInputError(f"expected frequencies of {row_format.rope_dim} dims, found {rope_dim}")
    return {
        "KIND": row_kind(row_format),
        "DIM": row_format.dim,
        "ROPE_DIM": rope_dim,
        "LOG2_DIM": row_format.dim.bit_length() - 1,
        "SCALE_BYTES": next_power_of_2(row_format.scale_bytes),
    }


def check_norm_weight(weight: Tensor, dim: int) -> Tensor:
    if weight.shape != (dim,) or weight.dtype not in KERNEL_DTYPES:
        raise KernelInputError(f"expected a norm weight of shape ({dim},), found {weight.dtype} {tuple(weight.shape)}")
    return weight.contiguous()


def rows_per_tile(dim: int) -> tuple[int, dict[str, Any]]:
    """Rows of a tile and launch options for rows of `dim` values: those of `rms_norm`."""
    _, config = pick_config(ROW_CONFIGS, dim, "a cached row")
    return config.rows, config.options


# ---- in kernels ----


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
    target,
    offsets,
    row_mask,
    codes,
    scales,
    roped,
    DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
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
):  # fmt: skip
    """encode_rows(hadamard(rope(rms_norm(x)))) of the rows [R] at x_offsets, into `target` and, where `ring_mask`,
    `ring`.

    Rope at positions [R]; the Hadamard rotation for index keys only. Rows outside the mask are neither read nor
    written.
    """
    R: tl.constexpr = x_offsets.shape[0]
    PAIRS: tl.constexpr = ROPE_DIM // 2
    cols = tl.arange(0, DIM)
    x = tl.load(x_ptr + x_offsets[:, None] + cols[None, :], mask=row_mask[:, None], other=0.0)
    # rms_norm_ref(x, weight, eps): rounded before it is rotated
    wide = x.to(tl.float32)
    inverse = inverse_rms(wide, DIM, eps)[:, None]
    normed = (wide * inverse * tl.load(weight_ptr + cols).to(tl.float32)[None, :]).to(x.dtype)
    angle = positions.to(tl.float32)[:, None]
    if KIND == _ENTRY_FP8:
        # the rope half is read again, from the nearest cache: registers cannot be sliced
        rope_cols = DIM - ROPE_DIM + tl.arange(0, ROPE_DIM)
        pairs = tl.load(x_ptr + x_offsets[:, None] + rope_cols[None, :], mask=row_mask[:, None], other=0.0)
        rope_weight = tl.load(weight_ptr + rope_cols).to(tl.float32)[None, :]
        pairs = (pairs.to(tl.float32) * inverse * rope_weight).to(x.dtype)
        cos, sin = cos_sin(angle * tl.load(freqs_ptr + tl.arange(0, PAIRS))[None, :])
        roped = _rotate(pairs.to(tl.float32), cos, sin).to(x.dtype).to(tl.bfloat16)
        codes, scales = quantize_e4m3(tl.reshape(normed.to(tl.float32), [R * (DIM // _ENTRY_GROUP), _ENTRY_GROUP]))
        codes = codes.to(tl.uint8, bitcast=True)
        _store_entries(target, offsets, row_mask, codes, scales, roped, DIM, ROPE_DIM, SCALE_BYTES)
        if HAS_RING:
            _store_entries(ring, ring_offsets, ring_mask, codes, scales, roped, DIM, ROPE_DIM, SCALE_BYTES)
    else:
        # rope over the whole row, at frequency 0 where there is none: the Hadamard rotation mixes both parts
        pair = tl.arange(0, DIM // 2) - (DIM // 2 - PAIRS)
        cos, sin = cos_sin(angle * tl.load(freqs_ptr + pair, mask=pair >= 0, other=0.0)[None, :])
        rotated = _rotate(normed.to(tl.float32), cos, sin).to(x.dtype)
        values = tl.where((cols >= DIM - ROPE_DIM)[None, :], rotated, normed)
        values = hadamard_rows(values.to(tl.float32), LOG2_DIM).to(x.dtype).to(tl.float32)
        if KIND == _INDEX_FP4:
            NUM: tl.constexpr = DIM // _INDEX_GROUP
            codes, scales = quantize_e2m1(tl.reshape(values, [R * NUM, _INDEX_GROUP]))
            _store_groups(target, offsets, row_mask, codes, scales, NUM, NUM)
        else:
            # _fp8_row_quantize: one scale a row, in fp32
            code = e4m3_scale(tl.max(abs_bits(values), axis=1))
            codes = (values * e8m0_reciprocal(code)[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(target.data + offsets[0][:, None] + cols[None, :], codes, mask=row_mask[:, None])
            tl.store(target.factor + offsets[3], e8m0_to_float(code), mask=row_mask)
