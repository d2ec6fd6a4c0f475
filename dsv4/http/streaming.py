"""Running a job for one HTTP client: to the end, or as server-sent events, and no longer than the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4.engine.async_engine import EngineStopped
from dsv4.engine.events import EndEvent, ErrorEvent, RequestStream, TokenEvent
from dsv4.engine.request import RequestAborted, RequestFailed
from dsv4.errors import Dsv4Error
from dsv4.http.apis.answers import Answer, Sent
from dsv4.http.errors import ApiError
from dsv4.http.metrics import Metrics, RequestTimer


class Assembler(Protocol):
    """Turns the events of a job into what one interface answers, as a stream or whole."""

    def opening(self) -> Sequence[Sent]:
        """What a stream begins with, before the first token."""

    def take(self, event: TokenEvent | EndEvent) -> Sequence[Any]:
        """What becomes certain with a token, or an end without one; each piece is `Sent`."""

    def closing(self) -> Sequence[Sent]:
        """What ends a stream in which every choice has ended."""

    def failure(self, error: ApiError) -> Sequence[Sent]:
        """What ends a stream that cannot go on."""

    def whole(self, chunks: Sequence[Any]) -> Answer:
        """The answer that all the pieces of `take` add up to."""


class ClientGone(Dsv4Error):
    """Nobody is there to answer."""


DISCONNECTED, STALLED = "disconnected", "stalled"  # what ends an answer besides an error's code


async def collect(
    request: Request, stream: RequestStream, assembler: Assembler, timer: RequestTimer
) -> list[Any]:  # fmt: skip
    """Every chunk of a job that runs to its end. `ClientGone` if the client goes first; `ApiError` if it fails."""
    chunks: list[Any] = []
    async with stream:
        with _watching(request.receive, stream) as gone:
            async for event in stream:
                if gone.is_set():
                    raise ClientGone
                if isinstance(event, ErrorEvent):
                    raise to_api_error(event.error)
                timer.token(event, stream.outputs[event.choice].prompt_len)
                chunks += assembler.take(event)
    return chunks


def to_api_error(error: Exception) -> ApiError:
    """A request that ended without a result, as an answer."""
    if isinstance(error, EngineStopped):
        message = "the server is shutting down and could not finish this request; send it again"
        return ApiError(503, message, code="shutting_down")
    if isinstance(error, RequestFailed):
        return ApiError(500, f"the request could not be continued: {error}", code="request_failed")
    assert isinstance(error, RequestAborted), error
    return ApiError(503, f"the request was dropped: {error}", code="request_aborted")


class EventStream(Response):
    """A job as server-sent events; one that fails ends with an error instead of its interface's usual end.

    on_end  told at the end what kept the client from getting everything: `DISCONNECTED`, `STALLED`, an error's code, or
            None
    """

    media_type = "text/event-stream"

    def __init__(
        self, stream: RequestStream, assembler: Assembler, metrics: Metrics, timer: RequestTimer,
        *, stall_seconds: float, on_end: Callable[[str | None], None] = lambda problem: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._stream = stream
        self._assembler = assembler
        self._metrics = metrics
        self._timer = timer
        self._stall_seconds = stall_seconds
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem: str | None = DISCONNECTED
        try:
            async with self._stream as stream:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                with _watching(receive, stream) as gone:
                    try:
                        problem = await self._write(send, gone)
                    except TimeoutError:  # connected, but taking nothing
                        problem = STALLED
        finally:
            if problem in (DISCONNECTED, STALLED):
                self._metrics.disconnects.inc()
            self._on_end(problem)

    async def _write(self, send: Send, gone: asyncio.Event) -> str | None:
        """What kept the client from getting everything; None if nothing did."""
        await self._send(send, self._assembler.opening())
        async for event in self._stream:
            if gone.is_set():
                return DISCONNECTED
            if isinstance(event, ErrorEvent):
                failed = to_api_error(event.error)
                await self._send(send, self._assembler.failure(failed), is_last=True)
                return failed.code
            self._timer.token(event, self._stream.outputs[event.choice].prompt_len)
            chunks = self._assembler.take(event)
            if chunks:
                await self._send(send, chunks)
                self._timer.sent(event)
        await self._send(send, self._assembler.closing(), is_last=True)
        return DISCONNECTED if gone.is_set() else None

    async def _send(self, send: Send, pieces: Sequence[Sent], *, is_last: bool = False) -> None:
        if pieces:
            body = b"".join(piece.to_event() for piece in pieces)
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})


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
