"""`attention_inputs`: bit for bit the ops it is made of, and nothing else written."""

from dataclasses import replace

import cache_cases
import pytest
import torch

from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.attention import attention_inputs, attention_inputs_ref
from dsv4.ops.indexer import turned_queries
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.norm import rms_norm, rms_norm_ref
from dsv4.ops.rows import Turn, append_swa, rope, rope_frequencies, rope_ref, window_rows
from dsv4.testing.inputs import around, kernel_device, normal, poison, wild
from dsv4.testing.numeric import assert_bitwise

FREQS = rope_frequencies(64, 10000.0, None).to(kernel_device())
RING = 133
CHUNKS = {"decode": [(2, 400, 1), (0, 1535, 1), (3, 3, 1)], "chunks": [(1, 500, 3), (2, 78, 6)]}
KEYS = {"fp4": cache_cases.INDEX_FP4, "fp8": cache_cases.INDEX_FP8, "none": None}


def projections(
    num_tokens, *, heads=9, index_heads=9, keys=cache_cases.INDEX_FP4, fmt=cache_cases.ENTRY, dtype=torch.bfloat16
):
    """q, kv, index_q and the norm's weight; index_q is None without keys."""
    return (
        wild((num_tokens, heads, fmt.dim), dtype, seed=1),
        wild((num_tokens, fmt.dim), dtype, seed=2),
        None if keys is None else wild((num_tokens, index_heads, keys.dim), dtype, seed=3),
        normal((fmt.dim,), seed=4),
    )


def pages(keys):
    """Index keys of which only the format matters."""
    return None if keys is None else PagedView(cache_cases.poisoned_rows((3, 32), keys))


def inputs_of(q, kv, index_q, weight, ring, keys, batch, *, appends=False, op=attention_inputs):
    return op(q, kv, index_q, weight, FREQS, cache_cases.EPS, ring, pages(keys), batch, appends=appends)


def assert_same(found, expected):
    assert_bitwise(found[0], expected[0], "queries")
    cache_cases.assert_same_rows(found[1], expected[1])
    assert (found[2] is None) == (expected[2] is None)
    if found[2] is not None:
        assert_bitwise(found[2], expected[2], "index queries")


def separately(q, kv, index_q, weight, ring, keys, batch, *, appends):
    at = batch.positions
    rows = window_rows(kv, weight, at, FREQS, cache_cases.EPS, ring.rows.format)
    if appends:
        append_swa(rows, ring, batch)
    index_q = None if keys is None else turned_queries(index_q, Turn.of(at, FREQS), keys)
    return rope(rms_norm(q, None, cache_cases.EPS), at, FREQS), rows, index_q


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("appends", [False, True])
def test_the_chain_of_ops_in_one(keys, chunks, appends):
    batch = cache_cases.batch_of(chunks, padding=2)
    values = projections(batch.num_tokens, keys=keys)
    for part in values[:3]:
        if part is not None:
            poison(part[-2:])
    ring = cache_cases.window(cache_cases.ENTRY, RING)
    expected_ring = cache_cases.cloned(ring)
    found = inputs_of(*values, ring, keys, batch, appends=appends)
    assert_same(found, separately(*values, expected_ring, keys, batch, appends=appends))
    cache_cases.assert_same_rows(ring.rows, expected_ring.rows)
    assert_bitwise(ring.positions, expected_ring.positions)
    if not appends:
        untouched = cache_cases.window(cache_cases.ENTRY, RING)
        cache_cases.assert_same_rows(ring.rows, untouched.rows)
        assert (ring.positions == -1).all()
        append_swa(found[1], ring, batch)
        inputs_of(*values, untouched, keys, batch, appends=True)
        cache_cases.assert_same_rows(ring.rows, untouched.rows)
        assert_bitwise(ring.positions, untouched.positions)


