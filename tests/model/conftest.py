"""The set A model, loaded once per numerics."""

from pathlib import Path

import pytest

from dsv4 import LLM
from dsv4.testing.vectors import VectorSet

SET_A = Path(__file__).parents[1] / "vectors" / "setA"


@pytest.fixture(scope="session")
def set_a() -> VectorSet:
    return VectorSet.open(SET_A)


@pytest.fixture(scope="session")
def exact_llm() -> LLM:
    return LLM(SET_A / "model", numerics="exact")


@pytest.fixture(scope="session")
def official_llm() -> LLM:
    return LLM(SET_A / "model", numerics="official")


@pytest.fixture(scope="session")
def dspark_llm() -> LLM:
    return LLM(SET_A.parent / "draftA" / "model", numerics="exact")
