"""A process's signs of life: a small file in memory that it changes ten times a second. No torch.

A process that is stopped, or hangs with the interpreter's lock, keeps its sockets open: only silence tells. The
engine's file also says how long the step that runs has been running. A front end's is changed by its event loop.
"""

import mmap
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("<qd")
_PERIOD_SECONDS = 0.1


class Pulse(NamedTuple):
    """`step_start` is the clock (`time.monotonic`) at the start of the step that runs; 0 between two."""

    num_beats: int
    step_start: float

    @property
    def step_seconds(self) -> float:
        return time.monotonic() - self.step_start if self.step_start else 0.0


class PulseWriter:
    def __init__(self, path: Path) -> None:
        self._map = _mapped(path)
        self._num_beats = PulseReader(path).read().num_beats

    def beat(self, step_start: float = 0.0) -> None:
        self._num_beats += 1
        _LAYOUT.pack_into(self._map, 0, self._num_beats, step_start)


class Heartbeat:
    """Beats from a thread of its own until the process ends, or `stop`. `step_start` is read at every beat."""

    def __init__(self, path: Path, step_start: Callable[[], float | None]) -> None:
        self._writer = PulseWriter(path)
        self._step_start = step_start
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv4-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._writer.beat(self._step_start() or 0.0)
            self._stopped.wait(_PERIOD_SECONDS)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class PulseReader:
    def __init__(self, path: Path) -> None:
        self._map = _mapped(path)

    def read(self) -> Pulse:
        return Pulse(*_LAYOUT.unpack_from(self._map, 0))


class PulseWatch:
    """`look` every `period` seconds; it says whether there was no beat for `seconds`. Looks are counted, not the clock:
    a watcher that was stopped itself does not blame the other."""

    def __init__(self, reader: PulseReader, seconds: float, period: float) -> None:
        self._reader = reader
        self._most_looks = round(seconds / period)
        self._last = reader.read().num_beats
        self._num_silent = 0

    def look(self) -> bool:
        found = self._reader.read().num_beats
        self._num_silent = 0 if found != self._last else self._num_silent + 1
        self._last = found
        return self._num_silent >= self._most_looks


def make_pulse_file(path: Path) -> None:
    path.write_bytes(bytes(_LAYOUT.size))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _LAYOUT.size)
