"""Two hundred requests over too small a cache: random arrivals, priorities, aborts and forced preemptions.

Every one ends, each has the tokens and log-probabilities of its solo run bit for bit, and nothing is left behind.
"""

from __future__ import annotations

import gc
import pickle
import random
from dataclasses import dataclass, replace

import pytest
import torch
from engine_cases import SMALL, assert_all_free

from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.sequence import Sequence
from dsv4.llm import LLM
from dsv4.loader.synth import random_params
from dsv4.request import SamplingParams

# A CSA layer has every kind of state: window, two compressors, paged entries and index keys.
CONFIG = replace(SMALL, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(4,), num_nextn_predict_layers=0)
NUM_REQUESTS, NUM_WAVES = 200, 2


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    abort_at: int | None


def random_requests():
    chance = random.Random(17)
    requests = []
    for place in range(NUM_REQUESTS):
        length = chance.choice([1, 2, 2, 3, 3, 7]) if place % 25 else chance.randrange(122, 131)
        params = SamplingParams(
            max_tokens=chance.randrange(1, 8) if place % 25 else 10, seed=chance.randrange(2**40),
            temperature=chance.choice([0.0, 1.0]), top_k=chance.choice([0, 20]), ignore_eos=place % 3 > 0,
            presence_penalty=chance.choice([0.0, 0.0, 0.5]), logprobs=chance.choice([0, 3]),
            priority=chance.choice([-1, 0, 0, 1]),
        )  # fmt: skip
        arrival = place % (NUM_REQUESTS // NUM_WAVES) // 3
        abort_at = arrival + chance.randrange(0, 30) if chance.random() < 0.2 else None
        prompt = tuple(chance.randrange(2, CONFIG.vocab_size) for _ in range(length))
        requests.append(Request(prompt, params, arrival, abort_at))
    return requests


def make_llm(params, **limits):
    return LLM.from_params(CONFIG, params, engine=EngineConfig(max_context_tokens=256, **limits))


def run_wave(engine: Engine, requests, chance):
    """Requests that come and go as they say: (tokens, logprobs, whether it was aborted) of each, pickled, so that
    results are no objects when objects are counted."""
    sequences: dict[int, Sequence] = {}
    step = 0
    while engine.has_work or step <= max(request.arrival for request in requests):
        for place, request in enumerate(requests):
            if request.arrival == step:
                sequences[place] = engine.prepare(request.prompt, request.params)
                engine.submit(sequences[place])
            if request.abort_at == step:
                engine.abort(sequences[place])
        if engine.has_work:
            engine.step()
        if chance.random() < 0.1:
            engine.check_integrity()
        step += 1
        assert step < 2000
    assert all(sequence.is_done and sequence.error is None for sequence in sequences.values())
    ended = [sequences[place] for place in range(len(requests))]
    return [pickle.dumps((one.output_ids, one.logprobs, one.is_aborted)) for one in ended]


def alive(kind):
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def test_two_hundred_requests_end_as_they_would_alone(params):
    requests = random_requests()
    llm = make_llm(params, max_concurrent_requests=8, max_chunk_tokens=40, num_blocks=3)
    chance, results, num_tensors, num_objects = random.Random(1), [], [], []
    size, num_before = NUM_REQUESTS // NUM_WAVES, alive(Sequence)
    for wave in range(NUM_WAVES):
        results += run_wave(llm.engine, requests[wave * size : (wave + 1) * size], chance)
        assert_all_free(llm)
        assert alive(Sequence) <= num_before, "an ended request is kept by nobody"
        num_tensors.append(alive(torch.Tensor))
        num_objects.append(alive(object))
    assert num_tensors[0] == num_tensors[1], "no tensor more after the second hundred"
    assert num_objects[1] - num_objects[0] < 20, "nothing is kept of a hundred requests"
    results = [pickle.loads(one) for one in results]

    stats = llm.engine.stats()
    assert stats.num_preemptions > 20, "the cache is too small on purpose"
    assert stats.num_aborted == sum(is_aborted for _, _, is_aborted in results) > 10
    assert (stats.num_finished + stats.num_aborted, stats.num_failed) == (NUM_REQUESTS, 0)

    alone = make_llm(params, max_concurrent_requests=1)
    for request, (token_ids, logprobs, is_aborted) in zip(requests, results, strict=True):
        solo = alone.generate([list(request.prompt)], request.params)[0]
        assert tuple(token_ids) == solo.token_ids[: len(token_ids)]
        assert tuple(logprobs) == solo.logprobs[: len(token_ids)]
        assert is_aborted or len(token_ids) == len(solo.token_ids)
