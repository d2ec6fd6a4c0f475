"""`StepBuilder`: the tensors of a plan, row by row, and padding that changes nothing."""

import pytest
import torch

from dsv4.engine.draft.round import make_table
from dsv4.engine.request import UNREAD
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.step.builder import LAST_DRAWN, StepBuilder
from dsv4.request import SamplingParams


@pytest.fixture
def planned(make_llm):
    """(llm, plan): 7 tokens of a long prompt from position 0, then one of a request that stands at 5."""
    llm = make_llm(num_blocks=4)
    prompts = [list(range(10, 30)), [40, 41, 42, 43, 44, 45]]
    requests = [llm.engine.prepare(prompt, SamplingParams()) for prompt in prompts]
    slots = [llm.cache.admit(100), llm.cache.admit(100)]
    llm.cache.prepare_forward([slots[1]], [0], [5])
    yield llm, StepPlan((Piece(requests[0], slots[0], 0, 7, False), Piece(requests[1], slots[1], 5, 1, True)), ())
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
    assert step.draw_rows.tolist() == [7]
    assert step.draw_slots.tolist() == [plan.pieces[1].slot]
    assert step.draw_positions.tolist() == [5]
    assert (step.drawing, step.num_tokens) == ((plan.pieces[1].request,), 8)
    for tensor in (step.batch.token_ids, step.batch.positions, step.batch.slots, step.draw_rows, step.draw_slots):
        assert tensor.dtype == torch.int64


def test_a_token_still_under_way_is_looked_up_by_its_slot(planned):
    """The host knows six tokens of the second request, the device has drawn a seventh."""
    llm, plan = planned
    piece = plan.pieces[1]
    llm.cache.prepare_forward([piece.slot], [5], [1])
    piece.request.num_unread = 1
    step = StepBuilder(llm.cache).build(StepPlan((Piece(piece.request, piece.slot, 6, 1, True),), ()))
    assert (step.batch.token_ids.tolist(), step.batch.positions.tolist()) == ([LAST_DRAWN], [6])


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_columns_are_aligned(make_llm, num_tokens):
    """A kernel is compiled apart for a pointer that is no multiple of 16 bytes."""
    llm = make_llm()
    slots = [llm.cache.admit(9) for _ in range(3)]
    pieces = [Piece(llm.engine.prepare([5] * 4, SamplingParams()), slot, 0, num_tokens, True) for slot in slots]
    step = StepBuilder(llm.cache).build(StepPlan(tuple(pieces), ()))
    start = step.batch.token_ids.data_ptr()
    batch = step.batch
    columns = (batch.positions, batch.slots, batch.chunk_starts, batch.chunk_ends)
    for column in (*columns, step.draw_rows, step.draw_slots, step.draw_positions):
        assert (column.data_ptr() - start) % 16 == 0
    for slot in slots:
        llm.cache.release(slot)


def test_nothing_to_run_is_all_padding(make_llm):
    """As on a rank whose experts serve the others."""
    step = StepBuilder(make_llm().cache).build(StepPlan((), ()), pad_to=3)
    assert step.batch.slots.tolist() == [-1, -1, -1]
    assert [column.tolist() for column in (step.draw_rows, step.draw_slots, step.draw_positions)] == [[], [], []]
    assert (step.drawing, step.num_tokens) == ((), 0)


def test_blocks_are_there_before_the_call(planned):
    llm, plan = planned
    StepBuilder(llm.cache).build(plan)
    assert [llm.cache.position(piece.slot) for piece in plan.pieces] == [7, 6]
    assert (llm.cache.block_table[:, 0] >= 0).sum() == 2


def test_nobody_draws_while_prompts_are_read(planned):
    llm, plan = planned
    step = StepBuilder(llm.cache).build(StepPlan(plan.pieces[:1], ()))
    assert (step.draw_rows.shape, step.draw_rows.dtype, step.drawing) == ((0,), torch.int64, ())


@pytest.mark.gpu
def test_staging_is_not_overwritten_while_it_is_copied(models):
    """Many builds without a synchronisation between them: each step's tensors hold its own numbers."""
    from dsv4.config import EngineConfig
    from dsv4.llm import LLM
    from dsv4.loader.write.synth import random_params

    config = models["one layer"][0]
    params = random_params(config, dequantize_to=torch.float32, device="cuda")
    llm = LLM.from_params(config, params, numerics="exact", engine=EngineConfig(max_context_tokens=512))
    request = llm.engine.prepare(list(range(2, 200)), SamplingParams())
    slot, builder, steps = llm.cache.admit(512), StepBuilder(llm.cache), []
    torch.cuda._sleep(100_000_000)
    for start in range(100):
        steps.append(builder.build(StepPlan((Piece(request, slot, start, 1, True),), ()), pad_to=1 + start % 7))
    for start, step in enumerate(steps):
        assert step.batch.token_ids.tolist() == [2 + start] + [0] * (start % 7)
        assert step.batch.positions.tolist()[0] == start
        assert step.draw_rows.tolist() == [0]
    llm.cache.release(slot)


@pytest.mark.parametrize("max_drafts", [0, 2])
def test_a_step_of_padding_alone(planned, max_drafts):
    """What a rank without requests of its own runs."""
    table = make_table(4, max_drafts, planned[0].cache.device) if max_drafts else None
    step = StepBuilder(planned[0].cache, table).build(StepPlan((), ()), pad_to=3, num_requests=2)
    assert (step.batch.slots.tolist(), step.draw_rows.tolist(), step.drawing) == ([-1] * 3, [], ())
    if max_drafts:
        assert (step.fed.slots.tolist(), step.fed.num_drafts.tolist()) == ([-1, -1], [-1, -1])
        assert step.fed.drafts.tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize("drafts", [(70, 71), (UNREAD, UNREAD), (70, UNREAD)])
def test_drafts_that_only_the_device_knows(planned, drafts):
    """Wherever a draft stands among a step's numbers, it is taken from its slot's row of the table."""
    llm, plan = planned
    piece = plan.pieces[1]._replace(length=3, num_drafts=2)
    piece.request.drafts = drafts
    table = make_table(4, 3, llm.cache.device)
    table[piece.slot] = torch.tensor([70, 71, 72])
    step = StepBuilder(llm.cache, table).build(StepPlan((piece,), ()), pad_to=4, num_requests=2)
    assert step.batch.token_ids.tolist() == [45, 70, 71, 0]
    assert step.draw_drafts.tolist() == [[-1, -1, -1], [70, -1, -1], [70, 71, -1]]
    assert step.fed.drafts.tolist() == [[70, 71, -1], [-1, -1, -1]]
    assert step.fed.next_ids.tolist() == [70, 71, 0, 0]
