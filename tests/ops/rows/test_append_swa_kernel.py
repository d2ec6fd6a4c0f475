"""The window kernels: rows byte for byte those of the norm and rope kernels and the codec, the ring byte for byte the
oracle's, what must not be written included.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cache_cases import ENTRY, EPS, INDEX_FP4, SMALL_ENTRY, assert_same_rows, batch_of, cloned, poisoned_rows, window

from dsv4.formats.row_store import RowStore, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.norm import rms_norm
from dsv4.ops.rows import append_swa, append_swa_ref, rope, rope_frequencies, window_rows, window_rows_ref
from dsv4.testing.inputs import around, kernel_device, normal, poison, strided, wild
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

FREQS = rope_frequencies(64, 10000.0, None).to(kernel_device())


def positions_of(num_tokens, step=997):
    return torch.arange(num_tokens, device=kernel_device()) * step


def chain(kv, weight, positions, fmt):
    return encode_rows(rope(rms_norm(kv, weight, EPS), positions, FREQS), fmt)


@pytest.mark.parametrize("num_tokens", around(8))
@pytest.mark.parametrize("fmt", [ENTRY, SMALL_ENTRY], ids=["512", "128"])
def test_rows_are_the_chain(fmt, num_tokens):
    kv, weight = wild((num_tokens, fmt.dim), seed=num_tokens), normal((fmt.dim,), seed=1)
    rows = window_rows(kv, weight, positions_of(num_tokens), FREQS, EPS, fmt)
    assert_same_rows(rows, chain(kv, weight, positions_of(num_tokens), fmt))
    assert rows.format == fmt


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    kv, weight = normal((5, 512), dtype, seed=2), normal((512,), torch.float32, seed=3)
    rows = window_rows(kv, weight, positions_of(5), FREQS, EPS, ENTRY)
    assert_same_rows(rows, chain(kv, weight, positions_of(5), ENTRY))


def test_rows_follow_the_oracle():
    kv, weight = wild((9, 512), seed=4), normal((512,), seed=5)
    rows = window_rows(kv, weight, positions_of(9), FREQS, EPS, ENTRY)

    def oracle(dtype):
        fmt = ENTRY if dtype == torch.bfloat16 else RowFormat(RowKind.PLAIN, 512, itemsize=dtype.itemsize)
        return decode_rows(window_rows_ref(kv.to(dtype), weight, positions_of(9), FREQS, EPS, fmt))

    assert_close_to_oracle(decode_rows(rows), oracle)


def test_a_strided_weight():
    kv, weight = wild((9, 512), seed=8), normal((512,), seed=9)
    rows = window_rows(kv, strided(weight, 0), positions_of(9), FREQS, EPS, ENTRY)
    assert_same_rows(rows, window_rows(kv, weight, positions_of(9), FREQS, EPS, ENTRY))


def random_rows(num_tokens, fmt):
    data = torch.randint(0, 256, (num_tokens, fmt.data_bytes), dtype=torch.uint8)
    scales = torch.randint(0, 256, (num_tokens, fmt.scale_bytes), dtype=torch.uint8)
    return RowStore(data.to(kernel_device()), scales.to(kernel_device()), fmt)


CHUNKS = {
    "decode": [(2, 300, 1), (0, 5, 1), (3, 0, 1)],
    "short chunks": [(1, 0, 3), (2, 126, 5)],
    "as long as the ring": [(0, 10, 20)],
    "longer than the ring": [(0, 3, 47), (3, 21, 21)],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("fmt", [SMALL_ENTRY, INDEX_FP4], ids=lambda fmt: fmt.kind.value)
def test_the_ring_is_the_oracle_s(chunks, fmt):
    batch = batch_of(chunks, padding=3)
    rows, ring = random_rows(batch.num_tokens, fmt), window(fmt, 20)
    poison(rows.data[-3:])
    expected = cloned(ring)
    append_swa(rows, ring, batch)
    append_swa_ref(rows, expected, batch)
    assert_same_rows(ring.rows, expected.rows)
    assert_bitwise(ring.positions, expected.positions, "positions")


def test_a_row_that_a_later_token_replaces_is_not_written_at_all():
    """Were it written and overwritten, who wins would be the GPU's choice. Here the later tokens are cut off."""
    batch = batch_of([(1, 0, 47)])
    first = {
        name: getattr(batch, name)[:30] for name in ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")
    }
    rows, ring = random_rows(30, SMALL_ENTRY), window(SMALL_ENTRY, 20)
    append_swa(rows, ring, replace(batch, **first))
    assert ring.positions[1].tolist() == [-1] * 7 + [27, 28, 29] + [-1] * 10
    assert (ring.rows.data[1, :7] == 0xA5).all()


