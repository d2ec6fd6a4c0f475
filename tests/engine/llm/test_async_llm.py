"""`AsyncLLM`: tokens as coroutines, those of `LLM`."""

import asyncio

import pytest
from engine_cases import assert_all_free

from dsv4.async_llm import AsyncLLM
from dsv4.engine.link.messages import EngineLost
from dsv4.engine.request import DeadlinePassed
from dsv4.request import RequestError, SamplingParams

PARAMS = [
    SamplingParams(max_tokens=7, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, seed=1, logprobs=0, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=300, seed=3, stop=("a", "e", "o", "1"), ignore_eos=True),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
]
PROMPTS = ["Once", [5, 6, 7], "upon a time", list(range(2, 140))]


@pytest.fixture
def expected(make_llm):
    return make_llm().generate(PROMPTS, PARAMS)


def run(llm, work):
    async def main():
        async with AsyncLLM.over(llm) as engine:
            return await asyncio.wait_for(work(engine), 60)

    found = asyncio.run(main())
    assert_all_free(llm)
    return found


def test_whole_answers_are_those_of_llm(make_llm, expected):
    assert run(make_llm(), lambda engine: engine.generate(PROMPTS, PARAMS)) == expected


def test_streams_are_those_of_llm(make_llm, expected):
    async def read(engine, prompt, params):
        return [token async for token in engine.stream(prompt, params)]

    async def work(engine):
        asked = [read(engine, *request) for request in zip(PROMPTS, PARAMS, strict=True)]
        return await asyncio.gather(*asked), await engine.stats()

    streams, stats = run(make_llm(), work)
    for tokens, whole in zip(streams, expected, strict=True):
        assert tuple(token.token_id for token in tokens if token.token_id is not None) == whole.token_ids
        assert "".join(token.text for token in tokens) == whole.text
        assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert tokens[-1].finish_reason == whole.finish_reason
        if whole.logprobs is not None:
            assert tuple(token.logprobs for token in tokens) == whole.logprobs
    assert stats.num_finished == len(PROMPTS)


def test_leaving_a_stream_or_cancelling_a_task_drops_its_requests(make_llm):
    async def work(engine):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async for _ in engine.stream([5], params):
            break
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        task = asyncio.create_task(engine.generate([[5], [6]], params))
        while (await engine.stats()).num_running < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await engine.stats()).num_running:
            await asyncio.sleep(0.01)
        return await engine.stats()

    assert run(make_llm(), work).num_aborted == 3


def test_closing_drops_what_runs(make_llm):
    llm = make_llm()

    async def main():
        async with AsyncLLM.over(llm) as engine:
            stream = engine.stream([5], SamplingParams(max_tokens=400, ignore_eos=True))
            await anext(stream)
        with pytest.raises(EngineLost):
            async for _ in stream:
                pass
        with pytest.raises(EngineLost, match="is not open"):
            await engine.generate([5])
        await engine.close()

    asyncio.run(main())
    assert_all_free(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([999], SamplingParams(), "prompt token 0 is 999"),
        ([5] * 600, SamplingParams(), "max_context_tokens"),
        ([5], SamplingParams(stop_token_ids=(999,)), "stop_token_ids"),
        ([5], [SamplingParams()] * 2, "1 prompts, but 2 SamplingParams"),
    ],
)
def test_mistakes_are_those_of_llm(make_llm, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        make_llm().generate([prompt], params)

    async def work(engine):
        with pytest.raises(RequestError, match=message):
            await engine.generate([prompt], params)

    run(make_llm(), work)


def test_a_request_that_fails_raises_and_its_neighbours_go_on(make_llm):
    async def work(engine):
        late = SamplingParams(max_tokens=400, ignore_eos=True, deadline=0.05)
        good = SamplingParams(max_tokens=20, ignore_eos=True)
        return await asyncio.gather(engine.generate([5], late), engine.generate([6], good), return_exceptions=True)

    failed, (whole,) = run(make_llm(), work)
    assert isinstance(failed, DeadlinePassed)
    assert len(whole.token_ids) == 20
