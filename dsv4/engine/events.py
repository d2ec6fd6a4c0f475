"""`RequestStream`: the asynchronous side of a request: what its engine thread has produced and nobody has read yet.

Reading never holds up the engine: events wait here, at most as many as the request may have tokens, until the reader
comes. Leaving the `async with` block before the end drops the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

from dsv4.request import FinishReason, TokenLogprobs
from dsv4.text.output import TextOutput


@dataclass(frozen=True)
class TokenEvent:
    """One new token of the request `choice` of a group, and the text that became certain with it.

    `finish_reason` is set on the last one. `seconds` is the clock (`time.perf_counter`) at the end of the step.
    """

    choice: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    seconds: float


@dataclass(frozen=True)
class ErrorEvent:
    """The request `choice` ended without a result."""

    choice: int
    error: Exception
    seconds: float


@dataclass(frozen=True)
class EndEvent:
    """The request `choice` ended without a token: it only scored its prompt."""

    choice: int
    finish_reason: FinishReason
    seconds: float
    token_id: ClassVar[None] = None
    text: ClassVar[str] = ""
    logprobs: ClassVar[None] = None


RequestEvent = TokenEvent | ErrorEvent | EndEvent


class RequestStream:
    """An asynchronous iterator of the events of a group of requests, in the order they happened.

    It ends when every request of the group has ended. Belongs to the event loop it was made in.
    """

    def __init__(self, outputs: Sequence[TextOutput], cancel: Callable[[RequestStream], None]) -> None:
        self.outputs = tuple(outputs)
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._ready: deque[RequestEvent] = deque()
        self._wake = asyncio.Event()
        self._num_open = len(self.outputs)

    def push(self, events: Sequence[RequestEvent]) -> None:
        """Called in the loop's own thread with what a step produced. A stream that was ended takes nothing more."""
        if self.is_over:
            return
        self._ready.extend(events)
        self._num_open -= sum(isinstance(event, ErrorEvent) or event.finish_reason is not None for event in events)
        self._wake.set()

    def end(self, event: ErrorEvent) -> None:
        """Called in the loop's own thread: end every request of the group with this error, whatever still runs."""
        if not self.is_over:
            self._ready.append(event)
            self._num_open = 0
            self._wake.set()

    @property
    def is_over(self) -> bool:
        """Whether every request has ended; unread events may remain."""
        return self._num_open == 0

    def cancel(self) -> None:
        """Drop what still runs; its blocks are free again before the engine's next step. Safe to repeat."""
        if not self.is_over:
            self._cancel(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._ready:
            if self.is_over:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._ready.popleft()

    async def next_batch(self) -> list[RequestEvent]:
        """All events that are ready, at least one; empty once every request has ended."""
        while not self._ready:
            if self.is_over:
                return []
            self._wake.clear()
            await self._wake.wait()
        ready = list(self._ready)
        self._ready.clear()
        return ready

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
