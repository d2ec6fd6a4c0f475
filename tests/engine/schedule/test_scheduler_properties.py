"""The scheduler under random loads: budgets hold, blocks are conserved, order is kept, and everyone ends in time."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import Books, collect, make_sequence, scheduler_of

from dsv4.cache.errors import CacheError, OutOfBlocks
from dsv4.cache.schema import blocks_at_position
from dsv4.engine.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt_len: int
    max_tokens: int
    priority: int
    deadline: int | None
    abort_at: tuple[int, bool] | None  # step, and whether between plan and commit


@dataclass(frozen=True)
class Load:
    num_slots: int
    num_blocks: int
    max_batched_tokens: int
    aging_steps: int
    arrivals: tuple[Arrival, ...]
    failing_steps: frozenset[int]
    overlap: bool = False  # a step is planned before the tokens of the one before it are known
    has_rows: bool = True

    def books(self):
        return Books(self.num_slots, self.num_blocks)

    def scheduler(self, books):
        return scheduler_of(
            books, max_batched_tokens=self.max_batched_tokens, aging_steps=self.aging_steps,
            num_rows=self.num_slots * self.has_rows,
        )  # fmt: skip


@st.composite
def loads(draw, with_endings=True, with_priorities=True):
    num_blocks = draw(st.integers(1, 6))
    longest = num_blocks * 128 + 3
    lengths = st.one_of(st.integers(1, 12), st.integers(1, longest - 1), st.integers(110, 140))
    arrivals = []
    for _ in range(draw(st.integers(1, 9))):
        prompt_len = min(draw(lengths), longest - 1)
        ending = draw(st.tuples(st.integers(0, 40), st.booleans())) if with_endings and draw(st.booleans()) else None
        deadline = draw(st.one_of(st.none(), st.integers(1, 60))) if with_endings else None
        most = min(draw(st.sampled_from([1, 2, 7, 30, 150])), longest - prompt_len)
        priority = draw(st.integers(-2, 2)) if with_priorities else 0
        arrivals.append(Arrival(draw(st.integers(0, 25)), prompt_len, most, priority, deadline, ending))
    failing = draw(st.frozensets(st.integers(0, 30), max_size=2)) if with_endings else frozenset()
    budget = draw(st.sampled_from([1, 2, 5, 16, 100, 128, 1000]))
    num_slots, aging, overlap = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.booleans())
    return Load(num_slots, num_blocks, budget, aging, tuple(arrivals), failing, overlap)


class Run:
    """Carries a load through, checking every step."""

    def __init__(self, load, scheduler_type=None):
        self.load = load
        self.books = load.books()
        self.scheduler = load.scheduler(self.books)
        if scheduler_type is not None:
            self.scheduler.__class__ = scheduler_type
        self.requests = [
            make_sequence(one.prompt_len, one.max_tokens, priority=one.priority, deadline=one.deadline)
            for one in load.arrivals
        ]
        self.step = 0
        self.last_arrival = max(one.step for one in load.arrivals)
        self.first_fed = []  # in the order of first admission
        self.uncollected = None
        self.plans = []

    def finish(self):
        total = sum(one.prompt_len + one.max_tokens for one in self.load.arrivals)
        limit = self.last_arrival + 2 * total + len(self.requests)
        while self.scheduler.has_work or self.step <= self.last_arrival:
            assert self.step <= limit * (1 + self.load.overlap), f"not done after {limit} steps"
            self.run_step()
        assert (self.books.num_free_slots, self.books.num_free_blocks) == (self.load.num_slots, self.load.num_blocks)
        for one, request in zip(self.load.arrivals, self.requests, strict=True):
            assert request.is_done
            assert request.slot is None
            if request.finish_reason is not None:
                assert request.num_output == one.max_tokens, "nothing is drawn twice, nothing is lost"
            else:
                assert request.is_aborted or request.is_expired, request.error

    def run_step(self):
        scheduler = self.scheduler
        for one, request in zip(self.load.arrivals, self.requests, strict=True):
            if one.step == self.step:
                scheduler.add(request, now=self.step)
            if one.abort_at == (self.step, False):
                scheduler.abort(request)
        scheduler.check_integrity()
        running = list(scheduler._running)
        outputs = [request.num_output for request in self.requests]
        plan = scheduler.schedule(now=self.step)
        self.check_plan(plan, running)
        self.plans.append(sorted(self.shown(plan)))
        self.books.apply(plan)  # raises if blocks are exceeded
        for one, request in zip(self.load.arrivals, self.requests, strict=True):
            if one.abort_at == (self.step, True):
                scheduler.abort(request)
        if self.step in self.load.failing_steps:
            scheduler.discard(plan)
            plan = None
        else:
            for piece in plan.pieces:
                assert piece.draws == (piece.start + piece.length == piece.request.num_known)
            scheduler.commit(plan)
        to_collect = self.uncollected if self.load.overlap else plan
        self.uncollected = plan
        if to_collect is not None:
            collect(scheduler, to_collect)
        scheduler.check_integrity()
        held = sum(blocks_at_position(request.num_processed) for request in scheduler._running)
        assert held + self.books.num_free_blocks == self.load.num_blocks, "blocks are conserved"
        assert all(new >= old for new, old in zip([s.num_output for s in self.requests], outputs, strict=True))
        self.step += 1

    def shown(self, plan):
        """What it feeds of which request, and whom it stops."""
        for piece in plan.pieces:
            yield self.requests.index(piece.request), piece.slot, piece.start, piece.length, piece.draws
        for name, requests in (("preempted", plan.preempted), ("failed", plan.failed)):
            yield from ((self.requests.index(request), -1, -1, -1, name) for request in requests)

    def check_plan(self, plan, running):
        scheduler, fed = self.scheduler, [piece.request for piece in plan.pieces]
        assert plan.num_tokens <= self.load.max_batched_tokens
        assert len(set(fed)) == len(fed) <= self.load.num_slots
        assert all(piece.length >= 1 for piece in plan.pieces)
        is_decode = [request.num_pending == 1 for request in fed]
        assert is_decode == sorted(is_decode, reverse=True), "decoding requests come first"
        if scheduler.has_work and scheduler._running:
            leader = scheduler._running[0]
            is_spent = plan.num_tokens == self.load.max_batched_tokens
            is_ending = leader.num_unread and not leader.num_pending
            assert leader in fed or is_spent or is_ending, "the best-ranked request moves while there are tokens"
        is_known = self.uncollected is None or not self.uncollected.pieces or not self.load.overlap
        assert plan.pieces or not scheduler.has_work or not is_known, "with the cache its own, something can always run"
        admitted = [request for request in fed if request not in running]
        for request in admitted:
            assert all(request.order < other.order for other in scheduler._waiting), "nobody is admitted past another"
        self.first_fed += sorted((s for s in admitted if s.num_read == 0 == s.num_preemptions), key=lambda s: s.order)
        for victim in plan.preempted:
            assert any(request.order < victim.order for request in fed), "only for someone ahead of it"
            assert victim not in fed


@settings(max_examples=200, deadline=None)
@given(loads())
def test_any_load_ends_within_bounds(load):
    Run(load).finish()


@settings(max_examples=40, deadline=None)
@given(loads(with_endings=False))
def test_everyone_finishes_when_nobody_interferes(load):
    run = Run(load)
    run.finish()
    assert all(request.finish_reason == "length" for request in run.requests)
    assert run.scheduler.num_preemptions == sum(request.num_preemptions for request in run.requests)
    assert run.scheduler.num_prompt_tokens == sum(one.prompt_len for one in load.arrivals)


@settings(max_examples=40, deadline=None)
@given(loads(with_endings=False, with_priorities=False))
def test_first_come_first_served_inside_a_priority(load):
    run = Run(load)
    run.finish()
    assert run.first_fed == sorted(run.requests, key=lambda request: request.order)


@settings(max_examples=80, deadline=None)
@given(loads(with_endings=False), st.integers(10, 60))
def test_with_blocks_to_spare_a_lower_priority_never_holds_a_slot_a_higher_one_waits_for(load, more):
    """Slots are the only thing to fight about, and tokens are left over."""
    arrivals = tuple(
        Arrival(one.step, min(one.prompt_len, 50), one.max_tokens, one.priority, None, None) for one in load.arrivals
    )
    run = Run(Load(load.num_slots, more, 1000, load.aging_steps, arrivals, frozenset()))
    while run.scheduler.has_work or run.step <= run.last_arrival:
        run.run_step()
        # who finished in this step has left a slot that nobody has taken yet
        for waiting in run.scheduler._waiting[:1] if run.books.num_free_slots == 0 else ():
            for running in run.scheduler._running:
                assert running.order < waiting.order or running.params.priority >= waiting.params.priority
    run.finish()


@settings(max_examples=100, deadline=None)
@given(loads())
def test_rows_change_no_plan(load):
    with_rows, one_by_one = Run(load), Run(replace(load, has_rows=False))
    with_rows.finish()
    one_by_one.finish()
    assert with_rows.plans == one_by_one.plans
    assert [one.token_ids for one in with_rows.requests] == [one.token_ids for one in one_by_one.requests]
    assert len(with_rows.scheduler.rows) == 0


class _Greedy(Scheduler):
    """Does not count the tokens of running requests."""

    def _feed(self, draft, request):
        before = draft.num_tokens
        super()._feed(draft, request)
        draft.num_tokens = before


class _Leaky(Scheduler):
    """Forgets the blocks of who leaves."""

    def _give_back(self, request, *, keep=True):
        self._running.remove(request)
        request.slot = None


class _Polite(Scheduler):
    """Never preempts: two prompts that fill the cache together would wait for each other."""

    def _behind(self, rank):
        return []


class _Unfair(Scheduler):
    """Admits the last in line first."""

    def _admit(self, draft):
        self._waiting.reverse()
        super()._admit(draft)
        self._waiting.sort(key=lambda request: request.order)


@pytest.mark.parametrize("mistake", [_Greedy, _Leaky, _Polite, _Unfair])
def test_the_checks_notice_a_mistake(mistake):
    """Four requests that start in one block each of four, and grow to three."""
    arrivals = tuple(Arrival(0, 120, 200, 0, None, None) for _ in range(4))
    load = Load(4, 4, 100, 5, arrivals, frozenset())
    Run(load).finish()
    with pytest.raises((AssertionError, CacheError, OutOfBlocks)):
        Run(load, mistake).finish()
