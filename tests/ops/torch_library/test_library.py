"""`torch.ops.dsv4.*`: every kernel is there, `opcheck` accepts it, results are the launcher's, and it compiles."""

from dataclasses import replace

import pytest
import torch
from cache_cases import CSA, EPS, HCA, INDEX_FP4, NUM_BLOCKS, SMALL_ENTRY, batch_of, compressor, window
from quantised_weights import quantised

import dsv4.ops.torch_library as library
from dsv4.cache.handle import PagedView, WindowView
from dsv4.formats.fp8 import fp8_quantize
from dsv4.formats.layouts import shuffle
from dsv4.formats.row_store import RowStore, encode_rows
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation, QuantFormat, QuantTensor
from dsv4.ops.attention import sparse_attention
from dsv4.ops.compress import compress
from dsv4.ops.indexer import index_topk, turned_queries
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.linear import LinearBundle, grouped_linear, linear, linears
from dsv4.ops.moe import fp4_linear, moe, prepare_experts
from dsv4.ops.norm import rms_norm, rms_norm_quant
from dsv4.ops.router import route
from dsv4.ops.rows import Turn, append_swa, rope, rope_frequencies, window_rows
from dsv4.ops.sampling import HAS_BIAS, HAS_PENALTIES, SamplingState
from dsv4.ops.torch_library.weights import bundle_tensors, shuffled_tensors, weight_tensors
from dsv4.testing.inputs import generator, kernel_device, normal
from dsv4.testing.numeric import assert_bitwise
from dsv4.testing.op_call import oracles_and_kernels

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = [op._qualname.removeprefix("dsv4::") for op in library.OPS]
ENTRY_FORMAT = (SMALL_ENTRY.kind.value, SMALL_ENTRY.dim, SMALL_ENTRY.rope_dim)
INDEX_FORMAT = (INDEX_FP4.kind.value, INDEX_FP4.dim)
DIM, WIDTH, EXPERTS, LIMIT = 128, 256, 2, 10.0


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


def input_arguments(has_index, appends=True):
    queries = normal((3, 2, 128)), normal((3, 128)), normal((3, 4, 128)) if has_index else None
    index_kind = (INDEX_FP4.kind.value,) if has_index else ()
    return (*queries, normal((128,)), freqs(), EPS, *ring_arguments(), appends, *ENTRY_FORMAT, *index_kind)


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


def weight_of(form, shape, seed=0):
    """A weight [N, K] or a stack of them."""
    return quantised(form, normal(shape, FP32, seed).cpu() * 0.2).to(kernel_device())


def codes_of(x):
    return QuantActivation(*fp8_quantize(x, ACTIVATION_GROUP))


def some_weights():
    return [weight_of("fp8", (130, DIM), 1), weight_of("bf16", (24, DIM), 2), weight_of("fp8", (40, DIM), 3)]


def experts_of(form, stack=()):
    shapes = (WIDTH, DIM), (DIM, WIDTH), (WIDTH, DIM)
    return prepare_experts(tuple(weight_of(form, (*stack, *shape), seed) for seed, shape in enumerate(shapes)))


def moe_arguments(form="nvfp4"):
    routed, shared = experts_of(form, (EXPERTS,)), experts_of("fp8")
    chosen = torch.tensor([[1], [0]], device=kernel_device())
    arguments = normal((2, DIM)), chosen, normal((2, 1), FP32).abs()
    return (*arguments, shuffled_tensors(*routed), shuffled_tensors(*shared), LIMIT, form, WIDTH), (routed, shared)


def fp4_linear_arguments(form="nvfp4"):
    weight = shuffle(weight_of(form, (72, DIM)))
    return (normal((3, DIM)), shuffled_tensors(weight), form, list(weight.shape), FP32), weight


