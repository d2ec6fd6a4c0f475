"""`EngineConnection`: a server's connection to its engine, and whether the engine is there. No torch."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dsv4.engine.link.client import EngineClient
from dsv4.engine.link.messages import EngineInfo, EngineLost, EngineStopped
from dsv4.engine.link.stream import RequestStream
from dsv4.engine.stats import EngineStats
from dsv4.http.processes.heartbeat import PulseReader, PulseWatch
from dsv4.text.output import TextOutput

Connect = Callable[[], str | socket.socket]
Answer = TypeVar("Answer")

SILENT_SECONDS = 1.5  # without a sign of life the engine hangs: its clients hear of it within two seconds
_WATCH_SECONDS = 0.25
_RETRY_SECONDS = 0.2
_ASK_SECONDS = 1.0  # a step may take longer; then the last answer is given again
_LOG = logging.getLogger("dsv4.serve")


class EngineConnection:
    """`open` it, `close` it; everything in one event loop. A lost connection is opened again: the engine may have been
    started again, or have dropped only this client.

    connect  where the engine is: a path, or a connected socket
    pulse    the engine's signs of life; None where it is in this process
    """

    def __init__(self, connect: Connect, *, pulse: PulseReader | None = None) -> None:
        self._connect = connect
        self._pulse = pulse
        self._client: EngineClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: dict[str, Any] = {}  # the last answers to questions
        self._is_open = self._is_draining = self._is_silent = False

    async def open(self) -> EngineInfo:
        """Wait for the engine; returns its limits. `EngineLost` if it ends before it is there."""
        client = await self._open_client()
        if self._pulse is not None:
            self._begin(self._watch(self._pulse))
        return client.info

    async def _open_client(self) -> EngineClient:
        self._client = await EngineClient.connect(self._connect(), self._lost)
        self._known["stats"] = await self._client.stats()
        self._is_open = True
        return self._client

    async def close(self) -> None:
        self._is_open = False
        for task in list(self._tasks):
            task.cancel()
        if self._client is not None:
            self._client.close()

    @property
    def info(self) -> EngineInfo:
        """Its limits, and which weights it runs now."""
        assert self._client is not None, "asked for after `open`"
        return self._client.info

    # ---- requests ----

    @property
    def num_open(self) -> int:
        """Requests sent and not ended."""
        return 0 if self._client is None else self._client.num_open

    @property
    def problem(self) -> str | None:
        """Why the engine cannot answer now; None if it can."""
        if self._client is None:
            return "the engine is starting"
        if self._client.is_lost:
            return "the engine has stopped"
        if self._is_silent:
            return f"the engine does not answer: no sign of life for {SILENT_SECONDS:g} s"
        return None

    @property
    def has_failed(self) -> bool:
        return self.problem is not None and not self._is_draining

    @property
    def is_accepting(self) -> bool:
        return self.problem is None and not self._is_draining

    async def submit(
        self, outputs: Sequence[TextOutput], grammar: str | None = None, opening: Sequence[int] = (), name: str = ""
    ) -> RequestStream:  # fmt: skip
        """Send requests and wait until the engine has taken them; raises its reason if it does not. `name`: for
        `abort`."""
        if self._is_draining:
            raise EngineStopped("the engine is shutting down and takes no more requests")
        if self.problem is not None:
            raise EngineLost(self.problem)
        assert self._client is not None
        stream = self._client.submit(outputs, grammar=grammar, opening=opening, name=name)
        try:
            await stream.accepted()
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Have the engine obey a command (`EngineControl`); however long it takes."""
        if self.problem is not None:
            raise EngineLost(self.problem)
        assert self._client is not None
        return await self._client.control(verb, **arguments)

    def record(self, line: bytes) -> None:
        if self._client is not None:
            self._client.record(line)

    def drain(self) -> None:
        """Take no more requests."""
        self._is_draining = True

    def drop_all(self, error: Exception) -> None:
        """End every request there is with this error."""
        if self._client is not None:
            self._client.drop_all(error)

    # ---- questions ----

    async def ask(self, what: str, kind: Any = Any) -> Any:
        """The engine's answer, or its last one if it is busy. `EngineLost` if there was none."""
        if self._client is not None and self.problem is None:
            try:
                self._known[what] = await asyncio.wait_for(self._client.control(what, kind), _ASK_SECONDS)
            except (TimeoutError, EngineLost) as error:
                if what not in self._known:
                    raise EngineLost(f"the engine did not answer within {_ASK_SECONDS:g} s") from error
        if what not in self._known:
            raise EngineLost(self.problem or "the engine has not answered yet")
        return self._known[what]

    async def stats(self) -> EngineStats:
        found: EngineStats = await self.ask("stats", EngineStats)
        return found

    # ---- life ----

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self) -> None:
        """The engine's end of the socket is closed."""
        if not self._is_open:
            return  # closed by this side, or not yet complete: `open` raises
        self._is_open = False
        if not self._is_draining:
            self._begin(self._reopen())

    async def _reopen(self) -> None:
        while not self._is_draining:
            try:
                await self._open_client()
                _LOG.warning("connected to the engine again")
                return
            except (OSError, EngineLost):
                await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self, pulse: PulseReader) -> None:
        """Tell clients when the engine falls silent: a process that is stopped keeps its sockets open."""
        watch = PulseWatch(pulse, SILENT_SECONDS, _WATCH_SECONDS)
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            is_silent = watch.look()
            if not self._is_open or is_silent == self._is_silent:
                continue
            self._is_silent = is_silent
            if not is_silent:
                _LOG.warning("the engine answers again")
            elif (problem := self.problem) is not None:
                _LOG.error("%s; %d requests are dropped", problem, self.num_open)
                self.drop_all(EngineLost(problem))
