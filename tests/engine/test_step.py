"""`StepBuilder`: the tensors of a plan, row by row, and padding that changes nothing."""

from __future__ import annotations

import pytest
import torch

from dsv4.engine.scheduler import Piece, StepPlan
from dsv4.engine.step import StepBuilder
from dsv4.request import SamplingParams


@pytest.fixture
def planned(make_llm):
    """(llm, plan): 7 tokens of a long prompt from position 0, then one of a request that stands at 5."""
    llm = make_llm(num_blocks=4)
    prompts = [list(range(10, 30)), [40, 41, 42, 43, 44, 45]]
    sequences = [llm.engine.prepare(prompt, SamplingParams()) for prompt in prompts]
    slots = [llm.cache.admit(100), llm.cache.admit(100)]
    llm.cache.prepare_forward([slots[1]], [0], [5])
    yield llm, StepPlan((Piece(sequences[0], slots[0], 0, 7, False), Piece(sequences[1], slots[1], 5, 1, True)), ())
    for slot in slots:
        llm.cache.release(slot)


@pytest.mark.parametrize("pad_to", [0, 3, 8, 11])
def test_rows(planned, pad_to):
    llm, plan = planned
    step = StepBuilder(llm.cache).build(plan, pad_to=pad_to)
    padding = [0] * max(0, pad_to - 8)
    assert step.batch.token_ids.tolist() == [*range(10, 17), 45, *padding]
    assert step.batch.positions.tolist() == [*range(7), 5, *padding]
    assert step.batch.slots.tolist() == [plan.pieces[0].slot] * 7 + [plan.pieces[1].slot] + [-1] * len(padding)
    assert step.batch.chunk_starts.tolist() == [0] * 7 + [5, *padding]
    assert step.batch.chunk_ends.tolist() == [7] * 7 + [6, *padding]
    assert step.batch.block_table is llm.cache.block_table
    assert step.sample_rows.tolist() == [7]
    assert step.drawing == (plan.pieces[1].sequence,)
    for tensor in (step.batch.token_ids, step.batch.positions, step.batch.slots, step.sample_rows):
        assert tensor.dtype == torch.int64


def test_blocks_are_there_before_the_call(planned):
    llm, plan = planned
    StepBuilder(llm.cache).build(plan)
    assert [llm.cache.position(piece.slot) for piece in plan.pieces] == [7, 6]
    assert (llm.cache.block_table[:, 0] >= 0).sum() == 2


def test_nobody_draws_while_prompts_are_read(planned):
    llm, plan = planned
    step = StepBuilder(llm.cache).build(StepPlan(plan.pieces[:1], ()))
    assert (step.sample_rows.shape, step.sample_rows.dtype, step.drawing) == ((0,), torch.int64, ())


@pytest.mark.gpu
def test_staging_is_not_overwritten_while_it_is_copied(models):
    """Many builds without a synchronisation between them: each step's tensors hold its own numbers."""
    from dsv4.config import EngineConfig
    from dsv4.llm import LLM
    from dsv4.loader.synth import random_params

    config = models["one layer"][0]
    params = random_params(config, dequantize_to=torch.float32, device="cuda")
    llm = LLM.from_params(config, params, numerics="exact", engine=EngineConfig(max_context_tokens=512))
    sequence = llm.engine.prepare(list(range(2, 200)), SamplingParams())
    slot, builder, steps = llm.cache.admit(512), StepBuilder(llm.cache), []
    torch.cuda._sleep(100_000_000)
    for start in range(100):
        steps.append(builder.build(StepPlan((Piece(sequence, slot, start, 1, True),), ()), pad_to=1 + start % 7))
    for start, step in enumerate(steps):
        assert step.batch.token_ids.tolist() == [2 + start] + [0] * (start % 7)
        assert step.batch.positions.tolist()[0] == start
        assert step.sample_rows.tolist() == [0]
    llm.cache.release(slot)
