"""The runner: a padded call over static buffers gives the bits of a direct one; on a GPU it is a graph."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import SMALL, finish
from offload_cases import offload

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.offload.placement import Placement
from dsv4.engine.run.bucket_sizes import decode_buckets
from dsv4.engine.run.compile_watch import CompileWatch
from dsv4.engine.run.graphs import RunnerError
from dsv4.engine.run.runner import Runner
from dsv4.engine.step.constraint import pack_tokens
from dsv4.formats.layouts import ShuffledTensor, unshuffle
from dsv4.formats.tensors import as_loaded
from dsv4.formats.trees import tensors_of
from dsv4.loader.write.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, TRITON, backend_for
from dsv4.request import SamplingParams

PROMPTS = [list(range(3 + i, 9 + 2 * i)) for i in range(5)]


@pytest.fixture(scope="module")
def params():
    return random_params(SMALL)


def make_cache(model, num_slots=8, device="cpu"):
    limits = EngineConfig(max_context_tokens=256, max_concurrent_requests=num_slots, max_chunk_tokens=64)
    return KVCacheManager(SMALL, model.schedule, limits, device=device, plain_dtype=None)


class FakeReplay:
    """Runs the call again, and leaves what it gives where the first call left it, as a graph does. What the call makes
    is what memory happens to hold until the first replay, since a capture runs nothing, and again after a replay of an
    earlier capture into the same `pool`, whose temporaries may have been there."""

    def __init__(self, call, pool):
        self._call, self._pool, self._place = call, pool, len(pool)
        self.result = call()
        pairs = zip(_tensors(self.result), _tensors(call()), strict=True)
        self._made = [static for static, again in pairs if static.data_ptr() != again.data_ptr()]  # else a buffer
        self._spoil()
        pool.append(self)

    def __call__(self):
        found = _tensors(self._call())
        for later in self._pool[self._place + 1 :]:
            later._spoil()
        for static, made in zip(_tensors(self.result), found, strict=True):
            static.copy_(made)
        return self.result

    def _spoil(self):
        for tensor in self._made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in _tensors(part)]


class FakeGraph:
    """A capture that runs the call again at every replay, over the same static buffers."""

    def __init__(self):
        self.num_captures = 0
        self._replays = []

    def __call__(self, call):
        self.num_captures += 1
        return FakeReplay(call, self._replays)


def make_runner(model, cache, buckets=(1, 2, 4, 8), **options):
    runner = Runner(model, cache, buckets=buckets, use_graphs=True, capture=FakeGraph(), **options)
    runner.warm_up()
    return runner


def make(params, **options):
    """A cache, and a runner over it with (fake) graphs."""
    model = Transformer(SMALL, params, torch.bfloat16)
    cache = make_cache(model)
    return cache, make_runner(model, cache, **options)


def last_rows(pieces, device="cpu"):
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
    return ends.to(device)


def generate(runner, cache, prompts, num_steps, tokens_per_step=1):
    """Greedy logits of every step: the prompts in one call, then `tokens_per_step` tokens each."""
    slots = [cache.admit(200) for _ in prompts]
    pieces, steps = prompts, []
    for _ in range(num_steps):
        batch = cache.make_batch(slots, pieces)
        logits = runner.forward(batch, last_rows(pieces, cache.device)).logits.clone()
        steps.append(logits.cpu())
        pieces = [[int(token)] * tokens_per_step for token in logits.argmax(-1)]
    for slot in slots:
        cache.release(slot)
    cache.check_integrity()
    return torch.stack(steps)


def direct(params, prompts, num_steps, tokens_per_step=1):
    model = Transformer(SMALL, params, torch.bfloat16)
    cache = make_cache(model)
    return generate(Runner(model, cache, buckets=(1,), use_graphs=False), cache, prompts, num_steps, tokens_per_step)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 5])
def test_padded_calls_have_the_same_bits(params, num_requests):
    cache, runner = make(params)
    prompts = PROMPTS[:num_requests]
    assert torch.equal(generate(runner, cache, prompts, 5), direct(params, prompts, 5))
    assert runner.num_replays >= 4
    if num_requests == 5:
        assert runner.num_direct == 1  # the prompts


def test_a_bucket_serves_chunks_too(params):
    """Three tokens each of two requests, in the bucket of eight."""
    cache, runner = make(params)
    assert torch.equal(generate(runner, cache, PROMPTS[:2], 4, 3), direct(params, PROMPTS[:2], 4, 3))
    assert runner.num_replays == 3


def test_old_rows_of_a_larger_call_are_gone(params):
    """A call of one token after one of four, in the same bucket: the other three rows must be padding again."""
    cache, runner = make(params, buckets=(4,))
    slots = [cache.admit(50) for _ in range(4)]
    runner.forward(cache.make_batch(slots, [[5], [6], [7], [8]]), torch.arange(4))
    before = [view.clone() for view in cache.handle(0).window.rows.data[1:]]
    runner.forward(cache.make_batch(slots[:1], [[9]]), torch.arange(1))
    graph = runner._graphs[4]
    assert graph.batch.slots.tolist() == [slots[0], -1, -1, -1]
    assert all(torch.equal(old, new) for old, new in zip(before, cache.handle(0).window.rows.data[1:], strict=True))
    assert cache.handle(0).window.positions[slots[1]].max() == 0


def test_forgotten_padding_is_noticed(params, monkeypatch):
    """Planted: the rows of the call before stay in the buffers."""
    cache, runner = make(params, buckets=(4,))
    slots = [cache.admit(50) for _ in range(2)]
    runner.forward(cache.make_batch(slots, [[5], [6]]), torch.arange(2))
    runner._graphs[4]._num_filled = 0
    runner.forward(cache.make_batch(slots[:1], [[9]]), torch.arange(1))
    assert runner._graphs[4].batch.slots.tolist() != [slots[0], -1, -1, -1]


def test_warm_up_leaves_the_cache_alone(params):
    model = Transformer(SMALL, params, torch.bfloat16)
    cache = make_cache(model)
    cache.handle(1).entries.rows.data.fill_(7)
    seen = []
    runner = Runner(model, cache, buckets=(2, 1), use_graphs=True, capture=FakeGraph())
    runner.warm_up(lambda what, done, total: seen.append((what, done, total)))
    assert seen == [("capturing", 1, 2), ("capturing", 2, 2)]
    assert runner.slots.state.last_tokens.eq(0).all()
    assert runner.captured == (1, 2)
    for graph in runner._graphs.values():
        graph._forward()
        graph._draw()
    assert bool((cache.handle(1).entries.rows.data == 7).all())
    assert cache.handle(0).window.positions.max() == -1


def test_another_block_table_runs_directly(params):
    cache, runner = make(params)
    slot = cache.admit(10)
    batch = cache.make_batch([slot], [[4]])
    runner.forward(replace(batch, block_table=batch.block_table.clone()), torch.zeros(1, dtype=torch.int64))
    assert (runner.num_direct, runner.num_replays) == (1, 0)


def test_rows_in_any_order(params):
    cache, runner = make(params)
    slots = [cache.admit(20) for _ in range(3)]
    batch = cache.make_batch(slots, [[4], [5], [6]])
    in_order = runner.forward(batch, torch.arange(3)).logits.clone()
    assert torch.equal(runner.forward(batch, torch.tensor([2, 0])).logits, in_order[[2, 0]])
    assert runner.forward(batch, torch.zeros(0, dtype=torch.int64)).logits.shape == (0, SMALL.vocab_size)


def serve(params, requests, overlap=False, **options):
    """Completions of requests that run together, the steps in (fake) graphs if there are buckets."""
    cache, runner = make(params, **options)
    engine = Engine(runner.model, cache, runner=runner, overlap=overlap)
    sequences = [engine.prepare(prompt, asked, rule() if rule else None) for prompt, asked, rule in requests]
    for sequence in sequences:
        engine.submit(sequence)
    finish(engine)
    engine.check_integrity()
    return [sequence.completion() for sequence in sequences], runner


class Even:
    """Allows even tokens."""

    def allowed(self):
        return pack_tokens(np.arange(SMALL.vocab_size) % 2 == 0)

    def accept(self, token_id):
        assert token_id % 2 == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_every_kind_in_graphs(params, overlap):
    """Draws, masks, log-probabilities and scores over static buffers, beside padding, as without graphs."""
    kinds = [
        ({"temperature": 0.0}, None),
        ({"seed": 4, "top_p": 0.8, "logprobs": 4}, None),
        ({"seed": 5, "logprobs": 60, "frequency_penalty": 0.7}, Even),
        ({"seed": 6, "min_tokens": 3, "logit_bias": {1: 50.0}}, None),
        ({"seed": 7, "prompt_logprobs": 2}, None),
    ]
    requests = [
        (prompt, SamplingParams(max_tokens=5 + place, ignore_eos=place != 3, **kind), rule)
        for place, (prompt, (kind, rule)) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    expected = [serve(params, [request], buckets=())[0][0] for request in requests]
    found, runner = serve(params, requests, overlap)
    assert found == expected
    assert runner.num_replays >= 8
    assert set(found[2].token_ids) <= set(range(0, SMALL.vocab_size, 2))


def test_a_mask_of_the_step_before_is_not_read(params):
    """A bound request ends, and the next one in its row is free."""
    bound = (PROMPTS[0], SamplingParams(max_tokens=2, seed=1, ignore_eos=True), Even)
    free = (PROMPTS[1], SamplingParams(max_tokens=8, seed=2, ignore_eos=True), None)
    expected = serve(params, [free], buckets=())[0][0]
    assert serve(params, [bound, free], buckets=(2,))[0][1] == expected


@pytest.mark.parametrize("placement", [Placement(1, 3), Placement(0, 2), Placement(4, 0)])
def test_offloaded_experts(params, placement):
    """Buckets whose experts may not fit are not captured, and the bits are those of the resident model."""
    moved, pool = offload(params, placement, TORCH, top_k=SMALL.num_experts_per_tok, device="cpu")
    model = Transformer(SMALL, moved, torch.bfloat16, backend=pool.backend)
    cache = make_cache(model)
    runner = make_runner(model, cache, experts=pool)
    assert set(runner.captured) == {bucket for bucket in (1, 2, 4, 8) if pool.always_fits(bucket)}
    assert pool.stats.num_uses == 0
    assert torch.equal(generate(runner, cache, PROMPTS[:3], 5), direct(params, PROMPTS[:3], 5))
    pool.check_integrity()


class PiecewiseCapture:
    """Captures as CUDA does: a call is cut at every layer's routing and replayed piece by piece.

    The pieces cannot be recorded on a CPU, so each replay runs the call and does at every cut what a replay does there.
    """

    def __init__(self):
        self.pool = None
        self.num_cuts = 0
        self._replays = []

    def cut(self, then):
        self.num_cuts += 1
        then()

    def __call__(self, call):
        def recorded():
            self.pool.recorder = self
            try:
                return call()
            finally:
                self.pool.recorder = None

        return FakeReplay(recorded, self._replays)


def test_offloaded_experts_in_pieces(params):
    moved, pool = offload(params, Placement(1, 3), TORCH, top_k=SMALL.num_experts_per_tok, device="cpu")
    model = Transformer(SMALL, moved, torch.bfloat16, backend=pool.backend)
    cache = make_cache(model)
    capture = PiecewiseCapture()
    capture.pool = pool
    runner = Runner(model, cache, buckets=(1, 2, 4), use_graphs=True, experts=pool, capture=capture)
    runner.warm_up()
    capture.num_cuts = 0
    assert torch.equal(generate(runner, cache, PROMPTS[:3], 6), direct(params, PROMPTS[:3], 6))
    assert capture.num_cuts == 5 * SMALL.num_hidden_layers
    pool.check_integrity()


def test_a_kernel_compiled_late_is_named(params):
    pytest.importorskip("triton")
    model = Transformer(SMALL, params, torch.bfloat16)
    cache = make_cache(model)

    def route(*arguments, **options):
        hook = importlib.import_module("triton").knobs.runtime.jit_post_compile_hook
        hook(key="k", repr="_late_kernel[num_warps=4](x)", fn=None, compile={}, is_manual_warmup=False)
        return TORCH.ops.route(*arguments, **options)

    runner = Runner(model, cache, buckets=(1,), use_graphs=False, forbid_compiles=True)
    runner.warm_up()
    batch = cache.make_batch([cache.admit(5)], [[4]])
    rows = torch.zeros(1, dtype=torch.int64)
    runner.forward(batch, rows)
    model.context = replace(model.context, backend=TORCH.with_ops(route=route))
    with pytest.raises(RunnerError, match="after warm-up, for 1 tokens: _late_kernel"):
        runner.forward(batch, rows)
    assert importlib.import_module("triton").knobs.runtime.jit_post_compile_hook is None


def test_watches_that_cross_leave_no_hook_behind():
    """As those of two engines in two threads may."""
    runtime = pytest.importorskip("triton").knobs.runtime
    first, second = CompileWatch(), CompileWatch()
    first.__enter__()
    second.__enter__()
    runtime.jit_post_compile_hook(key="a", repr="_both[](x)")
    first.__exit__()
    runtime.jit_post_compile_hook(key="b", repr="_second[](x)")
    second.__exit__()
    assert runtime.jit_post_compile_hook is None
    assert (first.names, second.names) == (["_both"], ["_both", "_second"])


def test_weights_are_prepared_once():
    """For the kernel only; shuffled again they would be wrong. Nothing but the layout changes."""
    params = random_params(SMALL, experts="nvfp4", mtp_experts="mxfp4")
    before = params.layers[1].ffn.experts.w2
    assert prepare_params(params, TORCH) is params
    assert as_loaded(params.layers[1].ffn.experts.w2) is before
    prepare_params(params, TRITON)
    shuffled = params.layers[1].ffn.experts.w2
    assert isinstance(shuffled, ShuffledTensor)
    assert shuffled.shape == before.shape
    back = unshuffle(shuffled)
    assert torch.equal(back.data, before.data)
    assert isinstance(params.mtp[0].block.ffn.shared.w1, ShuffledTensor)
    prepare_params(params, TRITON)
    assert params.layers[1].ffn.experts.w2 is shuffled


def test_shuffled_experts_are_offloaded_whole():
    """A slot stack of shuffled weights says its own shape, and holds each expert's own bytes."""
    params = prepare_params(random_params(SMALL, experts="nvfp4"), TRITON)
    stacks = params.layers[0].ffn.experts.matrices
    _, pool = offload(params, Placement(1, 2), TORCH, top_k=2, device="cpu")
    layer = pool.layers[0]
    slots = layer.slots_for(torch.tensor([[2, 3]]))
    assert [weight.shape for weight in layer.stack] == [torch.Size((3, *w.shape[1:])) for w in stacks]
    for part, whole in zip(tensors_of(layer.stack), tensors_of(stacks), strict=True):
        assert torch.equal(part[slots[0]], whole[[2, 3]])
        assert torch.equal(part[0], whole[0])