def test_chunks_do_not_matter_to_the_ring():
    rows, whole = random_rows(50, SMALL_ENTRY), window(SMALL_ENTRY, 20)
    append_swa(rows, whole, batch_of([(1, 0, 50)]))
    cuts = [0, 1, 24, 25, 50]
    chunked = window(SMALL_ENTRY, 20)
    for start, end in pairwise(cuts):
        part = rows[(torch.arange(start, end, device=kernel_device()),)]
        append_swa(part, chunked, batch_of([(1, start, end - start)]))
    assert_same_rows(chunked.rows, whole.rows)
    assert_bitwise(chunked.positions, whole.positions)


def test_strided_rows_and_rings():
    """Rows that are a view, and a ring whose slots are not side by side."""
    batch = batch_of([(1, 0, 7)])
    rows, ring = random_rows(7, SMALL_ENTRY), window(SMALL_ENTRY, 6)
    expected = cloned(ring)
    append_swa_ref(rows, expected, batch)
    views = replace(rows, data=strided(rows.data, 0), scales=strided(rows.scales, 0))
    gaps = replace(
        ring,
        rows=replace(ring.rows, data=strided(ring.rows.data, 0), scales=strided(ring.rows.scales, 1)),
        positions=strided(ring.positions, 0),
    )
    append_swa(views, gaps, batch)
    assert_same_rows(gaps.rows, expected.rows)
    assert_bitwise(gaps.positions, expected.positions)


def test_what_cannot_be_done_is_said():
    kv, weight, positions = wild((3, 512), seed=16), normal((512,), seed=17), positions_of(3)
    with pytest.raises(KernelInputError, match=r"expected kv \[3, 512\] .* found torch.float64"):
        window_rows(kv.double(), weight, positions, FREQS, EPS, ENTRY)
    with pytest.raises(KernelInputError, match="contiguous columns"):
        window_rows(kv.t().contiguous().t(), weight, positions, FREQS, EPS, ENTRY)
    with pytest.raises(KernelInputError, match="expected rows of entry_fp8, found index_fp4"):
        window_rows(kv[:, :128], weight, positions, FREQS, EPS, INDEX_FP4)
    with pytest.raises(KernelInputError, match=r"expected a norm weight of shape \(512,\)"):
        window_rows(kv, weight[:128], positions, FREQS, EPS, ENTRY)
    ring, batch = window(ENTRY, 20), batch_of([(1, 0, 3)])
    with pytest.raises(KernelInputError, match="expected 3 rows of"):
        append_swa(random_rows(2, ENTRY), ring, batch)
    with pytest.raises(KernelInputError, match="expected 3 rows of"):
        append_swa(random_rows(3, SMALL_ENTRY), ring, batch)
    with pytest.raises(KernelInputError, match="expected ring positions in int32"):
        append_swa(random_rows(3, ENTRY), replace(ring, positions=ring.positions.long()), batch)
    odd = replace(ring.rows, data=torch.zeros(4, 20, 577, dtype=torch.uint8, device=kv.device)[..., 1:])
    with pytest.raises(KernelInputError, match="expected rows aligned to 2 bytes"):
        append_swa(random_rows(3, ENTRY), replace(ring, rows=odd), batch)
    plain = RowFormat(RowKind.PLAIN, 512, itemsize=2)
    rows = RowStore.allocate((3,), plain, torch.bfloat16, kernel_device())
    with pytest.raises(KernelInputError, match="expected quantised rows, found plain"):
        append_swa(rows, replace(ring, rows=RowStore.allocate((4, 20), plain, torch.bfloat16, kernel_device())), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [4096, 4097])
def test_real_sizes(num_tokens):
    kv, weight = wild((num_tokens, 512), seed=18), normal((512,), seed=19)
    positions = positions_of(num_tokens, 251)
    rows = window_rows(kv, weight, positions, FREQS, EPS, ENTRY)
    assert_same_rows(rows, chain(kv, weight, positions, ENTRY))
    batch = batch_of([(2, 100, num_tokens - 5), (0, 7, 1)], padding=4)
    ring = replace(window(ENTRY, 130), rows=poisoned_rows((4, 130), ENTRY))
    expected = cloned(ring)
    append_swa(rows, ring, batch)
    append_swa_ref(rows, expected, batch)
    assert_same_rows(ring.rows, expected.rows)
    assert_bitwise(ring.positions, expected.positions)