def linears_arguments(is_bundle, has_codes):
    x, weights, segments = normal((3, DIM)), weight_tensors(*some_weights()), None
    if is_bundle:
        weights, segments = bundle_tensors(LinearBundle.build(some_weights()))
    quant = (codes_of(x).codes, codes_of(x).scale) if has_codes else (None, None)
    return (x, None, weights, [False, True, False], *quant, segments)


def reading_batch():
    """A token at 70 of slot 0 and one at 9 of slot 2."""
    batch = batch_of([(0, 70, 1), (2, 9, 1)])
    batch = replace(batch, block_table=batch.block_table[:, :1].contiguous())
    return batch, (batch.positions, batch.slots, batch.chunk_starts, batch.chunk_ends, batch.block_table)


def rows_of(leading, fmt, seed):
    return encode_rows(normal((*leading, fmt.dim), seed=seed), fmt)


def index_arguments(num_heads=4, top_k=5):
    (batch, places), keys = reading_batch(), rows_of((NUM_BLOCKS, 32), INDEX_FP4, 1)
    q, weights = normal((2, num_heads, INDEX_FP4.dim)), normal((2, num_heads), FP32, 2)
    return (q, weights, keys.data, keys.scales, *places, CSA, top_k, *INDEX_FORMAT, 0.5), batch


def attention_arguments(has_entries=True, num_heads=3):
    """The ring holds what came before."""
    batch, places = reading_batch()
    held = torch.full((4, 16), -1, dtype=torch.int32, device=kernel_device())
    for slot, end in ((0, 70), (2, 9)):
        positions = torch.arange(max(end - 16, 0), end, device=kernel_device())
        held[slot, positions % 16] = positions.int()
    rows, ring = rows_of((2,), SMALL_ENTRY, 1), rows_of((4, 16), SMALL_ENTRY, 2)
    pages = rows_of((NUM_BLOCKS, 32), SMALL_ENTRY, 3)
    picks = torch.tensor([[0, 3, 16, -1], [1, -1, 0, 17]], device=kernel_device())
    entries = (pages.data, pages.scales, picks) if has_entries else (None, None, None)
    q, sink = normal((2, num_heads, SMALL_ENTRY.dim)), normal((num_heads,), FP32, 4)
    arguments = (q, rows.data, rows.scales, ring.data, ring.scales, held, *entries, sink, *places)
    return (*arguments, 8, *ENTRY_FORMAT, freqs()), batch


def sample_arguments():
    device = kernel_device()
    state = SamplingState.empty(3, 20, device)
    fills = {"temperature": 0.9, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "flags": HAS_PENALTIES | HAS_BIAS}
    for name, value in fills.items():
        getattr(state, name).fill_(value)
    slots, positions = torch.tensor([2, -1], device=device), integers(9, (2,))
    mask, is_masked = torch.full((2, 1), -1, dtype=torch.int32, device=device), integers(2, (2,)).int()
    return (normal((2, 20), torch.float32), slots, positions, mask, is_masked, *vars(state).values())


