"""One small model, made once; ranks are made by the tests and must be gone when they end."""

import pytest
import torch
from rank_cases import SMALL, ThreadedRanks

from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params


@pytest.fixture(scope="session")
def models():
    """numerics: (params, dtype)"""
    return {
        "official": (random_params(SMALL), torch.bfloat16),
        "exact": (random_params(SMALL, dequantize_to=torch.float64), torch.float64),
    }


@pytest.fixture
def threaded():
    """`ThreadedRanks` that are closed at the end."""
    made = []
    yield lambda *given, **options: made.append(ThreadedRanks(*given, **options)) or made[-1]
    for ranks in made:
        ranks.close()


@pytest.fixture
def make_ranks(models, threaded):
    def make(size, numerics="official", limits=None, **options):
        params, dtype = models[numerics]
        given = EngineConfig(**{"max_context_tokens": 512, "max_concurrent_requests": 4 * size, **(limits or {})})
        return threaded(SMALL, params, size, given, dtype=dtype, **options)

    return make


@pytest.fixture
def one(models):
    """`one(numerics)`: the same model in one process."""

    def make(numerics="official", **limits):
        params, dtype = models[numerics]
        given = EngineConfig(**{"max_context_tokens": 512, "max_concurrent_requests": 8, **limits})
        return LLM.from_params(SMALL, params, numerics=numerics, dtype=dtype, engine=given)

    return make
