"""The life of a front end: how it starts to listen, how it ends.

It accepts requests once the model is loaded. After a first stop signal new requests get 503 while running ones finish.
Requests still running after `drain_seconds`, or at a second signal, end with an error that says why.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from dsv4.engine.link.messages import EngineStopped
from dsv4.http.connection import Connection, connection_class
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.settings import ServerConfig
from dsv4.http.telemetry.logs import log_config

_LOG = logging.getLogger("dsv4.serve")
_FLUSH_SECONDS = 2.0  # for the last words to those whose requests were dropped
_SPARE_DESCRIPTORS = 64  # for files, pipes to the grammar checker and whatever else is not a connection
_BACKLOG = 2048  # connections that come at once; the kernel drops further ones, which try again after a second


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
    """uvicorn with an end of our own. It listens to no signal: `stop` ends it, and again without waiting.

    on_start  called once clients are let in
    on_tick   called ten times a second from then on, until it is stopped
    """

    def __init__(
        self, settings: uvicorn.Config, config: ServerConfig, engine: EngineConnection, on_start: Callable[[], None],
        on_tick: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(settings)
        self._config = config
        self._on_start, self._on_tick = on_start, on_tick
        self.engine = engine

    def stop(self) -> None:
        """Finish what runs, then end; the second time, do not wait. From any thread."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio accepts as many connections in a row as the backlog it is given says, and where descriptors
        run out it reports each of them and tries each again; so it is given 1, and the kernel the real one."""
        asyncio.get_running_loop().set_exception_handler(_on_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        if self.started:
            self._on_start()

    async def on_tick(self, counter: int) -> bool:
        self._on_tick()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.drain()
        num_open = self.engine.num_open
        if num_open:
            _LOG.info("shutting down: %d requests to finish, for at most %g s", num_open, self._config.drain_seconds)
        await self._wait_for_answers(self._config.drain_seconds, heeds_force=True)
        num_dropped = self.engine.num_open
        if num_dropped:
            _LOG.warning("shutting down: %d requests are dropped", num_dropped)
        self.engine.drop_all(EngineStopped("the engine was stopped before this request was finished"))
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


def make_uvicorn(
    app: Starlette, config: ServerConfig, *, log_level: str = "INFO", on_start: Callable[[], None] = lambda: None,
    on_tick: Callable[[], None] = lambda: None,
) -> HttpServer:  # fmt: skip
    """A server for the app of `create_app`; `run(sockets=[take_address(config)])` serves until it is stopped."""
    tls = config.tls
    settings = uvicorn.Config(
        app, log_config=log_config(config.log_format, log_level), access_log=False, server_header=False,
        timeout_keep_alive=30, h11_max_incomplete_event_size=65536, backlog=1, ws="none", lifespan="on",
        http=connection_class(config, most_connections(config)),
        ssl_certfile=None if tls is None else tls.certfile, ssl_keyfile=None if tls is None else tls.keyfile,
        ssl_keyfile_password=None if tls is None else tls.keyfile_password,
    )  # fmt: skip
    return HttpServer(settings, config, app.state.server.engine, on_start, on_tick)