ARGUMENTS = {
    "rms_norm": lambda: (normal((3, 128)), None, EPS),
    "rms_norm_quant": lambda: (normal((3, 256)), normal((256,)), EPS, False),
    "rope": lambda: (normal((2, 3, 128)), integers(99, (2,)), freqs(), True),
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
    "expert_sort": lambda: (integers(16, (4, 3)), 16, 2),
    "sample": sample_arguments,
    "resolve_tokens": lambda: (integers(9, (4,)) - 5, integers(4, (4,)) - 1, integers(9, (3,))),
    "sampled_logprobs": lambda: (normal((2, 30), torch.float32), integers(30, (2,)), 3),
    "window_rows": lambda: (normal((3, 128)), normal((128,)), integers(99, (3,)), freqs(), EPS, *ENTRY_FORMAT),
    "append_swa": lambda: (
        integers(255, (3, SMALL_ENTRY.data_bytes)).byte(), integers(255, (3, SMALL_ENTRY.scale_bytes)).byte(),
        *ring_arguments(), *ENTRY_FORMAT,
    ),
    "attention_inputs": lambda: input_arguments(True),
    "compress": compress_arguments,
    "compress_pair": compress_pair_arguments,
    "linear": lambda: (normal((3, DIM)), None, weight_tensors(weight_of("fp8", (130, DIM)))),
    "linears": lambda: linears_arguments(is_bundle=True, has_codes=False),
    "grouped_linear": lambda: (normal((3, 2, DIM)), weight_tensors(weight_of("fp8", (48, DIM)))),
    "moe": lambda: moe_arguments()[0],
    "fp4_linear": lambda: fp4_linear_arguments()[0],
    "index_topk": lambda: index_arguments()[0],
    "sparse_attention": lambda: attention_arguments()[0],
    # with arguments of another kind
    "linear codes": lambda: (
        codes_of(normal((3, DIM))).codes, codes_of(normal((3, DIM))).scale, weight_tensors(weight_of("fp8", (40, DIM)))
    ),
    "linear bf16": lambda: (normal((3, DIM)), None, weight_tensors(weight_of("bf16", (40, DIM))), FP32),
    "linear mxfp4": lambda: (normal((3, DIM)), None, weight_tensors(weight_of("mxfp4", (40, DIM)))),
    "linear nvfp4": lambda: (normal((3, DIM)), None, weight_tensors(weight_of("nvfp4", (40, DIM)))),
    "linears list": lambda: linears_arguments(is_bundle=False, has_codes=False),
    "linears bundle and codes": lambda: linears_arguments(is_bundle=True, has_codes=True),
    "grouped_linear bf16": lambda: (normal((3, 2, DIM)), weight_tensors(weight_of("bf16", (48, DIM)))),
    "fp4_linear mxfp4": lambda: fp4_linear_arguments("mxfp4")[0],
    "attention_inputs window only": lambda: input_arguments(False, appends=False),
    "sparse_attention window only": lambda: attention_arguments(has_entries=False)[0],
}  # fmt: skip
WITHOUT_ORACLE = {"fp4_linear"}  # its oracle is that of another op
# parts of a step of this engine, of no use by themselves
NOT_IN_THE_LIBRARY = {
    "accept", "confidence", "tap_streams", "grouped_codes", "moe_fold", "moe_parts", "moe_shared",
}  # fmt: skip


def test_every_kernel_is_an_op():
    kernels = {kernel.__name__ for _, kernel in oracles_and_kernels().values()} | WITHOUT_ORACLE
    kernels -= NOT_IN_THE_LIBRARY
    assert kernels == set(NAMES) == {what.split(" ")[0] for what in ARGUMENTS}
    assert all(hasattr(torch.ops.dsv4, name) for name in NAMES)


@pytest.fixture(autouse=True)
def fp8_can_be_compared(monkeypatch):
    """opcheck looks at arguments before and after with torch.allclose, which has no FP8."""
    allclose = torch.allclose

    def by_value_or_byte(left, right, **options):
        if left.dtype == torch.float8_e4m3fn:
            return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        return allclose(left, right, **options)

    monkeypatch.setattr(torch, "allclose", by_value_or_byte)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
# the slow check, with symbolic shapes, for one op of every kind
DYNAMIC = ("rms_norm_quant", "expert_sort", "append_swa", "compress", "linears", "index_topk")


