"""A request gets the same tokens and log-probabilities, bit for bit, whatever runs beside it and however it is cut."""

import pytest
import torch
from bare import bare
from engine_cases import SMALL, assert_all_free

from benchmarks.free_model import free_llm
from dsv4.cache.errors import NoFreeSlot
from dsv4.cache.transfer import HostCopy
from dsv4.config import EngineConfig
from dsv4.engine.request import RequestAborted
from dsv4.engine.run import in_flight
from dsv4.request import SamplingParams

RUNS_BOTH_WAYS = True


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, SMALL.vocab_size, (length,), generator=generator).tolist() for length in lengths]


MIXED = [
    SamplingParams(max_tokens=5, temperature=0, logprobs=3),
    SamplingParams(max_tokens=4, seed=1, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=2**40, temperature=0.8, top_p=0.9, logprobs=5),
    SamplingParams(max_tokens=4, seed=1, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=3, seed=4, min_p=0.05, presence_penalty=1.0),
]


@pytest.mark.parametrize("numerics", ["official", "exact"])
def test_batched_equals_alone(make_llm, numerics):
    """Prompt lengths around 4 and 128, where entries close; five requests share three slots."""
    prompts = prompts_of(3, 130, 1, 127, 20)
    together = make_llm(numerics, max_concurrent_requests=3).generate(prompts, MIXED)
    alone_llm = make_llm(numerics)
    alone = [alone_llm.generate([prompt], params)[0] for prompt, params in zip(prompts, MIXED, strict=True)]
    assert together == alone
    assert [len(one.token_ids) for one in together] == [5, 4, 6, 4, 3]
    backwards = alone_llm.generate(prompts[::-1], MIXED[::-1])
    assert backwards == together[::-1]


@pytest.mark.parametrize(("max_chunk_tokens", "lengths"), [(1, (9, 5, 14)), (13, (30, 5, 94)), (64, (75, 5, 141))])
def test_prompts_cut_into_chunks_equal_one_go(make_llm, max_chunk_tokens, lengths):
    """Prompts longer than a chunk are read over many steps while shorter ones already write.

    Official numerics: the exact ones settle equal index scores by the length of the call, see `index_topk_ref`.
    """
    prompts, params = prompts_of(*lengths), MIXED[:3]
    expected = make_llm("official").generate(prompts, params)
    llm = make_llm("official", max_chunk_tokens=max_chunk_tokens)
    requests = [llm.engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    num_mixed = 0
    while llm.engine.has_work:
        reading = [request for request in requests if request.num_output == 0]
        num_mixed += bool(llm.engine.step()) and any(request.num_output == 0 for request in reading)
    assert num_mixed > 0, "some steps read one prompt and write another's answer"
    assert [request.completion() for request in requests] == bare(expected)


def test_a_chunk_is_never_longer_than_the_limit(make_llm):
    llm = make_llm(max_chunk_tokens=16)
    requests = [
        llm.engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True)) for prompt in prompts_of(40, 3, 40)
    ]
    while llm.engine.has_work:
        before = [request.num_processed for request in requests]
        llm.engine.step()
        assert sum(request.num_processed for request in requests) - sum(before) <= 16
        llm.cache.check_integrity()


