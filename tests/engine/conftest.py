"""One small model, made once; every test gets its own `LLM` (cache and engine) over it."""

from __future__ import annotations

import pytest
import torch
from engine_cases import SMALL, assert_all_free

from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.loader.synth import random_params
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def params_of():
    return {
        "official": random_params(SMALL),
        "exact": random_params(SMALL, dequantize_to=torch.float32),
    }


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(byte_tokenizer(SMALL.vocab_size), "the byte tokenizer")


@pytest.fixture
def make_llm(params_of, tokenizer):
    """`make_llm(numerics, with_tokenizer, **limits)`. When the test is over, every cache must be free again."""
    made = []

    def make(numerics="exact", with_tokenizer=True, **limits):
        llm = LLM.from_params(
            SMALL, params_of[numerics], numerics=numerics, tokenizer=tokenizer if with_tokenizer else None,
            engine=EngineConfig(**{"max_context_tokens": 512, "max_concurrent_requests": 4, **limits}),
        )  # fmt: skip
        made.append(llm)
        return llm

    yield make
    for llm in made:
        assert_all_free(llm)
