"""Commands to a running engine: in this process, through its thread, and through its socket."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from engine_cases import assert_all_free
from link_cases import connected, output_of, start_engine
from weight_cases import LIMITS, PARAMS, PROMPTS, answers, begin, finish, load

from dsv4 import AsyncLLM
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weights import target as weight_target
from dsv4.loader.header import CheckpointError
from dsv4.request import FinishReason, RequestError


@pytest.mark.parametrize("settings", [{}, {"drafts": 2}, {"offload_experts": 3}], ids=str)
def test_a_pause_in_the_middle_changes_nothing(folders, expected, settings):
    llm = load(folders[0], **settings)
    outputs = begin(llm, 5)
    llm.pause("keep")
    assert not llm.engine.has_work
    assert not all(output.is_done for output in outputs)
    assert llm.info()["is_paused"]
    assert llm.info()["num_requests"] == 4
    llm.engine.check_integrity()
    llm.resume()
    assert finish(llm, outputs) == expected[0]
    assert_all_free(llm)


def test_waiting_finishes_what_is_there_and_keeps_what_comes(folders, expected):
    llm = load(folders[0])
    outputs = begin(llm, 2)
    llm.control.pause("wait")
    late = llm.start(PROMPTS[1], PARAMS[1])[1]
    llm.pause("wait")
    assert all(output.is_done for output in outputs)
    assert late.num_output == 0
    assert llm.engine.stats().num_waiting == 1
    llm.resume()
    assert finish(llm, [late]) == [expected[0][1]]
    assert_all_free(llm)


def test_what_is_aborted_keeps_what_it_had(folders, expected):
    llm = load(folders[0])
    outputs = begin(llm, 5)
    llm.pause("abort")
    late = llm.start(PROMPTS[1], PARAMS[1])[0]
    found = [output.completion() for output in outputs]
    assert {one.finish_reason for one in found} == {FinishReason.ABORT}
    assert found[0].token_ids == expected[0][0][0][: len(found[0].token_ids)]
    assert len(found[0].token_ids) >= 5
    assert found[0].logprobs == expected[0][0][1][: len(found[0].token_ids)]
    llm.abort(late)
    llm.resume()
    assert llm.abort_all() == 0
    assert answers(llm) == expected[0]
    assert_all_free(llm)


def test_other_threads_wait_without_the_lock(folders, expected):
    llm, found = load(folders[0]), []
    llm.pause()
    with pytest.raises(RequestError, match="this thread paused the engine"):
        llm.generate(PROMPTS[0], PARAMS[0])
    thread = threading.Thread(target=lambda: found.append(answers(llm)))
    thread.start()
    while llm.info()["num_requests"] < 4:  # they are taken
        time.sleep(0.001)
    assert not found
    llm.resume()
    thread.join(60)
    assert found == [expected[0]]
    with pytest.raises(RequestError, match="mode must be one of wait, keep, abort, found 'now'"):
        llm.pause("now")


def test_weights_under_paused_requests(folders, expected):
    """Tokens before are of the old weights; with rows computed again, those after are what the new weights make of the
    same ids, and every token knows its weights."""
    fresh = load(folders[1])
    kept = {}
    for clear_cache in (False, True):
        llm = load(folders[0])
        outputs = begin(llm, 6)
        llm.pause("keep")
        counts = [output.num_output for output in outputs]
        with pytest.raises(CheckpointError):
            llm.update_weights({})
        llm.update_weights(folders[1], version="B", clear_cache=clear_cache)
        llm.engine.check_integrity()
        late = llm.start(PROMPTS[0], PARAMS[0])[1]
        llm.resume()
        found = kept[clear_cache] = finish(llm, [*outputs, late])
        assert found.pop() == expected[1][0]
        assert late.completion().weight_versions == ((0, "B"),)
        for place, (output, count) in enumerate(zip(outputs, counts, strict=True)):
            completion = output.completion()
            ids = completion.token_ids
            assert ids[:count] == expected[0][place][0][:count]
            assert completion.weight_versions == (((0, "0"), (count, "B")) if count else ((0, "B"),))
            if clear_cache and PARAMS[place].temperature == 0:
                rest = replace(PARAMS[place], max_tokens=24 - count)
                again = fresh.generate([*PROMPTS[place], *ids[:count]], rest)[0]
                assert (again.token_ids, again.logprobs) == (ids[count:], completion.logprobs[count:])
        assert answers(llm) == expected[1], "no row of before is found by those that come"
        assert_all_free(llm)
    assert kept[False] != kept[True], "rows of the old weights were kept"


def test_kept_rows_are_a_function_of_the_request(folders):
    """What a request that spans an update gives does not depend on those beside it."""

    def spanning(num_others):
        llm = load(folders[0], engine=replace(LIMITS, max_concurrent_requests=8))
        prompts = [PROMPTS[2], *(PROMPTS[place % 4] for place in range(num_others))]
        params = [PARAMS[1], *(replace(PARAMS[place % 4], seed=50 + place) for place in range(num_others))]
        outputs = [llm.start(prompts[0], params[0])[1]]
        while outputs[0].num_output < 6:
            llm.step()
            if len(outputs) < len(prompts):
                outputs.append(llm.start(prompts[len(outputs)], params[len(outputs)])[1])
        assert outputs[0].num_output == 6
        llm.pause("keep")
        llm.update_weights(folders[1])
        llm.resume()
        return finish(llm, outputs)[0]

    assert spanning(0) == spanning(6)


def test_a_stale_prefix_would_be_seen(folders, expected, monkeypatch):
    llm = load(folders[0])
    begin(llm, 6)
    llm.pause("keep")
    monkeypatch.setattr(llm.cache, "start_anew", lambda name: None)
    monkeypatch.setattr(llm.engine.scheduler, "start_anew", lambda clears: None)
    llm.update_weights(folders[1])
    llm.resume()
    llm.abort_all()
    assert answers(llm) != expected[1]


@pytest.mark.parametrize("running", [False, True])
def test_no_prefix_is_found_after_a_reset(folders, expected, running, tmp_path):
    llm = load(folders[0], engine=replace(LIMITS, cache_dir=str(tmp_path), cache_host_bytes=1 << 24))
    assert answers(llm) == expected[0]
    outputs = begin(llm, 3)
    with pytest.raises(RequestError, match="while no request runs or waits"):
        llm.reset_prefix_cache()
    llm.pause()
    num_preemptions = llm.engine.stats().num_preemptions
    llm.reset_prefix_cache(running=running)
    assert (llm.engine.stats().num_preemptions > num_preemptions) == running
    llm.engine.check_integrity()
    llm.resume()
    assert finish(llm, outputs) == expected[0]
    found = llm.generate(PROMPTS[2], PARAMS[2])
    assert found[0].num_cached_tokens == (256 if running else 0), "what was computed again is of use again"
    llm.close()


def test_a_failed_update_refuses_everybody_until_a_whole_one(folders, expected, monkeypatch):
    llm = load(folders[0])
    outputs = begin(llm, 6)
    llm.pause("keep")

    def fails(*arguments):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(weight_target, "assign", fails)
        with pytest.raises(OSError, match="gone"):
            llm.update_weights(folders[1])
    with pytest.raises(WeightsIncomplete):
        llm.resume()
    with pytest.raises(WeightsIncomplete):
        llm.start(PROMPTS[0], PARAMS[0])
    assert not llm.info()["weights_are_whole"]
    llm.update_weights(folders[0], clear_cache=True)
    llm.resume()
    assert finish(llm, outputs) == expected[0]


# ---- through the engine's thread and socket ----


async def spans(stream):
    """The events of one request until it ends."""
    return [event async for event in stream]


def test_commands_through_the_socket(folders, expected):
    llm = load(folders[0])
    thread = start_engine(llm)

    async def work():
        async with connected(thread) as client, connected(thread) as other:
            before = client.info
            streams = [
                client.submit([output_of(llm, prompt, one)], name=f"r{place}")
                for place, (prompt, one) in enumerate(zip(PROMPTS, PARAMS, strict=True))
            ]
            for _ in range(4):
                await anext(streams[0])
            await other.control("pause", mode="keep")
            late = client.submit([output_of(llm, PROMPTS[1], PARAMS[1])])
            await late.accepted()
            info = await other.control("info")
            assert (info["is_paused"], info["num_requests"], info["weight_version"]) == (True, 5, "0")
            assert await other.control("abort", names=["r1", "r3", "nobody"]) == 2
            with pytest.raises(CheckpointError, match="does not exist"):
                await client.control("update_weights", source=str(folders[0] / "none"))
            with pytest.raises(RequestError, match="verb must be one of abort, pause"):
                await client.control("explode")
            with pytest.raises(RequestError, match="missing a required argument"):
                await client.control("update_weights")
            assert await client.control("update_weights", source=str(folders[1]), version="B") == "B"
            await other.stats()
            assert client.info.weight_version == other.info.weight_version == "B"
            assert client.info.fingerprint == llm.identity().name != before.fingerprint
            await other.control("resume")
            ends = [(await spans(stream))[-1].finish_reason for stream in [*streams, late]]
            assert ends == ["length", "abort", "length", "abort", "length"]
            return [stream.outputs[0].completion() for stream in [*streams, late]]

    found = asyncio.run(asyncio.wait_for(work(), 120))
    assert thread.stop(10)
    versions = [[version for _, version in one.weight_versions] for one in found]
    assert versions[0] == ["0", "B"]
    start = found[0].weight_versions[1][0]
    assert found[0].token_ids[:start] == expected[0][0][0][:start]
    assert (found[4].token_ids, found[4].logprobs) == expected[1][1]
    assert found[4].weight_versions == ((0, "B"),)
    assert_all_free(llm)


def test_a_wait_is_answered_when_what_was_there_has_ended(folders, expected):
    llm = load(folders[0])
    thread = start_engine(llm)

    async def work():
        async with connected(thread) as client:
            first = client.submit([output_of(llm, *pair) for pair in zip(PROMPTS, PARAMS, strict=True)])
            await first.accepted()
            pausing = asyncio.create_task(client.control("pause", mode="wait"))
            await client.control("info")
            late = client.submit([output_of(llm, PROMPTS[1], PARAMS[1])])
            await pausing
            assert first.is_over
            assert not late.is_over
            second = asyncio.create_task(client.control("pause", mode="keep"))
            await asyncio.wait_for(second, 10)
            await client.control("resume")
            ids, aborted = await spans(late), client.submit([output_of(llm, PROMPTS[1], PARAMS[1])])
            await client.control("pause", mode="abort")
            last = (await spans(aborted))[-1]
            assert last.finish_reason is FinishReason.ABORT
            return tuple(event.token_id for event in ids)

    assert asyncio.run(asyncio.wait_for(work(), 120)) == expected[0][1][0]
    assert thread.stop(10, drains=True), "a paused engine stops too"
    assert_all_free(llm)


def test_the_verbs_of_async_llm(folders, expected):
    async def work():
        async with AsyncLLM(folders[0], engine=LIMITS) as llm:
            asking = asyncio.create_task(llm.generate(PROMPTS, PARAMS))
            await asyncio.sleep(0.05)
            await llm.pause()
            with pytest.raises(CheckpointError):
                await llm.update_weights([("a", "text")])
            assert (await llm.info())["is_paused"]
            await llm.reset_prefix_cache(running=True)
            await llm.resume()
            assert [(one.token_ids, one.logprobs) for one in await asking] == expected[0]
            assert await llm.update_weights(folders[1]) == "1" == llm.weight_version
            assert await llm.set_weight_version("step 1") == "step 1"
            found = await llm.generate(PROMPTS, PARAMS)
            assert {one.weight_versions for one in found} == {((0, "step 1"),)}
            asking = asyncio.create_task(llm.generate(PROMPTS, PARAMS))
            await asyncio.sleep(0.05)
            assert await llm.abort_all() == 4
            assert {one.finish_reason for one in await asking} == {FinishReason.ABORT}
            return [(one.token_ids, one.logprobs) for one in found]

    assert asyncio.run(asyncio.wait_for(work(), 120)) == expected[1]


def test_a_trainer_that_never_comes_stops_nobody(folders, expected):
    """The engine answers, and draws tokens, while it waits for its place in a group."""
    llm = load(folders[0])
    thread = start_engine(llm)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)  # and nobody else ever comes
    group = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}

    async def work():
        async with connected(thread) as client:
            joining = asyncio.create_task(client.control("init_group", **group, backend="gloo", timeout=6))
            await asyncio.sleep(0.3)
            assert not (await asyncio.wait_for(client.control("info"), 2))["is_paused"]
            with pytest.raises(RequestError, match="has not joined"):
                await client.control("receive_weights", names=[], dtypes=[], shapes=[])
            stream = client.submit([output_of(llm, PROMPTS[1], PARAMS[1])])
            drawn = [event.token_id async for event in stream]
            assert not joining.done(), "all of this was while it joined"
            with pytest.raises(RequestError, match=f"no group at 127.0.0.1:{store.port} in 6 s"):
                await joining
            return drawn

    assert tuple(asyncio.run(asyncio.wait_for(work(), 60))) == expected[0][1][0]
    assert thread.stop(10)
