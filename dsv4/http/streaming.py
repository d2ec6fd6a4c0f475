"""Running a job for one HTTP client: to the end, or as server-sent events, and no longer than the client is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4.engine.link.messages import EngineLost, EngineStopped
from dsv4.engine.link.stream import ErrorEvent, RequestStream, TokenEvent
from dsv4.engine.request import RequestAborted, RequestFailed
from dsv4.errors import Dsv4Error
from dsv4.http.apis.sse import DONE, PING, error_event
from dsv4.http.connection import OUTLET, Outlet
from dsv4.http.errors import ApiError
from dsv4.http.telemetry.metrics import Metrics, RequestTimer

_LONG_ANSWER = 2048  # tokens: the JSON of longer ones is written beside the loop that streams


class Assembler:
    """Turns the events of a job into the answer of one interface: a stream (`opening`, `take`, `closing`) as the text
    of server-sent events, or whole (`keep`, `whole`) as JSON. As it stands: events without names, `[DONE]` at the end.
    """

    ping = PING  # what a stream says while it has nothing to say

    def opening(self) -> str:
        """What a stream begins with, before the first token."""
        return ""

    def take(self, event: TokenEvent) -> str:
        """What becomes certain with a token, or an end without one; often nothing inside a tag."""
        raise NotImplementedError

    def closing(self) -> str:
        """What ends a stream in which every choice has ended."""
        return DONE

    def failure(self, error: ApiError) -> str:
        """What ends a stream that cannot go on."""
        return error_event(error)

    def keep(self, event: TokenEvent) -> None:
        """A token, or an end without one, of an answer that is sent whole."""
        self.take(event)

    def whole(self) -> str:
        """The answer, once every choice has ended."""
        raise NotImplementedError


class ClientGone(Dsv4Error):
    """The client has disconnected."""


class _Stalled(Dsv4Error):
    """The client is connected, but takes nothing."""


DISCONNECTED, STALLED = "disconnected", "stalled"  # what ends an answer besides an error's code


async def collect(request: Request, stream: RequestStream, assembler: Assembler, timer: RequestTimer) -> str:
    """The answer of a job that runs to its end. `ClientGone` if the client goes first; `ApiError` if it fails."""

    def read() -> bool:
        for event in stream.read():
            if isinstance(event, ErrorEvent):
                raise to_api_error(event.error)
            timer.token(event, stream.outputs[event.choice].prompt_len)
            assembler.keep(event)
        return stream.is_read

    async with stream:
        reading = _Reading(stream, read)
        with watching(request.receive, lambda: reading.fail(ClientGone())):
            await reading.over
    if sum(output.num_output for output in stream.outputs) > _LONG_ANSWER:
        return await asyncio.to_thread(assembler.whole)
    return assembler.whole()


async def unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`; it is cancelled, and `ClientGone` raised, if the client goes first."""
    task, gone = asyncio.ensure_future(work), list[bool]()
    with watching(request.receive, lambda: gone.append(task.cancel())):
        try:
            await task
        except asyncio.CancelledError:
            if gone:
                raise ClientGone from None
            raise


class _Reading:
    """Calls `read` whenever a job has something, until it says that this was all (`over`) or raises."""

    def __init__(self, stream: RequestStream, read: Callable[[], bool]) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read = read
        stream.attach(self.step)

    def step(self) -> None:
        if self.over.done():
            return
        try:
            if self._read():
                self.over.set_result(None)
        except Exception as error:  # the handler of the engine's messages goes on; the request's own task raises it
            self.over.set_exception(error)

    def fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


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
    that are ready are written at once, in the handler that has read the engine's message.

    on_end  called once at the end with what cut the answer short: `DISCONNECTED`, `STALLED`, an error's code, or None
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
        self._failure: str | None = None  # an error's code
        self._is_written = False  # to its end
        self._full_since: float | None = None
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem: str | None = DISCONNECTED
        self._outlet: Outlet = scope["extensions"][OUTLET]
        try:
            async with self._stream as stream:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._last_sent = time.perf_counter()
                if opening := self._assembler.opening():
                    self._put(opening)
                self._clock.add(self)
                self._reading = _Reading(stream, self._read)
                with watching(receive, lambda: self._reading.fail(ClientGone())):
                    await self._reading.over
                problem = self._failure
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        except _Stalled:
            problem = STALLED
            self._outlet.abort()
        finally:
            self._clock.remove(self)
            if problem in (DISCONNECTED, STALLED):
                self._metrics.disconnects.inc()
            self._on_end(problem)

    def _read(self) -> bool:
        """Write what is ready, unless the client still has to take what it was given; whether that was all."""
        if self._outlet.is_full:
            if self._full_since is None:
                self._full_since = time.perf_counter()
                self._outlet.when_free(self._go_on)
            return False
        if self._is_written:
            return True
        take, outputs, timer = self._assembler.take, self._stream.outputs, self._timer
        chunks: list[str] = []
        events = self._stream.read()
        for event in events:
            if isinstance(event, ErrorEvent):
                failed = to_api_error(event.error)
                self._failure, self._is_written = failed.code, True
                chunks.append(self._assembler.failure(failed))
                break
            timer.token(event, outputs[event.choice].prompt_len)
            chunks.append(take(event))
        else:
            if self._stream.is_read:
                self._is_written = True
                chunks.append(self._assembler.closing())
        if text := "".join(chunks):
            self._put(text)
            timer.sent(events, self._last_sent)
        return self._is_written and self._read()

    def _put(self, text: str) -> None:
        self._outlet.write(text.encode())
        self._last_sent = time.perf_counter()

    def _go_on(self) -> None:
        self._full_since = None
        self._reading.step()

    def look(self, now: float) -> None:
        """Called by the clock: end it where the client takes nothing, say that it lives where nothing comes."""
        if self._full_since is not None:
            if now - self._full_since > self._clock.stall_seconds:
                self._reading.fail(_Stalled())
        elif now - self._last_sent > self._clock.ping_seconds and not self._outlet.is_full:
            self._put(self._assembler.ping)


@contextmanager
def watching(receive: Receive, on_gone: Callable[[], object]) -> Iterator[None]:
    """`on_gone` is called as soon as the client is gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
