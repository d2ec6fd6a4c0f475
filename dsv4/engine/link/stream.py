"""`RequestStream`: the reader's side of a group of requests, with the tokens that are not read yet.

Reading never holds up the engine: tokens wait here as numbers, 16 bytes each, until the reader comes. They are at most
as many as the requests may have. Text is made when they are read. A reader is a task that waits (`next_batch`), or a
function that is called where the engine's message is read (`attach`): no task wakes up for a token then. Leaving the
`async with` block before the end drops the requests. No torch.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, final

from dsv4.engine.request import RequestAborted
from dsv4.request import FinishReason, TokenLogprobs
from dsv4.text.output import TextOutput

_NO_TOKEN = -1  # in the place of a token id: the request ended without one


class TokenEvent(NamedTuple):
    """One new token of the request `choice` of a group, and the text that became certain with it.

    `finish_reason` is set on the last one. That has no token (None) where the request only scored its prompt, or was
    ended early (`ABORT`). `seconds` is the clock (`time.perf_counter`) at the end of the step.
    """

    choice: int
    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    seconds: float


@final
@dataclass(frozen=True)
class ErrorEvent:
    """The request `choice` ended without a result."""

    choice: int
    error: Exception
    seconds: float


RequestEvent = TokenEvent | ErrorEvent


class RequestStream:
    """An asynchronous iterator of the events of a group of requests, in the order they happened; `next_batch` gives all
    that are ready at once.

    It ends when every request of the group has ended. Belongs to the event loop it was made in.
    on_finish  called with a request whose text is complete before the engine ends it
    on_cancel  called to abort the requests that still run
    """

    def __init__(
        self, outputs: Sequence[TextOutput], on_finish: Callable[[RequestStream, int], None],
        on_cancel: Callable[[RequestStream], None],
    ) -> None:  # fmt: skip
        self.outputs = tuple(outputs)
        self._on_finish, self._on_cancel = on_finish, on_cancel
        # what is not read, as columns: of each its choice, token id and clock; of some an end or log-probabilities
        self._choices, self._token_ids, self._seconds = array("i"), array("i"), array("d")
        self._ends: dict[int, FinishReason | Exception] = {}
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._events: list[RequestEvent] = []  # decoded, for readers that take one event at a time
        self._open = set(range(len(self.outputs)))  # not read to their end
        self._running = len(self.outputs)  # requests that the engine has not ended
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Callable[[], None] | None = None
        self._is_accepted = False

    # ---- the engine's side, in the loop's thread ----

    def push(
        self, choice: int, token_id: int | None, seconds: float, end: FinishReason | Exception | None = None,
        logprobs: TokenLogprobs | None = None,
    ) -> None:  # fmt: skip
        """A token as it came from the engine, or an end without one. Call `notify` when there is no more for now."""
        if end is not None:
            self._ends[len(self._choices)] = end
            self._running -= 1
        if logprobs is not None:
            self._logprobs[len(self._choices)] = logprobs
        self._choices.append(choice)
        self._token_ids.append(_NO_TOKEN if token_id is None else token_id)
        self._seconds.append(seconds)

    def accept(self) -> None:
        self._is_accepted = True
        self.notify()

    def end(self, error: Exception) -> None:
        """End every request of the group with this error."""
        for choice in sorted(self._open):
            self.push(choice, None, time.perf_counter(), error)
        self._running = 0
        self.notify()

    def notify(self) -> None:
        """Something is ready."""
        if self._reader is not None:
            self._reader()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the reader's side ----

    @property
    def is_over(self) -> bool:
        """Whether every request has ended; unread events may remain."""
        return not self._open or self._running <= 0

    async def accepted(self) -> None:
        """Until the engine has taken the requests; raises its reason if it does not."""
        while not self._is_accepted and not self._choices:
            await self._wait()
        error = self._ends.get(0)
        if not self._is_accepted and isinstance(error, Exception):
            self._open.clear()
            raise error

    def cancel(self) -> None:
        """Abort the requests that still run; their blocks are free before the engine's next step. A waiting reader
        gets the end of the stream. Safe to repeat."""
        if self._running > 0:
            self._on_cancel(self)
            self.end(RequestAborted("the request was cancelled"))

    async def next_batch(self) -> list[RequestEvent]:
        """All events that are ready, at least one; empty once every request has ended."""
        while self._open:
            if not self._choices:
                await self._wait()
            if events := self.read():
                return events
        return []

    def attach(self, reader: Callable[[], None]) -> None:
        """`reader` is called whenever something is ready, now if something is; it calls `read`, and raises nothing."""
        self._reader = reader
        if self._choices:
            reader()

    @property
    def is_read(self) -> bool:
        """Whether every request has been read to its end."""
        return not self._open

    def read(self) -> list[RequestEvent]:
        """All events that are ready."""
        if len(self._choices) == 1 and not self._ends and not self._logprobs:  # a token, most of the time
            choice, token_id, clock = self._choices.pop(), self._token_ids.pop(), self._seconds.pop()
            return [self._read(choice, token_id, None, None, clock)] if choice in self._open else []
        choices, token_ids, seconds = self._choices.tolist(), self._token_ids.tolist(), self._seconds.tolist()
        ends, logprobs = self._ends, self._logprobs
        del self._choices[:], self._token_ids[:], self._seconds[:]
        if ends:
            self._ends = {}
        if logprobs:
            self._logprobs = {}
        events = []
        for place, choice in enumerate(choices):
            if choice not in self._open:
                continue  # drawn after the end of its text
            end = ends.get(place) if ends else None
            scored = logprobs.get(place) if logprobs else None
            events.append(self._read(choice, token_ids[place], scored, end, seconds[place]))
        return events

    def _read(
        self, choice: int, token_id: int, logprobs: TokenLogprobs | None, end: FinishReason | Exception | None,
        seconds: float,
    ) -> RequestEvent:  # fmt: skip
        output = self.outputs[choice]
        if isinstance(end, Exception):
            self._open.discard(choice)
            output.error = end
            return ErrorEvent(choice, end, seconds)
        if token_id == _NO_TOKEN:
            assert end is not None, "an end without a token"
            self._open.discard(choice)
            return TokenEvent(choice, None, output.end(end), None, end, seconds)
        text = output.take(token_id, logprobs, end)
        if output.finish_reason is not None:
            self._open.discard(choice)
            if end is None:
                self._on_finish(self, choice)
        return TokenEvent(choice, token_id, text, logprobs, output.finish_reason, seconds)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestEvent:
        if not self._events:
            self._events = (await self.next_batch())[::-1]
            if not self._events:
                raise StopAsyncIteration
        return self._events.pop()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
