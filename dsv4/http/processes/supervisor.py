"""`Supervisor`: starts the engine and the front ends of a server, starts again those that die, ends them all. No torch.

It owns the listening socket and the private folder (mode 0700) with the engine's socket. A front end that dies loses
its own requests and is started again. An engine that dies ends the server with status 1, or is started again where that
was asked for; front ends tell clients meanwhile. A process that hangs is killed, and then it has died. Children end
with the supervisor, however it ends.
"""

import logging
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from dsv4.http.address import address_url
from dsv4.http.processes.child import FORCE, STOP, Child
from dsv4.http.processes.folder import private_folder
from dsv4.http.processes.heartbeat import PulseReader, PulseWatch, make_pulse_file
from dsv4.http.processes.settings import EngineSettings, FrontEndSettings, RecordSettings, Room
from dsv4.http.settings import ServerConfig
from dsv4.tools.model_loading import ModelSettings

_ENGINE, _FRONT_END = "dsv4.http.processes.engine_process", "dsv4.http.processes.front_end"
_TICK_SECONDS = 0.25
_SILENT_SECONDS = 10.0  # a process without a sign of life for this long hangs; the engine's clients hear after 1.5 s
_FLUSH_SECONDS = 5.0  # for a front end's last words, beyond the drain
_STEP_SECONDS = 5.0  # how long a shutdown waits for the forward call that runs
_END_SECONDS = 5.0  # for the cache's files and the processes' ends
_MAX_EARLY_ENDS = 3  # of children that end before they are ready, one after the other
_BACKLOG = 64
ADDRESS_FILE = "DSV4_ADDRESS_FILE"  # the environment's name of the file that gets the server's address
_LOG = logging.getLogger("dsv4.serve")