def test_more_requests_than_slots_in_order(make_llm):
    llm = make_llm(max_concurrent_requests=2)
    prompts = prompts_of(*range(1, 8))
    params = [SamplingParams(max_tokens=1 + i % 3, seed=i, ignore_eos=True) for i in range(7)]
    started = []
    requests = [llm.engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while llm.engine.has_work:
        llm.engine.step()
        llm.cache.check_integrity()
        assert sum(request.slot is not None for request in requests) <= 2
        started += [i for i, request in enumerate(requests) if request.num_processed and i not in started]
    assert started == list(range(7)), "first come, first served"
    assert [len(request.completion().token_ids) for request in requests] == [1 + i % 3 for i in range(7)]


def test_scarce_blocks_make_requests_wait_not_fail(make_llm):
    """Four slots but three blocks: the fourth request waits for the first chunk of its prompt."""
    llm = make_llm("official", num_blocks=3, prefix_cache_bytes=0)
    prompts, params = prompts_of(130, 4, 131, 4), SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
    expected = [make_llm("official").generate([prompt], params)[0] for prompt in prompts]
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    most_running = 0
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
        most_running = max(most_running, sum(request.slot is not None for request in requests))
    assert most_running == 3
    assert llm.engine.stats().num_preemptions > 0, "the first needs a second block while three run"
    assert [request.completion() for request in requests] == bare(expected)


def test_streams_and_batches_share_the_engine(make_llm):
    """Only one slot: a half-read stream does not block generate, which carries it to its end."""
    llm = make_llm(max_concurrent_requests=1)
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    expected = llm.generate("abc", params)[0]
    other = llm.generate("xyz", params)[0]
    stream = llm.stream("abc", params)
    pieces = [next(stream)]
    assert llm.generate("xyz", params) == [other]
    assert "".join(pieces + list(stream)) == expected.text


def test_a_stream_not_yet_read_costs_nothing(make_llm):
    llm = make_llm()
    stream = llm.stream("abc", SamplingParams(max_tokens=2))
    assert_all_free(llm)
    del stream
    assert_all_free(llm)


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_failed_forward_call_frees_everything(make_llm, monkeypatch, error):
    llm = make_llm()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = llm.generate("abc", params)
    stream = llm.stream("abc", params)
    next(stream)
    forward, calls = llm.model.forward, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return forward(*arguments)

    monkeypatch.setattr(llm.model, "forward", failing)
    with pytest.raises(type(error)):
        llm.generate(["xyz", "pq"], params)
    while llm.engine.has_work:  # a step launched before the one that failed
        llm.engine.step()
    assert_all_free(llm)
    with pytest.raises(RequestAborted, match="dropped after"):
        list(stream)
    assert llm.generate("abc", params) == expected, "the cache is sound for whoever comes next"


def test_slots_held_by_others_are_said_not_waited_for(make_llm):
    llm = make_llm(max_concurrent_requests=1)
    slot = llm.cache.admit(10)
    with pytest.raises(NoFreeSlot, match="1 requests wait"):
        llm.generate("abc")
    llm.cache.release(slot)


def test_a_step_without_requests_does_nothing(make_llm):
    assert not make_llm().engine.step()


class WatchedCopy(HostCopy):
    """Knows how many calls were launched before it, and how many of them the host has waited for."""

    num_launched = num_waited = 0

    def __init__(self, tensors, device):
        super().__init__(tensors, device)
        self.place = WatchedCopy.num_launched

    def wait(self):
        WatchedCopy.num_waited = max(WatchedCopy.num_waited, self.place)
        return super().wait()


def test_the_host_is_one_step_ahead_and_no_more(monkeypatch):
    """Of a device that reads a long prompt alone too, where no step draws: what a client cancels is not queued up."""
    llm = free_llm(EngineConfig(max_context_tokens=4096, max_concurrent_requests=1, max_chunk_tokens=64))
    engine, forward = llm.engine, llm.engine.runner.forward
    monkeypatch.setattr(in_flight, "HostCopy", WatchedCopy)
    monkeypatch.setattr(WatchedCopy, "num_launched", 0)
    monkeypatch.setattr(WatchedCopy, "num_waited", 0)

    def counted(batch, draw_rows):
        WatchedCopy.num_launched += 1
        return forward(batch, draw_rows)

    monkeypatch.setattr(engine.runner, "forward", counted)
    request = engine.add([5] * 2000, SamplingParams(max_tokens=20, ignore_eos=True))
    ahead = []
    while engine.has_work:
        engine.step()
        ahead.append(WatchedCopy.num_launched - WatchedCopy.num_waited)
    assert request.num_output == 20
    assert WatchedCopy.num_launched == 2000 // 64 + 20
    assert set(ahead[:-1]) == {1}, "one step ahead, and never two"
