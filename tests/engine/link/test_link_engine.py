"""Many asynchronous clients over one engine thread, none of which can hurt the others."""

import asyncio
import random
import socket
import threading
from dataclasses import replace

import pytest
import torch
from engine_cases import assert_all_free
from link_cases import connected, output_of, read, start_engine

from dsv4.engine.link import loop as loop_module
from dsv4.engine.link import messages
from dsv4.engine.request import RequestAborted, RequestFailed
from dsv4.request import RequestError, SamplingParams


@pytest.fixture
def started(make_llm):
    """`started(**options)`: an LLM and the thread of its engine; stopped when the test is over."""
    threads = []

    def start(max_waiting=64, model="one layer", **limits):
        llm = make_llm(model, **limits)
        threads.append(start_engine(llm, max_waiting=max_waiting))
        return llm, threads[-1]

    yield start
    for thread in threads:
        assert thread.stop(10)
        assert thread.loop.num_open == 0
        assert thread.error is None


def run(thread, work):
    """`work(client)`, in an event loop of its own."""

    async def main():
        async with connected(thread) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(main(), 60))


def requests_of(count, **params):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 250, (3 + 7 * i % 40,), generator=generator).tolist() for i in range(count)]
    shared = {"max_tokens": 8, "ignore_eos": True, **params}
    return [(prompt, SamplingParams(seed=i, **shared)) for i, prompt in enumerate(prompts)]


def test_concurrent_callers_get_what_they_would_get_alone(make_llm, started):
    requests = requests_of(10)
    alone = make_llm()
    expected = [list(alone.generate([prompt], params)[0].token_ids) for prompt, params in requests]
    llm, thread = started()

    async def work(client):
        async def ask(prompt, params):
            ids, errors = await read(client.submit([output_of(llm, prompt, params)]))
            assert errors == [None]
            return ids[0]

        found = await asyncio.gather(*(ask(*request) for request in requests))
        return found, await client.stats()

    found, stats = run(thread, work)
    assert found == expected
    assert stats.num_output_tokens == sum(map(len, expected))


def test_two_clients_do_not_see_each_other(make_llm, started):
    """Both use the same numbers for their requests."""
    requests = requests_of(4)
    alone = make_llm()
    expected = [list(alone.generate([prompt], params)[0].token_ids) for prompt, params in requests]
    llm, thread = started()

    async def main():
        async with connected(thread) as one, connected(thread) as other:
            asked = [
                read(client.submit([output_of(llm, *request)]))
                for client, request in zip((one, other, one, other), requests, strict=True)
            ]
            return [ids[0] for ids, errors in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == expected


def test_a_group_is_one_stream(make_llm, started):
    requests = requests_of(3)
    expected = [list(one.token_ids) for one in make_llm().generate([p for p, _ in requests], [s for _, s in requests])]
    llm, thread = started()
    found = run(thread, lambda client: read(client.submit([output_of(llm, *request) for request in requests])))
    assert found == (expected, [None] * 3)


def test_handles_begin_again(make_llm, started):
    """A group's first request is over, and its handle is another's, when the group is dropped: the other goes on."""
    llm, thread = started()
    other = requests_of(2, max_tokens=40)[1]
    (expected,) = make_llm().generate([other[0]], other[1])
    short, endless = SamplingParams(max_tokens=1, ignore_eos=True), SamplingParams(max_tokens=200, ignore_eos=True)

    async def work(client):
        group = client.submit([output_of(llm, [5, 6], params) for params in (short, endless)])
        async with group:
            while client.num_open > 1:
                await asyncio.sleep(0.001)
            client._next_handle = messages.LAST_HANDLE + 1
            asked = client.submit([output_of(llm, *other)])
            assert set(client._owners) == {0, 1}
        return await read(asked)

    assert run(thread, work) == ([list(expected.token_ids)], [None])


def test_text_logprobs_and_finish_reason_come_along(make_llm, started):
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True, seed=1)
    (expected,) = make_llm().generate([5, 6], params)
    llm, thread = started()
    output = output_of(llm, [5, 6], params)

    async def work(client):
        async with client.submit([output]) as stream:
            return [event async for event in stream]

    events = run(thread, work)
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert "".join(event.text for event in events) == output.text == expected.text
    assert tuple(event.logprobs for event in events) == expected.logprobs
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)
    assert output.completion() == expected


def test_a_batch_is_everything_that_is_ready(started):
    llm, thread = started()

    async def work(client):
        stream = client.submit([output_of(llm, [5 + place]) for place in range(3)])
        while client.num_open:
            await asyncio.sleep(0.01)
        batch = await stream.next_batch()
        return batch, await stream.next_batch()

    batch, after = run(thread, work)
    assert len(batch) == 24
    assert after == []


