"""Cached rows: their byte table, the codec, and the store that indexes them."""

import math

import pytest
import torch

from dsv4.formats.fp4 import mxfp4_dequantize, mxfp4_quantize
from dsv4.formats.fp8 import fp8_fake_quantize, fp8_quantize
from dsv4.formats.row_store import RowStore, decode_joined, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind

CPU = torch.device("cpu")
ENTRY = RowFormat(RowKind.ENTRY_FP8, 512, 64)
SMALL_ENTRY = RowFormat(RowKind.ENTRY_FP8, 128, 64)
INDEX_FP4 = RowFormat(RowKind.INDEX_FP4, 128)
INDEX_FP8 = RowFormat(RowKind.INDEX_FP8, 128)
QUANTISED = pytest.mark.parametrize("fmt", [ENTRY, SMALL_ENTRY, INDEX_FP4, INDEX_FP8], ids=lambda fmt: str(fmt.kind))


def values_for(fmt, *leading, dtype=torch.bfloat16, seed=0):
    """Normal values whose rows differ in magnitude by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, fmt.dim, generator=generator)
    return torch.ldexp(x, torch.randint(-10, 10, (*leading, 1), generator=generator)).to(dtype)


@pytest.mark.parametrize(
    ("fmt", "data_bytes", "scale_bytes", "row_bytes"),
    [
        (ENTRY, 576, 8, 584),
        (SMALL_ENTRY, 192, 8, 200),
        (INDEX_FP4, 64, 4, 68),
        (INDEX_FP8, 128, 4, 132),
        (RowFormat(RowKind.PLAIN, 512, itemsize=4), 2048, 0, 2048),
        (RowFormat(RowKind.PLAIN, 128, itemsize=8), 1024, 0, 1024),
        (RowFormat(RowKind.ENTRY_FP8, 64 * 9 + 64, 64), 704, 16, 720),  # nine scales need a second group of eight
    ],
)
def test_byte_table(fmt, data_bytes, scale_bytes, row_bytes):
    assert (fmt.data_bytes, fmt.scale_bytes, fmt.row_bytes) == (data_bytes, scale_bytes, row_bytes)
    store = RowStore.allocate((3, 5), fmt, {4: torch.float32, 8: torch.float64}.get(fmt.itemsize, torch.float32), CPU)
    assert store.nbytes == 15 * row_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RowKind.ENTRY_FP8, 512, 32), "multiple of 64, found 512 - 32"),
        ((RowKind.INDEX_FP4, 48), "multiple of 32: 48"),
        ((RowKind.PLAIN, 128), "itemsize is given for plain rows"),
        ((RowKind.INDEX_FP8, 128, 0, 2), "itemsize is given for plain rows, and for them only"),
    ],
)
def test_impossible_formats_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RowFormat(*arguments)


def test_entry_layout_is_codes_then_rope_then_scales():
    x = values_for(ENTRY, 6)
    rows = encode_rows(x, ENTRY)
    codes, scale = fp8_quantize(x[:, :448], 64)
    assert torch.equal(rows.data[:, :448], codes.view(torch.uint8))
    assert torch.equal(rows.data[:, 448:].contiguous().view(torch.bfloat16), x[:, 448:])
    assert torch.equal(rows.scales[:, :7], scale)
    assert not rows.scales[:, 7].any()


def test_entry_values_are_the_models_quantisation():
    x = values_for(ENTRY, 6)
    expected = torch.cat((fp8_fake_quantize(x[:, :448], 64), x[:, 448:]), -1)
    assert torch.equal(decode_rows(encode_rows(x, ENTRY)), expected)


def test_index_fp4_values_are_the_models_quantisation():
    x = values_for(INDEX_FP4, 6)
    rows = encode_rows(x, INDEX_FP4)
    packed, scale = mxfp4_quantize(x)
    assert torch.equal(rows.data, packed)
    assert torch.equal(rows.scales, scale)
    assert torch.equal(decode_rows(rows), mxfp4_dequantize(*mxfp4_quantize(x)).to(x.dtype))


def test_index_fp8_is_one_power_of_two_scale_a_row():
    x = values_for(INDEX_FP8, 6)
    rows = encode_rows(x, INDEX_FP8)
    factor = rows.scales.view(torch.float32)
    assert factor.shape == (6, 1)
    assert (factor.view(torch.int32) & 0x7FFFFF == 0).all()
    codes, scale = fp8_quantize(x, 128)
    assert torch.equal(rows.data, codes.view(torch.uint8))
    assert factor.log2().flatten().tolist() == (scale.flatten().int() - 127).tolist()
    assert torch.equal(decode_rows(rows), fp8_fake_quantize(x, 128))


@QUANTISED
def test_decoding_to_bf16_loses_nothing(fmt):
    """A code times a power of two fits bf16: decoding in fp32 gives the same number."""
    x = values_for(fmt, 40)
    rows = encode_rows(x, fmt)
    decoded = decode_rows(rows)
    if fmt.kind is RowKind.INDEX_FP8:
        exact = rows.data.view(torch.float8_e4m3fn).float() * rows.scales.view(torch.float32)
    elif fmt.kind is RowKind.INDEX_FP4:
        exact = mxfp4_dequantize(*mxfp4_quantize(x.float()))
    else:
        nope = fmt.dim - fmt.rope_dim
        exact = torch.cat((fp8_fake_quantize(x[:, :nope].float(), 64), x[:, nope:].float()), -1)
    assert torch.equal(decoded.float(), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plain_rows_are_kept_as_they_are(dtype):
    fmt = RowFormat(RowKind.PLAIN, 32, itemsize=dtype.itemsize)
    x = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = encode_rows(x, fmt)
    assert rows.scales is None
    assert decode_rows(rows).dtype == dtype
    assert torch.equal(decode_rows(rows), x)


@QUANTISED
def test_nan_is_not_swallowed(fmt):
    x = values_for(fmt, 3)
    x[1] = math.nan
    decoded = decode_rows(encode_rows(x, fmt))
    assert decoded[1].isnan().all()
    assert not decoded[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    "fmt", [ENTRY, INDEX_FP4, INDEX_FP8, RowFormat(RowKind.PLAIN, 16, itemsize=2)], ids=lambda fmt: str(fmt.kind)
)
def test_store_writes_and_gathers_by_index(fmt):
    store = RowStore.allocate((4, 8), fmt, torch.bfloat16, CPU)
    assert not store.data.any()
    rows = encode_rows(values_for(fmt, 3), fmt)
    slots, places = torch.tensor([0, 3, 3]), torch.tensor([7, 0, 5])
    before = store.data.clone()
    store[slots, places] = rows
    assert torch.equal(decode_rows(store[slots, places]), decode_rows(rows))
    assert torch.equal(decode_rows(store[slots.flip(0), places.flip(0)]), decode_rows(rows).flip(0))
    touched = torch.zeros(4, 8, dtype=torch.bool)
    touched[slots, places] = True
    assert torch.equal(store.data[~touched], before[~touched])
    if store.scales is not None:
        assert not store.scales[~touched].any()


def test_store_refuses_rows_of_another_format():
    store = RowStore.allocate((4,), INDEX_FP4, torch.bfloat16, CPU)
    rows = encode_rows(values_for(INDEX_FP8, 1), INDEX_FP8)
    with pytest.raises(AssertionError):
        store[(torch.tensor([0]),)] = rows


@pytest.mark.parametrize(
    "other", [SMALL_ENTRY, RowFormat(RowKind.PLAIN, 128, itemsize=2)], ids=lambda fmt: str(fmt.kind)
)
def test_joined_rows_are_the_single_ones(other):
    formats = (SMALL_ENTRY, other, SMALL_ENTRY)
    parts = [encode_rows(values_for(fmt, size, seed=size), fmt) for fmt, size in zip(formats, (3, 0, 2), strict=True)]
    assert torch.equal(decode_joined(parts), torch.cat([decode_rows(part) for part in parts]))
    assert torch.equal(decode_joined(parts[:1]), decode_rows(parts[0]))
