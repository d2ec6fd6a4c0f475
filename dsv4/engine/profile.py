"""`Profiler`: torch's profiler around the steps of a running engine, from one command to another."""

import time
from pathlib import Path
from typing import Any

import torch

from dsv4.request import RequestError


class Profiler:
    """`start`, some steps, `stop`: in the engine's thread, between two steps. It costs memory for every operation."""

    def __init__(self) -> None:
        self._running: Any = None
        self._file = Path()

    def start(self, folder: str) -> str:
        """The file that will be written."""
        if self._running is not None:
            raise RequestError("a profile is being taken already: stop it first")
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._file = target / f"dsv4-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.json.gz"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        running = torch.profiler.profile(activities=kinds)
        running.start()
        self._running = running
        return str(self._file)

    def stop(self) -> str:
        """Writes the file, which takes as long as it is large; requests wait. chrome://tracing and Perfetto show it."""
        if self._running is None:
            raise RequestError("no profile is being taken: start one first")
        running, self._running = self._running, None
        running.stop()
        running.export_chrome_trace(str(self._file))
        return str(self._file)
