"""`dsv4 serve` as a process of its own, and what all its processes use. For the benchmarks `server` and `storm`."""

import os
import queue
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dsv4.engine.link.thread import EngineThread
from dsv4.http.address import address_url, take_address
from dsv4.http.engine_side import engine_loop
from dsv4.http.processes.child import Child
from dsv4.http.processes.folder import private_folder
from dsv4.http.processes.heartbeat import Heartbeat, make_pulse_file
from dsv4.http.processes.settings import FrontEndSettings, Room
from dsv4.http.settings import ServerConfig
from dsv4.llm import LLM

_PARTS = ("engine_process", "front_end")
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

    def kill_one(self, chance: random.Random) -> str:
        """Kill the engine or one of the front ends; which of them. It is to be started again."""
        part = chance.choice(_PARTS)
        os.kill(chance.choice([pid for pid in family(self.process.pid) if _module_of(pid) == part]), signal.SIGKILL)
        return part

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
        return cpu_seconds(family(self.process.pid))


class ResidentServer:
    """The engine in a thread of this process, front ends in processes as `dsv4 serve` starts them: for a model that has
    no room on the disk. `folder` holds the tokenizer."""

    def __init__(self, llm: LLM, folder: Path, config: ServerConfig, num_front_ends: int) -> None:
        self._llm, self._folder, self._config, self._num_front_ends = llm, folder, config, num_front_ends
        self._ends = ExitStack()
        self._children: list[Child] = []

    def start(self) -> str:
        """Returns its address once every front end serves."""
        room = Room(str(self._ends.enter_context(private_folder())))
        make_pulse_file(room.pulse)
        engine_listener = self._ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        engine_listener.bind(room.socket)
        engine_listener.listen(64)
        loop = engine_loop(self._llm, max_waiting=self._config.max_waiting)
        self._ends.callback(Heartbeat(room.pulse, lambda: loop.step_start).stop)
        loop.listen(engine_listener)
        thread = EngineThread(loop)
        thread.start()
        self._ends.callback(thread.stop, 30.0)
        listener = self._ends.enter_context(take_address(self._config))
        ready = queue.SimpleQueue[Child]()
        for _ in range(self._num_front_ends):
            settings = FrontEndSettings(
                server=self._config, tokenizer=str(self._folder), room=room, pulse=str(room.pulse),
                listener=listener.fileno(),
            )  # fmt: skip
            module = "dsv4.http.processes.front_end"
            self._children.append(Child(module, settings, [settings.listener], ready.put, lambda child: None))
        for _ in self._children:
            ready.get(timeout=60)
        return address_url(self._config, listener)

    def stop(self) -> None:
        for child in self._children:
            child.kill()
            child.process.wait()
            child.close()
        self._ends.close()

    def cpu_seconds(self) -> dict[str, float]:
        return cpu_seconds([os.getpid(), *(child.process.pid for child in self._children)])


def cpu_seconds(pids: Iterable[int]) -> dict[str, float]:
    """CPU time of each process so far, by its number and name, user and system together."""
    found = {}
    for place, pid in enumerate(pids):
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
