"""A hundred requests over too small a cache: random arrivals, priorities, aborts and forced preemptions.

Every one ends, each has the tokens and log-probabilities of its solo run bit for bit, and nothing is left behind.
"""

from __future__ import annotations

import gc
import pickle
import random
from dataclasses import dataclass, replace
from itertools import count

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
NUM_REQUESTS, NUM_WAVES = 100, 2


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    abort_at: int | None
    has_rule: bool

    def rule(self):
        return Alternating() if self.has_rule else None


class Alternating:
    """Even and odd tokens in turn."""

    def __init__(self):
        self.num_accepted = 0

    def allowed(self):
        return torch.arange(CONFIG.vocab_size) % 2 == self.num_accepted % 2

    def accept(self, token_id):
        assert token_id % 2 == self.num_accepted % 2
        self.num_accepted += 1


def random_requests():
    chance = random.Random(17)
    requests = []
    for place in range(NUM_REQUESTS):
        length = chance.choice([1, 2, 2, 3, 3, 7]) if place % 25 else chance.randrange(122, 131)
        params = SamplingParams(
            max_tokens=chance.randrange(1, 8) if place % 25 else 10, seed=chance.randrange(2**40),
            temperature=chance.choice([0.0, 1.0]), top_k=chance.choice([0, 20]), ignore_eos=place % 3 > 0,
            presence_penalty=chance.choice([0.0, 0.0, 0.5]), logprobs=chance.choice([0, 3]),
            priority=chance.choice([-1, 0, 0, 1]), min_tokens=chance.choice([0, 0, 1]),
            logit_bias=chance.choice([None, None, {7: 4.0}]), bad_words_ids=chance.choice([(), ((9,),), ((7, 7),)]),
            prompt_logprobs=chance.choice([None, None, 1]), deadline=chance.choice([None] * 7 + [60.0]),
        )  # fmt: skip
        arrival = place % (NUM_REQUESTS // NUM_WAVES) // 3
        abort_at = arrival + chance.randrange(0, 30) if chance.random() < 0.2 else None
        prompt = tuple(chance.randrange(2, CONFIG.vocab_size) for _ in range(length))
        requests.append(Request(prompt, params, arrival, abort_at, has_rule=chance.random() < 0.2))
    return requests


def make_llm(params, overlap=False, **limits):
    llm = LLM.from_params(CONFIG, params, engine=EngineConfig(max_context_tokens=256, **limits))
    clock = count()
    llm.engine = Engine(llm.model, llm.cache, llm.tokenizer, overlap=overlap, clock=lambda: float(next(clock)))
    return llm


def run_wave(engine: Engine, requests, chance):
    """Requests that come and go as they say: (tokens, log-probabilities, those of the prompt, how it was cut off) of
    each, pickled, so that results are no objects when objects are counted."""
    sequences: dict[int, Sequence] = {}
    step = 0
    while engine.has_work or step <= max(request.arrival for request in requests):
        for place, request in enumerate(requests):
            if request.arrival == step:
                sequences[place] = engine.prepare(request.prompt, request.params, request.rule())
                engine.submit(sequences[place])
            if request.abort_at == step:
                engine.abort(sequences[place])
        if engine.has_work:
            engine.step()
        if chance.random() < 0.1:
            engine.check_integrity()
        step += 1
        assert step < 2000
    assert all(one.is_done and (one.error is None or one.is_expired) for one in sequences.values())
    ended = [sequences[place] for place in range(len(requests))]
    return [
        pickle.dumps((one.output_ids, one.logprobs, one.prompt_logprobs, one.is_aborted, one.is_expired))
        for one in ended
    ]


def run_alone(engine, sequence):
    engine.submit(sequence)
    while engine.has_work:
        engine.step()


def alive(kind):
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hundred_requests_end_as_they_would_alone(params, overlap):
    requests = random_requests()
    llm = make_llm(params, overlap, max_concurrent_requests=8, max_chunk_tokens=40, num_blocks=3)
    chance, results, num_tensors, num_objects = random.Random(1), [], [], []
    size, num_before = NUM_REQUESTS // NUM_WAVES, alive(Sequence)
    for wave in range(NUM_WAVES):
        results += run_wave(llm.engine, requests[wave * size : (wave + 1) * size], chance)
        assert_all_free(llm)
        assert alive(Sequence) <= num_before, "an ended request is kept by nobody"
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

    alone = make_llm(params, max_concurrent_requests=1)
    for request, (token_ids, logprobs, scores, is_aborted, is_expired) in zip(requests, results, strict=True):
        solo = alone.engine.prepare(request.prompt, replace(request.params, deadline=None), request.rule())
        run_alone(alone.engine, solo)
        assert token_ids == solo.output_ids[: len(token_ids)]
        assert logprobs == solo.logprobs[: len(token_ids)]
        assert scores == solo.prompt_logprobs[: len(scores)]
        assert is_aborted or is_expired or (token_ids, scores) == (solo.output_ids, solo.prompt_logprobs)
