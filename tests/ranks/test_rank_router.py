"""Placing requests on ranks, under random loads: everybody ends, nobody is given away past the first."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import SMALL, prompt_of

from dsv4.cache.ledger import CacheLedger
from dsv4.cache.prefix.watch import PrefixWatch
from dsv4.cache.schema import build_cache_schema
from dsv4.config import EngineConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.shares import expert_range, rank_limits
from dsv4.engine.ranks import router as router_module
from dsv4.engine.ranks.own import OwnRank
from dsv4.engine.ranks.router import Room, Router
from dsv4.engine.request import Request
from dsv4.engine.schedule.scheduler import Scheduler
from dsv4.request import SamplingParams

PREFIX_BYTES = 64 * 2**20


def sequence_of(prompt, max_tokens, **params):
    """`prompt`: token ids, or how many of them."""
    token_ids = [1] * prompt if isinstance(prompt, int) else prompt
    asked = SamplingParams(max_tokens=max_tokens, **params)
    return Request.start(token_ids, asked, max_context_tokens=4096, eos_token_id=0)


class NoCopies:
    def save(self, slot, position, snapshot): ...

    def restore(self, slot, position, snapshot): ...


def books_of(num_slots, num_blocks, prefix_cache_bytes=0, **more):
    limits = EngineConfig(
        max_context_tokens=1024, max_concurrent_requests=num_slots, num_blocks=num_blocks,
        prefix_cache_bytes=prefix_cache_bytes, **more,
    )  # fmt: skip
    schema = build_cache_schema(SMALL, build_schedule(SMALL, with_mtp=False), limits, plain_itemsize=None)
    return CacheLedger(schema, limits, NoCopies())


class SchedulerRank(OwnRank):
    """A scheduler over books without a cache; every request that may draws token 3."""

    def __init__(self, num_slots, num_blocks, prefix_cache_bytes=0, budget=64):
        self.books = books_of(num_slots, num_blocks, prefix_cache_bytes)
        self.scheduler = Scheduler(self.books, num_blocks=num_blocks, max_batched_tokens=budget)
        self.requests = {}
        trees = [] if self.books.prefix is None else [self.books.prefix.tree]
        self.books.watch_prefixes = lambda: PrefixWatch(trees)
        gate = SimpleNamespace(held=())
        engine = SimpleNamespace(scheduler=self.scheduler, cache=self.books, gate=gate, stats=lambda: None)
        super().__init__(engine)

    @property
    def num_open(self):
        return len(self.requests)

    def room(self):
        self.hear()
        return super().room()

    def step(self, now):
        plan = self.scheduler.schedule(now)
        self.books.prepare_forward(*([piece[place] for piece in plan.pieces] for place in (1, 2, 3)))
        self.scheduler.commit(plan)
        for piece in plan.pieces:
            if piece.draws:
                piece.request.num_unread -= 1
                piece.request.append(3, None)
            self.scheduler.settle(piece.request)
        self.scheduler.check_integrity()
        self.books.check_integrity()
        self.requests = {request: None for request in self.requests if not request.is_done}
        return plan


class Ranks:
    def __init__(self, num_ranks, num_slots=2, num_blocks=4, prefix_cache_bytes=0, budget=64):
        self.ranks = [SchedulerRank(num_slots, num_blocks, prefix_cache_bytes, budget) for _ in range(num_ranks)]
        self.router, self.homes, self.num_expired = Router(budget), {}, 0

    def add(self, request, now=0.0, step=0):
        request.chain = request.chain_by(self.ranks[0].books.chain)
        self.router.add(request, now, step)

    def give(self):
        rooms = [one.room() for one in self.ranks]
        while (given := self.router.give(rooms)) is not None:
            waiting, home, *_ = given
            self.homes[waiting.request] = home
            self.ranks[home].requests[waiting.request] = None
            self.ranks[home].scheduler.add(waiting.request, waiting.since)

    def abort(self, request):
        if self.router.remove(request):
            request.is_aborted = True
        elif request in self.homes:
            self.ranks[self.homes[request]].scheduler.abort(request)

    def step(self, now=0.0):
        self.num_expired += len(self.router.expire(now))
        self.give()
        return [one.step(now) for one in self.ranks]

    @property
    def has_work(self):
        return bool(len(self.router)) or any(one.scheduler.has_work for one in self.ranks)

    def run(self, *requests):
        """Together; where each of them lived."""
        for request in requests:
            self.add(request)
        while self.has_work:
            self.step()
        return [self.homes[request] for request in requests]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12), st.one_of(st.integers(1, 12), st.integers(110, 140)), st.integers(1, 30),
        st.integers(-1, 1), st.one_of(st.none(), st.integers(5, 60)), st.one_of(st.none(), st.integers(0, 20)),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.sampled_from([1, 5, 64, 1000]), ARRIVALS)
def test_everyone_ends_and_every_book_balances(num_ranks, num_slots, num_blocks, budget, arrivals):
    ranks = Ranks(num_ranks, num_slots, num_blocks, budget=budget)
    requests = [
        sequence_of(prompt_len, max_tokens, priority=priority, deadline=deadline)
        for _, prompt_len, max_tokens, priority, deadline, _ in arrivals
    ]
    total = sum(len(one.token_ids) + one.params.max_tokens for one in requests)
    for step in range(20 + 3 * total):
        for request, (arrival, *_, abort) in zip(requests, arrivals, strict=True):
            if arrival == step:
                ranks.add(request, float(step), step)
            if abort == step:
                ranks.abort(request)
        ranks.step(float(step))
        if step > 20 and not ranks.has_work:
            break
    assert not ranks.has_work
    assert all(request.is_done for request in requests)
    for one in ranks.ranks:
        assert (one.books.num_free_slots, one.books.num_free_blocks) == (num_slots, num_blocks)


def test_the_rank_with_most_room_and_nobody_past_the_first():
    ranks = Ranks(3, num_slots=2, num_blocks=3)
    for length in (130, 5, 5, 5, 5):
        ranks.add(sequence_of(length, 4))
    ranks.give()
    assert [len(one.requests) for one in ranks.ranks] == [1, 2, 2], "rank 0 has less room already"
    scarce = Ranks(2, num_blocks=2, budget=1000)
    running, large, small = [sequence_of(5, 3), sequence_of(5, 3)], sequence_of(200, 4), sequence_of(3, 4)
    for request in (*running, large, small):
        scarce.add(request)
    scarce.step()
    assert [scarce.homes.get(request) for request in (*running, large, small)] == [0, 1, None, None]
    while not running[0].is_done:
        assert small not in scarce.homes, "it would fit, but the one before it does not"
        scarce.step()
    scarce.step()
    assert scarce.homes[large] != scarce.homes[small]
    crowded = Ranks(2, num_slots=1)
    for _ in range(4):
        crowded.add(sequence_of(3, 2))
    assert [len(plan.pieces) for plan in crowded.step()] == [1, 1]
    assert len(crowded.router) == 2


def test_a_higher_priority_takes_the_slot_of_the_latest():
    ranks = Ranks(2, num_slots=1)
    first, second = sequence_of(3, 20), sequence_of(3, 20)
    ranks.add(first)
    ranks.add(second)
    ranks.step()
    urgent = sequence_of(3, 2, priority=1)
    ranks.add(urgent)
    plans = ranks.step()
    assert [plan.preempted for plan in plans] == [(), (second,)]
    assert ranks.homes[urgent] == ranks.homes[second]
    ranks.step()
    assert urgent.is_done
    ranks.step()
    assert second.slot is not None, "back on its rank, with all it knows"


def test_who_can_be_displaced_is_found_at_once():
    """However many run on however many ranks: the router looks at the last of each lower priority."""
    ranks = Ranks(2, num_slots=300, num_blocks=300)
    for _ in range(600):
        ranks.add(sequence_of(3, 20))
    ranks.give()
    ranks.add(sequence_of(3, 2, priority=1))
    looked_at = []

    class Looked(list):
        def __reversed__(self):
            for one in super().__reversed__():
                looked_at.append(one)
                yield one

    by_priority = ranks.router._by_priority
    assert {priority: len(given) for priority, given in by_priority.items()} == {0: 600}
    by_priority[0] = Looked(by_priority[0])
    rooms = [Room(0, 0, 0, 300) for _ in range(2)]
    _, home, *_ = ranks.router.give(rooms)
    assert looked_at == [(max(order for order, _ in by_priority[0]), home)]


def test_a_deadline_in_the_queue():
    ranks = Ranks(2, num_slots=1)
    late = sequence_of(3, 5, deadline=4.0)
    for request in (sequence_of(3, 20), sequence_of(3, 20), late):
        ranks.add(request, now=1.0)
    ranks.step(4.9)
    assert not late.is_done
    ranks.step(5.0)
    assert late.error == "the deadline of 4 s passed with 0 of at most 5 tokens written"


def test_a_conversation_stays_on_its_rank():
    ranks = Ranks(3, 40, 200, PREFIX_BYTES, 4096)
    talks = [sequence_of(prompt_of(300, seed), 4) for seed in range(3)]
    homes = ranks.run(*talks)
    assert sorted(homes) == [0, 1, 2]
    for order in ([2, 0, 1], [1, 2, 0]):
        again = [sequence_of([*talks[i].token_ids, 5, 6], 4) for i in order]
        assert ranks.run(*again) == [homes[i] for i in order]
        assert all(request.num_cached_tokens == 256 for request in again)


def test_a_prefix_that_many_share_does_not_crowd_one_rank():
    """Up to as many requests more as the prefix is worth; then another rank reads it too, and has it from then on."""
    ranks = Ranks(2, 40, 200, PREFIX_BYTES, 4096)
    system = prompt_of(520, 1)
    (home,) = ranks.run(sequence_of(system, 2))
    many = [sequence_of(system + prompt_of(5, 2 + i), 3) for i in range(12)]
    homes = ranks.run(*many)
    worth = 512 // router_module.IMBALANCE_TOKENS
    assert homes[:worth] == [home] * worth
    assert abs(homes.count(0) - homes.count(1)) <= worth
    assert sum(request.num_cached_tokens == 0 for request in many) <= 2, "the other rank reads it once or twice"


def test_a_full_rank_is_not_waited_for():
    ranks = Ranks(2, 1, 200, PREFIX_BYTES, 4096)
    talk = sequence_of(prompt_of(300, 1), 4)
    (home,) = ranks.run(talk)
    blocker, again = sequence_of(talk.token_ids, 30), sequence_of([*talk.token_ids, 5], 4)
    assert ranks.run(blocker, again) == [home, 1 - home]
    assert (blocker.num_cached_tokens, again.num_cached_tokens) == (256, 0)


def test_experts_and_limits_are_divided():
    for num_experts in (1, 6, 7, 256):
        for num_ranks in range(1, min(num_experts, 9) + 1):
            ranges = [expert_range(num_experts, num_ranks, rank) for rank in range(num_ranks)]
            assert [expert for own in ranges for expert in own] == list(range(num_experts))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    limits = rank_limits(EngineConfig(max_concurrent_requests=9, num_blocks=5), 4)
    assert (limits.max_concurrent_requests, limits.num_blocks) == (3, 5)
