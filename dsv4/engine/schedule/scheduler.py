"""`Scheduler`: which requests run in the next forward call, and how many of their tokens. Pure Python, no torch.

One order decides everything: its place, fixed on arrival, is (arrival step - priority * aging_steps, ticket).
Smaller goes first. Inside a priority that is first come, first served; between priorities it is linear aging: a request
can be overtaken only by those of higher priority that arrive within `aging_steps` steps per level after it. Ranks never
change, so two requests cannot take turns at displacing each other.

`schedule` spends two budgets, tokens and cache blocks, in this order:

1. **Decode.** Every running request with one token left to feed gets it: those with a row (rows.py) all at once, where
   tokens and blocks suffice for all, as they nearly always do. Then drafts are added, up to half of the tokens that are
   left and only within blocks their requests already hold: drafts take no block from another request.
2. **Prefill and admission**, in order. Running requests with more to feed get chunks, as far as tokens and blocks
   reach. The best waiting request, and only that one, is admitted when a slot is free and the blocks of its first chunk
   are; then the next. No request overtakes it, or a running request that lacks blocks.

A running request that can have no block takes those of the worst-ranked request behind it, which is preempted: slot and
blocks are freed and it waits again, at its old place, with all its known tokens to feed. To come back it must find room
for all of them and one spare block for each request ahead of it, so that it is not at once displaced again. The
last-ranked request keeps what it holds and waits. The best-ranked request therefore always moves, and every request is
the best-ranked one sooner or later: none starves. A waiting request of strictly higher priority preempts likewise.

A plan is made before the tokens of the step before it are known: the next one of a request is counted
(`Request.num_unread`) and fed all the same. What it was, and whether it was the last, `settle` hears later. Drafts are
not counted before `keep` says which of them came true.

A request starts from the longest prefix the cache still has, one that was preempted too. The head of the queue waits
while a request ahead of it reads the same tokens, and takes them over: a prompt that many share is read once. Pieces
end where the cache wants a snapshot.

The cache's ledger (`CacheLedger`) is changed here and by `prepare_forward`, nowhere else.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from math import inf

from dsv4.cache.errors import RequestNeverFits, require_integrity
from dsv4.cache.ledger import CacheLedger
from dsv4.cache.prefix.cache import Match
from dsv4.cache.schema import blocks_at_position
from dsv4.config import BLOCK_TOKENS
from dsv4.engine.request import Request, expire
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.schedule.plan_builder import (
    PlanBuilder,
    blocks_held,
    by_pending,
    last_position,
    new_blocks,
    piece_of,
    starts_block,
)
from dsv4.engine.schedule.rows import DecodeRows, order_of, slot_of


class Scheduler:
    """`add` requests, then `schedule`, launch the plan, `commit` it, `settle` what it ended, until `has_work` is false.

    max_batched_tokens  of one forward call, all requests together
    aging_steps         steps of waiting that outweigh one level of priority
    num_rows            slots of requests that may have a row (rows.py); with 0 every request is planned one by one

    A request leaves when `settle` finds it done, by `abort`, or in `schedule` when it can never go on. Not for several
    threads at once.
    """

    def __init__(
        self, cache: CacheLedger, *, num_blocks: int, max_batched_tokens: int, aging_steps: int = 1024,
        num_rows: int = 0,
    ) -> None:  # fmt: skip
        for name, value in (("max_batched_tokens", max_batched_tokens), ("aging_steps", aging_steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        self._cache = cache
        self._num_blocks = num_blocks
        self.max_batched_tokens = max_batched_tokens
        self._aging_steps = aging_steps
        self._waiting: list[Request] = []  # by order
        self._running: list[Request] = []  # by order
        self._singles: list[Request] = []  # those of them without a row
        self.rows = DecodeRows(num_rows)
        self._num_of_priority: Counter[int] = Counter()  # running
        self._deadlines: dict[Request, float] = {}
        self._next_deadline = inf  # none is before
        self._plan: StepPlan | None = None
        self._num_added = 0
        self.num_steps = self.num_prompt_tokens = self.num_recomputed_tokens = 0
        self.num_preemptions = self.num_finished = self.num_aborted = self.num_failed = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot, the first in order first."""
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queue a new request. `now` is the clock its deadline is counted from, that of `schedule`."""
        if request.order is not None or request.is_done:
            raise ValueError("the request was queued before; make a new one")
        needed = blocks_at_position(request.max_len)
        if needed > self._num_blocks:
            raise RequestNeverFits(
                f"a request of {request.max_len} tokens needs {needed} blocks, the whole cache has {self._num_blocks}"
            )
        if request.chain is None:
            request.chain = request.chain_by(self._cache.chain)
        request.order = (self.num_steps - request.params.priority * self._aging_steps, self._num_added)
        self._num_added += 1
        insort(self._waiting, request, key=order_of)
        if request.params.deadline is not None:
            self._deadlines[request] = now + request.params.deadline
            self._next_deadline = min(self._next_deadline, self._deadlines[request])

    def schedule(self, now: float = 0.0) -> StepPlan:
        """The next step, to be followed by `commit` or `discard`. Without anything to run when nothing can run now."""
        assert self._plan is None, "the last plan is neither committed nor discarded"
        late = self._expire(now)
        draft = PlanBuilder(self.max_batched_tokens, self._cache.num_free_blocks, failed=late)
        prefilling = self._sort_out(draft)
        for request in draft.decoding:
            if draft.num_tokens and not starts_block(request.num_processed) and request.slot is not None:
                draft.num_tokens -= 1  # as `_feed` would, without its arithmetic: most of a full decode batch
                draft.lengths[request] = 1
            else:
                self._feed(draft, request)
        num_drafts = self._grant_drafts(draft, draft.decoding)
        for request in prefilling:
            self._admit(draft, ahead_of=order_of(request))
            self._feed(draft, request)
        self._admit(draft)
        if draft.fresh:
            self._cache.reset(draft.fresh)
        decodes = [
            piece_of(request, length, num_drafts.get(request, 0))
            for request in draft.decoding
            if (length := draft.lengths.pop(request, 0))
        ]
        others = sorted(draft.lengths, key=lambda request: (request.num_pending > 1, order_of(request)))
        prefills = [piece_of(request, draft.lengths[request]) for request in others]
        self._plan = StepPlan(
            (*decodes, *prefills), tuple(draft.preempted), draft.rows, tuple(draft.failed), draft.is_waiting
        )
        return self._plan

    def _sort_out(self, draft: PlanBuilder) -> list[Request]:
        """Who decodes; returns the running requests with more to feed. Rows are fed as one if tokens and blocks are
        enough for all that decode: otherwise it is decided request by request, in order, who goes without."""
        rows = self.rows.to_feed()
        decoding, prefilling = by_pending(self._singles)
        num_new_blocks = rows.num_new_blocks + sum(starts_block(request.num_processed) for request in decoding)
        if len(rows) + len(decoding) <= draft.num_tokens and num_new_blocks <= draft.num_blocks:
            draft.take_rows(rows)
        elif rows:
            decoding, prefilling = by_pending(self._running)
        draft.decoding = decoding
        return prefilling

    def commit(self, plan: StepPlan) -> None:
        """The plan's forward call is launched: whatever is launched after it finds its tokens in the cache."""
        assert plan is self._plan, "commit takes the plan that was made last"
        self._plan = None
        self.num_steps += bool(plan)
        for slot in self.rows.launched(plan.rows):
            self._cache.launched(slot)
        for piece in plan.others:
            request, end = piece.request, piece.end
            if request.slot is None:
                continue  # aborted meanwhile
            if piece.start < request.prompt_len or piece.start < request.num_read:
                self.num_prompt_tokens += max(0, min(end, request.prompt_len) - max(piece.start, request.num_read))
                self.num_recomputed_tokens += max(0, min(end, request.num_read) - piece.start)
            request.num_processed = end
            request.num_unread += piece.draws
            if end > request.num_read:
                request.num_read = end
            if not piece.num_drafts and end // BLOCK_TOKENS > piece.start // BLOCK_TOKENS:
                self._cache.launched(piece.slot)
            if piece.draws and self.rows.has_room and request.rows is None:
                self._give_row(request)

    def _give_row(self, request: Request) -> None:
        """A request that decodes is a row from now on, if nothing about it is done one by one."""
        if request.num_pending and request.can_have_row:
            self.rows.add(request)
            del self._singles[bisect_left(self._singles, order_of(request), key=order_of)]

    def keep(self, piece: Piece, num_accepted: int) -> None:
        """Keep the accepted drafts of a piece; the ledger treats the others as never fed."""
        request = piece.request
        if not piece.num_drafts or not self._is_here(request) or request.slot is None:
            return
        # of a request that ended at one of them, what follows is not known either
        end = min(piece.end + num_accepted, len(request.token_ids))
        request.num_processed = end
        request.num_read = max(request.num_read, end)
        self._cache.rewind(request.slot, end)
        if end // BLOCK_TOKENS > piece.start // BLOCK_TOKENS:
            self._cache.launched(request.slot)

    def settle(self, request: Request) -> None:
        """What the request drew is known. If that was its end, or it failed, it leaves."""
        if request.is_done and self._is_here(request):
            self._leave(request, keep=request.error is None)
            self.num_finished += request.finish_reason is not None and request.error is None
            self.num_failed += request.error is not None

    def discard(self, plan: StepPlan) -> None:
        """The plan's forward call failed: some layers may have moved on and others not, so its requests are aborted."""
        assert plan is self._plan, "discard takes the plan that was made last"
        self._plan = None
        for request in (*plan.rows.requests, *(piece.request for piece in plan.others)):
            self._abort(request, keep=False)

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds, at any moment. One that has left, or never came, is left as it is."""
        self._abort(request, keep=True)

    def _abort(self, request: Request, *, keep: bool) -> None:
        if self._is_here(request):
            self._leave(request, keep=keep)
            request.is_aborted = True
            self.num_aborted += 1

    def start_anew(self, *, clears: bool) -> None:
        """The cache knows no prefix any more. With `clears` running requests are preempted: all is computed again."""
        for request in self.running if clears else ():
            self._displace(request, keep=False)
        for request in (*self._waiting, *self._running):
            if request.chain is not None:
                request.chain = request.chain_by(self._cache.chain)

    def check_integrity(self) -> None:
        """Recompute the truth: order, slots, positions, blocks and counts. Between two steps."""
        require_integrity(self._plan is None, "a plan is under way")
        queues = {"waiting": self._waiting, "running": self._running, "single": self._singles}
        for name, queue in queues.items():
            orders = [order_of(request) for request in queue]
            require_integrity(orders == sorted(set(orders)), f"the {name} requests are out of order")
            require_integrity(not any(request.is_done for request in queue), f"a {name} request is done")
        for request in self._waiting:
            require_integrity(request.slot is None and request.num_processed == 0, "a waiting request holds a slot")
        slots = [slot_of(request) for request in self._running]
        require_integrity(len(set(slots)) == len(slots), f"running requests share slots: {slots}")
        for slot, request in zip(slots, self._running, strict=True):
            position, processed = self._cache.position(slot), request.num_processed
            require_integrity(position == processed, f"slot {slot} stands at {position}, its request at {processed}")
            is_moving = request.num_pending > 0 or request.num_unread > 0 or request.draws_nothing
            require_integrity(is_moving, f"the request in slot {slot} has nothing to feed")
        singles = [request for request in self._running if request.rows is None]
        require_integrity(singles == self._singles, "the requests without rows are others, or out of order")
        self.rows.check_integrity(self._running)
        priorities = Counter(request.params.priority for request in self._running)
        require_integrity(priorities == self._num_of_priority, f"running priorities are {priorities}")
        held, taken = self._cache.blocks_freed_by(slots), self._num_blocks - self._cache.num_free_blocks
        require_integrity(held <= taken, f"running requests hold {held} blocks, the cache says {taken}")
        earliest = min(self._deadlines.values(), default=inf)
        require_integrity(self._next_deadline <= earliest, "a deadline is earlier than the next one")
        require_integrity(
            set(self._deadlines) <= {*self._waiting, *self._running}, "the deadline of a request that has left is kept"
        )
        ended = self.num_finished + self.num_aborted + self.num_failed
        here = self.num_waiting + self.num_running
        require_integrity(self._num_added == ended + here, f"{self._num_added} came, {ended} left, {here} are here")

    # ---- the parts of a plan ----

    def _expire(self, now: float) -> list[Request]:
        """Those whose deadline has passed: they fail."""
        if now < self._next_deadline:
            return []
        late = [request for request, deadline in self._deadlines.items() if now >= deadline]
        for request in late:
            self._fail(request, expire(request))
        self._next_deadline = min(self._deadlines.values(), default=inf)
        return late

    def _feed(self, draft: PlanBuilder, request: Request) -> None:
        """Give a running request its next piece, as long as the budgets allow, preempting only if it could not move."""
        if draft.num_tokens == 0 or request.slot is None:  # or preempted by one before it
            return
        length = self._fitting(request, draft)
        if length == 0:
            for victim in self._fewest(draft, self._behind(order_of(request)), num_blocks=1):
                self._preempt(draft, victim)
            length = self._fitting(request, draft)
        if length:
            draft.grant(request, length)
        elif request is self._running[0]:
            held, freed = blocks_held(request), self._freed(draft, [request])
            self._fail(
                request,
                f"no cache block is free for token {request.num_processed}: the request holds {held} of "
                f"{self._num_blocks}, and no other request of this engine holds any",
            )
            draft.failed.append(request)
            draft.num_blocks += freed
        elif draft.first_short is None or order_of(request) < draft.first_short:
            draft.first_short = order_of(request)

    def _grant_drafts(self, draft: PlanBuilder, decoding: list[Request]) -> dict[Request, int]:
        """How many drafts each request that decodes is fed besides its token."""
        granted: dict[Request, int] = {}
        room = draft.num_tokens // 2  # the other half is for prompts
        for request in decoding:
            if not request.drafts or request not in draft.lengths:
                continue
            start = request.num_processed + 1
            held = last_position(blocks_at_position(start))
            stop = self._cache.next_stop(slot_of(request))
            # a step draws one token more than it has drafts
            count = min(len(request.drafts), room, min(held, stop) - start, request.max_len - start - 1)
            if count > 0:
                granted[request] = count
                draft.lengths[request] += count
                draft.num_tokens -= count
                room -= count
        return granted

    def _admit(self, draft: PlanBuilder, ahead_of: tuple[int, int] | None = None) -> None:
        while self._waiting and draft.num_tokens:
            head = self._waiting[0]
            if ahead_of is not None and order_of(head) > ahead_of:
                return
            if draft.first_short is not None and order_of(head) > draft.first_short:
                return
            if head.num_unread:
                return  # preempted a moment ago: what it drew last must be known before it is fed again
            match = self._cache.match(head.chain)
            if match.is_loading or self._is_led(head, match):
                draft.is_waiting = match.is_loading
                return
            victims = self._victims(draft, head, match)
            if victims is None:
                return
            for victim in victims:
                self._preempt(draft, victim)
            if victims:  # what they held may be gone, or be kept now
                match = self._cache.match(head.chain)
            num_free = self._cache.num_free_blocks
            head.slot = self._cache.admit(head.max_len, head.chain, match, resets=False)
            draft.num_blocks -= num_free - self._cache.num_free_blocks
            head.num_processed = self._cache.position(head.slot)
            draft.fresh += [] if head.num_processed else [head.slot]
            head.admitted()
            del self._waiting[0]  # still the head: victims are behind it
            insort(self._running, head, key=order_of)
            insort(self._singles, head, key=order_of)
            self._num_of_priority[head.params.priority] += 1
            draft.grant(head, self._fitting(head, draft))

    def _is_led(self, head: Request, match: Match) -> bool:
        """Whether a running request ahead of the head of the queue is about to read what it could take over."""
        if not match.leaders:
            return False
        ahead = self._running[: bisect_left(self._running, order_of(head), key=order_of)]
        leader = next((slot_of(request) for request in ahead if request.slot in match.leaders), None)
        if leader is not None:
            self._cache.stop_at(leader, match.expected)
        return leader is not None

    def _victims(self, draft: PlanBuilder, head: Request, match: Match) -> list[Request] | None:
        """Requests to preempt so that a waiting one can start: [] if there is room, None if it cannot start."""
        needed = self._blocks_to_start(head, match) - draft.num_blocks
        num_slots = self._cache.num_free_slots
        if num_slots and needed <= 0:
            return []
        lower: list[Request] = []
        if min(self._num_of_priority, default=inf) < head.params.priority:
            lower = [one for one in self._behind(order_of(head)) if one.params.priority < head.params.priority]
        victims = self._fewest(draft, lower, num_blocks=needed)
        if not num_slots and not victims:
            victims = lower[:1]
        return victims if (num_slots or victims) and needed <= self._freed(draft, victims) else None

    def _fewest(self, draft: PlanBuilder, candidates: list[Request], *, num_blocks: int) -> list[Request]:
        """The first candidates that together free `num_blocks` blocks, or all of them if that is too few. Candidates
        that free nothing are left out. A shared block is free once all its requests are gone."""
        chosen: list[Request] = []
        for candidate in candidates:
            if self._freed(draft, chosen) >= num_blocks:
                break
            chosen.append(candidate)
        freed = self._freed(draft, chosen)
        for candidate in tuple(chosen):
            others = [one for one in chosen if one is not candidate]
            if self._freed(draft, others) == freed:
                chosen = others
        return chosen

    def _freed(self, draft: PlanBuilder, requests: list[Request]) -> int:
        """Blocks that preempting running requests would free: those they alone hold, and those promised to them."""
        if not requests:
            return 0
        draft.spread_rows()
        promised = sum(new_blocks(request, draft.lengths.get(request, 0)) for request in requests)
        return promised + self._cache.blocks_freed_by([slot_of(request) for request in requests])

    def _blocks_to_start(self, request: Request, match: Match) -> int:
        """A new request: its first chunk. One that was preempted: all it knows and the next token, and a spare block
        for each request ahead of it. What it takes over from running requests costs nothing."""
        if request.num_preemptions == 0:
            end = min(request.num_pending, match.position + self.max_batched_tokens)
            return blocks_at_position(end) - match.num_busy
        ahead = bisect_left(self._running, order_of(request), key=order_of)
        return blocks_at_position(request.num_pending + 1) + ahead - match.num_busy

    def _fitting(self, request: Request, draft: PlanBuilder) -> int:
        """Tokens of the request that what is left of the budgets allows; 0 when it lacks a block."""
        room = last_position(blocks_held(request) + draft.num_blocks) - request.num_processed
        stop = self._cache.next_stop(slot_of(request)) - request.num_processed
        return min(request.num_pending, draft.num_tokens, room, stop)

    def _behind(self, order: tuple[int, int]) -> list[Request]:
        """Running requests of later order, the worst first."""
        return self._running[bisect_right(self._running, order, key=order_of) :][::-1]

    def _preempt(self, draft: PlanBuilder, request: Request) -> None:
        draft.num_blocks += self._freed(draft, [request])
        draft.num_tokens += draft.lengths.pop(request, 0)
        draft.preempted.append(request)
        draft.fresh = [slot for slot in draft.fresh if slot != request.slot]
        self._displace(request)

    def _displace(self, request: Request, *, keep: bool = True) -> None:
        self._give_back(request, keep=keep)
        request.num_processed = 0
        request.drafts = ()
        insort(self._waiting, request, key=order_of)
        request.num_preemptions += 1
        self.num_preemptions += 1

    # ---- coming and going ----

    def _is_here(self, request: Request) -> bool:
        if request.order is None:
            return False
        queue = self._waiting if request.slot is None else self._running
        place = bisect_left(queue, request.order, key=order_of)
        return place < len(queue) and queue[place] is request

    def _leave(self, request: Request, *, keep: bool = True) -> None:
        self._deadlines.pop(request, None)
        if request.slot is None:
            del self._waiting[bisect_left(self._waiting, order_of(request), key=order_of)]
        else:
            self._give_back(request, keep=keep)

    def _give_back(self, request: Request, *, keep: bool = True) -> None:
        """Free the slot and the blocks of a running request, and `keep` its prefix for others, or for itself."""
        self._cache.release(slot_of(request), keep=keep)
        del self._running[bisect_left(self._running, order_of(request), key=order_of)]
        if request.rows is None:
            del self._singles[bisect_left(self._singles, order_of(request), key=order_of)]
        else:
            self.rows.remove(request)
        self._num_of_priority[request.params.priority] -= 1
        self._num_of_priority += Counter()  # drops counts of 0
        request.slot = None

    def _fail(self, request: Request, reason: str) -> None:
        self._leave(request)
        request.error = reason
        self.num_failed += 1
