"""`RankScheduler`: which requests run next, on which rank. Pure Python, no torch.

Every rank has a `Scheduler` of its own over the books of its cache, with its own budgets of tokens and blocks: requests
that live on it decode, prefill and preempt one another as on one rank. New requests wait together, in one order; the
first of them is placed as soon as a rank has room for it, and stays there. Nobody is placed past the first.

It goes to the rank that has the longest prefix of its tokens, unless that rank runs too many requests already: one more
than the emptiest rank has costs as much as reading `IMBALANCE_TOKENS` tokens again. Where no prefix decides, it goes to
the rank with most room. One that finds no room, but whose priority may displace somebody, goes to the rank whose last
request is the one to be displaced.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cache.errors import RequestNeverFits, require_integrity
from dsv4.cache.ledger import CacheLedger
from dsv4.cache.prefix.cache import Match
from dsv4.cache.schema import blocks_at_position
from dsv4.config import BLOCK_TOKENS
from dsv4.engine.request import Request, expire
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.schedule.plan_builder import starts_block
from dsv4.engine.schedule.scheduler import Scheduler

IMBALANCE_TOKENS = BLOCK_TOKENS


class StepSize(NamedTuple):
    """Of the calls of a step, which are the same on every rank.

    num_rows      of the forward call, padding included
    num_requests  the drafter runs for, padding included; less than draw here: as many as do
    num_drafts    it is asked for behind each of them; 0 asks for none
    """

    num_rows: int
    num_requests: int = 0
    num_drafts: int = 0


@dataclass(frozen=True)
class RanksPlan(StepPlan):
    """One forward call of every rank: `shares[rank]` is its own part of it, perhaps empty."""

    shares: tuple[StepPlan, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows every rank runs: the tokens of the busiest one."""
        return max(share.num_tokens for share in self.shares)

    @property
    def num_requests(self) -> int:
        """Requests every rank's drafter runs for: those that draw on the rank that has most of them."""
        return max(sum(piece.draws for piece in share.pieces) for share in self.shares)


class _Waiting(NamedTuple):
    rank: tuple[int, int]
    submitted: float
    request: Request


@dataclass
class _Room:
    """What a rank could still take in, while a plan is made, and the requests it runs."""

    num_slots: int
    num_blocks: int
    num_tokens: int
    num_running: int


