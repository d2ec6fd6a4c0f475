"""A request gets the same tokens and log-probabilities, bit for bit, whatever runs beside it and however it is cut."""

import pytest
from engine_cases import assert_all_free
from test_engine_preemption import PARAMS, PROMPTS, random_prompts

from benchmarks.free_model import free_llm
from dsv4.cache.errors import NoFreeSlot
from dsv4.cache.transfer import HostCopy
from dsv4.config import EngineConfig
from dsv4.engine.request import RequestAborted
from dsv4.engine.run import in_flight
from dsv4.request import SamplingParams

RUNS_BOTH_WAYS = True


def test_batched_equals_alone_in_exact_numerics(make_llm):
    """Prompt lengths around 4 and 128, where entries close; five requests share three slots. With official numerics:
    test_engine_preemption.py.
    """
    together = make_llm("exact", max_concurrent_requests=3).generate(PROMPTS, PARAMS)
    alone_llm = make_llm("exact")
    alone = [alone_llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert together == alone
    assert [len(one.token_ids) for one in together] == [one.max_tokens for one in PARAMS]
    backwards = alone_llm.generate(PROMPTS[::-1], PARAMS[::-1])
    assert backwards == together[::-1]


def test_a_chunk_is_never_longer_than_the_limit(make_llm):
    llm = make_llm(max_chunk_tokens=16)
    requests = [
        llm.engine.add(prompt, SamplingParams(max_tokens=2, ignore_eos=True)) for prompt in random_prompts(40, 3, 40)
    ]
    while llm.engine.has_work:
        before = [request.num_processed for request in requests]
        llm.engine.step()
        assert sum(request.num_processed for request in requests) - sum(before) <= 16
        llm.cache.check_integrity()


def test_more_requests_than_slots_in_order(make_llm):
    llm = make_llm(max_concurrent_requests=2)
    prompts = random_prompts(*range(1, 8))
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
