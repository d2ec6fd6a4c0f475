"""Serving before the last graph is captured: in which order graphs come, and that no bit depends on it."""

import pytest
import torch
from engine_cases import SMALL
from test_runner import PROMPTS, FakeGraph, make_cache

from dsv4.engine.engine import Engine
from dsv4.engine.run import runner as runner_module
from dsv4.engine.run.runner import Runner
from dsv4.loader.write.synth import random_params
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams

BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def params():
    return random_params(SMALL)


def make_engine(params, num_graphs, **options):
    model = Transformer(SMALL, params, torch.bfloat16)
    cache = make_cache(model)
    runner = Runner(model, cache, buckets=BUCKETS, use_graphs=True, capture=FakeGraph())
    runner.warm_up(num_graphs=num_graphs)
    return Engine(model, cache, runner=runner, **options)


def serve(engine, prompts, num_tokens=8):
    requests = [
        engine.add(prompt, SamplingParams(max_tokens=num_tokens, seed=place, ignore_eos=True, logprobs=3))
        for place, prompt in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return [request.completion() for request in requests]


@pytest.fixture(scope="module")
def expected(params):
    """With every graph from the beginning."""
    return serve(make_engine(params, None), PROMPTS[:3])


def test_the_largest_first_then_upwards(params):
    engine = make_engine(params, 2)
    runner = engine.runner
    assert (runner.captured, runner.missing) == ((1, 8), [2, 4])
    assert engine.has_idle_work
    engine.idle_step()
    assert runner.captured == (1, 2, 8)
    engine.idle_step()
    assert (runner.captured, runner.missing, engine.has_idle_work) == (BUCKETS, [], False)
    runner.drop_graphs()
    assert runner.missing == [8, 1, 2, 4]
    engine.gate.shut("keep")
    assert not engine.has_idle_work, "an engine that sleeps captures nothing"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_graphs", [0, 1, 2, 3])
def test_no_bit_depends_on_which_graphs_there_are(params, expected, num_graphs, overlap, monkeypatch):
    """A larger graph serves, or none does; and some are captured beside requests."""
    monkeypatch.setattr(runner_module, "CALLS_A_CAPTURE", 4)
    engine = make_engine(params, num_graphs, overlap=overlap)
    assert serve(engine, PROMPTS[:3]) == expected
    assert 4 in engine.runner.captured, "three requests missed it"
    while engine.has_idle_work:
        engine.idle_step()
    assert serve(engine, PROMPTS[:3]) == expected


def test_requests_wait_for_few_captures(params):
    """One for `CALLS_A_CAPTURE` calls, and only of what they miss."""
    engine = make_engine(params, 1)
    serve(engine, PROMPTS[:1], num_tokens=runner_module.CALLS_A_CAPTURE // 2)
    assert engine.runner.captured == (8,)
    serve(engine, PROMPTS[:1], num_tokens=2 * runner_module.CALLS_A_CAPTURE)
    assert engine.runner.captured == (1, 8)
