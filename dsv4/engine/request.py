"""`Request`: one request while it runs: its tokens and where it stands. Its text: text/output.py."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING

from dsv4.config import BLOCK_TOKENS
from dsv4.errors import Dsv4Error
from dsv4.replay import ReplayLog, replayed
from dsv4.request import Completion, FinishReason, RequestError, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from dsv4.cache.prefix.tree import ChainKeys
    from dsv4.engine.schedule.rows import DecodeRows  # numpy, which front ends do without
    from dsv4.engine.step.constraint import Constraint


UNREAD = -1  # as a draft: there is one, and only the device knows it yet
MAX_END_IDS = 8  # of a request with a row (schedule/rows.py)


class RequestAborted(Dsv4Error, RuntimeError):
    """The request was dropped before its end, by its caller or because a forward call it shared failed."""


class RequestFailed(Dsv4Error, RuntimeError):
    """The request could not be continued, through no fault of the others: its logits were no numbers, its constraint
    allowed no token, or no cache block will ever be free for it."""


class WeightsIncomplete(Dsv4Error, RuntimeError):
    """An update failed half way, or the weights were dropped: no request is taken until a whole update follows."""


class DeadlinePassed(RequestFailed):
    """The request was not done at its deadline. What it had written by then is in its `Request`."""


def expire(request: Request) -> str:
    """Mark a request whose deadline has passed; returns why it fails."""
    request.is_expired = True
    most = request.max_len - request.prompt_len
    return (
        f"the deadline of {request.params.deadline:g} s passed with {request.num_output} of at most "
        f"{most} tokens written"
    )


@dataclass(eq=False)
class Request:
    """`token_ids` are prompt and output, four bytes each; the first `num_processed` of them are in the cache. Running
    means a slot.

    Tokens that steps still under way draw are counted by `num_unread`: the first of them will be fed like any other,
    from the device's own memory, before the host knows which one it is.

    A request that loses its slot (preemption) starts again with everything it knows, so it draws no token twice;
    `num_read` is how far it ever was, `num_scored` how many of its tokens have been scored. `order` is its place in the
    scheduler's order, smaller first. `drafts` are tokens that may follow the last known one, to be fed with it and
    verified, `UNREAD` where the host has not read them; whatever they are, they change nothing but how soon it is done.
    `chain` is what the prefix cache knows its tokens by, `num_cached_tokens` how many of them it did not have to feed
    when it first started.

    `error` says why a request that failed could not go on. `constraint` gives the allowed tokens before each
    draw and takes the drawn one. `prompt_logprobs` grow as the prompt is read, where they were asked for.

    `replay` grows as tokens are fed, where it was asked for.

    `weight_versions` are runs of its tokens: the number of the first one, and the version of the weights that drew it.
    `admitted_seconds` is the clock when it first got a slot; nothing depends on it.

    While the request has a row among `rows`, how far it is stands there: `num_processed`, `num_read` and `num_unread`
    are read from there.
    """

    params: SamplingParams
    token_ids: array[int]
    prompt_len: int
    max_len: int
    eos_token_id: int
    slot: int | None = None
    rows: DecodeRows | None = None
    num_scored: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    drafts: tuple[int, ...] = ()
    chain: ChainKeys | None = None
    order: tuple[int, int] | None = None
    finish_reason: FinishReason | None = None
    is_aborted: bool = False
    is_expired: bool = False
    error: str | None = None
    constraint: Constraint | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    weight_versions: list[tuple[int, str]] = field(default_factory=list)
    replay: ReplayLog | None = None
    admitted_seconds: float = 0.0
    name: str = ""
    _num_processed: int = field(default=0, init=False)
    _num_unread: int = field(default=0, init=False)
    _num_read: int = field(default=0, init=False)

    def admitted(self) -> None:
        """It has a slot, and stands behind the prefix it took over."""
        if self.num_preemptions == 0:
            self.num_cached_tokens, self.admitted_seconds = self.num_processed, time.perf_counter()

    @classmethod
    def start(
        cls, prompt: Sequence[int], params: SamplingParams, *, max_context_tokens: int, eos_token_id: int,
        constraint: Constraint | None = None,
    ) -> Request:  # fmt: skip
        """A checked prompt, not yet admitted."""
        replay = ReplayLog.of(params)
        if params.n != 1:
            raise RequestError(f"n must be 1 for one answer, found {params.n}; generate() gives several", field="n")
        (params,) = params.answers()
        if params.replay_start > len(prompt):
            message = f"replay_start must be at most the prompt's {len(prompt)} tokens, found {params.replay_start}"
            raise RequestError(message, field="replay_start")
        return cls(
            params=params,
            token_ids=array("i", prompt),
            prompt_len=len(prompt),
            max_len=min(len(prompt) + params.max_tokens, max_context_tokens),
            eos_token_id=eos_token_id,
            constraint=constraint,
            prompt_logprobs=[] if params.prompt_logprobs is None else [None],  # nothing predicts the first token
            replay=replay,
        )

    @property
    def num_processed(self) -> int:
        return self._num_processed if self.rows is None else int(self.rows.num_processed[self.slot])

    @num_processed.setter
    def num_processed(self, value: int) -> None:
        if self.rows is None:
            self._num_processed = value
        else:
            self.rows.num_processed[self.slot] = value

    @property
    def num_unread(self) -> int:
        return self._num_unread if self.rows is None else int(self.rows.num_unread[self.slot])

    @num_unread.setter
    def num_unread(self, value: int) -> None:
        if self.rows is None:
            self._num_unread = value
        else:
            self.rows.num_unread[self.slot] = value

    @property
    def num_read(self) -> int:
        return self._num_read if self.rows is None else self.num_processed  # with a row, it is as far as it ever was

    @num_read.setter
    def num_read(self, value: int) -> None:
        assert self.rows is None or value == self.num_processed, "with a row, a request is as far as it ever was"
        self._num_read = value

    @property
    def num_known(self) -> int:
        """Tokens it has, those still under way included."""
        return len(self.token_ids) + self.num_unread

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache: the rest of the prompt, or the one drawn last; 0 once the last one is drawn."""
        return 0 if self.num_unread and self.num_known >= self.max_len else self.num_known - self.num_processed

    @property
    def draws_nothing(self) -> bool:
        """Its prompt is scored, and nothing more."""
        return self.max_len == self.prompt_len

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.is_aborted or self.error is not None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :].tolist()

    @property
    def has_rules(self) -> bool:
        """Whether what it may draw next depends on what it has drawn, so that the host must say it before each draw."""
        return self.constraint is not None or self.num_output < self.params.min_tokens or self._has_bad_words

    @property
    def may_have_rules(self) -> bool:
        """Whether `has_rules` was true at its beginning."""
        return self.constraint is not None or self.params.min_tokens > 0 or self._has_bad_words

    @property
    def _has_bad_words(self) -> bool:
        """Of several tokens; those of one are a bias."""
        return any(len(word) > 1 for word in self.params.bad_words_ids or ())

    def forbidden_ids(self, drafts: tuple[int, ...] = ()) -> list[int]:
        """Tokens that may not come next, or behind these drafts if they come true: ends, before `min_tokens`; what
        would complete a bad word of several."""
        params, words = self.params, [word for word in self.params.bad_words_ids if len(word) > 1]
        longest = max(map(len, words), default=0)
        last = [*self.token_ids[max(0, len(self.token_ids) - longest) :], *drafts]
        found = [word[-1] for word in words if last[1 - len(word) :] == list(word[:-1])]
        if self.num_output + len(drafts) < params.min_tokens:
            found += params.stop_token_ids
            if not params.ignore_eos:
                found.append(self.eos_token_id)
        return found

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that would be its last, whatever comes before."""
        stop_ids = self.params.stop_token_ids
        return stop_ids if self.params.ignore_eos else (self.eos_token_id, *stop_ids)

    @property
    def can_have_row(self) -> bool:
        """Whether each step feeds it one token and draws one, and its end is known by that token."""
        return not self.drafts and self.replay is None and len(self.end_ids) <= MAX_END_IDS

    def chain_by(self, make: Callable[[Sequence[int], str | None], ChainKeys | None]) -> ChainKeys | None:
        """What the prefix cache may know its tokens by: none that must be read, since their scores are asked for, or
        the experts they choose."""
        if self.params.prompt_logprobs is not None:
            return None
        if self.replay is None:
            return make(self.token_ids, self.params.cache_salt)
        num_blocks = self.replay.start // BLOCK_TOKENS
        if not num_blocks:
            return None
        chain = make(self.token_ids[: num_blocks * BLOCK_TOKENS + 1], self.params.cache_salt)
        if chain is not None:
            chain.is_complete = True
        return chain

    def ends_at(self, token_id: int) -> bool:
        """Whether this token would be its last, whatever comes before."""
        return token_id in self.end_ids

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take the next token. Sets `finish_reason` when this was the last."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.ends_at(token_id):
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH

    def end_if_read(self, num_processed: int) -> None:
        """A request that draws nothing is over when its prompt has been read."""
        if not self.draws_nothing or num_processed < self.prompt_len or self.is_done:
            return
        place = next((place for place, one in enumerate(self.prompt_logprobs) if one and isnan(one.logprob)), None)
        if place is None:
            self.finish_reason = FinishReason.LENGTH
        else:
            self.error = f"the model gave no numbers (NaN logits) for the token at position {place}"

    def failure(self) -> RequestFailed:
        """Why the request failed, as the error to raise."""
        assert self.error is not None, "the request has not failed"
        return DeadlinePassed(self.error) if self.is_expired else RequestFailed(self.error)

    def problem(self) -> Exception | None:
        """Why there will be no result; None for a request that ended well or runs."""
        if self.error is not None:
            return self.failure()
        if self.is_aborted:
            return RequestAborted(f"the request was dropped after {self.num_output} of its tokens")
        return None

    def completion(self) -> Completion:
        """The result without its text, once done; `RequestAborted` or `RequestFailed` if there will be none."""
        problem = self.problem()
        if problem is not None:
            raise problem
        assert self.finish_reason is not None, "the request is still running"
        assert self.params.seed is not None, "a request has one"
        return Completion(
            prompt_token_ids=tuple(self.token_ids[: self.prompt_len]),
            token_ids=tuple(self.output_ids),
            text=None,
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            num_cached_tokens=self.num_cached_tokens,
            seed=self.params.seed,
            weight_versions=tuple(self.weight_versions),
            **replayed(self.replay, len(self.token_ids)),
        )