@pytest.mark.parametrize("what", ARGUMENTS)
def test_opcheck(what):
    op = getattr(torch.ops.dsv4, what.split(" ")[0]).default
    checks = (*CHECKS, "test_aot_dispatch_dynamic") if what in DYNAMIC else CHECKS
    torch.library.opcheck(op, ARGUMENTS[what](), test_utils=checks)


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
    q, index_q = normal((5, 3, 128)), normal((5, 4, 128))
    queries, data, _, index_queries = torch.ops.dsv4.attention_inputs(
        q, kv, index_q, weight, freqs(), EPS, ours.rows.data, ours.rows.scales, ours.positions, *places, True,
        *ENTRY_FORMAT, INDEX_FP4.kind.value,
    )  # fmt: skip
    assert_bitwise(queries, rope(rms_norm(q, None, EPS), batch.positions, freqs()))
    assert_bitwise(index_queries, turned_queries(index_q, Turn.of(batch.positions, freqs()), INDEX_FP4))
    for left, right in ((data, rows.data), (ours.rows.data, theirs.rows.data), (ours.positions, theirs.positions)):
        assert_bitwise(left, right)
    batch = batch_of([(2, 126, 3)], padding=1)
    ours, theirs = (compressor(SMALL_ENTRY, HCA, num_tokens=4) for _ in range(2))
    (inputs, state), tensors = spread(ours, batch)
    spread(theirs, batch)
    compress(theirs.kv, theirs.gate, theirs.spec, theirs.state, theirs.pages, batch)
    torch.ops.dsv4.compress(inputs, state, *tensors, HCA, EPS, torch.bfloat16, *ENTRY_FORMAT)
    assert_bitwise(ours.pages.rows.data, theirs.pages.rows.data)
    assert_bitwise(ours.state.own.score, theirs.state.own.score)


# ---- weights ----


