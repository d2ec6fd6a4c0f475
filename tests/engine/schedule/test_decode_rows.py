"""`DecodeRows`: what a step does to the numbers of its requests, which are those they would keep."""

import numpy as np
import pytest
from scheduler_cases import EOS, Books, make_sequence, run_step, scheduler_of

from dsv4.cache.errors import IntegrityError
from dsv4.engine.request import MAX_END_IDS
from dsv4.request import FinishReason


def decoding(*requests, **limits):
    """A scheduler whose requests have read their prompts."""
    scheduler = scheduler_of(Books(num_slots=len(requests), num_blocks=16), **limits)
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    return scheduler


def launch(scheduler):
    plan = scheduler.schedule()
    scheduler._cache.apply(plan)
    scheduler.commit(plan)
    return plan.rows


def test_who_has_a_row():
    many = tuple(range(10, 10 + MAX_END_IDS))
    plain, stops = make_sequence(2, 9), make_sequence(2, 9, stop_token_ids=many[1:])
    other = make_sequence(2, 9, stop_token_ids=many)
    scored, short = make_sequence(2, 9, logprobs=3), make_sequence(2, 3)
    least, worded = make_sequence(2, 9, min_tokens=3), make_sequence(2, 9, bad_words_ids=((4, 5),))
    scheduler = decoding(plain, stops, scored, short, least, worded, other)
    assert all(one.rows is scheduler.rows for one in (plain, stops, scored, short, least, worded))
    assert other.rows is None
    step = scheduler.rows.to_feed()
    assert step.counts == (None, None, 3, None, None, None)
    assert step.with_rules() == [(4, least), (5, worded)]
    for _ in range(2):
        run_step(scheduler)
    assert scheduler.rows.to_feed().with_rules() == [(4, worded)], "one has ended, and one has its first tokens"
    assert make_sequence(2, 9, ignore_eos=True, stop_token_ids=many).can_have_row


def test_the_requests_of_a_step_are_the_same_tuple_until_one_comes_or_goes():
    first, second, short = make_sequence(2, 9), make_sequence(2, 9), make_sequence(2, 3)
    scheduler = decoding(first, second, short)
    seen = []
    for _ in range(4):
        rows = launch(scheduler)
        seen.append(rows.requests)
        for request in scheduler.rows.take(rows, np.full(len(rows), 3)).ended:
            scheduler.settle(request)
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert (seen[0], seen[2]) == ((first, second, short), (first, second))


@pytest.mark.parametrize(
    ("params", "token_id", "reason"),
    [
        ({}, EOS, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
        ({"stop_token_ids": (7, 8)}, 8, FinishReason.STOP),
        ({"stop_token_ids": (7, 8)}, 9, None),
        ({"max_tokens": 2}, 9, FinishReason.LENGTH),
        ({"max_tokens": 2}, EOS, FinishReason.STOP),
    ],
)
def test_how_a_row_ends(params, token_id, reason):
    request, other = make_sequence(2, **{"max_tokens": 9, **params}), make_sequence(2, 9)
    scheduler = decoding(request, other)
    rows = launch(scheduler)
    taken = scheduler.rows.take(rows, np.array([token_id, 5]))
    assert (request.finish_reason, other.finish_reason) == (reason, None)
    assert taken.ended == ([] if reason is None else [request])
    assert (request.token_ids[-1], other.token_ids[-1]) == (token_id, 5)
    assert (request.num_unread, request.num_processed, request.num_read) == (0, 3, 3)


def test_draws_that_are_no_tokens_and_rows_that_are_gone():
    requests = [make_sequence(2, 9) for _ in range(4)]
    scheduler = decoding(*requests)
    rows = launch(scheduler)
    scheduler.abort(requests[1])
    taken = scheduler.rows.take(rows, np.array([5, 5, -1, 6]))
    assert (taken.requests, taken.token_ids.tolist()) == ((requests[0], requests[3]), [5, 6])
    assert (taken.left, taken.invalid) == ([1], [2])
    assert [len(request.token_ids) for request in requests] == [4, 3, 3, 4]
    assert requests[2].num_unread == 1, "nothing was done with it"


def test_a_request_that_comes_back_to_its_slot_is_another_stay():
    request, late = make_sequence(2, 9), make_sequence(2, 9)
    scheduler = decoding(request)
    rows = launch(scheduler)
    scheduler.abort(request)
    scheduler.add(late)
    run_step(scheduler)
    assert late.slot == rows.slots[0]
    taken = scheduler.rows.take(rows, np.array([5]))
    assert (taken.left, [*late.token_ids], [*request.token_ids]) == ([0], [1, 1, 3], [1, 1, 3])


def test_a_request_keeps_its_numbers_when_its_row_goes():
    request = make_sequence(3, 9)
    scheduler = decoding(request)
    launch(scheduler)
    with_row = request.num_processed, request.num_unread, request.num_read, request.num_pending
    scheduler.rows.remove(request)
    assert request.rows is None
    assert (
        (request.num_processed, request.num_unread, request.num_read, request.num_pending) == with_row == (4, 1, 4, 1)
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows, request: rows.num_processed.__setitem__(request.slot, 1),
        lambda rows, request: rows.num_unread.__setitem__(request.slot, 2),
        lambda rows, request: rows._max_lens.__setitem__(request.slot, 99),
        lambda rows, request: rows._end_ids.__setitem__((request.slot, 0), 99),
        lambda rows, request: rows._stays.__setitem__(request.slot, 99),
        lambda rows, request: rows._members.reverse(),
        lambda rows, request: rows._members.pop(),
        lambda rows, request: request.token_ids.append(4),
        lambda rows, request: setattr(request, "token_ids", list(request.token_ids)),
        lambda rows, request: setattr(request, "rows", None),
    ],
)
def test_the_check_sees_damage(damage):
    first, second = make_sequence(2, 9), make_sequence(2, 9)
    scheduler = decoding(first, second)
    scheduler.rows.to_feed()
    scheduler.check_integrity()
    damage(scheduler.rows, second)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
