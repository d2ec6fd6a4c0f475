"""Sleeping gives memory back, waking brings the same bits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_cases import SMALL, assert_all_free
from test_runner import FakeGraph

from dsv4 import LLM, AsyncLLM, EngineConfig, SamplingParams
from dsv4.engine.engine import Engine
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import storages_of
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import RequestError

CONFIG = replace(SMALL, n_routed_experts=8)
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=3, max_chunk_tokens=64)
PROMPTS = [[7, 8, 9], [token % 200 for token in range(100, 400)]]
PARAMS = [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True, logprobs=1) for seed in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sleep")
    return [write_checkpoint(root / name, CONFIG, experts="mxfp4", seed=seed) for seed, name in enumerate("AB")]


@pytest.fixture(scope="module")
def expected(folders):
    return [answers(LLM(folder, engine=LIMITS)) for folder in folders]


def answers(llm):
    return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]


def held(llm):
    """Bytes of weights on the device, and of cached rows."""
    stacks = [] if llm.pool is None else [layer.stack for layer in llm.pool.layers]
    weights = [one for one in storages_of((llm.model.weights, stacks)) if one.resizable()]
    return sum(one.nbytes() for one in weights), sum(pool.nbytes for pool in llm.cache._pools())


@pytest.mark.parametrize("settings", [{}, {"drafts": 2}, {"offload_experts": 3}], ids=str)
def test_the_same_bits_after_waking(folders, expected, settings):
    llm = LLM(folders[0], engine=LIMITS, **settings)
    before, bits = held(llm), answers(llm)
    assert min(before) > 0
    assert bits == expected[0]
    outputs = [llm.start(prompt, one)[1] for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
    while outputs[0].num_output < 3:
        llm.step()
    for _ in range(2):
        llm.sleep()
        assert held(llm) == (0, 0)
        assert llm.info()["asleep"] == ["kv_cache", "weights"]
        llm.wake()
    assert held(llm) == before
    llm.resume()
    while not all(output.is_done for output in outputs):
        llm.step()
    found = [(one.token_ids, one.logprobs) for one in (output.completion() for output in outputs)]
    assert found == bits == answers(llm)
    assert_all_free(llm)


def test_dropped_weights_need_an_update(folders, expected):
    """The order of trainers: weights awake, new ones, then the cache."""
    llm = LLM(folders[0], engine=LIMITS, drafts=2)
    llm.sleep(level=2)
    with pytest.raises(RequestError, match="sleeps already"):
        llm.sleep()
    with pytest.raises(RequestError, match=r"wake\(\['weights'\]\) first"):
        llm.update_weights(folders[1])
    with pytest.raises(RequestError, match="tags must be among weights, kv_cache"):
        llm.wake(["graphs"])
    with pytest.raises(RequestError, match="the engine sleeps"):
        llm.resume()
    llm.wake(["weights"])
    with pytest.raises(WeightsIncomplete, match="dropped"):
        llm.generate([1, 2], PARAMS[0])
    llm.update_weights(folders[1])
    assert llm.info()["asleep"] == ["kv_cache"]
    llm.wake(["kv_cache"])
    assert not llm.info()["is_paused"], "it was not paused before it slept"
    assert answers(llm) == expected[1]
    with pytest.raises(RequestError, match="level must be 1"):
        llm.sleep(3)
    assert not llm.info()["is_paused"]
    assert_all_free(llm)


def test_graphs_are_captured_again(folders, expected):
    """Once for each waking, and not before the memory is there."""
    llm = LLM(folders[0], engine=LIMITS)
    captures = []

    class Watched(FakeGraph):
        def __call__(self, call):
            replay, places = super().__call__(call), [one.data_ptr() for one in storages_of(llm.model.weights)]
            captures.append(replay)

            def watched():
                assert places == [one.data_ptr() for one in storages_of(llm.model.weights)], "weights have moved"
                return replay()

            watched.result = replay.result
            return watched

    runner = Runner(llm.model, llm.cache, buckets=(1, 2, 4), use_graphs=True, capture=Watched())
    runner.warm_up()
    llm.engine = Engine(llm.model, llm.cache, runner=runner)
    assert answers(llm) == expected[0]
    num_captures = len(captures)
    llm.sleep(1)
    assert runner.captured == ()
    llm.wake(["kv_cache"])
    assert runner.captured == ()
    llm.wake(["weights"])
    assert runner.captured == (1, 2, 4)
    assert len(captures) == 2 * num_captures
    assert answers(llm) == expected[0]
    assert runner.num_replays > 0


def test_sleep_of_a_served_engine(folders, expected):
    async def work():
        async with AsyncLLM(folders[0], engine=LIMITS) as llm:
            asking = asyncio.create_task(llm.generate(PROMPTS, PARAMS))
            await asyncio.sleep(0.05)
            with pytest.raises(RequestError, match="only while no request runs"):
                await llm.sleep()
            await llm.pause()
            await llm.sleep(1)
            late = asyncio.create_task(llm.generate(PROMPTS, PARAMS))
            await asyncio.sleep(0.05)
            assert (await llm.info())["is_sleeping"]
            await llm.wake()
            assert not asking.done()
            await llm.resume()
            return [[(one.token_ids, one.logprobs) for one in await task] for task in (asking, late)]

    assert asyncio.run(asyncio.wait_for(work(), 60)) == [expected[0]] * 2
