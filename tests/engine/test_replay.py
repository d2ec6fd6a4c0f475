"""Routed experts and the indexer's picks of a request: those of a trace of its text, however it was computed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SMALL, assert_all_free, let_it_say

from dsv4 import LLM, AsyncLLM, EngineConfig, SamplingParams
from dsv4.engine.step import replays
from dsv4.loader.write.synth import write_checkpoint
from dsv4.replay import ReplayLog
from dsv4.request import RequestError

CONFIG = replace(SMALL, n_routed_experts=8)
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=3, max_chunk_tokens=64)
PROMPTS = [[token % 200 for token in range(100, 400)], [7, 8, 9], list(range(3, 43))]
ASKED = {"routed_experts": True, "indexer_topk": True, "ignore_eos": True}
PARAMS = [SamplingParams(max_tokens=14, seed=seed, **ASKED) for seed in range(3)]
NO_ENTRY = 0xFFFF


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("replay") / "model", CONFIG, experts="mxfp4", seed=0)


@pytest.fixture(scope="module")
def oracle(folder):
    """What each token of a text was computed with, by a trace of it in one go."""
    llm, known = LLM(folder, engine=LIMITS), {}

    def trace(token_ids):
        ids = tuple(token_ids)
        if ids not in known:
            layers = llm.trace(ids)
            picks = [one.entries for one in layers if one.entries is not None]
            known[ids] = [one.experts.tolist() for one in layers], [one.tolist() for one in picks]
        return known[ids]

    return trace


def assert_exact(oracle, completions, start=0):
    for one in completions:
        text = [*one.prompt_token_ids, *one.token_ids][:-1]
        experts, picks = oracle(text)
        assert one.routed_experts.dtype == np.uint8
        assert one.routed_experts.swapaxes(0, 1).tolist() == [rows[start:] for rows in experts]
        assert one.indexer_topk.dtype == np.uint16
        found = one.indexer_topk.swapaxes(0, 1).tolist()
        for rows, wanted in zip(found, picks, strict=True):
            assert [[pick for pick in row if pick != NO_ENTRY] for row in rows] == [
                [pick for pick in row if pick >= 0] for row in wanted[start:]
            ]


@pytest.mark.parametrize(
    "settings", [{}, {"drafts": 2}, {"offload_experts": 3}, {"engine": replace(LIMITS, num_blocks=4)}], ids=str
)
def test_they_are_those_of_a_trace(folder, oracle, settings):
    """In chunks, beside others, with drafts, offloaded experts, and preempted; though the prompts are cached."""
    llm = LLM(folder, **{"engine": LIMITS, **settings})
    plain = llm.generate(PROMPTS, [replace(one, routed_experts=False, indexer_topk=False) for one in PARAMS])
    found = llm.generate(PROMPTS, PARAMS)
    assert_exact(oracle, found)
    assert [one.num_cached_tokens for one in found] == [0, 0, 0], "each token is computed"
    assert plain == found, "asking changes nothing"
    if "engine" in settings:
        assert llm.engine.stats().num_preemptions > 0
    assert_all_free(llm)


def test_drafts_come_true(folder, oracle):
    """Text that the drafter guesses: several rows of one step are kept."""
    llm = LLM(folder, engine=LIMITS, drafts=2)
    plain = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, seed=1, ignore_eos=True))[0]
    offer = llm.engine._drafts.offer

    def right(request, drafts, confidences):
        text = [*PROMPTS[0], *plain.token_ids]
        here = len(request.token_ids)
        offer(request, tuple(text[here : here + len(drafts)]), confidences)

    llm.engine._drafts.offer = right
    one = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, seed=1, **ASKED))[0]
    assert one == plain
    assert llm.engine.stats().drafts.num_accepted > 0
    assert_exact(oracle, [one])


def test_from_a_token_on_what_is_before_may_be_cached(folder, oracle):
    llm = LLM(folder, engine=LIMITS)
    params = SamplingParams(max_tokens=20, seed=0, replay_start=300, **ASKED)
    for cached in (0, 256):
        one = llm.generate(PROMPTS[0], params)[0]
        assert one.num_cached_tokens == cached
        assert_exact(oracle, [one], start=300)
    # a shorter start reads less from the cache
    one = llm.generate(PROMPTS[0], replace(params, replay_start=200))[0]
    assert one.num_cached_tokens <= 128
    assert_exact(oracle, [one], start=200)
    with pytest.raises(RequestError, match="at most the prompt's 3 tokens, found 4"):
        llm.generate([1, 2, 3], replace(params, replay_start=4))
    assert_all_free(llm)


def test_over_the_engines_socket(folder, oracle):
    """Also where a stop string ends an answer before the engine does, and where it is aborted."""

    async def work():
        async with AsyncLLM.over(LLM(folder, engine=LIMITS)) as llm:
            found = await llm.generate(PROMPTS, PARAMS)
            asking = asyncio.create_task(llm.generate(PROMPTS[2], replace(PARAMS[2], max_tokens=400)))
            while not (await llm.stats()).num_output_tokens > 70:
                await asyncio.sleep(0.005)
            await llm.abort_all()
            return [*found, *await asking]

    found = asyncio.run(asyncio.wait_for(work(), 60))
    assert found[-1].finish_reason == "abort"
    assert_exact(oracle, found)


def test_a_stop_string_ends_them_too(make_llm):
    llm = let_it_say(make_llm("official"), "abcdef")
    params = SamplingParams(max_tokens=9, seed=0, stop=("cd",), **ASKED)
    one = llm.generate([5, 6, 7], params)[0]
    assert one.text == "ab"
    assert len(one.routed_experts) == 3 + len(one.token_ids) - 1


@pytest.mark.parametrize("mistake", ["rejected drafts are kept", "the rows of another request", "one row late"])
def test_planted_mistakes_are_seen(folder, oracle, mistake, monkeypatch):
    if mistake == "rejected drafts are kept":
        monkeypatch.setattr(replays, "num_accepted", lambda piece, found: piece.num_drafts)
    elif mistake == "the rows of another request":
        monkeypatch.setattr(replays, "_own", lambda table, here: table[: here.stop - here.start].copy())
    else:
        add = ReplayLog.add
        monkeypatch.setattr(ReplayLog, "add", lambda self, position, *rows: add(self, max(0, position - 1), *rows))
    llm = LLM(folder, engine=LIMITS, drafts=2)
    with pytest.raises(AssertionError):
        assert_exact(oracle, llm.generate(PROMPTS, PARAMS))
