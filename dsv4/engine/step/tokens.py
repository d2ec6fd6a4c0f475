"""`StepTokens`: what a step of the engine gave. `Results` gathers it while a step is collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsv4.engine.request import Request
from dsv4.request import FinishReason, TokenLogprobs

_NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class StepTokens:
    """New tokens of the requests that ran: one entry of `requests` for each, several where drafts came true.

    requests   the same tuple as in the last step, where the requests are the same
    token_ids  int32, one for each
    logprobs   by place among them, where a request asked
    ended      requests that are over since the last step, except those that the caller ended: with the last of these
               tokens, without one (its prompt was only scored), or without a result (`Request.problem`)
    rest       of several ranks: what the others gave, always as many
    """

    requests: tuple[Request, ...] = ()
    token_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_IDS)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    ended: tuple[Request, ...] = ()
    rest: tuple[StepTokens, ...] = ()

    @property
    def parts(self) -> tuple[StepTokens, ...]:
        return (self, *self.rest)

    def __len__(self) -> int:
        """Tokens."""
        return len(self.requests)

    def __bool__(self) -> bool:
        return bool(self.requests or self.ended)

    def last_tokens(self) -> dict[int, FinishReason]:
        """Places of tokens that were their request's last, and why."""
        found: dict[int, FinishReason] = {}
        backwards = self.requests[::-1] if self.ended else ()
        for request in self.ended:
            if request.error is None and request.finish_reason is not None and request in backwards:
                found[len(backwards) - 1 - backwards.index(request)] = request.finish_reason
        return found


class Results:
    """What was collected and not yet returned."""

    def __init__(self) -> None:
        self._requests: list[tuple[Request, ...]] = []
        self._token_ids: list[NDArray[np.integer]] = []
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._singles: list[tuple[Request, int]] = []
        self._num_tokens = 0
        self._last: tuple[Request, ...] = ()  # of the results taken last, while they all go on
        self.ended: list[Request] = []

    def __bool__(self) -> bool:
        """Whether there are tokens, or ends."""
        return self._num_tokens > 0 or bool(self.ended)

    def add(
        self, requests: tuple[Request, ...], token_ids: NDArray[np.integer],
        logprobs: Sequence[TokenLogprobs | None] = (),
    ) -> None:  # fmt: skip
        """Add one token for each request, and the log-probabilities that some of them asked for."""
        if requests:
            self._add_singles()
            for place, one in enumerate(logprobs):
                if one is not None:
                    requests[place].logprobs.append(one)
                    self._logprobs[self._num_tokens + place] = one
            self._requests.append(requests)
            self._token_ids.append(token_ids)
            self._num_tokens += len(requests)

    def append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """One token."""
        if logprobs is not None:
            self._logprobs[self._num_tokens] = logprobs
        self._num_tokens += 1
        self._singles.append((request, token_id))

    def _add_singles(self) -> None:
        if self._singles:
            requests, token_ids = zip(*self._singles, strict=True)
            self._requests.append(requests)
            self._token_ids.append(np.array(token_ids, dtype=np.int32))
            self._singles = []

    def take(self) -> StepTokens:
        """All of it; nothing is left."""
        self._add_singles()
        parts, ids = self._requests, self._token_ids
        requests = parts[0] if len(parts) == 1 else tuple([request for part in parts for request in part])
        if requests == self._last:
            requests = self._last
        token_ids = np.concatenate(ids, dtype=np.int32, casting="same_kind") if ids else _NO_IDS
        made = StepTokens(requests, token_ids, self._logprobs, tuple(self.ended))
        self._requests, self._token_ids, self._logprobs, self._num_tokens, self.ended = [], [], {}, 0, []
        self._last = () if made.ended else requests
        return made

    def forget(self) -> None:
        """Drop the references to requests: one of the last results has left."""
        self._last = ()
