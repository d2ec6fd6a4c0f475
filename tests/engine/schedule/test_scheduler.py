"""`Scheduler` over plain books: order, chunks, admission, preemption, deadlines, and what leaves when. No model."""

import pytest
from scheduler_cases import Books, collect, make_sequence, pieces_of, run_step, scheduler_of

from dsv4.cache.errors import IntegrityError, RequestNeverFits
from dsv4.cache.schema import blocks_at_position
from dsv4.engine.schedule.plan_builder import last_position, starts_block


def test_positions_of_blocks():
    for num_blocks in range(6):
        most = last_position(num_blocks)
        assert blocks_at_position(most) == num_blocks
        assert blocks_at_position(most + 1) == num_blocks + 1
    for position in range(600):
        assert starts_block(position) == (blocks_at_position(position + 1) > blocks_at_position(position))


def test_a_prompt_is_fed_in_chunks_and_decoding_goes_first():
    scheduler = scheduler_of(max_batched_tokens=10)
    long, short = make_sequence(25, 3), make_sequence(2, 3)
    scheduler.add(long)
    scheduler.add(short)
    assert run_step(scheduler) == [(long, 0, 10)]
    assert run_step(scheduler) == [(long, 10, 10)]
    assert run_step(scheduler) == [(long, 20, 5), (short, 0, 2)], "the rest of the budget admits the next"
    assert run_step(scheduler) == [(long, 25, 1), (short, 2, 1)]
    late = make_sequence(30, 1)
    scheduler.add(late)
    assert run_step(scheduler) == [(long, 26, 1), (short, 3, 1), (late, 0, 8)]
    assert long.finish_reason == short.finish_reason == "length"
    assert scheduler.num_prompt_tokens == 25 + 2 + 8


def test_first_come_first_served_and_nobody_slips_past_the_head():
    """The head needs two blocks and one is free; the small one behind it waits all the same."""
    books = Books(num_slots=4, num_blocks=3)
    scheduler = scheduler_of(books, max_batched_tokens=1000)
    first, head, small = make_sequence(200, 40), make_sequence(200, 5), make_sequence(2, 5)
    for request in (first, head, small):
        scheduler.add(request)
    assert run_step(scheduler) == [(first, 0, 200)]
    assert scheduler.num_waiting == 2
    scheduler.abort(first)
    assert run_step(scheduler) == [(head, 0, 200), (small, 0, 2)]


def test_priority_decides_between_waiting_requests_and_age_in_the_end():
    """Two steps of waiting outweigh one level."""
    scheduler = scheduler_of(Books(num_slots=1, num_blocks=8), aging_steps=2)
    running = make_sequence(1, 6, priority=10)
    low, high = make_sequence(1, 1, priority=0), make_sequence(1, 1, priority=1)
    scheduler.add(running)
    scheduler.add(low)
    run_step(scheduler)
    scheduler.add(high)  # one step after: it overtakes
    for _ in range(4):
        run_step(scheduler)
    late = make_sequence(1, 1, priority=1)
    scheduler.add(late)  # five steps after: it does not
    order = []
    while scheduler.has_work:
        order += [request for request, _, _ in run_step(scheduler) if request not in order]
    assert order == [running, high, low, late]


def test_a_higher_priority_takes_the_slot_of_a_lower_one():
    scheduler = scheduler_of(Books(num_slots=2, num_blocks=8))
    low, middle = make_sequence(5, 9, priority=-1), make_sequence(5, 9)
    scheduler.add(low)
    scheduler.add(middle)
    run_step(scheduler)
    high, equal = make_sequence(5, 9, priority=2), make_sequence(5, 9)
    scheduler.add(equal)
    scheduler.add(high)
    assert pieces_of(run_step(scheduler)) == {high, middle}, "the lowest gives way, the equal one has to wait"
    assert (low.num_preemptions, middle.num_preemptions, low.slot) == (1, 0, None)
    scheduler.abort(high)
    scheduler.abort(middle)
    assert pieces_of(run_step(scheduler)) == {equal, low}


