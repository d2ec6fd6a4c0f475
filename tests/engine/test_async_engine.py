"""`AsyncEngine`: many asynchronous callers over one engine thread, none of whom can hurt the others."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial

import pytest
import torch
from engine_cases import assert_all_free

from dsv4.engine.async_engine import AsyncEngine, EngineBusy, EngineStopped
from dsv4.engine.events import EndEvent, ErrorEvent
from dsv4.engine.request import RequestAborted, RequestFailed
from dsv4.request import SamplingParams


@pytest.fixture
def started(make_llm):
    """`started(**options)`: an engine on its thread and its LLM; stopped when the test is over."""
    engines = []

    def start(max_waiting=64, **limits):
        llm = make_llm(**limits)
        engine = AsyncEngine(llm.engine, max_waiting=max_waiting)
        engine.start()
        engines.append(engine)
        return llm, engine

    yield start
    for engine in engines:
        engine.stop(timeout=10)
        assert engine.num_open == 0


def requests_of(count, **params):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 250, (3 + 7 * i % 40,), generator=generator).tolist() for i in range(count)]
    shared = {"max_tokens": 8, "ignore_eos": True, **params}
    return [(prompt, SamplingParams(seed=i, **shared)) for i, prompt in enumerate(prompts)]


async def read(stream):
    """Ids of each request of the group, and its error if it had one."""
    ids, errors = [[] for _ in stream.requests], [None] * len(stream.requests)
    async with stream:
        async for event in stream:
            if isinstance(event, ErrorEvent):
                errors[event.choice] = event.error
            else:
                ids[event.choice].append(event.token_id)
    return ids, errors


def test_concurrent_callers_get_what_they_would_get_alone(make_llm, started):
    requests = requests_of(10)
    alone = make_llm()
    expected = [list(alone.generate([prompt], params)[0].token_ids) for prompt, params in requests]
    llm, engine = started()

    async def ask(prompt, params):
        ids, errors = await read(engine.submit([llm.engine.prepare(prompt, params)]))
        assert errors == [None]
        return ids[0]

    async def run():
        return await asyncio.gather(*(ask(*request) for request in requests))

    assert asyncio.run(run()) == expected
    assert engine.stats.num_output_tokens == sum(map(len, expected))


def test_a_group_is_one_stream(make_llm, started):
    requests = requests_of(3)
    expected = [list(one.token_ids) for one in make_llm().generate([p for p, _ in requests], [s for _, s in requests])]
    llm, engine = started()

    async def run():
        return await read(engine.submit([llm.engine.prepare(*request) for request in requests]))

    assert asyncio.run(run()) == (expected, [None] * 3)


def test_text_logprobs_and_finish_reason_come_along(started):
    llm, engine = started()

    async def run():
        stream = engine.submit([llm.engine.prepare([5, 6], SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))])
        async with stream:
            return stream.requests[0], [event async for event in stream]

    sequence, events = asyncio.run(run())
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert "".join(event.text for event in events) == sequence.text
    assert [event.logprobs for event in events] == sequence.logprobs
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)


def test_cancelling_frees_everything_before_the_next_step(started, monkeypatch):
    llm, engine = started(max_concurrent_requests=2)
    step, held = llm.engine.step, []

    def recording():
        held.append(llm.cache.schema.num_blocks - llm.cache.num_free_blocks)
        return step()

    monkeypatch.setattr(llm.engine, "step", recording)

    async def run():
        long = engine.submit([llm.engine.prepare(list(range(2, 150)), SamplingParams(max_tokens=300, ignore_eos=True))])
        other = engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=30, ignore_eos=True))])
        async with long:
            await anext(long)
            assert llm.cache.num_free_blocks < llm.cache.schema.num_blocks
        num_steps = len(held)
        ids, errors = await read(other)
        assert errors == [None]
        return ids, held[num_steps + 1 :]

    ids, after = asyncio.run(run())
    assert len(ids[0]) == 30
    assert after
    assert set(after) <= {0, 1}, "the long request's blocks were free again after one step at most"


def test_cancelling_what_still_waits(started):
    llm, engine = started(max_concurrent_requests=1)

    async def run():
        first = engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=20, ignore_eos=True))])
        second = engine.submit([llm.engine.prepare([6], SamplingParams(max_tokens=20, ignore_eos=True))])
        second.cancel()
        _, errors = await read(second)
        ids, _ = await read(first)
        return ids, errors

    ids, errors = asyncio.run(run())
    assert len(ids[0]) == 20
    assert isinstance(errors[0], RequestAborted)


def test_a_reader_that_never_reads_holds_up_nobody(started):
    llm, engine = started()

    async def run():
        sleepy = engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=40, ignore_eos=True))])
        ids, errors = await read(
            engine.submit([llm.engine.prepare([6], SamplingParams(max_tokens=60, ignore_eos=True))])
        )
        assert (len(ids[0]), errors) == (60, [None])
        assert sleepy.is_over, "it ran beside the other one, unread"
        assert len((await read(sleepy))[0][0]) == 40, "and nothing of it is lost"

    asyncio.run(run())


def test_a_poisoned_request_fails_alone(make_llm, started, monkeypatch):
    """Token 7 has an embedding of NaN: who has it in the prompt gets no numbers. The slot is sound afterwards."""
    expected = make_llm().generate([5, 6], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    assert 7 not in expected
    llm, engine = started(max_concurrent_requests=2)
    embed = llm.model.params.embed.clone()
    embed[7] = float("nan")
    monkeypatch.setattr(llm.model, "params", llm.model.params.__class__(**{**vars(llm.model.params), "embed": embed}))

    async def run():
        good = [llm.engine.prepare([5, 6], SamplingParams(max_tokens=12, ignore_eos=True)) for _ in range(2)]
        bad = llm.engine.prepare([5, 7], SamplingParams(max_tokens=12, ignore_eos=True))
        streams = [engine.submit([one]) for one in (good[0], bad, good[1])]
        return await asyncio.gather(*map(read, streams))

    first, failed, second = asyncio.run(run())
    assert first == second == ([list(expected)], [None])
    assert failed[0] == [[]]
    assert isinstance(failed[1][0], RequestFailed)
    assert "NaN" in str(failed[1][0])
    assert engine.stats.num_failed == 1
    assert_all_free(llm)


def test_a_failed_step_is_told_to_its_requests_and_the_next_ones_run(started, monkeypatch):
    llm, engine = started()
    forward, calls = llm.model.forward, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return forward(*arguments)

    monkeypatch.setattr(llm.model, "forward", failing)

    async def run():
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        failed = await read(engine.submit([llm.engine.prepare([5], params)]))
        return failed, await read(engine.submit([llm.engine.prepare([5], params)]))

    (ids, errors), (later_ids, later_errors) = asyncio.run(run())
    assert len(ids[0]) == 2
    assert isinstance(errors[0], RequestAborted)
    assert "device lost" in str(errors[0])
    assert (len(later_ids[0]), later_errors) == (10, [None])


def test_slots_held_by_others_end_in_an_error_not_in_a_wait(started):
    llm, engine = started(max_concurrent_requests=1)
    slot = llm.cache.admit(4)

    async def run():
        return await asyncio.wait_for(read(engine.submit([llm.engine.prepare([5], SamplingParams())])), 10)

    _, errors = asyncio.run(run())
    assert isinstance(errors[0], RequestAborted)
    llm.cache.release(slot)


def test_the_queue_is_bounded(started):
    llm, engine = started(max_waiting=2, max_concurrent_requests=1)

    async def run():
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        streams = [engine.submit([llm.engine.prepare([5], params)]) for _ in range(3)]
        with pytest.raises(EngineBusy, match="2 requests wait already; at most 2 may"):
            engine.submit([llm.engine.prepare([5], params)])
        for stream in streams:
            assert len((await read(stream))[0][0]) == 30
        assert (await read(engine.submit([llm.engine.prepare([5], params)])))[1] == [None]

    asyncio.run(run())


def test_stopping_finishes_what_runs_and_refuses_what_comes(started):
    llm, engine = started()

    async def run():
        stream = engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=30, ignore_eos=True))])
        await anext(stream)
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 20))
        while engine.is_accepting:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineStopped, match="shutting down"):
            engine.submit([llm.engine.prepare([5], SamplingParams())])
        ids, errors = await read(stream)
        assert await stopping is True
        return ids, errors

    ids, errors = asyncio.run(run())
    assert (len(ids[0]), errors) == (29, [None])


def test_stopping_does_not_wait_for_ever(started):
    llm, engine = started()

    async def run():
        stream = engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=500, ignore_eos=True))])
        await anext(stream)
        assert await asyncio.to_thread(engine.stop, 0.05) is False
        return await read(stream)

    _, errors = asyncio.run(run())
    assert isinstance(errors[0], RequestAborted)
    assert_all_free(llm)


def test_stopping_tells_readers_while_a_step_runs(started, monkeypatch):
    """A forward call may take long: nobody waits for its end to hear that there will be no answer."""
    llm, engine = started()
    step, is_stuck, may_go_on = llm.engine.step, threading.Event(), threading.Event()

    def slow_step():
        is_stuck.set()
        may_go_on.wait(20)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)

    async def run():
        streams = [engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=9))]) for _ in range(2)]
        await asyncio.to_thread(is_stuck.wait, 20)
        assert await asyncio.to_thread(partial(engine.stop, 0.05, join_timeout=0.05)) is False
        answers = [await asyncio.wait_for(read(stream), 5) for stream in streams]
        assert engine.is_alive, "still in its forward call"
        may_go_on.set()
        return answers

    for ids, errors in asyncio.run(run()):
        assert ids == [[]]
        assert isinstance(errors[0], EngineStopped)
    assert engine.stop(timeout=10)
    assert_all_free(llm)
    with pytest.raises(EngineStopped):
        asyncio.run(_submit(engine, llm))


async def _submit(engine, llm):
    engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=9))])


def test_a_loop_that_is_gone_holds_up_nobody(started):
    llm, engine = started()

    async def leave():
        engine.submit([llm.engine.prepare([5], SamplingParams(max_tokens=25, ignore_eos=True))])

    asyncio.run(leave())

    async def run():
        return await read(engine.submit([llm.engine.prepare([6], SamplingParams(max_tokens=40, ignore_eos=True))]))

    ids, errors = asyncio.run(run())
    assert (len(ids[0]), errors) == (40, [None])


def test_random_arrivals_and_departures(make_llm, started):
    """Callers come, read a little, and half of them leave early; the others get what they would get alone."""
    requests = requests_of(14, max_tokens=8)
    alone = make_llm()
    expected = [list(alone.generate([prompt], params)[0].token_ids) for prompt, params in requests]
    llm, engine = started(max_concurrent_requests=3)
    chance = random.Random(8)
    plans = [(chance.random() * 0.3, chance.choice([None, chance.randrange(8)])) for _ in requests]

    async def ask(place):
        delay, num_read = plans[place]
        await asyncio.sleep(delay)
        stream = engine.submit([llm.engine.prepare(*requests[place])])
        if num_read is None:
            return await read(stream)
        async with stream:
            for _ in range(num_read):
                await anext(stream)
        return None

    async def run():
        return await asyncio.gather(*(ask(place) for place in range(len(requests))))

    results = asyncio.run(run())
    engine.stop(timeout=10)
    assert sum(result is None for result in results) > 3
    for result, ids in zip(results, expected, strict=True):
        assert result is None or result == ([ids], [None])
    assert_all_free(llm)


def test_a_prompt_that_is_only_scored_ends_without_a_token(make_llm):
    llm = make_llm()
    engine = AsyncEngine(llm.engine)
    engine.start()

    async def ask():
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        async with engine.submit([llm.engine.prepare([5, 6, 7], params) for _ in range(2)]) as stream:
            return [event async for event in stream], stream.requests

    events, sequences = asyncio.run(ask())
    assert engine.stop(timeout=10)
    assert [type(event) for event in events] == [EndEvent, EndEvent]
    assert sorted(event.choice for event in events) == [0, 1]
    assert [len(sequence.prompt_logprobs) for sequence in sequences] == [3, 3]