class RankScheduler:
    """As `Scheduler`, over several caches. `max_batched_tokens` is of one rank's part of a call."""

    def __init__(self, books: Sequence[CacheLedger], *, max_batched_tokens: int, aging_steps: int = 1024) -> None:
        self.books = tuple(books)
        budgets = {"max_batched_tokens": max_batched_tokens, "aging_steps": aging_steps}
        self.shares = tuple(Scheduler(one, num_blocks=one.schema.num_blocks, **budgets) for one in books)
        self.max_batched_tokens = max_batched_tokens
        self._aging_steps = aging_steps
        self._queue: list[_Waiting] = []  # by rank
        self._homes: dict[Request, int] = {}
        self._plan: RanksPlan | None = None
        self.num_steps = self._num_added = 0
        self._num_aborted = self._num_failed = 0  # of those that were never placed

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + sum(share.num_waiting for share in self.shares)

    @property
    def num_running(self) -> int:
        return sum(share.num_running for share in self.shares)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot, rank by rank."""
        return tuple(request for share in self.shares for request in share.running)

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or any(share.has_work for share in self.shares)

    @property
    def num_prompt_tokens(self) -> int:
        return self._total("num_prompt_tokens")

    @property
    def num_recomputed_tokens(self) -> int:
        return self._total("num_recomputed_tokens")

    @property
    def num_preemptions(self) -> int:
        return self._total("num_preemptions")

    @property
    def num_finished(self) -> int:
        return self._total("num_finished")

    @property
    def num_aborted(self) -> int:
        return self._total("num_aborted") + self._num_aborted

    @property
    def num_failed(self) -> int:
        return self._total("num_failed") + self._num_failed

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queue a new request. `now` is the clock its deadline is counted from."""
        if request.order is not None or request.is_done or any(one.request is request for one in self._queue):
            raise ValueError("the request was queued before; make a new one")
        needed, most = blocks_at_position(request.max_len), max(one.schema.num_blocks for one in self.books)
        if needed > most:
            raise RequestNeverFits(
                f"a request of {request.max_len} tokens needs {needed} blocks, the whole cache of a rank has {most}"
            )
        if request.params.prompt_logprobs is None:
            request.chain = self.books[0].chain(request.token_ids, request.params.cache_salt)
        rank = (self.num_steps - request.params.priority * self._aging_steps, self._num_added)
        self._num_added += 1
        insort(self._queue, _Waiting(rank, now, request), key=lambda one: one.rank)

    def schedule(self, now: float = 0.0) -> RanksPlan:
        """The next step, to be followed by `commit` or `discard`. Without pieces when nothing can run now."""
        assert self._plan is None, "the last plan is neither committed nor discarded"
        late = self._expire(now)
        self._place()
        shares = tuple(share.schedule(now) for share in self.shares)
        pieces = tuple(piece for share in shares for piece in share.pieces)
        preempted = tuple(request for share in shares for request in share.preempted)
        failed = (*late, *(request for share in shares for request in share.failed))
        is_waiting = any(share.is_waiting for share in shares)
        self._plan = RanksPlan(pieces, preempted, failed=failed, is_waiting=is_waiting, shares=shares)
        return self._plan

    def commit(self, plan: StepPlan) -> None:
        """The plan's forward call is launched on every rank."""
        for share, part in zip(self.shares, self._end(plan).shares, strict=True):
            share.commit(part)
        self.num_steps += bool(plan)
        self._forget()

    def keep(self, piece: Piece, num_accepted: int) -> None:
        """So many of the piece's drafts came true."""
        if piece.request in self._homes:
            self.shares[self._homes[piece.request]].keep(piece, num_accepted)

    def settle(self, request: Request) -> None:
        """What the request drew is known. If that was its end, or it failed, it leaves."""
        if request in self._homes:
            self.shares[self._homes[request]].settle(request)
            if request.is_done:
                del self._homes[request]

    def discard(self, plan: StepPlan) -> None:
        """The plan's forward call failed: its requests are aborted."""
        for share, part in zip(self.shares, self._end(plan).shares, strict=True):
            share.discard(part)
        self._forget()

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds, at any moment. One that has left, or never came, is left as it is."""
        if request in self._homes:
            self.shares[self._homes.pop(request)].abort(request)
            return
        for place, one in enumerate(self._queue):
            if one.request is request:
                del self._queue[place]
                request.is_aborted = True
                self._num_aborted += 1
                return

    def check_integrity(self) -> None:
        """Recompute the truth of every rank's scheduler and of what waits here. Between two steps."""
        require_integrity(self._plan is None, "a plan is under way")
        for share in self.shares:
            share.check_integrity()
        ranks = [one.rank for one in self._queue]
        require_integrity(ranks == sorted(set(ranks)), "the waiting requests are out of order")
        here = sum(share.num_waiting + share.num_running for share in self.shares)
        require_integrity(len(self._homes) == here, f"{len(self._homes)} requests have a home, {here} are there")
        ended = self.num_finished + self.num_aborted + self.num_failed
        require_integrity(
            self._num_added == ended + here + len(self._queue),
            f"{self._num_added} came, {ended} left, {here + len(self._queue)} are here",
        )

    # ---- placing ----

    def _place(self) -> None:
        rooms = [self._room(rank) for rank in range(len(self.shares))]
        while self._queue:
            rank, submitted, request = self._queue[0]
            home = self._best_home(rooms, request)
            if home is not None:
                match, room = self.books[home].match(request.chain), rooms[home]
                room.num_slots -= 1
                room.num_running += 1
                room.num_blocks -= self._blocks_to_start(request, match)
                room.num_tokens -= request.num_pending - match.position
            else:
                home = self._with_last_victim(rank, request)
                if home is None:
                    return
            del self._queue[0]
            self._homes[request] = home
            self.shares[home].add(request, submitted, rank)

    def _room(self, rank: int) -> _Room:
        """None where requests of its own wait already: they are ahead."""
        share, books = self.shares[rank], self.books[rank]
        if share.num_waiting:
            return _Room(0, 0, 0, share.num_running)
        growing = sum(starts_block(request.num_processed) for request in share.running)
        pending = sum(request.num_pending for request in share.running)
        num_blocks, num_tokens = books.num_free_blocks - growing, self.max_batched_tokens - pending
        return _Room(books.num_free_slots, num_blocks, num_tokens, share.num_running)

    def _blocks_to_start(self, request: Request, match: Match) -> int:
        """Of its first chunk. What it takes over from running requests costs nothing."""
        return blocks_at_position(min(request.num_pending, match.position + self.max_batched_tokens)) - match.num_busy

    def _best_home(self, rooms: list[_Room], request: Request) -> int | None:
        """The rank to live on; None if none has room."""
        open_ranks = [rank for rank, room in enumerate(rooms) if room.num_slots > 0 and room.num_tokens > 0]
        matches = {rank: self.books[rank].match(request.chain) for rank in open_ranks}
        fitting = [
            rank for rank in open_ranks if rooms[rank].num_blocks >= self._blocks_to_start(request, matches[rank])
        ]
        if not fitting:
            return None
        fewest = min(rooms[rank].num_running for rank in fitting)

        def worth(rank: int) -> tuple[int, int, int, int]:
            match = matches[rank]
            saved = max(match.position, match.loading) - IMBALANCE_TOKENS * (rooms[rank].num_running - fewest)
            return max(0, saved), rooms[rank].num_blocks, rooms[rank].num_slots, -rank

        return max(fitting, key=worth)

    def _with_last_victim(self, rank: tuple[int, int], request: Request) -> int | None:
        """Where the worst-ranked request runs that this one may displace."""
        found: tuple[tuple[int, int], int] | None = None
        for home, share in enumerate(self.shares):
            if share.num_waiting:
                continue
            for running in share.running:
                assert running.order is not None
                is_victim = running.params.priority < request.params.priority and running.order > rank
                if is_victim and (found is None or running.order > found[0]):
                    found = running.order, home
        return None if found is None else found[1]

    # ---- coming and going ----

    def _expire(self, now: float) -> list[Request]:
        late = [
            one
            for one in self._queue
            if one.request.params.deadline is not None and now >= one.submitted + one.request.params.deadline
        ]
        for one in late:
            self._queue.remove(one)
            one.request.error = expire(one.request)
            self._num_failed += 1
        return [one.request for one in late]

    def _end(self, plan: StepPlan) -> RanksPlan:
        assert plan is self._plan, "commit and discard take the plan that was made last"
        assert isinstance(plan, RanksPlan)
        self._plan = None
        return plan

    def _total(self, name: str) -> int:
        return sum(getattr(share, name) for share in self.shares)

    def _forget(self) -> None:
        self._homes = {request: home for request, home in self._homes.items() if not request.is_done}
