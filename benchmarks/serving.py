"""`dsv4 serve` as a process of its own, and what all its processes use. For the benchmarks `server` and `storm`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Sample:
    """All processes of a server at one moment; `process` counts its starts."""

    seconds: float
    process: int
    memory_bytes: int
    descriptors: int
    threads: int
    log_bytes: int


class ServerProcess:
    """`dsv4 serve` on one address, started as often as needed, and looked at while it runs."""

    def __init__(self, folder: Path, log: Path, options: list[str]) -> None:
        self._command = [sys.executable, "-m", "dsv4", "serve", "--model", str(folder), "--name", "model", *options]
        self._log = log
        self._port = 0
        self._began = time.monotonic()
        self._is_up = False
        self.number = 0
        self.samples: list[Sample] = []
        self.exit_codes: list[int] = []

    def start(self) -> str:
        """Start it, wait until it answers; returns its address."""
        already = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as file:
            self.process = subprocess.Popen([*self._command, "--port", str(self._port)], stderr=file)
        self.number += 1
        while "running on http" not in (text := self._log.read_text()[already:]):
            if self.process.poll() is not None:
                sys.exit(f"the server did not start:\n{text}")
            time.sleep(0.05)
        url = text.partition("running on ")[2].split()[0]
        self._port = int(url.rpartition(":")[2])
        self._is_up = True
        return url

    def stop(self) -> None:
        self._is_up = False
        self.process.send_signal(signal.SIGTERM)
        self.exit_codes.append(self.process.wait(120))

    def look(self) -> None:
        """Take a sample, if the server is up."""
        if not self._is_up:
            return
        memory = descriptors = threads = 0
        try:
            for pid in family(self.process.pid):
                folder = Path(f"/proc/{pid}")
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                descriptors += len(list((folder / "fd").iterdir()))
                memory += int(status["VmRSS"].split()[0]) * 1024
                threads += int(status["Threads"])
        except (OSError, KeyError):  # one ended just now
            return
        now, log_bytes = round(time.monotonic() - self._began, 1), self._log.stat().st_size
        self.samples.append(Sample(now, self.number, memory, descriptors, threads, log_bytes))

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each process so far, by its number and name, user and system together."""
        found = {}
        for place, pid in enumerate(family(self.process.pid)):
            try:
                name, fields = _module_of(pid), _stat(pid)[1]
            except OSError:  # it ended just now
                continue
            found[f"{place} {name}"] = (int(fields[11]) + int(fields[12])) / _TICKS
        return found


def family(pid: int) -> list[int]:
    """A process and all its descendants, oldest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                children.setdefault(int(_stat(int(folder.name))[1][1]), []).append(int(folder.name))
            except OSError:  # it ended just now
                continue
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop(0))
        waiting += sorted(children.get(found[-1], ()))
    return found


def _module_of(pid: int) -> str:
    """The last part of the module that a Python process runs."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else words[0].rpartition("/")[2]


def _stat(pid: int) -> tuple[str, list[str]]:
    """The name of a process, and the fields of /proc/PID/stat that follow it, from the state on."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
