"""Caches and batches for the tests of the kernels that write the cache. Shared by several test files."""

import copy

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView, WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.compress import Compression, CompressorSpec
from dsv4.ops.rows import rope_frequencies
from dsv4.testing.inputs import generator, kernel_device, normal
from dsv4.testing.numeric import assert_bitwise

EPS = 1e-6
CSA, HCA = 4, 128
NUM_BLOCKS = 40
BLOCKS_PER_SLOT = 12

ENTRY = RowFormat(RowKind.ENTRY_FP8, 512, rope_dim=64)
SMALL_ENTRY = RowFormat(RowKind.ENTRY_FP8, 128, rope_dim=64)
INDEX_FP4 = RowFormat(RowKind.INDEX_FP4, 128)
INDEX_FP8 = RowFormat(RowKind.INDEX_FP8, 128)


def batch_of(chunks, *, num_slots=4, padding=0, seed=0):
    """A batch of (slot, start, num_tokens) chunks, then `padding` rows; the block table is shuffled.

    Padded rows carry positions and chunk borders that would write everywhere if their slot were believed.
    """
    parts = [(slot, start + i, start, start + num) for slot, start, num in chunks for i in range(num)]
    parts += [(-1, 3 + 4 * i, 3 + 4 * i, 4 + 4 * i) for i in range(padding)]
    columns = torch.tensor(parts, dtype=torch.int64).reshape(-1, 4)
    slots, positions, starts, ends = (column.clone().to(kernel_device()) for column in columns.unbind(1))
    table = torch.randperm(NUM_BLOCKS, generator=generator(seed)).to(torch.int32)
    table = table[torch.arange(num_slots * BLOCKS_PER_SLOT) % NUM_BLOCKS].view(num_slots, BLOCKS_PER_SLOT)
    return TokenBatch(torch.zeros_like(slots), positions, slots, starts, ends, table.to(kernel_device()))


def poisoned_rows(leading, fmt):
    rows = RowStore.allocate(leading, fmt, torch.bfloat16, kernel_device())
    rows.data.fill_(0xA5)
    rows.scales.fill_(0x5A)
    return rows


def window(fmt, ring_len, num_slots=4):
    positions = torch.full((num_slots, ring_len), -1, dtype=torch.int32, device=kernel_device())
    return WindowView(poisoned_rows((num_slots, ring_len), fmt), positions)


def tail(num_slots, ring_len, dim):
    """A fresh slot's rows are 0 and -inf; here they are NaN, since nothing may read them before they are written."""
    shape = (num_slots, ring_len, dim)
    nan = torch.full(shape, float("nan"), device=kernel_device())
    return TailView(nan, nan.clone())


def compressor(fmt, ratio, *, num_tokens, drafts=0, num_slots=4, dtype=torch.bfloat16, seed=0):
    """Random projections and weights, NaN tails, poisoned pages: one `Compression`."""
    width = fmt.dim * (2 if ratio == CSA else 1)
    spec = CompressorSpec(
        ratio=ratio,
        ape=normal((ratio, width), torch.float32, seed + 1),
        norm_weight=normal((fmt.dim,), torch.bfloat16, seed + 2),
        freqs=rope_frequencies(64, 160000.0, None).to(kernel_device()),
        eps=EPS,
        dtype=dtype,
    )
    own = tail(num_slots, ratio + drafts, fmt.dim)
    following = tail(num_slots, 2 * ratio + drafts, fmt.dim) if ratio == CSA else None
    return Compression(
        kv=normal((num_tokens, width), torch.float32, seed + 3),
        gate=3 * normal((num_tokens, width), torch.float32, seed + 4),
        spec=spec,
        state=CompressorView(own, following),
        pages=PagedView(poisoned_rows((NUM_BLOCKS, 128 // ratio), fmt)),
    )


def cloned(value):
    """An independent copy of any structure of frozen dataclasses and tensors."""
    return copy.deepcopy(value)


def tails_of(state):
    return [t for view in (state.own, state.following) if view is not None for t in (view.kv, view.score)]


def assert_same_rows(actual, expected, what="rows"):
    assert_bitwise(actual.data, expected.data, f"{what}, data")
    assert_bitwise(actual.scales, expected.scales, f"{what}, scales")


def assert_same_cache(actual, expected, what="cache"):
    """Pages and tails of two `Compression`s, byte for byte, what must not be written included."""
    assert_same_rows(actual.pages.rows, expected.pages.rows, what)
    for found, wanted in zip(tails_of(actual.state), tails_of(expected.state), strict=True):
        assert_bitwise(found, wanted, f"{what}, tails")
