"""`torch.ops.dsv4.*`: every kernel is there, `opcheck` accepts it, results are the launcher's, and it compiles."""

from __future__ import annotations

import pytest
import torch
from cache_cases import CSA, EPS, HCA, INDEX_FP4, SMALL_ENTRY, batch_of, compressor, window
from test_op_contracts import PAIRS

import dsv4.ops.library as library
from dsv4.ops.append_swa import append_swa, window_rows
from dsv4.ops.compress import compress
from dsv4.ops.norm import rms_norm_quant
from dsv4.ops.rope import rope_frequencies
from dsv4.ops.router import route
from dsv4.testing.inputs import generator, kernel_device, normal
from dsv4.testing.numeric import assert_bitwise

NAMES = [op._qualname.removeprefix("dsv4::") for op in library.OPS]
ENTRY_FORMAT = (SMALL_ENTRY.kind.value, SMALL_ENTRY.dim, SMALL_ENTRY.rope_dim)


def integers(high, shape, seed=0):
    return torch.randint(0, high, shape, generator=generator(seed)).to(kernel_device())


def hyper_weights(num_mixes=24, width=128):
    scales = 3 if num_mixes == 24 else 1
    return [normal(shape, torch.float32, seed) * 0.1
            for seed, shape in enumerate([(num_mixes, 4 * width), (num_mixes,), (scales,)])]  # fmt: skip


def spread(job, batch):
    """A compressor's two lists, and the batch."""
    inputs = [job.kv, job.gate, job.spec.ape, job.spec.norm_weight, job.spec.freqs]
    tails = [job.state.own] + ([job.state.following] if job.state.following else [])
    pages = job.pages.rows
    state = [tensor for tail in tails for tensor in (tail.kv, tail.score)] + [pages.data, pages.scales]
    for tensor in state:
        tensor.copy_(torch.nan_to_num(tensor))  # opcheck compares values, and NaN equals nothing
    batch_tensors = (batch.positions, batch.slots, batch.chunk_starts, batch.chunk_ends, batch.block_table)
    return (inputs, state), batch_tensors


def ring_arguments():
    ring, batch = window(SMALL_ENTRY, 8), batch_of([(0, 5, 2)], padding=1)
    return (ring.rows.data, ring.rows.scales, ring.positions, batch.positions, batch.slots, batch.chunk_ends)


def freqs():
    return rope_frequencies(64, 10000.0, None).to(kernel_device())


def compress_arguments(ratio=CSA):
    batch = batch_of([(0, ratio - 2, 3)], padding=1)
    lists, places = spread(compressor(SMALL_ENTRY, ratio, num_tokens=4), batch)
    return (*lists, *places, ratio, EPS, torch.bfloat16, *ENTRY_FORMAT)


def compress_pair_arguments():
    batch = batch_of([(0, 2, 3)], padding=1)
    lists, places = spread(compressor(SMALL_ENTRY, CSA, num_tokens=4), batch)
    index_lists, _ = spread(compressor(INDEX_FP4, CSA, num_tokens=4, seed=9), batch)
    formats = (*ENTRY_FORMAT, INDEX_FP4.kind.value, INDEX_FP4.dim)
    return (*lists, *index_lists, *places, CSA, EPS, torch.bfloat16, *formats)


def sample_arguments():
    fills = {
        "temperature": 0.9,
        "top_k": 3,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition": 1.2,
        "presence": 0.1,
        "frequency": 0.1,
    }
    device = kernel_device()
    columns = [torch.full((2,), value, device=device) for value in fills.values()]
    counts = integers(2, (2, 20)).int()
    logits = normal((2, 20), torch.float32)
    return (logits, *columns, integers(9, (2,)), integers(9, (2,)), counts > 0, counts)


