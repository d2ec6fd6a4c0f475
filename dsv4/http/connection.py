"""`Connection`: one HTTP connection, which must say what it wants in time.

uvicorn's own protocol waits for ever for the rest of a head or of a body. Here each has a deadline, counted from its
first byte (a new connection's from its opening), and nothing else of the request matters before: no key is compared, no
handler waits longer. The number of connections has a limit too, below that of the process's descriptors.

A connection is also the `Outlet` of a streamed answer: its pieces go straight to the transport, past the application's
layers, which see its head and its end.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from dsv4.http.errors import ApiError
from dsv4.http.settings import ServerConfig

_LOG = logging.getLogger("dsv4.serve")


OUTLET = "dsv4.outlet"  # among a scope's extensions


class Outlet(Protocol):
    """Where the body of a streamed answer goes, between its head and its end. Nothing here waits."""

    @property
    def is_full(self) -> bool:
        """Whether the client has not taken what it was given: what is written now would pile up."""

    def write(self, body: bytes) -> None:
        """A piece of the body."""

    def when_free(self, call: Callable[[], None]) -> None:
        """Call this once the client takes more."""

    def abort(self) -> None:
        """Close without waiting for the client to take what is left."""


class Connection(H11Protocol):
    """`settings` gives the limits; make a class of it with `connection_class`."""

    settings: ServerConfig
    max_connections: int

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, _loop)
        self._awaited: Literal["head", "body"] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._when_free: Callable[[], None] | None = None

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived whole and its answer is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            _LOG.warning("more than %d connections; further ones are refused", self.max_connections)
            message = f"the server has {self.max_connections} connections already; try again later"
            self._refuse(ApiError(503, message, code="too_many_connections"))
            return
        self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:  # its handler begins later
            self.scope["extensions"] = {OUTLET: self}  # type: ignore[dict-item]
        state = self.conn.their_state
        if self.transport.is_closing():
            self._expect(None)
        elif state is h11.SEND_BODY:
            self._expect("body")
        elif state is h11.IDLE and (self.timeout_keep_alive_task is None or self.conn.trailing_data[0]):
            self._expect("head")  # uvicorn's timer for what may come between two requests stops at the first byte
        else:
            self._expect(None)

    def _expect(self, part: Literal["head", "body"] | None) -> None:
        """Start the clock of what has to come; a clock that runs for the same part goes on."""
        if part == self._awaited and self._deadline is not None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._deadline = part, None
        if part is not None:
            seconds = self.settings.header_seconds if part == "head" else self.settings.body_seconds
            self._deadline = self.loop.call_later(seconds, self._too_slow, part, seconds)

    def _too_slow(self, part: str, seconds: float) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        _LOG.info("%s: the %s of a request did not arrive within %g s", self._peer, part, seconds)
        self._refuse(ApiError(408, f"the {part} of the request did not arrive within {seconds:g} s", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "malformed HTTP request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error unless an answer has begun, and close. A waiting handler then sees a disconnect."""
        self._expect(None)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.scope["state"]["is_refused"] = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode("utf-8")
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode("ascii")),
                (b"connection", b"close"),
            ]
            head = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _peer(self) -> str:
        return f"{self.client[0]}:{self.client[1]}" if self.client else "a client"

    # ---- the outlet of a streamed answer ----

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused and not self.transport.is_closing()

    def write(self, body: bytes) -> None:
        """As h11 would: HTTP/1.1 has chunks where no length is given, before it the end of the connection."""
        if self.cycle.disconnected or self.transport.is_closing():
            return
        if self.scope["http_version"] == "1.1":
            body = b"%x\r\n%s\r\n" % (len(body), body)
        self.transport.write(body)

    def when_free(self, call: Callable[[], None]) -> None:
        self._when_free = call

    def resume_writing(self) -> None:
        super().resume_writing()
        call, self._when_free = self._when_free, None
        if call is not None:
            call()

    def abort(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()


def connection_class(settings: ServerConfig, max_connections: int) -> type[Connection]:
    """`Connection` with its limits; uvicorn makes the instances."""
    return type("Connection", (Connection,), {"settings": settings, "max_connections": max_connections})