def test_cancelling_frees_everything_before_the_next_step(started, monkeypatch):
    llm, thread = started(max_concurrent_requests=2)
    step, held = llm.engine.step, []

    def recording():
        held.append(llm.cache.schema.num_blocks - llm.cache.num_free_blocks)
        return step()

    monkeypatch.setattr(llm.engine, "step", recording)

    async def work(client):
        long = client.submit([output_of(llm, range(2, 150), max_tokens=300)])
        other = client.submit([output_of(llm, [5], max_tokens=30)])
        async with long:
            await anext(long)
            assert llm.cache.num_free_blocks < llm.cache.schema.num_blocks
        num_steps = len(held)
        ids, errors = await read(other)
        assert errors == [None]
        return ids, held[num_steps + 2 :]  # the message travels while a step runs

    ids, after = run(thread, work)
    assert len(ids[0]) == 30
    assert after
    assert set(after) <= {0, 1}, "the long request's blocks are free again"


def test_cancelling_what_still_waits(started):
    llm, thread = started(max_concurrent_requests=1)

    async def work(client):
        first = client.submit([output_of(llm, [5], max_tokens=20)])
        second = client.submit([output_of(llm, [6], max_tokens=20)])
        second.cancel()
        _, errors = await read(second)
        ids, _ = await read(first)
        return ids, errors

    ids, errors = run(thread, work)
    assert len(ids[0]) == 20
    assert isinstance(errors[0], RequestAborted)


def test_a_client_that_goes_frees_what_it_had(started):
    llm, thread = started()

    async def main():
        async with connected(thread) as stays:
            async with connected(thread) as goes:
                lost = goes.submit([output_of(llm, [5], max_tokens=400) for _ in range(3)])
                kept = stays.submit([output_of(llm, [6], max_tokens=40)])
                await anext(lost)
            ids, errors = await read(kept)
            assert (len(ids[0]), errors) == (40, [None])
            assert (await stays.stats()).num_running == 0
            return [event async for event in lost]

    assert isinstance(asyncio.run(main())[-1].error, messages.EngineLost)
    assert_all_free(llm)


def test_a_client_that_lets_news_pile_up_is_disconnected(started, monkeypatch):
    """Its process is stopped, or stuck: what the engine keeps for it is bounded, and its requests end."""
    monkeypatch.setattr(loop_module, "MAX_UNSENT_BYTES", 2000)
    llm, thread = started()
    params = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=20)
    with thread.connect() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        message = messages.Submit(0, [messages.pack_ids([5])], [0] * 4, [params] * 4)
        stuck.sendall(messages.encode(message))

        async def work(client):
            ids, errors = await read(client.submit([output_of(llm, [6], max_tokens=400)]))
            assert (len(ids[0]), errors) == (400, [None])
            return await client.stats()

        stats = run(thread, work)
    assert (stats.num_aborted, stats.num_finished) == (4, 1)
    assert_all_free(llm)


def test_a_reader_that_never_reads_holds_up_nobody(started):
    llm, thread = started()

    async def work(client):
        sleepy = client.submit([output_of(llm, [5], max_tokens=40)])
        ids, errors = await read(client.submit([output_of(llm, [6], max_tokens=60)]))
        assert (len(ids[0]), errors) == (60, [None])
        assert sleepy.is_over, "it ran beside the other one, unread"
        assert len((await read(sleepy))[0][0]) == 40, "and nothing of it is lost"

    run(thread, work)


