"""`DecodeRows`: requests that decode a token a step, as rows of arrays. No torch.

Such a request is fed the token it drew last and draws one more, in every step until it ends. So what changes are a few
numbers, kept here by slot; its `Request` reads them from here while it has its row. A step over a thousand of them is
arithmetic on arrays: a request is touched where it comes, where a block begins, and where it ends. Log-probabilities
are listed for all rows of a step at once. What a rule allows a row is asked beside (`ruled`).

A row belongs to one stay of a request in its slot: a step that was launched before the request left finds another
number in `stays`, and leaves the row alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.errors import require_integrity
from dsv4.config import BLOCK_TOKENS, CSA_RATIO
from dsv4.engine.request import MAX_END_IDS, Request
from dsv4.request import FinishReason

_NO_ID = -9  # among ids that end a request: equal to nothing that is drawn

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowsOfStep:
    """The rows that one step feeds, R of them, in the scheduler's order; each is fed one token and draws one.

    requests     the same tuple as in the last step, where they are the same requests
    token_lists  their `Request.token_ids`
    slots        [R]
    stays        [R]  see `DecodeRows`
    starts       [R]  position of the token that is fed
    end_ids      [R, E]  of each, and -9 where it has fewer than E
    counts       their `SamplingParams.logprobs`; None if no request asks for log-probabilities
    ruled        places of those that may have rules (`Request.has_rules`)
    """

    requests: tuple[Request, ...]
    token_lists: tuple[array[int], ...]
    slots: Numbers
    stays: Numbers
    starts: Numbers
    end_ids: Numbers
    counts: tuple[int | None, ...] | None = None
    ruled: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def with_rules(self) -> list[tuple[int, Request]]:
        """Requests that go on, and whose next draw depends on what they have drawn; with their places."""
        found = [(place, self.requests[place]) for place in self.ruled]
        return [(place, request) for place, request in found if request.has_rules and not request.is_done]

    @cached_property
    def num_new_blocks(self) -> int:
        """Blocks that the step's tokens need."""
        return int(np.count_nonzero(self.starts % BLOCK_TOKENS == CSA_RATIO - 1))


_NONE = np.zeros(0, dtype=np.int64)
NO_ROWS = RowsOfStep((), (), _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True)
class RowsTaken:
    """What became of a step's draws: of the requests that took one, in order, with their tokens, those that ended.

    rows     places in the step of those that took one
    left     places in the step of requests that had lost their row since it was launched
    invalid  places of draws that are no tokens; nothing was done with them
    """

    requests: tuple[Request, ...]
    token_ids: Numbers
    rows: Sequence[int]
    ended: Sequence[Request] = ()
    left: Sequence[int] = ()
    invalid: Sequence[int] = ()


