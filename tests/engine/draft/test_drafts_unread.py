"""The host plans the step that verifies drafts before it has read them: they go from the drafter to the next step on
the device. Tokens and log-probabilities are those without drafts."""

import pytest
from draft_cases import MOST, drafting_llm, plain_llm, run, truth_of
from test_draft_rules import Sums
from test_drafts import PARAMS, PROMPTS, expected
from test_runner import FakeGraph

from dsv4.engine import engine as engine_module
from dsv4.engine.draft.counts import ChosenDrafts, FixedDrafts
from dsv4.engine.request import UNREAD
from dsv4.engine.step import builder as step
from dsv4.request import SamplingParams


def told(kind, **options):
    """An engine that always asks for as many drafts as there may be, and need not see them."""
    return drafting_llm(kind, FixedDrafts(MOST[kind]), is_told=True, **options)


def tell(engine, completions):
    engine.check_integrity()
    engine.runner.drafting.drafter.tell(engine, truth_of(completions))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("mtp", {}, marks=pytest.mark.slow),
        ("dspark", {"capture": FakeGraph(), "buckets": (2, 4, 12, 18)}),
        ("mtp", {"overlap": True, "num_blocks": 2, "max_chunk_tokens": 24}),
    ],
)
def test_drafts_nobody_has_read(kind, options, monkeypatch):
    """Every step that verifies drafts is launched before they are read."""
    order = []
    read = engine_module.read_offers

    def note(drafted, num_requests):
        order.append("read")
        return read(drafted, num_requests)

    monkeypatch.setattr(engine_module, "read_offers", note)
    llm = told(kind, **options)
    forward = llm.engine.runner.forward

    def launch(batch, draw_rows):
        order.append("launch")
        return forward(batch, draw_rows)

    llm.engine.runner.forward = launch
    assert run(llm, PROMPTS, PARAMS, lambda engine: tell(engine, expected(kind))) == expected(kind)
    stats = llm.engine.stats().drafts
    assert stats.num_accepted > 5
    assert 0 < stats.num_accepted < stats.num_verified
    assert "launch read launch read launch read" in " ".join(order)


def test_rules_read_them_in_time():
    """What a grammar allows behind drafts is asked when the forward call is under way: the drafts are read then."""
    params = SamplingParams(max_tokens=9, seed=3, logprobs=1, ignore_eos=True)
    found = []
    for llm in (plain_llm(), told("mtp")):
        rule = Sums()
        request = llm.engine.prepare(PROMPTS[0], params, rule)
        llm.engine.submit(request)
        while llm.engine.has_work:
            llm.engine.step()
            if found:
                tell(llm.engine, found)
        found.append(request.completion())
    assert found[0] == found[1]
    assert llm.engine.stats().drafts.num_accepted > 2
    assert rule.most_tried >= 2


def test_a_request_that_leaves_before_they_are_read():
    """Aborted while its drafts were made; the next one takes its slot at once."""
    llm = told("mtp", max_concurrent_requests=1)
    first = llm.engine.add(PROMPTS[0], PARAMS[0])
    while first.num_output < 2:
        llm.engine.step()
    assert UNREAD in first.drafts
    llm.engine.abort(first)
    assert run(llm, PROMPTS[2:], PARAMS[2:], lambda engine: tell(engine, expected())) == expected()[2:]


def test_drafts_that_never_arrive(monkeypatch):
    """The step that verified them is lost, and its requests are told; others go on."""
    llm = told("mtp")
    lost = llm.engine.add(PROMPTS[0], PARAMS[0])
    while lost.num_output < 2:
        llm.engine.step()
        tell(llm.engine, expected())

    def fail(drafted, num_requests):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine_module, "read_offers", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.engine.step()
    monkeypatch.undo()
    assert lost.is_aborted
    assert llm.engine.take_results().ended == (lost,)
    assert not llm.engine.has_work
    assert run(llm, PROMPTS[2:], PARAMS[2:], lambda engine: tell(engine, expected())) == expected()[2:]


def test_who_must_see_them():
    """A head's confidences decide how many are verified."""
    assert [FixedDrafts(2).must_read, ChosenDrafts(3, is_block=False).must_read] == [False, False]
    assert ChosenDrafts(3, is_block=True).must_read


@pytest.mark.slow
def test_drafts_of_another_slot_would_be_seen(monkeypatch):
    """The host then reads other drafts than those that were verified, and takes tokens that were not drawn."""
    fill = step.fill_drafts
    monkeypatch.setattr(step, "fill_drafts", lambda numbers, table: fill(numbers, table.roll(1, 0)))
    llm = told("mtp")
    try:
        found = run(llm, PROMPTS, PARAMS, lambda engine: tell(engine, expected()))
    except (AssertionError, RuntimeError, ValueError):
        return
    assert found != expected()