ARGUMENTS = {
    "rms_norm": lambda: (normal((3, 128)), None, EPS),
    "rms_norm_quant": lambda: (normal((3, 256)), normal((256,)), EPS, False),
    "rope": lambda: (normal((2, 3, 128)), integers(99, (2,)), freqs(), True),
    "head_norm_rope": lambda: (normal((2, 3, 128)), integers(99, (2,)), freqs(), EPS),
    "hc_enter": lambda: (normal((2, 128)), *hyper_weights(), normal((128,)), 3, EPS, EPS, True),
    "hc_boundary": lambda: (
        normal((2, 128)), normal((2, 4, 128)), normal((2, 4), torch.float32), normal((2, 4, 4), torch.float32),
        *hyper_weights(), normal((128,)), 3, EPS, EPS, False,
    ),
    "hc_pre": lambda: (normal((2, 4, 128)), *hyper_weights(), 3, EPS, EPS),
    "hc_post": lambda: (
        normal((2, 128)), normal((2, 4, 128)), normal((2, 4), torch.float32), normal((2, 4, 4), torch.float32)
    ),
    "hc_head": lambda: (normal((2, 4, 128)), *hyper_weights(4), EPS, EPS),
    "hc_head_norm": lambda: (normal((2, 4, 128)), *hyper_weights(4), normal((128,)), EPS, EPS),
    "topk_select": lambda: (normal((2, 50), torch.float32), 5, integers(50, (2,)), True),
    "activation_topk": lambda: (normal((2, 16), torch.float32), None, 3, 1.5),
    "route": lambda: (normal((2, 128)), normal((16, 128)), None, integers(16, (9, 3)), integers(9, (2,)), 3, 1.5),
    "expert_sort": lambda: (integers(16, (4, 3)), 16, 2, integers(3, (4,)) - 1),
    "sample": sample_arguments,
    "sampled_logprobs": lambda: (normal((2, 30), torch.float32), integers(30, (2,)), 3),
    "window_rows": lambda: (normal((3, 128)), normal((128,)), integers(99, (3,)), freqs(), EPS, *ENTRY_FORMAT),
    "append_swa": lambda: (
        integers(255, (3, SMALL_ENTRY.data_bytes)).byte(), integers(255, (3, SMALL_ENTRY.scale_bytes)).byte(),
        *ring_arguments(), *ENTRY_FORMAT,
    ),
    "store_window": lambda: (normal((3, 128)), normal((128,)), freqs(), EPS, *ring_arguments(), *ENTRY_FORMAT),
    "compress": compress_arguments,
    "compress_pair": compress_pair_arguments,
}  # fmt: skip


def test_every_kernel_is_an_op():
    kernels = {kernel.__name__ for _, kernel in PAIRS.values()}
    assert kernels == set(NAMES) == set(ARGUMENTS)
    assert all(hasattr(torch.ops.dsv4, name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    op = getattr(torch.ops.dsv4, name).default
    torch.library.opcheck(
        op, ARGUMENTS[name](), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("name", ["rms_norm_quant", "expert_sort", "append_swa", "compress"])
def test_opcheck_under_dispatch(name):
    """The slow part, with symbolic shapes, for one op of every kind."""
    op = getattr(torch.ops.dsv4, name).default
    torch.library.opcheck(op, ARGUMENTS[name](), test_utils=("test_aot_dispatch_dynamic",))


def test_results_are_the_launchers():
    x, weight = normal((3, 256)), normal((256,))
    plain, codes, scale = torch.ops.dsv4.rms_norm_quant(x, weight, EPS, True)
    expected, quant = rms_norm_quant(x, weight, EPS, True)
    for left, right in ((plain, expected), (codes, quant.codes), (scale, quant.scale)):
        assert_bitwise(left, right)
    arguments = ARGUMENTS["route"]()
    expected = route(*arguments[:5], top_k=3, scale=1.5)
    for left, right in zip(torch.ops.dsv4.route(*arguments), expected, strict=True):
        assert_bitwise(left, right)


def test_the_cache_is_written_as_the_launchers_write_it():
    batch, kv, weight = batch_of([(1, 6, 3)], padding=2), normal((5, 128)), normal((128,))
    places = batch.positions, batch.slots, batch.chunk_ends
    ours, theirs = window(SMALL_ENTRY, 8), window(SMALL_ENTRY, 8)
    rows = window_rows(kv, weight, batch.positions, freqs(), EPS, SMALL_ENTRY)
    append_swa(rows, theirs, batch)
    found = torch.ops.dsv4.store_window(
        kv, weight, freqs(), EPS, ours.rows.data, ours.rows.scales, ours.positions, *places, *ENTRY_FORMAT
    )
    for left, right in ((found[0], rows.data), (ours.rows.data, theirs.rows.data), (ours.positions, theirs.positions)):
        assert_bitwise(left, right)
    batch = batch_of([(2, 126, 3)], padding=1)
    ours, theirs = (compressor(SMALL_ENTRY, HCA, num_tokens=4) for _ in range(2))
    (inputs, state), tensors = spread(ours, batch)
    spread(theirs, batch)
    compress(theirs.kv, theirs.gate, theirs.spec, theirs.state, theirs.pages, batch)
    torch.ops.dsv4.compress(inputs, state, *tensors, HCA, EPS, torch.bfloat16, *ENTRY_FORMAT)
    assert_bitwise(ours.pages.rows.data, theirs.pages.rows.data)
    assert_bitwise(ours.state.own.score, theirs.state.own.score)


def test_compiles_whole():
    """Two ops and torch code between them, without a graph break."""
    gate, token_ids, table = normal((16, 128)), integers(9, (4,)), integers(16, (9, 3))

    def layer(x):
        normed = torch.ops.dsv4.rms_norm(x, None, EPS)
        experts, weights = torch.ops.dsv4.route(normed + 1, gate, None, table, token_ids, 3, 1.5)
        return experts, weights * 2

    x = normal((4, 128))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for left, right in zip(compiled(x), layer(x), strict=True):
        assert_bitwise(left, right)
