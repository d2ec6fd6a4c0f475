"""The compressor kernels: the same bytes as the oracle's pooling followed by the norm and rope kernels, tails and
unwritten pages included, however a sequence is cut into chunks, batched, padded or planned.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cache_cases import (
    CSA,
    ENTRY,
    HCA,
    INDEX_FP4,
    INDEX_FP8,
    SMALL_ENTRY,
    assert_same_cache,
    batch_of,
    cloned,
    compressor,
    tails_of,
)

from dsv4.formats.row_store import RowStore, decode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.compress import (
    CSA_FEW,
    CSA_MANY,
    HCA_FEW,
    HCA_MANY,
    CompressPlan,
    compress,
    compress_pair,
    compress_pair_ref,
    compress_ref,
    launch_compress,
    launch_compress_pair,
)
from dsv4.ops.compress import op as compress_module
from dsv4.ops.lib.guard import KernelInputError, jit, tl
from dsv4.ops.lib.launch import LaunchConfig
from dsv4.ops.lib.maths import exp_fp32
from dsv4.ops.norm import rms_norm
from dsv4.ops.rows import rope
from dsv4.testing.inputs import kernel_device
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle


@jit
def _exp_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + cols, exp_fp32(tl.load(x_ptr + cols)))


def kernel_exp(x):
    """The kernels' exponential of a tensor on the CPU; tests/ops/lib/test_maths.py holds it to its bound."""
    block = 1 << 14
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % block)).to(kernel_device())
    out = torch.empty_like(padded)
    _exp_kernel[(padded.numel() // block,)](padded, out, BLOCK=block, enable_fp_fusion=False)
    return out[: x.numel()].cpu().view(x.shape)


def fp32_sum(x, dim):
    """`ordered_sum` without torch's running sum in fp64: every addition is rounded, as in the kernels."""
    total = torch.zeros_like(x.select(dim, 0))  # where torch starts as well: a sum of -0 is 0
    for term in x.unbind(dim):
        total = total + term
    return total


@pytest.fixture
def chain(monkeypatch):
    """The oracle on the CPU with the kernels' exponential and order of sums, and the norm and rope kernels, in it: what
    the fused kernels must give, bit for bit. How far that is from the oracle itself: `test_entries_follow_the_oracle`.
    """

    def on_kernel_device(launcher):
        def call(x, *args):
            args = [arg.to(kernel_device()) if isinstance(arg, torch.Tensor) else arg for arg in args]
            return launcher(x.to(kernel_device()), *args).cpu()

        return call

    monkeypatch.setattr(compress_module, "exp", kernel_exp)
    monkeypatch.setattr(compress_module, "ordered_sum", fp32_sum)
    monkeypatch.setattr(compress_module, "rms_norm_ref", on_kernel_device(rms_norm))
    monkeypatch.setattr(compress_module, "rope_ref", on_kernel_device(rope))

    def run(job, batch):
        expected, places = to_cpu(job), to_cpu(batch)
        compress_ref(expected.kv, expected.gate, expected.spec, expected.state, expected.pages, places)
        return expected

    return run


def to_cpu(value):
    """A copy on the CPU of any structure of dataclasses and tensors."""
    if isinstance(value, torch.Tensor):
        return value.cpu().clone()
    if not hasattr(value, "__dataclass_fields__") or isinstance(value, RowFormat):
        return value
    return replace(value, **{name: to_cpu(getattr(value, name)) for name in value.__dataclass_fields__})


def part(job, rows):
    """The same cache with other rows of the projections."""
    return replace(job, kv=job.kv[rows], gate=job.gate[rows])


def run_chunks(job, cuts, plan, slot=1):
    """One request's tokens through `cuts`; `job` has its projections in order, its cache is written in place."""
    for start, end in pairwise(cuts):
        launch_compress(part(job, slice(start, end)), batch_of([(slot, start, end - start)]), plan)


CHUNKS = {
    "from nothing": [(2, 0, 13)],
    "one token that closes": [(0, 7, 1)],
    "one token that does not": [(3, 9, 1)],
    "several requests": [(1, 0, 5), (0, 8, 1), (3, 0, 3), (2, 0, 4)],
}


HCA_CHUNKS = {"decode": [(2, 255, 1), (0, 126, 1)], "a chunk with a carry": [(2, 120, 20), (0, 0, 5)]}
CSA_FORMS = ((SMALL_ENTRY, CSA_FEW), (SMALL_ENTRY, CSA_MANY), (INDEX_FP4, CSA_FEW), (INDEX_FP8, CSA_MANY))
AGAINST_THE_CHAIN = [
    *((CSA, *form, chunks) for form in CSA_FORMS for chunks in CHUNKS),
    *((HCA, SMALL_ENTRY, plan, chunks) for plan in (HCA_FEW, HCA_MANY) for chunks in HCA_CHUNKS),
]


@pytest.mark.parametrize(("ratio", "fmt", "plan", "chunks"), AGAINST_THE_CHAIN)
def test_entries_are_those_of_the_chain(chain, ratio, fmt, plan, chunks):
    batch = batch_of({**CHUNKS, **HCA_CHUNKS}[chunks], padding=2)
    job = compressor(fmt, ratio, num_tokens=batch.num_tokens)
    _fill_tails(job, batch)
    job.kv[-2:], job.gate[-2:] = float("nan"), float("nan")
    expected = chain(job, batch)
    launch_compress(job, batch, plan)
    assert_same_cache(job, expected)


def _fill_tails(job, batch):
    """Finite rows in the rings, but only at positions before each request's chunk: the rest stays NaN."""
    source = torch.Generator().manual_seed(9)
    for slot, start in {(int(s), int(p)) for s, p in zip(batch.slots, batch.chunk_starts, strict=True) if s >= 0}:
        for ring in tails_of(job.state):
            for position in range(max(0, start - ring.shape[1]), start):
                ring[slot, position % ring.shape[1]] = torch.randn(ring.shape[2], generator=source).to(ring.device)


def test_real_width(chain):
    batch = batch_of([(1, 0, 4)])
    job = compressor(ENTRY, CSA, num_tokens=4)
    expected = chain(job, batch)
    compress(job.kv, job.gate, job.spec, job.state, job.pages, batch)
    assert_same_cache(job, expected)


def test_entries_follow_the_oracle():
    """Against fp64 all the way: the codes' own error is the larger part, and the oracle has the same."""
    batch = batch_of([(1, 0, 20), (2, 0, 8)])
    job = compressor(SMALL_ENTRY, CSA, num_tokens=28)
    before = cloned(job)
    compress(job.kv, job.gate, job.spec, job.state, job.pages, batch)
    blocks = batch.block_table[[1] * 5 + [2] * 2, 0].long()
    entries = torch.tensor([0, 1, 2, 3, 4, 0, 1], device=blocks.device)

    def oracle(dtype):
        run = cloned(before)
        plain = RowStore.allocate(
            run.pages.rows.data.shape[:2],
            RowFormat(RowKind.PLAIN, 128, itemsize=dtype.itemsize),
            dtype,
            kernel_device(),
        )
        wide = torch.promote_types(dtype, torch.float32)
        pages = run.pages if dtype == torch.bfloat16 else replace(run.pages, rows=plain)
        spec = replace(run.spec, dtype=dtype)
        compress_ref(run.kv.to(wide), run.gate.to(wide), spec, run.state, pages, batch)
        return decode_rows(pages.rows[blocks, entries])

    assert_close_to_oracle(decode_rows(job.pages.rows[blocks, entries]), oracle)


@pytest.mark.parametrize("plan", [CSA_FEW, CSA_MANY], ids=["few", "many"])
def test_csa_chunks_do_not_matter(plan):
    """Every border in a block, chunks of one token, chunks longer than both rings."""
    job = compressor(INDEX_FP4, CSA, num_tokens=30)
    whole = cloned(job)
    run_chunks(whole, [0, 30], CSA_MANY)
    for cuts in ([0, 1, 3, 4, 5, 8, 30], [0, 3, 20, 26, 30], [0, 6, 29, 30]):
        chunked = cloned(job)
        run_chunks(chunked, cuts, plan)
        assert_same_cache(chunked, whole, str(cuts))


def test_hca_chunks_do_not_matter():
    """Chunks that end before a border, on it and behind it; the second is as long as the ring."""
    job = compressor(SMALL_ENTRY, HCA, num_tokens=262)
    whole = cloned(job)
    run_chunks(whole, [0, 262], HCA_MANY)
    chunked = cloned(job)
    run_chunks(chunked, [0, 120, 248, 255, 256, 262], HCA_MANY)
    assert_same_cache(chunked, whole)


def test_drafts_that_are_taken_back():
    """Rings with room for drafts: three tokens are written, two of them again with other values."""
    job = compressor(INDEX_FP8, CSA, num_tokens=12, drafts=2)
    expected, other = cloned(job), compressor(INDEX_FP8, CSA, num_tokens=12, seed=50)
    launch_compress(part(expected, slice(0, 12)), batch_of([(1, 0, 12)]), CSA_FEW)
    drafted = replace(job, kv=other.kv.clone(), gate=other.gate.clone())
    drafted.kv[:10], drafted.gate[:10] = job.kv[:10], job.gate[:10]
    launch_compress(part(drafted, slice(0, 9)), batch_of([(1, 0, 9)]), CSA_FEW)
    launch_compress(part(drafted, slice(9, 12)), batch_of([(1, 9, 3)]), CSA_FEW)
    launch_compress(part(job, slice(10, 12)), batch_of([(1, 10, 2)]), CSA_FEW)
    assert_same_cache(job, expected)


@pytest.mark.parametrize(("fmt", "plan"), [(INDEX_FP4, CSA_FEW), (INDEX_FP8, CSA_MANY)], ids=["few", "many"])
def test_the_pair_is_two_single_calls(fmt, plan):
    batch = batch_of([(1, 0, 9), (2, 0, 4)], padding=1)
    attention = compressor(SMALL_ENTRY, CSA, num_tokens=batch.num_tokens)
    index = compressor(fmt, CSA, num_tokens=batch.num_tokens, seed=20)
    single_attention, single_index = cloned(attention), cloned(index)
    launch_compress_pair(attention, index, batch, plan)
    for mine, single in ((attention, single_attention), (index, single_index)):
        compress(single.kv, single.gate, single.spec, single.state, single.pages, batch)
        assert_same_cache(mine, single)


def test_the_pair_s_oracle_is_two_calls_of_the_oracle():
    batch = batch_of([(1, 0, 4)])
    pair = [compressor(fmt, CSA, num_tokens=4) for fmt in (SMALL_ENTRY, INDEX_FP4)]
    expected = cloned(pair)
    compress_pair_ref(*pair, batch)
    for mine, single in zip(pair, expected, strict=True):
        compress_ref(single.kv, single.gate, single.spec, single.state, single.pages, batch)
        assert_same_cache(mine, single)


def test_another_plan():
    batch = batch_of([(0, 0, 9)])
    job = compressor(SMALL_ENTRY, CSA, num_tokens=9)
    expected = cloned(job)
    launch_compress(expected, batch, CSA_FEW)
    launch_compress(job, batch, CompressPlan(LaunchConfig(rows=4, num_warps=4), tail_rows=4))
    assert_same_cache(job, expected)


def test_extreme_scores(chain):
    """One slot that outweighs all others, weights that underflow, and scores that are equal."""
    batch = batch_of([(0, 0, 12)])
    job = compressor(INDEX_FP4, CSA, num_tokens=12)
    job.gate[1] += 1e4
    job.gate[4:8] = 0.0
    job.gate[8] -= torch.linspace(80, 110, job.gate.shape[1], device=job.gate.device)
    expected = chain(job, batch)
    launch_compress(job, batch, CSA_FEW)
    assert_same_cache(job, expected)


def test_signed_zeros(chain):
    """A sum of nothing but -0 is 0, and -0 again under a negative norm weight: the rope half is stored as it is."""
    batch = batch_of([(0, 0, 8)])
    job = compressor(SMALL_ENTRY, CSA, num_tokens=8)
    job.kv[:, 200:] = -0.0
    job.kv[:, 72:128] = -0.0
    job.spec.freqs.zero_()  # no rotation
    expected = chain(job, batch)
    launch_compress(job, batch, CSA_FEW)
    assert_same_cache(job, expected)
    entries = decode_rows(job.pages.rows[batch.block_table[0, :1].long(), torch.tensor([1], device=job.kv.device)])
    assert torch.signbit(entries[:, 72:]).any()


def test_a_nan_spoils_its_own_entries_only():
    """Token 5 takes part in entries 1 and 2."""
    batch = batch_of([(0, 0, 16)])
    job = compressor(SMALL_ENTRY, CSA, num_tokens=16)
    clean = cloned(job)
    launch_compress(clean, batch, CSA_FEW)
    job.gate[5, :] = float("nan")
    launch_compress(job, batch, CSA_FEW)
    block = int(batch.block_table[0, 0])
    entries = [decode_rows(run.pages.rows[torch.full((4,), block), torch.arange(4)]) for run in (job, clean)]
    assert entries[0][[1, 2]].isnan().all()
    assert_bitwise(entries[0][[0, 3]], entries[1][[0, 3]])


def test_a_missing_block_is_not_written():
    batch = batch_of([(1, 0, 4)])
    batch.block_table.fill_(-1)
    job = compressor(SMALL_ENTRY, CSA, num_tokens=4)
    before = cloned(job)
    launch_compress(job, batch, CSA_FEW)
    assert_bitwise(job.pages.rows.data, before.pages.rows.data)


def test_what_cannot_be_done_is_said():
    batch = batch_of([(1, 0, 4)])
    job = compressor(SMALL_ENTRY, CSA, num_tokens=4)

    def refused(message, **changes):
        wrong = replace(job, **changes)
        with pytest.raises(KernelInputError, match=message):
            compress(wrong.kv, wrong.gate, wrong.spec, wrong.state, wrong.pages, batch)

    refused("expected kv in fp32 .* found torch.float64", kv=job.kv.double())
    refused(r"expected gate in fp32 of shape \(4, 256\)", gate=job.gate[:, :128])
    refused("expected ape in fp32", spec=replace(job.spec, ape=job.spec.ape[:2]))
    refused("expected entries rounded to one of", spec=replace(job.spec, dtype=torch.float64))
    refused("expected 4 tokens per entry with overlap or 128 without, found 128", spec=replace(job.spec, ratio=128))
    refused(r"expected a norm weight of shape \(128,\)", spec=replace(job.spec, norm_weight=job.spec.norm_weight[1:]))
    refused("expected frequencies of 64 dims, found 32", spec=replace(job.spec, freqs=job.spec.freqs[:16]))
    plain = RowStore.allocate((40, 32), RowFormat(RowKind.PLAIN, 128, itemsize=2), torch.bfloat16, kernel_device())
    refused("expected quantised rows, found plain", pages=replace(job.pages, rows=plain))
    own = replace(job.state.own, kv=job.state.own.kv.double())
    refused("expected a tail's kv in fp32", state=replace(job.state, own=own))
    with pytest.raises(KernelInputError, match="expected two CSA compressors"):
        compress_pair(job, compressor(INDEX_FP4, CSA, num_tokens=4, drafts=1), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [CSA, HCA])
def test_real_sizes(chain, ratio):
    """A long prefill in one go, in uneven chunks, and against the chain."""
    chunks = [(1, 0, 1300), (3, 0, 7), (0, 0, 1029)]
    batch = batch_of(chunks)
    job = compressor(ENTRY, ratio, num_tokens=batch.num_tokens)
    chunked, expected = cloned(job), chain(job, batch)
    compress(job.kv, job.gate, job.spec, job.state, job.pages, batch)
    assert_same_cache(job, expected)
    first = 0
    for slot, start, num in chunks:
        for cut in range(0, num, 333):
            rows = slice(first + cut, first + min(cut + 333, num))
            step = part(chunked, rows)
            compress(
                step.kv, step.gate, step.spec, step.state, step.pages, batch_of([(slot, start + cut, step.kv.shape[0])])
            )
        first += num
    assert_same_cache(chunked, job)


@pytest.mark.gpu
def test_decode_of_256_requests():
    """Every phase of a block at once, alone and together."""
    chunks = [(slot, 8 + slot % 8, 1) for slot in range(256)]
    batch = batch_of(chunks, num_slots=256)
    # one block per request, so that none overwrites another's entry
    batch = replace(batch, block_table=torch.arange(256, dtype=torch.int32, device="cuda").unsqueeze(1).contiguous())

    def job(fmt, seed):
        made = compressor(fmt, CSA, num_tokens=256, num_slots=256, seed=seed)
        for ring in tails_of(made.state):
            ring.normal_()
        rows = RowStore.allocate((256, 32), fmt, torch.bfloat16, kernel_device())
        return replace(made, pages=replace(made.pages, rows=rows))

    attention, index = job(ENTRY, 0), job(INDEX_FP4, 30)
    single = cloned((attention, index))
    compress_pair(attention, index, batch)
    for slot in range(256):
        one = batch_of([chunks[slot]], num_slots=256)
        one = replace(one, block_table=batch.block_table)
        compress_pair(*(part(job, slice(slot, slot + 1)) for job in single), one)
    for mine, other in zip((attention, index), single, strict=True):
        assert_same_cache(mine, other)
