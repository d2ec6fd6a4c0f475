"""Sleeping gives memory back, waking brings the same bits."""

import asyncio

import pytest
from engine_cases import assert_all_free
from test_runner import FakeGraph
from weight_cases import LIMITS, PARAMS, PROMPTS, answers, begin, finish

from dsv4 import LLM, AsyncLLM
from dsv4.engine.engine import Engine
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import storages_of
from dsv4.request import RequestError


def held(llm):
    """Bytes of weights on the device, and of cached rows."""
    stacks = [] if llm.pool is None else [layer.stack for layer in llm.pool.layers]
    weights = [one for one in storages_of((llm.model.weights, stacks)) if one.resizable()]
    return sum(one.nbytes() for one in weights), sum(pool.nbytes for pool in llm.cache._pools())


@pytest.mark.parametrize("settings", [{}, {"drafts": 2}, {"offload_experts": 3}], ids=str)
def test_the_same_bits_after_waking(folders, expected, settings):
    llm = LLM(folders[0], engine=LIMITS, **settings)
    before = held(llm)
    assert min(before) > 0
    outputs = begin(llm, 3)
    for _ in range(2):
        llm.sleep()
        assert held(llm) == (0, 0)
        assert llm.info()["asleep"] == ["kv_cache", "weights"]
        llm.wake()
    assert held(llm) == before
    llm.resume()
    assert finish(llm, outputs) == expected[0] == answers(llm)
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


def test_weights_and_cache_sleep_on_their_own(folders, expected):
    llm = LLM(folders[0], engine=LIMITS)
    before = held(llm)
    for tag, left in (("weights", (0, before[1])), ("kv_cache", (before[0], 0))):
        llm.sleep(tags=[tag])
        assert held(llm) == left
        assert llm.info()["asleep"] == [tag]
        llm.wake([tag])
        assert held(llm) == before
        assert not llm.info()["is_paused"]
    llm.sleep(tags=["kv_cache"])
    llm.sleep(tags=["kv_cache", "weights"])
    assert held(llm) == (0, 0)
    llm.wake(["kv_cache"])
    assert llm.info()["is_paused"], "the weights still sleep"
    llm.wake()
    assert answers(llm) == expected[0]
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
