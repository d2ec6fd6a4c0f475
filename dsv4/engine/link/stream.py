"""`RequestStream`: the reader's side of a group of requests, with the tokens that are not read yet.

Reading never holds up the engine: tokens wait here, at most as many as the requests may have, until the reader comes.
Text is made when they are read. A reader is a task that waits (`next_batch`), or a function that is called where the
engine's message is read (`attach`): no task wakes up for a token then. Leaving the `async with` block before the end
drops the requests. No torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, NamedTuple, final

from dsv4.engine.request import RequestAborted
from dsv4.request import FinishReason, TokenLogprobs
from dsv4.text.output import TextOutput


class TokenEvent(NamedTuple):
    """One new token of the request `choice` of a group, and the text that became certain with it.

    `finish_reason` is set on the last one. `seconds` is the clock (`time.perf_counter`) at the end of the step.
    """

    choice: int
    token_id: int
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


@dataclass(frozen=True)
class EndEvent:
    """The request `choice` ended without a token: it only scored its prompt, or was ended early (`ABORT`). `text` was
    held back before."""

    choice: int
    finish_reason: FinishReason
    seconds: float
    text: str = ""
    token_id: ClassVar[None] = None
    logprobs: ClassVar[None] = None


RequestEvent = TokenEvent | ErrorEvent | EndEvent


class RawToken(NamedTuple):
    """A token as it came from the engine. `token_id` None: an end without one."""

    choice: int
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    seconds: float


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
        self._ready: list[RawToken | ErrorEvent] = []
        self._events: list[RequestEvent] = []  # decoded, for readers that take one event at a time
        self._open = set(range(len(self.outputs)))  # not read to their end
        self._running = len(self.outputs)  # requests that the engine has not ended
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Callable[[], None] | None = None
        self._is_accepted = False

    # ---- the engine's side, in the loop's thread ----

    def push(self, item: RawToken | ErrorEvent) -> None:
        """Whoever pushes calls `notify` when there is no more for now."""
        self._ready.append(item)
        if type(item) is ErrorEvent or item.finish_reason is not None:
            self._running -= 1

    def accept(self) -> None:
        self._is_accepted = True
        self.notify()

    def end(self, event: ErrorEvent) -> None:
        """End every request of the group with this error."""
        for choice in sorted(self._open):
            self.push(ErrorEvent(choice, event.error, event.seconds))
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
        while not self._is_accepted and not self._ready:
            await self._wait()
        first = self._ready[0] if self._ready else None
        if not self._is_accepted and isinstance(first, ErrorEvent):
            self._open.clear()
            raise first.error

    def cancel(self) -> None:
        """Abort the requests that still run; their blocks are free before the engine's next step. A waiting reader
        gets the end of the stream. Safe to repeat."""
        if self._running > 0:
            self._on_cancel(self)
            self.end(ErrorEvent(0, RequestAborted("the request was cancelled"), time.perf_counter()))

    async def next_batch(self) -> list[RequestEvent]:
        """All events that are ready, at least one; empty once every request has ended."""
        while self._open:
            if not self._ready:
                await self._wait()
            if events := self.read():
                return events
        return []

    def attach(self, reader: Callable[[], None]) -> None:
        """`reader` is called whenever something is ready, now if something is; it calls `read`, and raises nothing."""
        self._reader = reader
        if self._ready:
            reader()

    @property
    def is_read(self) -> bool:
        """Whether every request has been read to its end."""
        return not self._open

    def read(self) -> list[RequestEvent]:
        """All events that are ready."""
        ready, self._ready = self._ready, []
        return [event for item in ready if (event := self._read(item)) is not None]

    def _read(self, item: RawToken | ErrorEvent) -> RequestEvent | None:
        choice = item.choice
        if choice not in self._open:
            return None  # drawn after the end of its text
        output = self.outputs[choice]
        if type(item) is ErrorEvent:
            self._open.discard(choice)
            output.error = item.error
            return item
        if item.token_id is None:
            assert item.finish_reason is not None
            self._open.discard(choice)
            return EndEvent(choice, item.finish_reason, item.seconds, output.end(item.finish_reason))
        text = output.take(item.token_id, item.logprobs, item.finish_reason)
        if output.finish_reason is not None:
            self._open.discard(choice)
            if item.finish_reason is None:
                self._on_finish(self, choice)
        return TokenEvent(choice, item.token_id, text, item.logprobs, output.finish_reason, item.seconds)

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
