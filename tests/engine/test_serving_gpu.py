"""What only a GPU can show of serving: nothing is compiled or slow after warm-up, and a storm of requests through
graphs and overlapped steps gives each the bits of its solo run."""

import pickle
import random
import time

import pytest
from engine_cases import SMALL
from load_cases import CONFIG, assert_as_alone, random_requests, run_wave, runs_alone

from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams

pytestmark = pytest.mark.gpu
KINDS = {
    "greedy": {"temperature": 0.0},
    "filters": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "log-probabilities": {"logprobs": 20},
    "many log-probabilities": {"logprobs": 100},
    "bias": {"logit_bias": {7: 1.0}, "allowed_token_ids": (7, 8, 9)},
    "rules": {"min_tokens": 16},
    "scores": {"prompt_logprobs": 5},
}


def make_llm(config, **limits):
    params = random_params(config, device="cuda")
    return LLM.from_params(config, params, engine=EngineConfig(max_context_tokens=256, **limits))


def step_times(engine, prompt, params):
    """Milliseconds of each step of one request."""
    engine.submit(engine.prepare(prompt, params))
    times = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def test_the_first_request_of_every_kind_is_like_the_next():
    llm = make_llm(SMALL, max_concurrent_requests=8, max_chunk_tokens=64)
    chance, slow = random.Random(3), []
    for name, kind in KINDS.items():
        prompt = [chance.randrange(2, SMALL.vocab_size) for _ in range(37)]
        params = SamplingParams(max_tokens=16, ignore_eos=True, seed=1, **kind)
        first = step_times(llm.engine, prompt, params)
        again = step_times(llm.engine, prompt[::-1], params)
        if max(first) > 3 * max(again) + 3:  # a kernel compiled or loaded late takes tens of milliseconds or more
            slow.append((name, first, again))
    assert llm.engine.runner.compiled_late == ()
    assert not slow


def test_a_storm_through_graphs_ends_as_solo_runs():
    requests = random_requests()
    storm = make_llm(CONFIG, max_concurrent_requests=8, max_chunk_tokens=40, num_blocks=3)
    assert storm.engine.runner.captured
    found = [pickle.loads(one) for one in run_wave(storm.engine, requests, random.Random(1))]
    storm.engine.check_integrity()
    stats = storm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_aborted > 0
    assert_as_alone(found, runs_alone(requests, make_llm(CONFIG, max_concurrent_requests=1).engine))