def assert_all_bitwise(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert_bitwise(left, right)


@pytest.mark.parametrize("form", ["fp8", "bf16", "mxfp4", "nvfp4"])
def test_a_weight_of_every_kind_is_recognised(form):
    x, weight = normal((3, DIM)), weight_of(form, (40, DIM))
    assert_bitwise(torch.ops.dsv4.linear(x, None, weight_tensors(weight)), linear(x, weight))
    grouped = normal((3, 2, DIM), seed=1)
    assert_bitwise(torch.ops.dsv4.grouped_linear(grouped, weight_tensors(weight)), grouped_linear(grouped, weight))


def test_several_weights_are_the_launcher_s():
    """Of four kinds in one list; of a bundle; with codes. No result shares another's memory."""
    x, mixed = normal((3, DIM)), [*some_weights(), *(weight_of(form, (8, DIM)) for form in ("nvfp4", "mxfp4", "bf16"))]
    wide = [False, True, True, False, True, False]
    dtypes = [FP32 if is_wide else None for is_wide in wide]
    assert_all_bitwise(torch.ops.dsv4.linears(x, None, weight_tensors(*mixed), wide), linears(x, mixed, dtypes))
    expected = linears(x, LinearBundle.build(some_weights()), dtypes[:1] + dtypes[1:2] + dtypes[:1])
    for has_codes in (False, True):
        found = torch.ops.dsv4.linears(*linears_arguments(is_bundle=True, has_codes=has_codes))
        assert_all_bitwise(found, expected)
        assert len({result.untyped_storage().data_ptr() for result in found}) == len(found)
    codes, fp8 = codes_of(x), [weight for weight in some_weights() if isinstance(weight, QuantTensor)]
    found = torch.ops.dsv4.linears(codes.codes, codes.scale, weight_tensors(*fp8), [False, True])
    assert_all_bitwise(found, linears(codes, fp8, [None, FP32]))
    assert [result.dtype for result in found] == [BF16, FP32]


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_shuffled_weights_are_the_launcher_s(form):
    arguments, (routed, shared) = moe_arguments(form)
    assert_bitwise(torch.ops.dsv4.moe(*arguments), moe(*arguments[:3], routed, shared, limit=LIMIT))
    arguments, weight = fp4_linear_arguments(form)
    assert_bitwise(torch.ops.dsv4.fp4_linear(*arguments), fp4_linear(arguments[0], weight, FP32))


def test_lists_that_are_no_weights():
    x, weight = normal((3, DIM)), weight_of("fp8", (40, DIM))
    with pytest.raises(KernelInputError, match="one after another"):
        torch.ops.dsv4.linear(x, None, [weight.data])
    with pytest.raises(KernelInputError, match="one weight, found 2"):
        torch.ops.dsv4.linear(x, None, weight_tensors(weight, weight))
    with pytest.raises(KernelInputError, match="within 170 and 24 rows"):
        torch.ops.dsv4.linears(*linears_arguments(True, False)[:3], [True], segments=[1, 128, 43, 1])
    with pytest.raises(KernelInputError, match="codes and their scale"):
        torch.ops.dsv4.linears(x, None, weight_tensors(weight), [True], x)
    (x, tensors, form, shape, dtype), _ = fp4_linear_arguments()
    for wrong in ((tensors, "mxfp4", shape), (tensors, form, [136, DIM]), (tensors, form, [72, 2 * DIM])):
        with pytest.raises(KernelInputError, match="expected a shuffled"):
            torch.ops.dsv4.fp4_linear(x, *wrong, dtype)
    arguments = moe_arguments()[0]
    with pytest.raises(KernelInputError, match="nine tensors twice"):
        torch.ops.dsv4.moe(*arguments[:3], arguments[3][:6], *arguments[4:])
    with pytest.raises(ValueError, match="in blocks of"):
        weight_tensors(QuantTensor(weight.data, weight.scale, QuantFormat.FP8_BLOCK, block=(64, 64)))


# ---- what reads the cache ----


def test_the_cache_is_read_as_the_launchers_read_it():
    arguments, batch = index_arguments()
    q, weights, data, scales = arguments[:4]
    queries = turned_queries(q, Turn.of(batch.positions, freqs()), INDEX_FP4)
    keys = PagedView(RowStore(data, scales, INDEX_FP4))
    found = torch.ops.dsv4.index_topk(queries, *arguments[1:])
    assert_bitwise(found, index_topk(queries, weights, keys, batch, ratio=CSA, top_k=5, scale=0.5))
    assert (found[1] >= 0).sum() == 2, "a token at 9 sees two entries"
    for has_entries in (True, False):
        arguments, batch = attention_arguments(has_entries)
        q, data, scales, ring_data, ring_scales, held, entry_data, entry_scales, picks, sink = arguments[:10]
        ring = WindowView(RowStore(ring_data, ring_scales, SMALL_ENTRY), held)
        pages = PagedView(RowStore(entry_data, entry_scales, SMALL_ENTRY)) if has_entries else None
        rows = RowStore(data, scales, SMALL_ENTRY)
        expected = sparse_attention(q, rows, ring, pages, picks, sink, batch, window_len=8, freqs=freqs())
        assert_bitwise(torch.ops.dsv4.sparse_attention(*arguments), expected)


# ---- compiled ----


def test_an_attention_and_an_moe_layer_compile_whole():
    """From the indexer to the experts, with symbolic sizes and without a graph break."""
    ops = torch.ops.dsv4
    index, attention, experts = index_arguments()[0], attention_arguments()[0], moe_arguments()[0]
    wo_a, bundle = weight_tensors(weight_of("fp8", (3 * 64, DIM))), bundle_tensors(LinearBundle.build(some_weights()))
    up = weight_tensors(weight_of("bf16", (DIM, 3 * 64)))
    fp4 = fp4_linear_arguments()[0]

    def layer(q, x, chosen, weights):
        picks = ops.index_topk(ops.rope(index[0], attention[10], freqs()), *index[1:])
        out = ops.sparse_attention(q, *attention[1:8], picks, *attention[9:])
        out = ops.linear(ops.grouped_linear(out, wo_a).flatten(1), None, up)
        first, second, third = ops.linears(x + 1, None, bundle[0], [False, True, False], None, None, bundle[1])
        moved = ops.moe(x, chosen, weights, *experts[3:])
        return out, first * 2, second, third, moved, ops.fp4_linear(moved, *fp4[1:])

    arguments = attention[0], *experts[:3]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_all_bitwise(compiled(*arguments), layer(*arguments))
