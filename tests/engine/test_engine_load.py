"""A hundred requests over too small a cache: random arrivals, priorities, aborts and forced preemptions.

Every one ends, each has the tokens and log-probabilities of its solo run bit for bit, and nothing is left behind.
"""

import gc
import pickle
import random
from itertools import count

import pytest
import torch
from engine_cases import assert_all_free
from load_cases import CONFIG, NUM_REQUESTS, NUM_WAVES, assert_as_alone, random_requests, run_wave, runs_alone

from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.request import Request
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params


def make_llm(params, overlap=False, **limits):
    llm = LLM.from_params(CONFIG, params, engine=EngineConfig(max_context_tokens=256, **limits))
    clock = count()
    llm.engine = Engine(llm.model, llm.cache, overlap=overlap, clock=lambda: float(next(clock)))
    return llm


def alive(kind):
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def solos(params):
    return list(runs_alone(random_requests(), make_llm(params, max_concurrent_requests=1).engine))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hundred_requests_end_as_they_would_alone(params, solos, overlap):
    requests = random_requests()
    llm = make_llm(params, overlap, max_concurrent_requests=8, max_chunk_tokens=40, num_blocks=3)
    chance, results, num_tensors, num_objects = random.Random(1), [], [], []
    size, num_before = NUM_REQUESTS // NUM_WAVES, alive(Request)
    for wave in range(NUM_WAVES):
        results += run_wave(llm.engine, requests[wave * size : (wave + 1) * size], chance)
        assert_all_free(llm)
        assert alive(Request) <= num_before, "an ended request is kept by nobody"
        num_tensors.append(alive(torch.Tensor))
        num_objects.append(alive(object))
    assert num_tensors[0] == num_tensors[1], "no tensor more after the second wave"
    assert num_objects[1] - num_objects[0] < 20, "nothing is kept of fifty requests"
    results = [pickle.loads(one) for one in results]

    stats = llm.engine.stats()
    assert stats.num_preemptions > 5, "the cache is too small on purpose"
    assert stats.num_aborted == sum(is_aborted for *_, is_aborted, _ in results) > 5
    assert stats.num_failed == sum(is_expired for *_, is_expired in results) > 0
    assert stats.num_finished + stats.num_aborted + stats.num_failed == NUM_REQUESTS

    assert_as_alone(results, solos)