class Supervisor:
    """`run` serves until SIGINT or SIGTERM, then finishes what runs; a second signal does not wait.

    num_front_ends  processes that take requests
    restarts        start an engine again that has died
    step_seconds    an engine whose step runs longer hangs
    """

    def __init__(
        self, model: ModelSettings, server: ServerConfig, listener: socket.socket, *, num_front_ends: int,
        record: RecordSettings | None = None, restarts: bool = False, step_seconds: float = 300.0,
    ) -> None:  # fmt: skip
        self._model = model
        self._server = server
        self._listener = listener
        self._num_front_ends = num_front_ends
        self._record = record
        self._restarts = restarts
        self._step_seconds = step_seconds
        self._events: queue.SimpleQueue[tuple[str, Child | int]] = queue.SimpleQueue()
        self._engine: Child | None = None
        self._front_ends: dict[Child, PulseWatch] = {}
        self._num_started = 0  # front ends, all in all
        self._num_early_ends = 0
        self._is_announced = self._is_killing = False
        self._status: int | None = None  # set once the server is ending
        self._deadline = float("inf")  # after it, children that are left are killed

    def run(self) -> int:
        """The exit status: 0 after SIGTERM, 130 after Ctrl-C; 1 after the engine died, or a process that still had
        something to finish; the engine's own if it could not start."""
        with private_folder() as folder, _signal_handler(lambda number: self._events.put(("signal", number))):
            self._room = Room(str(folder))
            make_pulse_file(self._room.pulse)
            pulse = PulseReader(self._room.pulse)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as self._engine_listener:
                self._engine_listener.bind(self._room.socket)
                self._engine_listener.listen(_BACKLOG)
                try:
                    self._start_engine()
                    for _ in range(self._num_front_ends):
                        self._start_front_end()
                    self._watch(pulse)
                finally:
                    self._kill_all()
        assert self._status is not None
        return self._status

    # ---- children ----

    def _start_engine(self) -> None:
        settings = EngineSettings(
            model=self._model, record=self._record, max_waiting=self._server.max_waiting,
            log_format=self._server.log_format, room=self._room, listener=self._engine_listener.fileno(),
        )  # fmt: skip
        self._engine = self._start(_ENGINE, settings, settings.listener)

    def _start_front_end(self) -> None:
        share = -(-self._server.max_connections // self._num_front_ends)
        pulse = self._room.path / f"pulse-{self._num_started}"
        self._num_started += 1
        make_pulse_file(pulse)
        settings = FrontEndSettings(
            server=replace(self._server, max_connections=share), tokenizer=self._model.folder, room=self._room,
            pulse=str(pulse), listener=self._listener.fileno(),
        )  # fmt: skip
        child = self._start(_FRONT_END, settings, settings.listener)
        self._front_ends[child] = PulseWatch(PulseReader(pulse), _SILENT_SECONDS, _TICK_SECONDS)

    def _start(self, module: str, settings: EngineSettings | FrontEndSettings, listener: int) -> Child:
        return Child(
            module, settings, [listener], lambda child: self._events.put(("ready", child)),
            lambda child: self._events.put(("exit", child)),
        )  # fmt: skip

    def _kill_all(self) -> None:
        for child in (*self._front_ends, *([] if self._engine is None else [self._engine])):
            child.kill()
            child.process.wait()
            child.close()

    # ---- what happens ----

    def _watch(self, pulse: PulseReader) -> None:
        watch = PulseWatch(pulse, _SILENT_SECONDS, _TICK_SECONDS)
        while self._engine is not None or self._front_ends:
            with suppress(queue.Empty):
                kind, subject = self._events.get(timeout=_TICK_SECONDS)
                if isinstance(subject, int):
                    self._on_signal(subject)
                elif kind == "ready":
                    self._on_ready(subject)
                elif subject is self._engine:
                    self._on_engine_end(subject)
                else:
                    self._on_front_end_end(subject)
                continue
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")
                self._kill_the_rest()
            if self._engine is not None and self._engine.is_ready:
                self._check_engine(self._engine, pulse, watch)
            if self._status is None:
                self._check_front_ends()

    def _on_signal(self, number: int) -> None:
        if self._status is None:
            self._status = 130 if number == signal.SIGINT else 0
            if not self._is_announced:  # no request can be running yet
                self._kill_the_rest()
                return
            _LOG.info("shutting down: what runs is finished, for at most %g s", self._server.drain_seconds)
            announce_end(self._server.drain_seconds + _FLUSH_SECONDS + _STEP_SECONDS + _END_SECONDS)
            self._stop_front_ends(STOP, self._server.drain_seconds)
        else:
            self._stop_front_ends(FORCE, 0.0)

    def _stop_front_ends(self, order: bytes, seconds: float) -> None:
        for child in self._front_ends:
            child.order(order)
        self._deadline = time.monotonic() + seconds + _FLUSH_SECONDS
        if not self._front_ends:
            self._stop_engine()

    def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.order(STOP)
            self._deadline = time.monotonic() + _STEP_SECONDS

    def _kill_the_rest(self) -> None:
        self._is_killing = True
        for child in (*self._front_ends, *([] if self._engine is None else [self._engine])):
            child.kill()

    def _on_ready(self, child: Child) -> None:
        self._num_early_ends = 0
        if child is self._engine and self._is_announced:
            _LOG.warning("the engine runs again")
        is_complete = self._engine is not None and all(one.is_ready for one in (self._engine, *self._front_ends))
        if is_complete and not self._is_announced and self._status is None:
            self._is_announced = True
            place = address_url(self._server, self._listener)
            announce_ready(place)
            _LOG.info("serving %s, running on %s (Ctrl-C stops it)", self._server.name, place)

    def _on_front_end_end(self, child: Child) -> None:
        del self._front_ends[child]
        child.close()
        if self._status is None:
            self._num_early_ends += not child.is_ready
            _LOG.error("a front end has died (%s) and its requests with it", child.ending)
            if self._num_early_ends < _MAX_EARLY_ENDS:
                self._start_front_end()
            else:
                _LOG.error("front ends end before they can serve: the server ends")
                self._status = 1
                self._stop_front_ends(STOP, 0.0)
            return
        if child.is_ready and child.process.returncode != 0 and not self._is_killing:
            _LOG.error("a front end has died (%s) and the requests it was finishing with it", child.ending)
            self._status = 1
        if not self._front_ends:
            self._stop_engine()

    def _on_engine_end(self, child: Child) -> None:
        self._engine = None
        child.close()
        if self._status is not None:
            if self._front_ends and not self._is_killing:
                _LOG.error("the engine has died (%s) and the requests that were being finished with it", child.ending)
                self._status = 1
                self._stop_front_ends(FORCE, 0.0)
            return
        if not child.is_ready and not self._is_announced:  # it has said why
            self._status = child.process.returncode if child.process.returncode > 0 else 1
            self._kill_the_rest()
            return
        self._num_early_ends += not child.is_ready
        if self._restarts and self._num_early_ends < _MAX_EARLY_ENDS:
            _LOG.error("the engine has died (%s) and all requests with it; it is started again", child.ending)
            self._start_engine()
        else:
            _LOG.error("the engine has died (%s) and all requests with it; the server ends", child.ending)
            self._status = 1
            self._stop_front_ends(STOP, 0.0)

    def _check_engine(self, engine: Child, pulse: PulseReader, watch: PulseWatch) -> None:
        """Kill it if it hangs. Its end is then handled as any other."""
        step_seconds = pulse.read().step_seconds
        if watch.look():
            _LOG.error("the engine has given no sign of life for %g s and is killed", _SILENT_SECONDS)
        elif step_seconds > self._step_seconds:
            _LOG.error("the engine's step has been running for %.0f s (--step-seconds); it is killed", step_seconds)
        else:
            return
        engine.kill()

    def _check_front_ends(self) -> None:
        """Likewise, those whose event loop does not run."""
        for child, watch in self._front_ends.items():
            if child.is_ready and watch.look():
                _LOG.error("a front end has given no sign of life for %g s and is killed", _SILENT_SECONDS)
                child.kill()


@contextmanager
def _signal_handler(handle: Callable[[int], None]) -> Iterator[None]:
    """`handle(number)` is called for SIGINT and SIGTERM, instead of what was called before."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        handle(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def announce_ready(url: str) -> None:
    """Tell whoever started the server: systemd (`Type=notify`), and a container's health check."""
    if os.environ.get(ADDRESS_FILE):
        Path(os.environ[ADDRESS_FILE]).write_text(url, encoding="utf-8")
    _notify("READY=1")


def announce_end(seconds: float) -> None:
    """Tell systemd that the server stops, and that this may take `seconds`."""
    _notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def _notify(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)
