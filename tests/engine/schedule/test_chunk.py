"""The chunk that a model has where no number is given: one rule for `LLM`, a server and the plan of either."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsv4 import llm_start
from dsv4.config import CPU_CHUNK_TOKENS, EngineConfig, ModelConfig
from dsv4.engine.schedule.chunk import CHUNK_SPEEDS, SHORT_CHUNK, pick_chunk
from dsv4.llm_start import with_chunk
from dsv4.ops import TORCH, TRITON
from dsv4.tools.plan.budget import Budget, WeightBytes
from dsv4.tools.plan.sizes import count_weights

GIB = 2**30
FLASH = ModelConfig.flash()
CUDA = torch.device("cuda")
LIMITS = EngineConfig(max_context_tokens=16384)


def picked(room, cache=0, **options):
    """Where a call takes a byte a token."""
    return pick_chunk(lambda chunk: chunk, cache, room, **options)[0]


def test_the_shortest_that_is_about_as_fast_as_the_best():
    assert picked(room=2**30) == 8192
    assert CHUNK_SPEEDS[8192] >= 0.95 * max(CHUNK_SPEEDS.values()) > CHUNK_SPEEDS[2048]


def test_what_does_not_fit_is_not_chosen():
    """An eighth of the room is for calls; and they stand beside the whole cache."""
    assert [picked(room) for room in (8 * 8192, 8 * 8192 - 1, 8 * 2048, 8 * 2048 - 1)] == [
        8192,
        2048,
        2048,
        SHORT_CHUNK,
    ]
    room = 2**20
    assert [picked(room, room - needed) for needed in (8192, 8191, 2047)] == [8192, 2048, SHORT_CHUNK]


def test_oracles_on_a_gpu_keep_a_cpu_s():
    assert picked(2**30, has_kernels=False) == CPU_CHUNK_TOKENS
    assert picked(1000, has_kernels=False) == SHORT_CHUNK


@pytest.fixture
def chunk_with(monkeypatch):
    """Of an `LLM` over weights that leave `room` bytes of a GPU."""

    def chunk(room, limits=LIMITS, backend=TRITON, device=CUDA, **options):
        monkeypatch.setattr(llm_start, "usable_bytes", lambda device: room)
        return with_chunk(limits, FLASH, device, backend, None, **{"offloads": False, **options}).max_chunk_tokens

    return chunk


def test_llm_chooses_on_a_gpu_with_its_experts_alone(chunk_with):
    assert chunk_with(60 * GIB) == 8192
    assert chunk_with(60 * GIB, offloads=True) == CPU_CHUNK_TOKENS
    assert chunk_with(60 * GIB, backend=TORCH) == CPU_CHUNK_TOKENS
    assert chunk_with(60 * GIB, device=torch.device("cpu")) == CPU_CHUNK_TOKENS
    assert chunk_with(GIB) == SHORT_CHUNK


def test_a_number_wins(chunk_with):
    for chunk in (1, 2048, 100_000):
        assert chunk_with(GIB, replace(LIMITS, max_chunk_tokens=chunk)) == chunk


def test_llm_and_the_plan_choose_alike(chunk_with):
    weights = WeightBytes.counted(count_weights(FLASH, "mxfp4", with_draft=False), FLASH, with_draft=False)
    budget = Budget(FLASH, weights)
    chosen = [
        (chunk_with(room), budget.pick_chunk(LIMITS, room + budget.weight_bytes())[0])
        for room in range(4 * GIB, 40 * GIB, GIB)
    ]
    assert {one for one, _ in chosen} == {SHORT_CHUNK, 2048, 8192}
    assert all(one == other for one, other in chosen)


def test_ranks_choose_by_what_their_gpus_have(chunk_with, monkeypatch):
    """What is free may differ; a chunk may not."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=60 * GIB))
    assert chunk_with(GIB, num_ranks=4) == 8192


def test_an_llm_has_a_chunk(make_llm):
    """Whatever reads the limits of a loaded model finds a number."""
    assert make_llm().cache.limits.max_chunk_tokens == CPU_CHUNK_TOKENS
    assert make_llm(max_chunk_tokens=7).cache.limits.max_chunk_tokens == 7
    assert EngineConfig().chunk_tokens == CPU_CHUNK_TOKENS
