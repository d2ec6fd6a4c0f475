"""The host's side of drafts: what the scheduler grants and takes back, who decides how many, what users may ask for."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import Books, make_sequence, scheduler_of

from dsv4.cache.schema import blocks_at_position
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.draft.counts import ChosenDrafts, FixedDrafts
from dsv4.engine.draft.options import check_drafts, draft_limits, make_choice
from dsv4.engine.draft.policy import LEAST_TRIES
from dsv4.engine.schedule.kept import kept_rows, num_accepted
from dsv4.engine.schedule.plan import Piece
from dsv4.engine.step.sampler import Drawn, Undrawable
from dsv4.request import RequestError
from dsv4.tools.model_loading import parse_drafts

TINY = ModelConfig.tiny()
DSPARK = TINY.with_dspark(noise_token_id=3, markov_rank=16, block_size=5)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(2, 5), st.sampled_from([4, 9, 64]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_random_drafts(requests, num_blocks, budget, source):
    """Whatever is drafted and accepted: budgets hold, drafts take no block, everyone ends with its tokens."""
    books = Books(3, num_blocks)
    scheduler = scheduler_of(books, max_batched_tokens=budget, num_rows=0)
    longest = num_blocks * 128
    sequences = [make_sequence(min(length, longest - 41), count) for length, count in requests]
    for sequence in sequences:
        scheduler.add(sequence)
    num_steps = 0
    while scheduler.has_work:
        num_steps += 1
        assert num_steps < 4000
        for sequence in scheduler.running:
            if sequence.num_pending == 1 and sequence.num_output:
                sequence.drafts = tuple([3] * source.randint(0, 5))
        plan = scheduler.schedule()
        assert plan.num_tokens <= budget
        for piece in plan.pieces:
            assert piece.length == 1 + piece.num_drafts or not piece.num_drafts
            assert piece.start + piece.length + piece.draws <= piece.request.max_len
            assert blocks_at_position(piece.start + piece.length) == blocks_at_position(piece.end)
        books.apply(plan)
        scheduler.commit(plan)
        for piece in plan.pieces:
            take(scheduler, piece, source.randint(0, piece.num_drafts))
        scheduler.check_integrity()
    assert all(sequence.num_output == sequence.max_len - sequence.prompt_len for sequence in sequences)
    assert (books.num_free_blocks, books.num_free_slots) == (num_blocks, 3)
    assert scheduler.num_prompt_tokens == sum(sequence.prompt_len for sequence in sequences)


def take(scheduler, piece, accepted):
    sequence = piece.request
    if piece.draws:
        sequence.num_unread -= 1
        for _ in range(1 + accepted):
            if not sequence.is_done:
                sequence.append(3, None)
        scheduler.keep(piece, accepted)
        sequence.drafts = ()
    scheduler.settle(sequence)


def test_drafts_take_no_block_and_leave_half_to_prompts():
    books = Books(3, 4)
    scheduler = scheduler_of(books, max_batched_tokens=10, num_rows=0)
    decoding, reading = make_sequence(128, 30), make_sequence(100, 30)
    scheduler.add(decoding)
    while decoding.num_output == 0:
        plan = scheduler.schedule()
        books.apply(plan)
        scheduler.commit(plan)
        take(scheduler, plan.pieces[0], 0)
    scheduler.add(reading)
    decoding.drafts = (3,) * 9
    plan = scheduler.schedule()
    assert [(piece.start, piece.length, piece.num_drafts) for piece in plan.pieces] == [(128, 3, 2), (0, 7, 0)]
    scheduler.discard(plan)


def drawn(*token_ids):
    return [Undrawable("no") if token is None else Drawn(token, None) for token in token_ids]


def test_which_draws_count():
    sequence = make_sequence(4, 9)
    sequence.drafts = (5, 6, 7)
    piece = Piece(sequence, 0, 4, 4, True, 3)
    for found, expected in (
        ((5, 6, 7, 8), 3), ((5, 6, 8, 8), 2), ((6, 6, 7, 8), 0), ((5, None, 7, 8), 1), ((None, 6, 7, 8), 0)
    ):  # fmt: skip
        assert num_accepted(piece, drawn(*found)) == expected
    reading = Piece(make_sequence(8, 9), 1, 0, 2, False)
    assert kept_rows((piece, reading), drawn(5, 9, 7, 8)) == [0, 1, 4, 5]
    assert piece.end == 5


@pytest.mark.parametrize(
    ("drafts", "config", "numerics", "expected"),
    [
        ("off", TINY, "official", "off"), (0, TINY, "official", "off"), ("auto", TINY, "official", "auto"),
        (3, TINY, "official", 3),
        (5, DSPARK, "official", 5),
        ("auto", TINY, "exact", "off"), ("auto", replace(TINY, num_nextn_predict_layers=0), "official", "off"),
        (4, TINY, "official", "at most 3 with this model's MTP block, found 4"),
        (6, DSPARK, "official", "at most 5 with this model's DSpark head, found 6"),
        (1, TINY, "exact", "exact numerics"), (1, replace(TINY, num_nextn_predict_layers=0), "official", "no drafter"),
        (-1, TINY, "official", "'auto', 'off' or a number"), ("many", TINY, "official", "'auto', 'off' or a number"),
        (True, TINY, "official", "'auto', 'off' or a number"), (1.5, TINY, "official", "'auto', 'off' or a number"),
    ],
)  # fmt: skip
def test_what_may_be_asked_for(drafts, config, numerics, expected):
    if isinstance(expected, str) and expected not in ("auto", "off"):
        with pytest.raises(RequestError, match=expected):
            check_drafts(drafts, config, numerics=numerics)
    else:
        assert check_drafts(drafts, config, numerics=numerics) == expected


def test_the_command_line():
    assert [parse_drafts(text) for text in ("auto", "off", "0", "3")] == ["auto", "off", 0, 3]
    with pytest.raises(RequestError, match="--drafts must be auto, off or a number of tokens, found '-1'"):
        parse_drafts("-1")


def test_rings_have_room():
    limits = EngineConfig()
    assert draft_limits(limits, TINY, "off") == limits
    assert draft_limits(limits, TINY, 2).max_draft_tokens == 2
    assert draft_limits(limits, DSPARK, "auto").max_draft_tokens == 5
    assert draft_limits(EngineConfig(max_draft_tokens=9), DSPARK, "auto").max_draft_tokens == 9


def test_choices_of_drafters():
    assert make_choice(TINY, "off") is None
    assert make_choice(TINY, 2).choices == (2,)
    assert make_choice(TINY, "auto").choices == (1, 2, 3)
    assert make_choice(DSPARK, "auto").choices == (5,), "a block costs the same however many of it are used"


def live(choice, cost, rate, steps=400, drafting=0.0):
    """How many drafts were asked for in the last steps of a life in which a row costs `cost` of the first, and making
    drafts `drafting` of it."""
    asked = []
    for _ in range(steps):
        count = choice.how_many(1)
        asked.append(count)
        accepted = 0
        while accepted < count and (len(asked) * 7 + accepted * 3) % 10 < 10 * rate:
            accepted += 1
        if count:
            choice.record(count, accepted)
        choice.record_step_time(1 + count, 1.0 + cost * count + drafting * (count > 0), has_drafted=count > 0)
    return asked[-100:]


def test_drafts_that_pay_are_asked_for_and_others_tried_now_and_then():
    assert min(live(ChosenDrafts(3, is_block=False), cost=0.02, rate=0.9)) >= 1
    dear = live(ChosenDrafts(3, is_block=False), cost=2.0, rate=0.5)
    assert 0 < sum(dear) < 15
    # a plain step is tried again now and then too: only so can it be seen that drafts still pay
    assert live(ChosenDrafts(5, is_block=True), cost=0.02, rate=0.9).count(5) >= 99
    assert live(ChosenDrafts(5, is_block=True), cost=0.02, rate=0.9, drafting=0.9).count(5) >= 99
    assert live(ChosenDrafts(5, is_block=True), cost=0.1, rate=0.5, drafting=1.0).count(5) <= 5
    assert ChosenDrafts(3, is_block=False).how_many(0) == 0


def test_confidences_decide_how_many_are_verified():
    choice = ChosenDrafts(5, is_block=True)
    for rows, seconds in ((1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (6, 2.0), (8, 2.4), (16, 4.0)):
        choice.record_step_time(rows, seconds, has_drafted=True)
    sure, unsure, unread = (make_sequence(4, 20) for _ in range(3))
    for request in (sure, unsure):
        request.num_processed = 3
    unread.num_processed, unread.num_unread = 4, 1  # its next token is drawn already: these drafts are for its place
    choice.offer(sure, [1, 2, 3, 4, 5], [0.99] * 5)
    choice.offer(unsure, [1, 2, 3, 4, 5], [0.02] * 5)
    choice.offer(unread, [1, 2, 3, 4, 5], [0.99] * 5)
    choice.trim_drafts([sure, unsure, unread])
    assert len(sure.drafts) >= 2
    assert (unsure.drafts, unread.drafts) == ((), ())


def test_a_drafter_of_another_model_is_told_once(caplog):
    choice = FixedDrafts(2)
    with caplog.at_level(logging.WARNING, logger="dsv4.engine"):
        for _ in range(LEAST_TRIES + 10):
            choice.record(2, 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"of {LEAST_TRIES} first drafts 0 were accepted, a mean of 1.00 tokens a step: is the drafter one of this "
        "model? Answers are right all the same; --drafts off saves the time"
    ]
    stats = choice.stats()
    assert (stats.num_steps, stats.num_verified, stats.num_accepted, stats.tokens_per_step) == (210, 420, 0, 1.0)
    choice.record(2, 1)
    assert choice.stats().acceptance == (1 / 211, 0.0)
