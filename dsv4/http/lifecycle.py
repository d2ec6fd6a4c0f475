"""The life of a server: where it listens, how it starts, how it ends.

The address is taken before anything slow (`take_address`), but nobody is let in before the model is there. At the
first SIGINT or SIGTERM the engine takes no more requests; clients that come are told so (503) while what runs is
finished. What is not done after `drain_seconds`, or at the second signal, ends with an error that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from dsv4.config import ConfigError
from dsv4.engine.async_engine import AsyncEngine
from dsv4.http.connection import Connection, connection_class
from dsv4.http.logs import log_config
from dsv4.http.settings import ServerConfig

_LOG = logging.getLogger("dsv4.serve")
_FLUSH_SECONDS = 2.0  # for the last words to those whose requests were dropped
_SPARE_DESCRIPTORS = 64  # for files, pipes to the grammar checker and whatever else is not a connection
_BACKLOG = 128


# ---- where ----


def take_address(config: ServerConfig) -> socket.socket:
    """A socket bound to the server's address, not yet listening. `ConfigError` if the address cannot be had.

    Nobody can connect before the server listens. A bound socket alone does not keep another process from listening
    there, nor does binding notice one that does, so the address is tried out first.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {config.host!r} is not an address of this machine: {error}") from None
    try:
        if config.port != 0:
            with _bound(family, kind, protocol, address) as trial:
                trial.listen(1)
        return _bound(family, kind, protocol, address)
    except OSError as error:
        place = f"{config.host} port {config.port}"
        if error.errno == errno.EADDRINUSE:
            message = f"{place} is in use: stop what listens there, or choose another with --port (0 takes a free one)"
            raise ConfigError(message) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"{place}: this user may not listen there; choose a --port above 1023") from None
        raise ConfigError(f"{place} cannot be listened on: {error.strerror}; choose another --host") from None


def _bound(family: int, kind: int, protocol: int, address: object) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)  # type: ignore[arg-type]
    except OSError:
        made.close()
        raise
    return made


def address_url(config: ServerConfig, listener: socket.socket) -> str:
    """Where a browser finds the server."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if config.tls is None else 'https'}://{host}:{listener.getsockname()[1]}"


def most_connections(config: ServerConfig) -> int:
    """As many connections as are allowed and the process has descriptors for (its soft limit is raised to the hard)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    free = soft - len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else soft // 2
    possible = max(free - _SPARE_DESCRIPTORS, free // 2, 1)
    if possible < config.max_connections:
        _LOG.warning(
            "%d connections at most: this process may open %d files (ulimit -n); %d were asked for",
            possible, soft, config.max_connections,
        )  # fmt: skip
    return min(config.max_connections, possible)


# ---- running ----


class HttpServer(uvicorn.Server):
    """uvicorn with an end of our own."""

    def __init__(self, settings: uvicorn.Config, config: ServerConfig, engine: AsyncEngine) -> None:
        super().__init__(settings)
        self._config = config
        self.engine = engine
        self.first_signal: int | None = None

    @property
    def exit_status(self) -> int:
        """0 after SIGTERM, 130 after Ctrl-C, as shells expect; 1 after a rank failed."""
        if self.engine.has_failed:
            return 1
        return 130 if self.first_signal == signal.SIGINT else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            self.first_signal = sig
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio accepts as many connections in a row as the backlog it is given says, and where descriptors
        run out it reports each of them and tries each again; so it is given 1, and the kernel the real one."""
        asyncio.get_running_loop().set_exception_handler(_on_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
            place = address_url(self._config, listener)
            _LOG.info("serving %s, running on %s (Ctrl-C stops it)", self._config.name, place)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.drain()
        num_open = self.engine.num_open
        _LOG.info("shutting down: %d requests to finish, for at most %g s", num_open, self._config.drain_seconds)
        await self._wait_for_answers(self._config.drain_seconds, heeds_force=True)
        num_dropped = self.engine.num_open
        if num_dropped:
            _LOG.warning("shutting down: %d requests are dropped", num_dropped)
        self.engine.drop_all()
        await self._wait_for_answers(_FLUSH_SECONDS, heeds_force=False)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.abort()
        for _ in range(20):  # handlers whose clients are gone now end by themselves
            if not self.server_state.tasks:
                break
            await asyncio.sleep(0.01)
        if self.force_exit:
            _leave(self.exit_status)
        await self.lifespan.shutdown()

    async def _wait_for_answers(self, seconds: float, *, heeds_force: bool) -> None:
        """Until every request that has arrived is answered. Those that have not arrived whole are not waited for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (heeds_force and self.force_exit):
            if self.engine.num_open == 0 and not any(
                isinstance(one, Connection) and one.is_answering for one in self.server_state.connections
            ):
                return
            await asyncio.sleep(0.02)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """One line instead of a traceback for what the network does to a server; the rest as usual."""
    error = context.get("exception")
    if isinstance(error, OSError):
        _LOG.warning("%s: %s", context.get("message"), error.strerror or error)
    else:
        loop.default_exception_handler(context)


def make_uvicorn(app: FastAPI, config: ServerConfig, *, log_level: str = "INFO") -> HttpServer:
    """A server for the app of `create_app`; `run(sockets=[take_address(config)])` serves until a signal comes, or
    `should_exit` is set."""
    tls = config.tls
    settings = uvicorn.Config(
        app, log_config=log_config(config.log_format, log_level), access_log=False, server_header=False,
        timeout_keep_alive=30, h11_max_incomplete_event_size=65536, backlog=1, ws="none", lifespan="on",
        http=connection_class(config, most_connections(config)),
        ssl_certfile=None if tls is None else tls.certfile, ssl_keyfile=None if tls is None else tls.keyfile,
        ssl_keyfile_password=None if tls is None else tls.keyfile_password,
    )  # fmt: skip
    return HttpServer(settings, config, app.state.server.engine)


def run_process(server: HttpServer, listener: socket.socket) -> int:
    """Serve until a signal; returns the exit status.

    The engine's thread may still be inside a forward call that takes long. Python would tear the interpreter down
    around it, which torch answers with an abort; leaving at once does no harm, since nothing is written anywhere.
    """
    server.run(sockets=[listener])
    if server.engine.is_alive:
        _leave(server.exit_status)
    return server.exit_status


def _leave(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
