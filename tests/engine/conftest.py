"""One small model, made once; every test gets its own `LLM` (cache and engine) over it."""

import pytest
import torch
from engine_cases import ONE_LAYER, SMALL, assert_all_free, finish
from weight_cases import CONFIG, answers, load

from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params, write_checkpoint
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def models():
    """name: (config, params, numerics)"""
    return {
        "official": (SMALL, random_params(SMALL), "official"),
        "exact": (SMALL, random_params(SMALL, dequantize_to=torch.float32), "exact"),
        "one layer": (ONE_LAYER, random_params(ONE_LAYER, dequantize_to=torch.float32), "exact"),
    }


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One model with two sets of weights."""
    root = tmp_path_factory.mktemp("weights")
    return [write_checkpoint(root / name, CONFIG, experts="mxfp4", seed=seed) for seed, name in enumerate("AB")]


@pytest.fixture(scope="session")
def expected(folders):
    """What each of them answers."""
    return [answers(load(folder)) for folder in folders]


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(byte_tokenizer(SMALL.vocab_size), "the byte tokenizer")


def pytest_generate_tests(metafunc):
    if "make_llm" in metafunc.fixturenames:
        ways = [False, True] if getattr(metafunc.module, "RUNS_BOTH_WAYS", False) else [False]
        names = ["in turn", "overlapped"][: len(ways)]
        metafunc.parametrize("make_llm", ways, ids=names, indirect=True)


@pytest.fixture
def make_llm(models, tokenizer, request):
    """`make_llm(model, with_tokenizer, **limits)`. When the test is over, every cache must be free again.

    In a module with `RUNS_BOTH_WAYS` its tests run in turn and overlapped: each step launched before the one before it
    is collected, as on a GPU.
    """
    made = []

    def make(model="one layer", with_tokenizer=True, **limits):
        config, params, numerics = models[model]
        llm = LLM.from_params(
            config, params, numerics=numerics, tokenizer=tokenizer if with_tokenizer else None,
            engine=EngineConfig(**{"max_context_tokens": 512, "max_concurrent_requests": 4, **limits}),
        )  # fmt: skip
        llm.engine = Engine(llm.model, llm.cache, overlap=request.param)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        finish(llm.engine)
        assert_all_free(llm)
