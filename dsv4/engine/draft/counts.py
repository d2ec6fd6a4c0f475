"""How many drafts an engine asks for and verifies, and how many were accepted. On the host; no torch.

`FixedDrafts` always asks for as many; `ChosenDrafts` for as many as pay, by what steps took and drafts achieved so far.
No choice changes a token.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dsv4.engine.draft.policy import AcceptanceMeter, DraftPolicy, LearnedTimes
from dsv4.engine.stats import DraftStats

if TYPE_CHECKING:
    from dsv4.engine.request import Request  # has numpy

_LOG = logging.getLogger("dsv4.engine")


class Offer(NamedTuple):
    """The tokens a drafter expects next of one request, and how sure it is of each, where it says that."""

    drafts: tuple[int, ...]
    confidences: tuple[float, ...] | None


class FixedDrafts:
    """`num_drafts` for every request in every step.

    must_read  whether `offer` is to hear of drafts before the step that verifies them is planned. Otherwise the host
               plans it while they are made, and reads them later
    """

    must_read = False

    def __init__(self, num_drafts: int) -> None:
        self.max_drafts = num_drafts
        self.choices: tuple[int, ...] = (num_drafts,)
        self.meter = AcceptanceMeter(num_drafts)
        self._num_steps = 0
        self._verified = [0] * num_drafts
        self._has_warned = False

    def how_many(self, num_requests: int) -> int:
        """Drafts to ask for after a step in which `num_requests` draw: 0, or one of `choices`."""
        return self.max_drafts

    def offer(self, request: "Request", drafts: Sequence[int], confidences: Sequence[float] | None) -> None:
        """What the drafter says comes next, and how sure it is of each."""
        request.drafts = tuple(drafts)

    def trim_drafts(self, requests: "Iterable[Request]") -> None:
        """Before a step is planned: take away drafts that it should not verify, among them those of a request whose
        next token is launched and not read: they were meant for its place."""
        for request in requests:
            if request.drafts and (request.num_unread or request.num_pending != 1):
                request.drafts = ()

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Count one request's verified and accepted drafts of a step."""
        self._num_steps += 1
        for place in range(num_drafts):
            self._verified[place] += 1
        self.meter.record(num_drafts, num_accepted)
        if self.meter.looks_broken and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "of %d first drafts %d were accepted, a mean of %.2f tokens a step: is the drafter one of this model? "
                "Answers are right all the same; --drafts off saves the time", self.meter.num_tried[0],
                self.meter.num_accepted[0], self.stats().tokens_per_step,
            )  # fmt: skip

    def record_step_time(self, num_rows: int, seconds: float, *, has_drafted: bool) -> None:
        """Learn the duration of a step of `num_rows` rows, with or without drafting after it."""

    def stats(self) -> DraftStats:
        return DraftStats(self._num_steps, tuple(self._verified), tuple(self.meter.num_accepted))


class ChosenDrafts(FixedDrafts):
    """As many as make a step give the most tokens a second (policy.py).

    is_block  the drafter makes `max_drafts` at once, as cheaply as fewer
    """

    def __init__(self, max_drafts: int, *, is_block: bool) -> None:
        super().__init__(max_drafts)
        self.choices = (max_drafts,) if is_block else tuple(range(1, max_drafts + 1))
        self.must_read = is_block  # confidences
        self._times, self._plain_times = LearnedTimes(), LearnedTimes()  # with the drafter's own time, and without
        self._policy = DraftPolicy(self._times, plain=self._plain_times)
        self._is_probe = False
        self._confidences: dict[Request, Sequence[float]] = {}

    def how_many(self, num_requests: int) -> int:
        if not num_requests:
            return 0
        wanted, self._is_probe = self._policy.ask(self.meter.survivals(), num_requests)
        return next(choice for choice in self.choices if choice >= wanted) if wanted else 0

    def offer(self, request: "Request", drafts: Sequence[int], confidences: Sequence[float] | None) -> None:
        super().offer(request, drafts, confidences)
        if confidences is not None:
            self._confidences[request] = confidences

    def trim_drafts(self, requests: "Iterable[Request]") -> None:
        many = list(requests)
        super().trim_drafts(many)
        known, self._confidences = self._confidences, {}
        drafting = [request for request in many if request.drafts]
        if not drafting or self._is_probe or not known:
            return
        rest = sum(request.num_pending for request in many) - len(drafting)
        chances = [_survivals(known.get(request, ()), len(request.drafts)) for request in drafting]
        for request, count in zip(drafting, self._policy.choose(chances, rest), strict=True):
            request.drafts = request.drafts[:count]

    def record_step_time(self, num_rows: int, seconds: float, *, has_drafted: bool) -> None:
        (self._times if has_drafted else self._plain_times).record(num_rows, seconds)


def _survivals(confidences: Sequence[float], count: int) -> list[float]:
    """The probability that each draft and all before it come true; 0 where nothing is known."""
    chance, found = 1.0, []
    for place in range(count):
        chance *= confidences[place] if place < len(confidences) else 0.0
        found.append(chance)
    return found
