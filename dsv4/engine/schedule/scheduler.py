"""`Scheduler`: which requests run in the next forward call, and how many of their tokens. Pure Python, no torch.

One order decides everything: a request's rank, fixed on arrival, is (arrival step - priority * aging_steps, ticket).
Smaller goes first. Inside a priority that is first come, first served; between priorities it is linear aging: a request
can be overtaken only by those of higher priority that arrive within `aging_steps` steps per level after it. Ranks never
change, so two requests cannot take turns at displacing each other.

`schedule` spends two budgets, tokens and cache blocks, in this order:

1. **Decode.** Every running request with one token left to feed gets it. Then those that have drafts get them too, as
   far as the blocks they hold reach, and half of the tokens that are left: drafts cost nobody a block.
2. **Prefill and admission**, in rank order. Running requests with more to feed get chunks, as far as tokens and blocks
   reach. The best waiting request, and only that one, is admitted when a slot is free and the blocks of its first chunk
   are; then the next. Nobody is admitted past it, or past a running request that lacks blocks.

A running request that can have no block takes those of the worst-ranked request behind it, which is preempted: slot and
blocks are freed and it waits again, at its old rank, with all its known tokens to feed. To come back it must find room
for all of them and one spare block for each request ahead of it, so that it is not at once displaced again. With nobody
behind it a request keeps what it holds and waits. The best-ranked request therefore always moves, and every request is
the best-ranked one sooner or later: nobody starves. A waiting request of strictly higher priority preempts likewise.

A plan is made before the tokens of the step before it are known: the next one of a request is counted
(`Sequence.num_unread`) and fed all the same. What it was, and whether it was the last, `settle` hears later. Drafts are
not counted before `keep` says which of them came true.

A request starts from the longest prefix the cache still has, one that was preempted too. The head of the queue waits
while a request ahead of it reads the same tokens, and takes them over: a prompt that many share is read once. Pieces
end where the cache wants a snapshot.

The cache's books (`CacheBooks`) are changed here and by `prepare_forward`, nowhere else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from dsv4.cache.errors import RequestNeverFits, require_integrity
from dsv4.cache.prefix.cache import Match
from dsv4.cache.schema import blocks_at_position
from dsv4.config import BLOCK_TOKENS, CSA_RATIO
from dsv4.engine.request import Sequence
from dsv4.engine.schedule.plan import CacheBooks, Piece, StepPlan


@dataclass
class _Draft:
    """A plan being made: what is left of the budgets, and what each request gets."""

    num_tokens: int
    num_blocks: int
    lengths: dict[Sequence, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    first_short: tuple[int, int] | None = None  # best rank that lacked blocks


class Scheduler:
    """`add` requests, then `schedule`, launch the plan, `commit` it, `settle` what it ended, until `has_work` is false.

    max_batched_tokens  of one forward call, all requests together
    aging_steps         steps of waiting that outweigh one level of priority

    A request leaves when `settle` finds it done, by `abort`, or in `schedule` when it can never go on. Not for several
    threads at once.
    """

    def __init__(self, cache: CacheBooks, *, num_blocks: int, max_batched_tokens: int, aging_steps: int = 1024) -> None:
        for name, value in (("max_batched_tokens", max_batched_tokens), ("aging_steps", aging_steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        self._cache = cache
        self._num_blocks = num_blocks
        self.max_batched_tokens = max_batched_tokens
        self._aging_steps = aging_steps
        self._waiting: list[Sequence] = []  # by rank
        self._running: list[Sequence] = []  # by rank
        self._deadlines: dict[Sequence, float] = {}
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
    def running(self) -> tuple[Sequence, ...]:
        """Requests that hold a slot, the best rank first."""
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence, now: float = 0.0, rank: tuple[int, int] | None = None) -> None:
        """Queue a new request. `now` is the clock its deadline is counted from, the one `schedule` is told. `rank`: its
        place, where that was decided before."""
        if sequence.rank is not None or sequence.is_done:
            raise ValueError("the request was queued before; make a new one")
        needed = blocks_at_position(sequence.max_len)
        if needed > self._num_blocks:
            raise RequestNeverFits(
                f"a request of {sequence.max_len} tokens needs {needed} blocks, the whole cache has {self._num_blocks}"
            )
        if (
            sequence.chain is None and sequence.params.prompt_logprobs is None
        ):  # whose prompt is scored must read all of it
            sequence.chain = self._cache.chain(sequence.token_ids, sequence.params.cache_salt)
        sequence.rank = rank or (self.num_steps - sequence.params.priority * self._aging_steps, self._num_added)
        self._num_added += 1
        insort(self._waiting, sequence, key=_rank)
        if sequence.params.deadline is not None:
            self._deadlines[sequence] = now + sequence.params.deadline

    def schedule(self, now: float = 0.0) -> StepPlan:
        """The next step, to be followed by `commit` or `discard`. Without pieces when nothing can run now."""
        assert self._plan is None, "the last plan is neither committed nor discarded"
        self._expire(now)
        draft = _Draft(self.max_batched_tokens, self._cache.num_free_blocks)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            num_pending = sequence.num_pending
            if num_pending:
                (decoding if num_pending == 1 else prefilling).append(sequence)
        for sequence in decoding:
            if draft.num_tokens and not starts_block(sequence.num_processed) and sequence.slot is not None:
                draft.num_tokens -= 1  # as `_feed` would, without its arithmetic: most of a full decode batch
                draft.lengths[sequence] = 1
            else:
                self._feed(draft, sequence)
        num_drafts = self._grant_drafts(draft, decoding)
        for sequence in prefilling:
            self._admit(draft, ahead_of=_rank(sequence))
            self._feed(draft, sequence)
        self._admit(draft)
        decodes = [
            _piece(sequence, length, num_drafts.get(sequence, 0))
            for sequence in decoding
            if (length := draft.lengths.pop(sequence, 0))
        ]
        others = sorted(draft.lengths, key=lambda sequence: (sequence.num_pending > 1, _rank(sequence)))
        prefills = [_piece(sequence, draft.lengths[sequence]) for sequence in others]
        self._plan = StepPlan((*decodes, *prefills), tuple(draft.preempted))
        return self._plan

    def commit(self, plan: StepPlan) -> None:
        """The plan's forward call is launched: whatever is launched after it finds its tokens in the cache."""
        assert plan is self._plan, "commit takes the plan that was made last"
        self._plan = None
        self.num_steps += bool(plan.pieces)
        for piece in plan.pieces:
            sequence, end = piece.sequence, piece.end
            if sequence.slot is None:
                continue  # aborted meanwhile
            if piece.start < sequence.prompt_len or piece.start < sequence.num_read:
                self.num_prompt_tokens += max(0, min(end, sequence.prompt_len) - max(piece.start, sequence.num_read))
                self.num_recomputed_tokens += max(0, min(end, sequence.num_read) - piece.start)
            sequence.num_processed = end
            sequence.num_unread += piece.draws
            if end > sequence.num_read:
                sequence.num_read = end
            if not piece.num_drafts and end // BLOCK_TOKENS > piece.start // BLOCK_TOKENS:
                self._cache.launched(piece.slot)

    def keep(self, piece: Piece, num_accepted: int) -> None:
        """So many of the piece's drafts came true; the others were never fed, as far as the books know."""
        sequence = piece.sequence
        if not piece.num_drafts or not self._is_here(sequence) or sequence.slot is None:
            return
        # of a request that ended at one of them, what follows is not known either
        end = min(piece.end + num_accepted, len(sequence.token_ids))
        sequence.num_processed = end
        sequence.num_read = max(sequence.num_read, end)
        self._cache.rewind(sequence.slot, end)
        if end // BLOCK_TOKENS > piece.start // BLOCK_TOKENS:
            self._cache.launched(sequence.slot)

    def settle(self, sequence: Sequence) -> None:
        """What the request drew is known. If that was its end, or it failed, it leaves."""
        if sequence.is_done and self._is_here(sequence):
            self._leave(sequence, keep=sequence.error is None)
            self.num_finished += sequence.finish_reason is not None and sequence.error is None
            self.num_failed += sequence.error is not None

    def discard(self, plan: StepPlan) -> None:
        """The plan's forward call failed: some layers may have moved on and others not, so its requests are aborted."""
        assert plan is self._plan, "discard takes the plan that was made last"
        self._plan = None
        for piece in plan.pieces:
            self._abort(piece.sequence, keep=False)

    def abort(self, sequence: Sequence) -> None:
        """Drop a request and free what it holds, at any moment. One that has left, or never came, is left as it is."""
        self._abort(sequence, keep=True)

    def _abort(self, sequence: Sequence, *, keep: bool) -> None:
        if self._is_here(sequence):
            self._leave(sequence, keep=keep)
            sequence.is_aborted = True
            self.num_aborted += 1

    def check_integrity(self) -> None:
        """Recompute the truth: order, slots, positions, blocks and counts. Between two steps."""
        require_integrity(self._plan is None, "a plan is under way")
        for name, queue in (("waiting", self._waiting), ("running", self._running)):
            ranks = [_rank(sequence) for sequence in queue]
            require_integrity(ranks == sorted(set(ranks)), f"the {name} requests are out of order")
            require_integrity(not any(sequence.is_done for sequence in queue), f"a {name} request is done")
        for sequence in self._waiting:
            require_integrity(sequence.slot is None and sequence.num_processed == 0, "a waiting request holds a slot")
        slots = [_slot(sequence) for sequence in self._running]
        require_integrity(len(set(slots)) == len(slots), f"running requests share slots: {slots}")
        for slot, sequence in zip(slots, self._running, strict=True):
            position, processed = self._cache.position(slot), sequence.num_processed
            require_integrity(position == processed, f"slot {slot} stands at {position}, its request at {processed}")
            is_moving = sequence.num_pending > 0 or sequence.num_unread > 0 or sequence.draws_nothing
            require_integrity(is_moving, f"the request in slot {slot} has nothing to feed")
        held, taken = self._cache.blocks_freed_by(slots), self._num_blocks - self._cache.num_free_blocks
        require_integrity(held <= taken, f"running requests hold {held} blocks, the cache says {taken}")
        require_integrity(
            set(self._deadlines) <= {*self._waiting, *self._running}, "the deadline of a request that has left is kept"
        )
        ended = self.num_finished + self.num_aborted + self.num_failed
        here = self.num_waiting + self.num_running
        require_integrity(self._num_added == ended + here, f"{self._num_added} came, {ended} left, {here} are here")

    # ---- the parts of a plan ----

    def _expire(self, now: float) -> None:
        late = [sequence for sequence, deadline in self._deadlines.items() if now >= deadline]
        for sequence in late:
            self._fail(sequence, expire(sequence))

    def _feed(self, draft: _Draft, sequence: Sequence) -> None:
        """Give a running request its next piece, as long as the budgets allow, preempting only if it could not move."""
        if draft.num_tokens == 0 or sequence.slot is None:  # or preempted by one before it
            return
        length = self._fitting(sequence, draft)
        if length == 0:
            for victim in self._fewest(draft, self._behind(_rank(sequence)), num_blocks=1):
                self._preempt(draft, victim)
            length = self._fitting(sequence, draft)
        if length:
            _grant(draft, sequence, length)
        elif sequence is self._running[0]:
            held, freed = _blocks_held(sequence), self._freed(draft, [sequence])
            self._fail(
                sequence,
                f"no cache block is free for token {sequence.num_processed}: the request holds {held} of "
                f"{self._num_blocks}, and no other request of this engine holds any",
            )
            draft.num_blocks += freed
        elif draft.first_short is None or _rank(sequence) < draft.first_short:
            draft.first_short = _rank(sequence)

    def _grant_drafts(self, draft: _Draft, decoding: list[Sequence]) -> dict[Sequence, int]:
        """How many drafts each request that decodes is fed besides its token."""
        granted: dict[Sequence, int] = {}
        room = draft.num_tokens // 2  # the other half is for prompts
        for sequence in decoding:
            if not sequence.drafts or sequence not in draft.lengths:
                continue
            start = sequence.num_processed + 1
            held = last_position(blocks_at_position(start))
            stop = self._cache.next_stop(_slot(sequence))
            # a step draws one token more than it has drafts
            count = min(len(sequence.drafts), room, min(held, stop) - start, sequence.max_len - start - 1)
            if count > 0:
                granted[sequence] = count
                draft.lengths[sequence] += count
                draft.num_tokens -= count
                room -= count
        return granted

    def _admit(self, draft: _Draft, ahead_of: tuple[int, int] | None = None) -> None:
        while self._waiting and draft.num_tokens:
            head = self._waiting[0]
            if ahead_of is not None and _rank(head) > ahead_of:
                return
            if draft.first_short is not None and _rank(head) > draft.first_short:
                return
            if head.num_unread:
                return  # preempted a moment ago: what it drew last must be known before it is fed again
            match = self._cache.match(head.chain)
            if self._is_led(head, match):
                return
            victims = self._victims(draft, head, match)
            if victims is None:
                return
            for victim in victims:
                self._preempt(draft, victim)
            num_free = self._cache.num_free_blocks
            head.slot = self._cache.admit(head.max_len, head.chain)
            draft.num_blocks -= num_free - self._cache.num_free_blocks
            head.num_processed = self._cache.position(head.slot)
            if head.num_preemptions == 0:
                head.num_cached_tokens = head.num_processed
            del self._waiting[0]  # still the head: victims are behind it
            insort(self._running, head, key=_rank)
            _grant(draft, head, self._fitting(head, draft))

    def _is_led(self, head: Sequence, match: Match) -> bool:
        """Whether a running request ahead of the head of the queue is about to read what it could take over, or a file
        is, while others have something to do."""
        if match.is_loading and self._running:
            return True
        ahead = self._running[: bisect_left(self._running, _rank(head), key=_rank)]
        leader = next((_slot(sequence) for sequence in ahead if sequence.slot in match.leaders), None)
        if leader is not None:
            self._cache.stop_at(leader, match.expected)
        return leader is not None

    def _victims(self, draft: _Draft, head: Sequence, match: Match) -> list[Sequence] | None:
        """Whom to preempt so that a waiting request can start: nobody if there is room, None if that is impossible."""
        needed = self._blocks_to_start(head, match) - draft.num_blocks
        num_slots = self._cache.num_free_slots
        if num_slots and needed <= 0:
            return []
        lower = [sequence for sequence in self._behind(_rank(head)) if sequence.params.priority < head.params.priority]
        victims = self._fewest(draft, lower, num_blocks=needed)
        if not num_slots and not victims:
            victims = lower[:1]
        return victims if (num_slots or victims) and needed <= self._freed(draft, victims) else None

    def _fewest(self, draft: _Draft, candidates: list[Sequence], *, num_blocks: int) -> list[Sequence]:
        """The first of the candidates that free so many blocks together, without those that free nothing; all that free
        something if they are too few. What requests share is free only when all of them are gone."""
        chosen: list[Sequence] = []
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

    def _freed(self, draft: _Draft, sequences: list[Sequence]) -> int:
        """Blocks that preempting running requests would free: those they alone hold, and those promised to them."""
        if not sequences:
            return 0
        promised = sum(_new_blocks(sequence, draft.lengths.get(sequence, 0)) for sequence in sequences)
        return promised + self._cache.blocks_freed_by([_slot(sequence) for sequence in sequences])

    def _blocks_to_start(self, sequence: Sequence, match: Match) -> int:
        """A new request: its first chunk. One that was preempted: all it knows and the next token, and a spare block
        for each request ahead of it. What it takes over from running requests costs nothing."""
        if sequence.num_preemptions == 0:
            end = min(sequence.num_pending, match.position + self.max_batched_tokens)
            return blocks_at_position(end) - match.num_busy
        ahead = bisect_left(self._running, _rank(sequence), key=_rank)
        return blocks_at_position(sequence.num_pending + 1) + ahead - match.num_busy

    def _fitting(self, sequence: Sequence, draft: _Draft) -> int:
        """Tokens of the request that what is left of the budgets allows; 0 when it lacks a block."""
        room = last_position(_blocks_held(sequence) + draft.num_blocks) - sequence.num_processed
        stop = self._cache.next_stop(_slot(sequence)) - sequence.num_processed
        return min(sequence.num_pending, draft.num_tokens, room, stop)

    def _behind(self, rank: tuple[int, int]) -> list[Sequence]:
        """Running requests of worse rank, the worst first."""
        return self._running[bisect_right(self._running, rank, key=_rank) :][::-1]

    def _preempt(self, draft: _Draft, sequence: Sequence) -> None:
        draft.num_blocks += self._freed(draft, [sequence])
        draft.num_tokens += draft.lengths.pop(sequence, 0)
        draft.preempted.append(sequence)
        self._give_back(sequence)
        sequence.num_processed = 0
        sequence.drafts = ()
        insort(self._waiting, sequence, key=_rank)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    # ---- coming and going ----

    def _is_here(self, sequence: Sequence) -> bool:
        if sequence.rank is None:
            return False
        queue = self._waiting if sequence.slot is None else self._running
        place = bisect_left(queue, sequence.rank, key=_rank)
        return place < len(queue) and queue[place] is sequence

    def _leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._deadlines.pop(sequence, None)
        if sequence.slot is None:
            del self._waiting[bisect_left(self._waiting, _rank(sequence), key=_rank)]
        else:
            self._give_back(sequence, keep=keep)

    def _give_back(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free the slot and the blocks of a running request, and `keep` its prefix for others, or for itself."""
        self._cache.release(_slot(sequence), keep=keep)
        del self._running[bisect_left(self._running, _rank(sequence), key=_rank)]
        sequence.slot = None

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self._leave(sequence)
        sequence.error = reason
        self.num_failed += 1


def expire(sequence: Sequence) -> str:
    """Mark a request whose deadline has passed; returns why it fails."""
    sequence.is_expired = True
    most = sequence.max_len - sequence.prompt_len
    return (
        f"the deadline of {sequence.params.deadline:g} s passed with {sequence.num_output} of at most "
        f"{most} tokens written"
    )


def _rank(sequence: Sequence) -> tuple[int, int]:
    assert sequence.rank is not None, "the request was never queued"
    return sequence.rank


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a running request has a slot"
    return sequence.slot


def _piece(sequence: Sequence, length: int, num_drafts: int = 0) -> Piece:
    draws = length - num_drafts == sequence.num_pending and not sequence.draws_nothing
    return Piece(sequence, _slot(sequence), sequence.num_processed, length, draws, num_drafts)


def _blocks_held(sequence: Sequence) -> int:
    """Blocks a running request owns between two forward calls."""
    return blocks_at_position(sequence.num_processed)


def _new_blocks(sequence: Sequence, length: int) -> int:
    return blocks_at_position(sequence.num_processed + length) - _blocks_held(sequence)


def last_position(num_blocks: int) -> int:
    """The most tokens a request can have processed with `num_blocks` blocks: the inverse of `blocks_at_position`."""
    return num_blocks * BLOCK_TOKENS + CSA_RATIO - 1


def starts_block(position: int) -> bool:
    """Whether a request at `position` needs another block for its next token."""
    return position % BLOCK_TOKENS == CSA_RATIO - 1


def _grant(draft: _Draft, sequence: Sequence, length: int) -> None:
    draft.num_tokens -= length
    draft.num_blocks -= _new_blocks(sequence, length)
    draft.lengths[sequence] = length
