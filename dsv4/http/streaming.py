"""Running a job for one HTTP client: to the end, or as server-sent events, and no longer than the client is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4.engine.link.messages import EngineLost, EngineStopped
from dsv4.engine.link.stream import EndEvent, ErrorEvent, RequestEvent, RequestStream, TokenEvent
from dsv4.engine.request import RequestAborted, RequestFailed
from dsv4.errors import Dsv4Error
from dsv4.http.errors import ApiError
from dsv4.http.metrics import Metrics, RequestTimer

_LONG_ANSWER = 2048  # tokens: the JSON of longer ones is written beside the loop that streams


class Assembler(Protocol):
    """Turns the events of a job into the answer of one interface: a stream (`opening`, `take`, `closing`) as the text
    of server-sent events, or whole (`keep`, `whole`) as JSON."""

    ping: str  # what a stream says while it has nothing to say

    def opening(self) -> str:
        """What a stream begins with, before the first token."""

    def take(self, event: TokenEvent | EndEvent) -> str:
        """What becomes certain with a token, or an end without one."""

    def closing(self) -> str:
        """What ends a stream in which every choice has ended."""

    def failure(self, error: ApiError) -> str:
        """What ends a stream that cannot go on."""

    def keep(self, event: TokenEvent | EndEvent) -> None:
        """A token, or an end without one, of an answer that is sent whole."""

    def whole(self) -> str:
        """The answer, once every choice has ended."""


class ClientGone(Dsv4Error):
    """Nobody is there to answer."""


class _Stalled(Dsv4Error):
    """The client is connected, but takes nothing."""


DISCONNECTED, STALLED = "disconnected", "stalled"  # what ends an answer besides an error's code


async def collect(request: Request, stream: RequestStream, assembler: Assembler, timer: RequestTimer) -> str:
    """The answer of a job that runs to its end. `ClientGone` if the client goes first; `ApiError` if it fails."""
    async with stream:
        with _watching(request.receive, stream) as gone:
            while events := await stream.next_batch():
                if gone.is_set():
                    raise ClientGone
                for event in events:
                    if isinstance(event, ErrorEvent):
                        raise to_api_error(event.error)
                    timer.token(event, stream.outputs[event.choice].prompt_len)
                    assembler.keep(event)
    if sum(output.num_output for output in stream.outputs) > _LONG_ANSWER:
        return await asyncio.to_thread(assembler.whole)
    return assembler.whole()


def to_api_error(error: Exception) -> ApiError:
    """A request that ended without a result, as an answer."""
    if isinstance(error, EngineStopped):
        message = "the server is shutting down and could not finish this request; send it again"
        return ApiError(503, message, code="shutting_down")
    if isinstance(error, EngineLost):
        return ApiError(503, f"{error}; send the request again", code="engine_lost")
    if isinstance(error, RequestFailed):
        return ApiError(500, f"the request could not be continued: {error}", code="request_failed")
    assert isinstance(error, RequestAborted), error
    return ApiError(503, f"the request was dropped: {error}", code="request_aborted")


class StreamClock:
    """Looks at all open streams once a second, so that no token needs a timer: a stream whose client has taken nothing
    for `stall_seconds` ends, one that has sent nothing for `ping_seconds` says that it lives."""

    def __init__(self, stall_seconds: float, *, ping_seconds: float = 5.0, tick_seconds: float = 1.0) -> None:
        self.stall_seconds = stall_seconds
        self.ping_seconds = ping_seconds
        self._tick_seconds = tick_seconds
        self._streams: set[EventStream] = set()
        self._next: asyncio.TimerHandle | None = None

    def add(self, stream: EventStream) -> None:
        self._streams.add(stream)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)

    def remove(self, stream: EventStream) -> None:
        self._streams.discard(stream)

    def _tick(self) -> None:
        self._next = None
        now = time.perf_counter()
        for stream in self._streams:
            stream.look(now)
        if self._streams:
            self._next = asyncio.get_running_loop().call_later(self._tick_seconds, self._tick)


class EventStream(Response):
    """A job as server-sent events; one that fails ends with an error instead of its interface's usual end. All events
    that are ready are sent at once.

    on_end  told at the end what kept the client from getting everything: `DISCONNECTED`, `STALLED`, an error's code, or
            None
    """

    media_type = "text/event-stream"

    def __init__(
        self, stream: RequestStream, assembler: Assembler, metrics: Metrics, timer: RequestTimer, clock: StreamClock,
        *, on_end: Callable[[str | None], None] = lambda problem: None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._stream = stream
        self._assembler = assembler
        self._metrics = metrics
        self._timer = timer
        self._clock = clock
        self._on_end = on_end
        # what the clock looks at: the task waits for events, or has been sending since
        self._task: asyncio.Task[None] | None = None
        self._waits = False
        self._sending_since: float | None = None
        self._last_sent = 0.0
        self._is_interrupted = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem: str | None = DISCONNECTED
        self._task = asyncio.current_task()
        try:
            async with self._stream as stream:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._last_sent = time.perf_counter()
                self._clock.add(self)
                with _watching(receive, stream) as gone:
                    try:
                        problem = await self._write(send, gone)
                    except _Stalled:
                        problem = STALLED
        finally:
            self._clock.remove(self)
            if problem in (DISCONNECTED, STALLED):
                self._metrics.disconnects.inc()
            self._on_end(problem)

    async def _write(self, send: Send, gone: asyncio.Event) -> str | None:
        """What kept the client from getting everything; None if nothing did."""
        await self._send(send, self._assembler.opening())
        take, outputs, timer = self._assembler.take, self._stream.outputs, self._timer
        while events := await self._next_batch(send):
            if gone.is_set():
                return DISCONNECTED
            chunks: list[str] = []
            for event in events:
                if isinstance(event, ErrorEvent):
                    failed = to_api_error(event.error)
                    await self._send(send, "".join(chunks) + self._assembler.failure(failed), is_last=True)
                    return failed.code
                timer.token(event, outputs[event.choice].prompt_len)
                chunks.append(take(event))
            text = "".join(chunks)
            if text:
                await self._send(send, text)
                timer.sent(events, self._last_sent)
        await self._send(send, self._assembler.closing(), is_last=True)
        return DISCONNECTED if gone.is_set() else None

    async def _next_batch(self, send: Send) -> Sequence[RequestEvent]:
        """Events that are ready, none at the end. While there are none, pings go out."""
        while True:
            self._waits = True
            try:
                return await self._stream.next_batch()
            except asyncio.CancelledError:
                if not self._takes_interrupt():
                    raise
            finally:
                self._waits = False
            await self._send(send, self._assembler.ping)

    async def _send(self, send: Send, text: str, *, is_last: bool = False) -> None:
        if not text:
            return
        self._sending_since = time.perf_counter()
        try:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})
        except asyncio.CancelledError:
            if not self._takes_interrupt():
                raise
            raise _Stalled from None
        finally:
            self._sending_since = None
        self._last_sent = time.perf_counter()

    # ---- the clock ----

    def look(self, now: float) -> None:
        """Called by the clock: interrupt a send that takes too long, or a wait in which a ping is due."""
        is_stalled = self._sending_since is not None and now - self._sending_since > self._clock.stall_seconds
        is_silent = self._waits and now - self._last_sent > self._clock.ping_seconds
        if (is_stalled or is_silent) and not self._is_interrupted:
            assert self._task is not None
            self._is_interrupted = True
            self._task.cancel()

    def _takes_interrupt(self) -> bool:
        """Whether a cancellation was the clock's and nobody else's."""
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        assert self._task is not None
        return was_interrupted and self._task.uncancel() == 0


@contextmanager
def _watching(receive: Receive, stream: RequestStream) -> Iterator[asyncio.Event]:
    """Drop the job as soon as the client is gone; the event says so."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        stream.cancel()

    task = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        task.cancel()