@pytest.mark.parametrize("heads", around(8))
@pytest.mark.parametrize("index_heads", around(8))
def test_numbers_of_heads(heads, index_heads):
    batch, ring = cache_cases.batch_of([(1, 40, 2)]), cache_cases.window(cache_cases.SMALL_ENTRY, RING)
    values = projections(2, heads=heads, index_heads=index_heads, fmt=cache_cases.SMALL_ENTRY)
    found = inputs_of(*values, ring, cache_cases.INDEX_FP4, batch)
    assert_same(found, separately(*values, ring, cache_cases.INDEX_FP4, batch, appends=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    batch, ring = cache_cases.batch_of([(1, 40, 2)]), cache_cases.window(cache_cases.ENTRY, RING)
    values = projections(2, dtype=dtype)
    found = inputs_of(*values, ring, cache_cases.INDEX_FP8, batch)
    assert_same(found, separately(*values, ring, cache_cases.INDEX_FP8, batch, appends=False))


@pytest.mark.parametrize("appends", [False, True])
def test_the_oracle_is_the_chain_of_oracles(appends):
    """And it differs from the kernel only where norms may: index queries are the same bits."""
    batch, ring = cache_cases.batch_of(CHUNKS["decode"]), cache_cases.window(cache_cases.ENTRY, RING)
    other = cache_cases.cloned(ring)
    values = projections(3)
    expected = inputs_of(*values, ring, cache_cases.INDEX_FP4, batch, appends=appends, op=attention_inputs_ref)
    assert_bitwise(expected[0], rope_ref(rms_norm_ref(values[0], None, cache_cases.EPS), batch.positions, FREQS))
    assert_bitwise(expected[2], turned_queries(values[2], Turn.of(batch.positions, FREQS), cache_cases.INDEX_FP4))
    found = inputs_of(*values, other, cache_cases.INDEX_FP4, batch, appends=appends)
    assert_bitwise(found[2], expected[2])
    assert_bitwise(other.positions, ring.positions)
    assert (ring.positions >= 0).sum() == (3 if appends else 0)


@pytest.mark.parametrize("keys", [cache_cases.INDEX_FP4, cache_cases.INDEX_FP8], ids=["fp4", "fp8"])
def test_a_query_of_nan_stays_alone(keys):
    batch, ring = cache_cases.batch_of([(1, 40, 3)]), cache_cases.window(cache_cases.ENTRY, RING)
    values = projections(3, keys=keys)
    expected = inputs_of(*values, ring, keys, batch)
    poison(values[0][1])
    poison(values[2][1])
    found = inputs_of(*values, ring, keys, batch)
    for name in (0, 2):
        assert_bitwise(found[name][[0, 2]], expected[name][[0, 2]])
        assert found[name][1].isnan().all()


def test_what_cannot_be_done_is_said():
    batch, ring = cache_cases.batch_of([(1, 40, 2)]), cache_cases.window(cache_cases.ENTRY, RING)
    q, kv, index_q, weight = projections(2)
    with pytest.raises(KernelInputError, match=r"expected q \[2, H, 512\] in torch.bfloat16, found torch.float32"):
        inputs_of(q.float(), kv, index_q, weight, ring, cache_cases.INDEX_FP4, batch)
    with pytest.raises(KernelInputError, match=r"expected q \[2, H, 512\]"):
        inputs_of(q[..., :128], kv, index_q, weight, ring, cache_cases.INDEX_FP4, batch)
    with pytest.raises(KernelInputError, match=r"expected kv \[2, 512\]"):
        inputs_of(q, kv[:1], index_q, weight, ring, cache_cases.INDEX_FP4, batch)
    with pytest.raises(KernelInputError, match=r"expected index_q \[2, Hi, 128\]"):
        inputs_of(q, kv, index_q[:1], weight, ring, cache_cases.INDEX_FP4, batch)
    with pytest.raises(KernelInputError, match="expected index keys, found None"):
        inputs_of(q, kv, index_q, weight, ring, None, batch)
    with pytest.raises(KernelInputError, match="expected index queries where there are index keys, found none"):
        inputs_of(q, kv, None, weight, ring, cache_cases.INDEX_FP4, batch)
    plain = RowFormat(RowKind.PLAIN, 512, itemsize=2)
    rows = RowStore.allocate((4, RING), plain, torch.bfloat16, kernel_device())
    with pytest.raises(KernelInputError, match="expected rows of"):
        inputs_of(q, kv, index_q, weight, replace(ring, rows=rows), cache_cases.INDEX_FP4, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 257, 4096])
def test_real_sizes(num_tokens):
    """64 heads of both kinds."""
    positions = torch.arange(num_tokens, device=kernel_device())
    slots = torch.zeros_like(positions)
    batch = replace(
        cache_cases.batch_of([]), token_ids=slots, positions=positions, slots=slots, chunk_starts=slots,
        chunk_ends=slots + num_tokens,
    )  # fmt: skip
    values = projections(num_tokens, heads=64, index_heads=64)
    ring, expected_ring = cache_cases.window(cache_cases.ENTRY, RING, 1), cache_cases.window(cache_cases.ENTRY, RING, 1)
    found = inputs_of(*values, ring, cache_cases.INDEX_FP4, batch, appends=True)
    assert_same(found, separately(*values, expected_ring, cache_cases.INDEX_FP4, batch, appends=True))
    cache_cases.assert_same_rows(ring.rows, expected_ring.rows)
    assert_bitwise(ring.positions, expected_ring.positions)