def test_a_long_prompt_does_not_keep_an_urgent_one_out():
    """Its chunks would take every token of the budget."""
    scheduler = scheduler_of(max_batched_tokens=10)
    long, urgent, equal = make_sequence(500, 3), make_sequence(4, 2, priority=1), make_sequence(4, 2)
    scheduler.add(long)
    run_step(scheduler)
    scheduler.add(equal)
    scheduler.add(urgent)
    assert run_step(scheduler) == [(urgent, 0, 4), (long, 10, 6)]
    assert run_step(scheduler) == [(urgent, 4, 1), (long, 16, 9)]
    assert run_step(scheduler) == [(long, 25, 10)]


def test_the_last_comer_is_preempted_when_blocks_run_out_and_comes_back():
    books = Books(num_slots=4, num_blocks=3)
    scheduler = scheduler_of(books, max_batched_tokens=1000)
    requests = [make_sequence(length, 8) for length in (130, 20, 20)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    assert books.num_free_blocks == 0
    assert pieces_of(run_step(scheduler)) == set(requests), "position 131 still fits its block"
    assert pieces_of(run_step(scheduler)) == set(requests[:2]), "position 132 does not"
    victim = requests[2]
    assert (victim.slot, victim.num_processed, victim.num_pending, victim.num_preemptions) == (None, 0, 22, 1)
    assert scheduler.num_preemptions == 1
    while not requests[0].is_done:
        assert victim.slot is None, "it would need its own block and one for each of the others"
        run_step(scheduler)
    while scheduler.has_work:
        run_step(scheduler)
    assert [request.num_output for request in requests] == [8, 8, 8]
    assert (victim.num_preemptions, scheduler.num_recomputed_tokens, scheduler.num_prompt_tokens) == (1, 21, 170)


def test_the_last_in_line_keeps_what_it_holds():
    """Its prompt needs a third block while the one before it holds the other: it waits with its two."""
    books = Books(num_slots=2, num_blocks=3)
    scheduler = scheduler_of(books, max_batched_tokens=100)
    first, second = make_sequence(20, 40), make_sequence(300, 2)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(8):
        run_step(scheduler)
    assert (second.num_processed, second.num_preemptions) == (last_position(2), 0)
    while not first.is_done:
        assert second.num_processed == last_position(2)
        run_step(scheduler)
    while scheduler.has_work:
        run_step(scheduler)
    assert (scheduler.num_preemptions, second.num_output) == (0, 2)


def test_a_prompt_ahead_takes_the_blocks_of_a_decoding_request_behind_it():
    """The one behind it was already promised a token of this step; it gets none."""
    scheduler = scheduler_of(Books(num_slots=2, num_blocks=2), max_batched_tokens=100)
    behind, ahead = make_sequence(5, 30), make_sequence(200, 1, priority=1)
    scheduler.add(behind)
    run_step(scheduler)
    scheduler.add(ahead)
    assert run_step(scheduler) == [(behind, 5, 1), (ahead, 0, 99)]
    assert run_step(scheduler) == [(behind, 6, 1), (ahead, 99, 32)], "as far as its block reaches"
    assert run_step(scheduler) == [(ahead, 131, 69)]
    assert (behind.slot, behind.num_preemptions) == (None, 1)
    assert run_step(scheduler) == [(behind, 0, 8)]


@pytest.mark.parametrize("when", ["waiting", "planned", "running", "preempted", "done"])
def test_aborting_at_any_moment_frees_everything(when):
    books = Books(num_slots=2, num_blocks=2)
    scheduler = scheduler_of(books, max_batched_tokens=1000)
    first, second = make_sequence(130, 6), make_sequence(20, 3)
    scheduler.add(first)
    scheduler.add(second)
    if when == "planned":
        plan = scheduler.schedule()
        books.apply(plan)
        scheduler.abort(second)
        scheduler.commit(plan)
        collect(scheduler, plan)
    elif when != "waiting":
        for _ in range({"running": 1, "preempted": 3, "done": 3}[when]):
            run_step(scheduler)
        assert (second.slot is None) == (when != "running")
    if when == "done":
        while scheduler.has_work:
            run_step(scheduler)
    scheduler.abort(second)
    scheduler.abort(second)
    assert (second.is_aborted, scheduler.num_aborted) == ((False, 0) if when == "done" else (True, 1))
    scheduler.check_integrity()
    while scheduler.has_work:
        run_step(scheduler)
    assert first.num_output == 6
    assert (books.num_free_slots, books.num_free_blocks) == (2, 2)


def test_a_stranger_is_not_aborted():
    scheduler = scheduler_of()
    stranger = make_sequence(3, 3)
    scheduler.abort(stranger)
    assert not stranger.is_aborted
    scheduler.check_integrity()


def test_deadlines():
    scheduler = scheduler_of(Books(num_slots=1, num_blocks=4))
    running, waiting, patient = make_sequence(3, 99, deadline=5), make_sequence(3, 99, deadline=2), make_sequence(3, 2)
    for request in (running, waiting, patient):
        scheduler.add(request, now=100.0)
    run_step(scheduler, now=101.9)
    assert not waiting.is_done
    assert run_step(scheduler, now=102.0) == [(running, 3, 1)]
    assert waiting.error == "the deadline of 2 s passed with 0 of at most 99 tokens written"
    assert run_step(scheduler, now=105.5) == [(patient, 0, 3)], "its slot is free in the same step"
    assert (running.error, running.is_expired) == (
        "the deadline of 5 s passed with 2 of at most 99 tokens written",
        True,
    )
    assert (scheduler.num_failed, scheduler.num_running) == (2, 1)


def test_a_request_for_which_no_block_can_be_free_fails():
    """Someone else holds two of three blocks for ever."""
    books = Books(num_slots=3, num_blocks=3)
    outside = books.admit(300)
    books.advance(outside, 200)
    scheduler = scheduler_of(books, max_batched_tokens=1000)
    grows, next_one = make_sequence(100, 60), make_sequence(3, 2)
    scheduler.add(grows)
    scheduler.add(next_one)
    while scheduler.has_work:
        run_step(scheduler)
    assert grows.error == (
        "no cache block is free for token 131: the request holds 1 of 3, and no other request of this engine holds any"
    )
    assert next_one.num_output == 2
    assert scheduler.num_failed == 1


def test_impossible_requests_are_refused():
    scheduler = scheduler_of(Books(num_slots=1, num_blocks=2))
    with pytest.raises(RequestNeverFits, match="260 tokens needs 3 blocks, the whole cache has 2"):
        scheduler.add(make_sequence(200, 60))
    request = make_sequence(200, 50)
    scheduler.add(request)
    with pytest.raises(ValueError, match="queued before"):
        scheduler.add(request)
    for limits in ({"max_batched_tokens": 0}, {"aging_steps": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(limits))} must be at least 1"):
            scheduler_of(**limits)


def test_a_failed_step_aborts_its_requests_alone():
    books = Books(num_slots=2, num_blocks=4)
    scheduler = scheduler_of(books, max_batched_tokens=5)
    first, second = make_sequence(5, 3), make_sequence(5, 3)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    scheduler.discard(plan)
    assert (first.is_aborted, second.is_aborted) == (True, False)
    assert run_step(scheduler) == [(second, 0, 5)]


def test_the_check_sees_damage():
    def broken(change):
        scheduler = scheduler_of(Books(num_slots=2, num_blocks=4))
        for _ in range(3):
            scheduler.add(make_sequence(20, 5, deadline=9))
        run_step(scheduler)
        scheduler.check_integrity()
        change(scheduler)
        with pytest.raises(IntegrityError):
            scheduler.check_integrity()

    broken(lambda scheduler: scheduler._running.reverse())
    broken(lambda scheduler: scheduler._running.pop())
    broken(lambda scheduler: setattr(scheduler._running[0], "slot", scheduler._running[1].slot))
    broken(lambda scheduler: setattr(scheduler._running[0], "num_processed", 7))
    broken(lambda scheduler: setattr(scheduler._waiting[0], "num_processed", 7))
    broken(lambda scheduler: setattr(scheduler._waiting[0], "error", "failed"))
    broken(lambda scheduler: setattr(scheduler, "num_finished", 1))
    broken(lambda scheduler: scheduler._deadlines.update({make_sequence(1, 1): 3.0}))
    broken(lambda scheduler: scheduler._cache._allocator._free.append(0))
    broken(lambda scheduler: scheduler.schedule())