def test_graphs_need_a_gpu(params):
    model = Transformer(SMALL, params, torch.bfloat16)
    with pytest.raises(ValueError, match="graphs need a CUDA device, found cpu"):
        Runner(model, make_cache(model), buckets=(1,), use_graphs=True)


def test_the_backend_of_a_device():
    assert backend_for(torch.device("cpu"), "official") is TORCH
    assert backend_for(torch.device("cuda"), "official") is TRITON
    assert backend_for(torch.device("cuda"), "exact") is TORCH


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_graphs_give_the_bits_of_direct_calls(is_offloaded):
    """And no kernel is compiled after warm-up, at any size up to the longest chunk."""
    params = prepare_params(random_params(SMALL, device="cuda"), TRITON)

    def run(use_graphs):
        used, pool = params, None
        if is_offloaded:
            used, pool = offload(params, Placement(1, 3), TRITON, top_k=SMALL.num_experts_per_tok, device="cuda")
        model = Transformer(SMALL, used, torch.bfloat16, backend=TRITON if pool is None else pool.backend)
        cache = make_cache(model, device="cuda")
        runner = Runner(
            model, cache, buckets=decode_buckets(8), use_graphs=use_graphs, experts=pool, forbid_compiles=True
        )
        runner.warm_up()
        steps = generate(runner, cache, PROMPTS, 6)
        assert runner.num_replays == (5 if use_graphs else 0)
        for length in (1, 7, 33, 63):
            generate(runner, cache, [list(range(1, length + 1))], 2)
        if pool is not None:
            pool.check_integrity()
        return steps

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_built_where_its_graph_reads_it(params, overlap, monkeypatch):
    """No copy on the device between the host's numbers and the graph's own."""
    cache, runner = make(params)
    engine = Engine(runner.model, cache, runner=runner, overlap=overlap)
    copies, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *tensors: copies.append(tensors) or copy(*tensors))
    asked = SamplingParams(max_tokens=6, ignore_eos=True)
    sequences = [engine.add(prompt[:2], asked) for prompt in PROMPTS[:3]]
    finish(engine)
    assert copies == []
    assert engine.runner.num_replays >= 6
    assert engine.runner.num_direct == 0
    assert all(sequence.num_output == 6 for sequence in sequences)
    slot = cache.admit(20)
    engine.runner.forward(cache.make_batch([slot], [[3, 4]]), torch.tensor([1]))
    assert len(copies) == 1, "a batch made elsewhere is copied"
    cache.release(slot)