def test_a_poisoned_request_fails_alone(make_llm, started, monkeypatch):
    """Token 7 has an embedding of NaN: a prompt with it gets no numbers. The slot is sound afterwards."""
    expected = make_llm().generate([5, 6], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    assert 7 not in expected
    llm, thread = started(max_concurrent_requests=2)
    embed = llm.model.weights.embed.clone()
    embed[7] = float("nan")
    monkeypatch.setattr(llm.model, "weights", replace(llm.model.weights, embed=embed))

    async def work(client):
        prompts = ([5, 6], [5, 7], [5, 6])
        streams = [client.submit([output_of(llm, prompt, max_tokens=12)]) for prompt in prompts]
        return await asyncio.gather(*map(read, streams)), await client.stats()

    (first, failed, second), stats = run(thread, work)
    assert first == second == ([list(expected)], [None])
    assert failed[0] == [[]]
    assert isinstance(failed[1][0], RequestFailed)
    assert "NaN" in str(failed[1][0])
    assert stats.num_failed == 1
    assert_all_free(llm)


def test_a_failed_step_is_told_to_its_requests_and_the_next_ones_run(started, monkeypatch):
    llm, thread = started()
    forward, calls = llm.model.forward, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return forward(*arguments)

    monkeypatch.setattr(llm.model, "forward", failing)

    async def work(client):
        failed = await read(client.submit([output_of(llm, [5], max_tokens=10)]))
        return failed, await read(client.submit([output_of(llm, [5], max_tokens=10)]))

    (ids, errors), (later_ids, later_errors) = run(thread, work)
    assert len(ids[0]) == 2
    assert isinstance(errors[0], RequestAborted)
    assert "device lost" in str(errors[0])
    assert (len(later_ids[0]), later_errors) == (10, [None])


def test_slots_held_by_others_end_in_an_error_not_in_a_wait(started):
    llm, thread = started(max_concurrent_requests=1)
    slot = llm.cache.admit(4)
    _, errors = run(thread, lambda client: read(client.submit([output_of(llm, [5])])))
    assert isinstance(errors[0], RequestAborted)
    llm.cache.release(slot)


def test_the_queue_is_bounded(started):
    llm, thread = started(max_waiting=2, max_concurrent_requests=1)

    async def work(client):
        def ask():
            return client.submit([output_of(llm, [5], max_tokens=30)])

        streams = [ask() for _ in range(3)]
        for stream in streams:
            await stream.accepted()
        with pytest.raises(messages.EngineBusy, match="2 requests wait already; at most 2 may"):
            await ask().accepted()
        for stream in streams:
            assert len((await read(stream))[0][0]) == 30
        assert (await read(ask()))[1] == [None]

    run(thread, work)


def test_what_the_engine_refuses_is_told_with_its_field(started):
    llm, thread = started(num_blocks=2)

    async def work(client):
        with pytest.raises(RequestError, match="need 3 cache blocks of 2") as caught:
            await client.submit([output_of(llm, [5] * 300, max_tokens=30)]).accepted()
        assert caught.value.field == "max_tokens"
        with pytest.raises(RequestError, match="this engine has no grammars"):
            await client.submit([output_of(llm, [5])], grammar="start: /a/").accepted()
        assert client.num_open == 0

    run(thread, work)


def test_stopping_finishes_what_runs_and_refuses_what_comes(started):
    llm, thread = started()

    async def work(client):
        stream = client.submit([output_of(llm, [5], max_tokens=30)])
        await anext(stream)
        stopping = asyncio.create_task(asyncio.to_thread(thread.stop, 20, drains=True))
        while not thread.loop._is_draining:
            await asyncio.sleep(0.001)
        with pytest.raises((messages.EngineStopped, messages.EngineLost)):
            await client.submit([output_of(llm, [5])]).accepted()
        ids, errors = await read(stream)
        assert await stopping is True
        return ids, errors

    ids, errors = run(thread, work)
    assert (len(ids[0]), errors) == (29, [None])


def test_stopping_at_once_ends_what_runs(started):
    llm, thread = started()

    async def work(client):
        stream = client.submit([output_of(llm, [5], max_tokens=500)])
        await anext(stream)
        assert await asyncio.to_thread(thread.stop, 10)
        found = await read(stream)
        with pytest.raises(messages.EngineLost):  # at once, or when the socket's end is read
            await client.submit([output_of(llm, [5])]).accepted()
        return found

    _, errors = run(thread, work)
    assert isinstance(errors[0], messages.EngineStopped)
    assert_all_free(llm)


def test_dropping_all_tells_readers_while_a_step_runs(started, monkeypatch):
    """A forward call may take long: readers do not wait for its end to hear that there will be no answer."""
    llm, thread = started()
    step, is_stuck, may_go_on = llm.engine.step, threading.Event(), threading.Event()

    def slow_step():
        is_stuck.set()
        may_go_on.wait(20)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)

    async def work(client):
        streams = [client.submit([output_of(llm, [5])]) for _ in range(2)]
        await asyncio.to_thread(is_stuck.wait, 20)
        client.drop_all(messages.EngineStopped("the server goes"))
        answers = [await asyncio.wait_for(read(stream), 5) for stream in streams]
        assert not thread.stop(0.05), "still in its forward call"
        may_go_on.set()
        return answers

    for ids, errors in run(thread, work):
        assert ids == [[]]
        assert isinstance(errors[0], messages.EngineStopped)
    assert thread.stop(10)
    assert_all_free(llm)


def test_random_arrivals_and_departures(make_llm, started):
    """Callers come, read a little, and half of them leave early; the others get what they would get alone."""
    requests = requests_of(14, max_tokens=8)
    alone = make_llm()
    expected = [list(alone.generate([prompt], params)[0].token_ids) for prompt, params in requests]
    llm, thread = started(max_concurrent_requests=3)
    chance = random.Random(8)
    plans = [(chance.random() * 0.3, chance.choice([None, chance.randrange(8)])) for _ in requests]

    async def work(client):
        async def ask(place):
            delay, num_read = plans[place]
            await asyncio.sleep(delay)
            stream = client.submit([output_of(llm, *requests[place])])
            if num_read is None:
                return await read(stream)
            async with stream:
                for _ in range(num_read):
                    await anext(stream)
            return None

        return await asyncio.gather(*(ask(place) for place in range(len(requests))))

    results = run(thread, work)
    assert thread.stop(10)
    assert sum(result is None for result in results) > 3
    for result, ids in zip(results, expected, strict=True):
        assert result is None or result == ([ids], [None])
    assert_all_free(llm)


def test_a_prompt_that_is_only_scored_ends_without_a_token(started):
    llm, thread = started()
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)

    async def work(client):
        async with client.submit([output_of(llm, [5, 6, 7], params) for _ in range(2)]) as stream:
            return [event async for event in stream], stream.outputs

    events, outputs = run(thread, work)
    assert [(event.token_id, event.finish_reason) for event in events] == [(None, "length")] * 2
    assert sorted(event.choice for event in events) == [0, 1]
    assert [len(output.prompt_logprobs) for output in outputs] == [3, 3]
