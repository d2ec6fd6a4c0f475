"""Requests of every kind that come, go and lose their place at random, and what each must have in the end."""

import pickle
import random
from dataclasses import dataclass, replace

import numpy as np
from engine_cases import SMALL

from dsv4.engine.engine import Engine
from dsv4.engine.request import Request as EngineRequest
from dsv4.engine.step.constraint import pack_tokens
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
        return pack_tokens(np.arange(CONFIG.vocab_size) % 2 == self.num_accepted % 2)

    def accept(self, token_id):
        assert token_id % 2 == self.num_accepted % 2
        self.num_accepted += 1

    def rollback(self, count):
        self.num_accepted -= count


def random_requests():
    chance = random.Random(17)
    requests = []
    for place in range(NUM_REQUESTS):
        length = chance.choice([1, 2, 2, 3, 3, 7]) if place % 25 else chance.randrange(122, 131)
        params = SamplingParams(
            max_tokens=chance.randrange(1, 8) if place % 25 else 10, seed=chance.randrange(2**40),
            temperature=chance.choice([0.0, 1.0]), top_k=chance.choice([0, 20]), ignore_eos=place % 3 > 0,
            presence_penalty=chance.choice([0.0, 0.0, 0.5]), logprobs=chance.choice([None, 0, 3]),
            priority=chance.choice([-1, 0, 0, 1]), min_tokens=chance.choice([0, 0, 1]),
            logit_bias=chance.choice([None, None, {7: 4.0}]), bad_words_ids=chance.choice([(), ((9,),), ((7, 7),)]),
            prompt_logprobs=chance.choice([None, None, 1]), deadline=chance.choice([None] * 7 + [60.0]),
        )  # fmt: skip
        arrival = place % (NUM_REQUESTS // NUM_WAVES) // 3
        abort_at = arrival + chance.randrange(0, 30) if chance.random() < 0.2 else None
        prompt = tuple(chance.randrange(2, CONFIG.vocab_size) for _ in range(length))
        requests.append(Request(prompt, params, arrival, abort_at, has_rule=chance.random() < 0.2))
    return requests


def run_wave(engine: Engine, requests, chance):
    """Requests that come and go as they say: (tokens, log-probabilities, those of the prompt, how it was cut off) of
    each, pickled, so that results are no objects when objects are counted."""
    sequences: dict[int, EngineRequest] = {}
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


def runs_alone(requests, engine):
    """The same requests one after the other, each to its end."""
    for request in requests:
        solo = engine.prepare(request.prompt, replace(request.params, deadline=None), request.rule())
        run_alone(engine, solo)
        yield solo


def assert_as_alone(results, solos):
    """Each request has the tokens, log-probabilities and scores it has alone, as far as it came."""
    for solo, (token_ids, logprobs, scores, is_aborted, is_expired) in zip(solos, results, strict=True):
        assert token_ids == solo.output_ids[: len(token_ids)]
        assert logprobs == solo.logprobs[: len(token_ids)]
        assert scores == solo.prompt_logprobs[: len(scores)]
        assert is_aborted or is_expired or (token_ids, scores) == (solo.output_ids, solo.prompt_logprobs)
