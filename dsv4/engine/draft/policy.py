"""How many drafts to verify: as many as make a step give the most tokens a second. No torch.

A step with R requests and K drafts among them gives R + (the sum of K survivals) tokens, a draft's survival being the
probability that it and all before it are accepted, and takes as long as a step of that many rows was measured to take.
Rows of prompts in the same step make further drafts cheap or dear, so they count. Which drafts are verified never
changes a token (a row's logits and noise do not depend on the others), so the choice may use anything, at any time.

Survivals come from what was accepted before, by place of a draft (`AcceptanceMeter`), or from a drafter's confidences.
"""

from collections.abc import Sequence
from itertools import accumulate

LEAST_TRIES = 200  # before acceptance says anything about a drafter
_MOMENT = 1e-12  # seconds, where nothing is known
BROKEN_RATE = 0.02  # first drafts accepted less often than this: not a drafter of this model


class LearnedTimes:
    """Seconds of a step by its number of rows, from the steps there were. Sizes are grouped by powers of two.

    What was not seen for `memory` steps counts as fast as the next smaller size that was: so it is tried, and then
    known. Where none was, it takes as long as the smallest that was. A larger step never counts as faster than a
    smaller one.
    """

    def __init__(self, *, memory: int = 512, weight: float = 0.2) -> None:
        self._memory, self._weight = memory, weight
        self._seen: dict[int, tuple[float, int]] = {}  # by size: seconds, and when
        self._num_steps = 0

    def record(self, num_rows: int, seconds: float) -> None:
        """Learn the duration of a step of `num_rows` rows."""
        self._num_steps += 1
        size = _size(num_rows)
        before, _ = self._seen.get(size, (seconds, 0))
        self._seen[size] = before + self._weight * (seconds - before), self._num_steps

    def seconds(self, num_rows: int) -> float:
        """0 for no rows, or as long as nothing is known."""
        oldest = self._num_steps - self._memory
        size = _size(num_rows)
        known = {seen: took for seen, (took, when) in self._seen.items() if when >= oldest}
        if not known or num_rows <= 0:
            return 0.0
        smaller = [took for seen, took in known.items() if seen <= size]
        return max(smaller) if smaller else known[min(known)]


def _size(num_rows: int) -> int:
    return num_rows if num_rows <= 8 else 1 << (num_rows - 1).bit_length()


class AcceptanceMeter:
    """How often a draft at each place was accepted, of those whose predecessors were. Recent steps weigh most.

    `memory`: drafts it takes to forget. A place not seen yet counts as `expected`.
    """

    def __init__(self, max_drafts: int, *, memory: float = 256.0, expected: float = 0.7) -> None:
        self._tried = [0.0] * max_drafts
        self._accepted = [0.0] * max_drafts
        self._keep = 1 - 1 / memory
        self._expected = expected
        self.num_tried = [0] * max_drafts  # since the beginning
        self.num_accepted = [0] * max_drafts

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """One request's step: of `num_drafts` verified the first `num_accepted` stayed. What is behind the first that
        did not stay was not tried.
        """
        assert 0 <= num_accepted <= num_drafts <= len(self._tried), (num_accepted, num_drafts)
        for place in range(min(num_accepted + 1, num_drafts)):
            is_accepted = place < num_accepted
            self._tried[place] = self._tried[place] * self._keep + 1
            self._accepted[place] = self._accepted[place] * self._keep + is_accepted
            self.num_tried[place] += 1
            self.num_accepted[place] += is_accepted

    def rate(self, place: int) -> float:
        """Of the drafts at this place that were tried; between what was seen and what is expected of one try."""
        return (self._accepted[place] + self._expected) / (self._tried[place] + 1)

    def survivals(self) -> list[float]:
        """For each place, the probability that the draft there and all before it are accepted."""
        return list(accumulate((self.rate(place) for place in range(len(self._tried))), lambda a, b: a * b))

    @property
    def looks_broken(self) -> bool:
        """Whether hardly any first draft was ever accepted: weights of another model, or tensors that were dropped."""
        tried = self.num_tried[0] if self.num_tried else 0
        return tried >= LEAST_TRIES and self.num_accepted[0] < BROKEN_RATE * tried


class DraftPolicy:
    """Chooses how many drafts to ask for, and how many of each request of a step to verify.

    verify       seconds of a step by its rows, with the drafting after it
    plain        seconds of a step behind which no drafts are made, by its rows; None: as `verify`
    probe_steps  steps without drafts after which one draft is tried again, in case drafts pay by now
    """

    def __init__(self, verify: LearnedTimes, *, plain: LearnedTimes | None = None, probe_steps: int = 64) -> None:
        self._verify, self._plain = verify, plain or verify
        self._probe_steps = probe_steps
        self._idle_steps = 0

    def ask(self, chances: Sequence[float], num_requests: int) -> tuple[int, bool]:
        """How many drafts to ask for if each of `num_requests` requests has these survivals, and whether only to see
        how they do."""

        def rate(count: int) -> float:
            if not count:
                return 1 / max(self._plain.seconds(num_requests), _MOMENT)
            return (1 + sum(chances[:count])) / max(self._verify.seconds(num_requests * (1 + count)), _MOMENT)

        best = max(range(len(chances) + 1), key=lambda count: (rate(count), -count))
        self._idle_steps = 0 if best else self._idle_steps + 1
        if best or self._idle_steps < self._probe_steps:
            return best, False
        self._idle_steps = 0
        return min(1, len(chances)), True

    def choose(self, survivals: Sequence[Sequence[float]], other_rows: int = 0) -> list[int]:
        """How many drafts to verify for each request, given each one's survivals (as many as it may have drafts) and
        the rows of the step that are not theirs.
        """
        num_requests = len(survivals)
        order = sorted(
            (-chance, place, request)  # ties by place, then by request: never by what else is in the step
            for request, chances in enumerate(survivals)
            for place, chance in enumerate(accumulate(chances, min))
        )
        base_rows = other_rows + num_requests
        best_rate, best_count = num_requests / max(self._verify.seconds(base_rows), _MOMENT), 0
        expected = float(num_requests)
        for count, (negative, _, _) in enumerate(order, start=1):
            expected -= negative
            rate = expected / max(self._verify.seconds(base_rows + count), _MOMENT)
            if rate > best_rate:
                best_rate, best_count = rate, count
        counts = [0] * num_requests
        for _, _, request in order[:best_count]:
            counts[request] += 1
        return counts