class DecodeRows:
    """Rows for the requests of `num_slots` slots. `has_room` says whether there are any."""

    def __init__(self, num_slots: int) -> None:
        self.num_processed = np.zeros(num_slots, dtype=np.int64)
        self.num_unread = np.zeros(num_slots, dtype=np.int64)
        self._max_lens = np.zeros(num_slots, dtype=np.int64)
        self._end_ids = np.full((num_slots, MAX_END_IDS), _NO_ID, dtype=np.int64)
        self._stays = np.zeros(num_slots, dtype=np.int64)
        # by order: that, what `RowsOfStep` has of a request, and how many end ids
        self._members: list[tuple[tuple[int, int], Request, int, array[int], int | None, bool, int]] = []
        self._all: RowsOfStep | None = None  # of all members, until one comes or goes; its `starts` are of no use

    def __len__(self) -> int:
        return len(self._members)

    @property
    def has_room(self) -> bool:
        return len(self._stays) > 0

    # ---- coming and going ----

    def add(self, request: Request) -> None:
        """The request has a row from now on. Its prompt is read, and a draw of it is launched."""
        slot, ends = slot_of(request), request.end_ids
        assert len(ends) <= MAX_END_IDS, "a request of many end ids has no row"
        self.num_processed[slot], self.num_unread[slot] = request.num_processed, request.num_unread
        self._max_lens[slot] = request.max_len
        self._end_ids[slot] = [*ends, *[_NO_ID] * (MAX_END_IDS - len(ends))]
        self._stays[slot] += 1
        order, asked, has_rules = order_of(request), request.params.logprobs, request.may_have_rules
        member = order, request, slot, request.token_ids, asked, has_rules, len(ends)
        self._members.insert(bisect_left(self._members, (order,)), member)
        self._all = None
        request.rows = self

    def remove(self, request: Request) -> None:
        """The request keeps its numbers itself again."""
        slot = slot_of(request)
        processed, unread = request.num_processed, request.num_unread
        request.rows = None
        request.num_processed = request.num_read = processed
        request.num_unread = unread
        self._stays[slot] += 1
        del self._members[bisect_left(self._members, (order_of(request),))]
        self._all = None

    # ---- a step ----

    def to_feed(self) -> RowsOfStep:
        """The rows that have a token to feed: all but requests whose last token was launched already."""
        if not self._members:
            return NO_ROWS
        if self._all is None:
            _, requests, places, lists, counts, has_rules, num_ends = zip(*self._members, strict=True)
            slots = np.array(places, dtype=np.int64)
            is_asked = counts.count(None) < len(counts)
            self._all = RowsOfStep(
                requests, lists, slots, self._stays[slots], slots, self._end_ids[slots, : max(num_ends)],
                counts if is_asked else None, tuple(compress(range(len(slots)), has_rules)),
            )  # fmt: skip
        every = self._all
        starts = self.num_processed[every.slots]
        is_fed = starts + 1 < self._max_lens[every.slots]
        if is_fed.all():
            return replace(every, starts=starts)
        kept = is_fed.tolist()
        return RowsOfStep(
            tuple(compress(every.requests, kept)), tuple(compress(every.token_lists, kept)),
            every.slots[is_fed], every.stays[is_fed], starts[is_fed], every.end_ids[is_fed],
            None if every.counts is None else tuple(compress(every.counts, kept)),
            tuple([sum(kept[:place]) for place in every.ruled if kept[place]]),
        )  # fmt: skip

    def launched(self, step: RowsOfStep) -> list[int]:
        """The step was launched. The slots whose requests have filled a block with it."""
        slots, ends = step.slots, step.starts + 1
        is_here = self._stays[slots] == step.stays
        if not is_here.all():
            slots, ends = slots[is_here], ends[is_here]
        self.num_processed[slots] = ends
        self.num_unread[slots] += 1
        filled: list[int] = slots[ends % BLOCK_TOKENS == 0].tolist()
        return filled

    def take(self, step: RowsOfStep, token_ids: Numbers) -> RowsTaken:
        """Give each request of a step its token, `token_ids` [R], and mark those that end with it. Their rows stay."""
        requests, lists, slots, tokens = step.requests, step.token_lists, step.slots, token_ids
        end_ids = step.end_ids
        is_here = self._stays[slots] == step.stays
        is_taken = is_here & (tokens >= 0)
        rows: Sequence[int] = range(len(step))
        left: Sequence[int] = ()
        invalid: Sequence[int] = ()
        if not is_taken.all():
            left, invalid = np.flatnonzero(~is_here).tolist(), np.flatnonzero(is_here & (tokens < 0)).tolist()
            kept, rows = is_taken.tolist(), np.flatnonzero(is_taken).tolist()
            requests, lists = tuple(compress(requests, kept)), tuple(compress(lists, kept))
            slots, tokens, end_ids = slots[is_taken], tokens[is_taken], end_ids[is_taken]
        unread = self.num_unread[slots] - 1
        self.num_unread[slots] = unread
        deque(map(array.append, lists, tokens.tolist()), maxlen=0)
        is_stop = (end_ids == tokens[:, None]).any(axis=1)
        is_end = is_stop | (self.num_processed[slots] + 1 - unread >= self._max_lens[slots])
        ended = []
        for place in np.flatnonzero(is_end).tolist():
            requests[place].finish_reason = FinishReason.STOP if is_stop[place] else FinishReason.LENGTH
            ended.append(requests[place])
        return RowsTaken(requests, tokens, rows, ended, left, invalid)

    # ---- checks ----

    def check_integrity(self, running: Iterable[Request]) -> None:
        """`running` are all requests with a slot, in order: recompute the rows from those that have one."""
        expected = [request for request in running if request.rows is not None]
        require_integrity(
            [member[1] for member in self._members] == expected, "the requests with rows are others, or out of order"
        )
        for request in expected:
            slot = slot_of(request)
            num_known = len(request.token_ids) + int(self.num_unread[slot])
            require_integrity(request.rows is self, f"the request in slot {slot} reads another's rows")
            is_known = num_known == int(self.num_processed[slot]) + 1
            require_integrity(is_known, f"the row of slot {slot} stands at {self.num_processed[slot]} of {num_known}")
            require_integrity(self._max_lens[slot] == request.max_len, f"the row of slot {slot} ends elsewhere")
            ends = [end for end in self._end_ids[slot].tolist() if end != _NO_ID]
            require_integrity(ends == list(request.end_ids), f"the row of slot {slot} ends at {ends}")
        if self._all is not None:
            found = [(request, slot) for request, slot in zip(self._all.requests, self._all.slots, strict=True)]
            require_integrity(found == [(one, one.slot) for one in expected], "the rows of a step are out of date")
            require_integrity(
                all(tokens is one.token_ids for tokens, one in zip(self._all.token_lists, expected, strict=True))
                and bool((self._stays[self._all.slots] == self._all.stays).all()),
                "the rows of a step belong to other stays",
            )


def order_of(request: Request) -> tuple[int, int]:
    assert request.order is not None, "the request was never queued"
    return request.order


def slot_of(request: Request) -> int:
    assert request.slot is not None, "a running request has a slot"
    return request.slot
