"""Both ends of a child process: `Child` in the supervisor, `Orders` in the child. No torch.

The child ignores signals: a Ctrl-C or a SIGTERM to the whole group must not end an engine whose answers are still
being written. It obeys the pipe on which its settings came: `STOP` and `FORCE`, each a byte. The pipe's end is the
supervisor's end, at whatever moment it comes, and the child's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

STOP, FORCE = b"s", b"f"
_READY = b"r"
_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
Settings = TypeVar("Settings", bound=msgspec.Struct)


class Child:
    """A process of a module with `main`, started with its settings.

    descriptors  inherited by the child
    on_ready     called in a thread when it says so
    on_exit      called in a thread when it has ended
    """

    def __init__(
        self, module: str, settings: msgspec.Struct, descriptors: Sequence[int],
        on_ready: Callable[[Child], None], on_exit: Callable[[Child], None],
    ) -> None:  # fmt: skip
        orders, self._orders = os.pipe()
        self._status, status = os.pipe()
        self.is_ready = False
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(orders), str(status)], stdin=subprocess.DEVNULL,
                pass_fds=(orders, status, *descriptors), process_group=0,
            )  # fmt: skip
        finally:
            os.close(orders)
            os.close(status)
        data = msgspec.msgpack.encode(settings)
        self._send(_LENGTH.pack(len(data)) + data)
        threading.Thread(target=self._watch, args=(on_ready, on_exit), daemon=True).start()

    def _watch(self, on_ready: Callable[[Child], None], on_exit: Callable[[Child], None]) -> None:
        if os.read(self._status, 1) == _READY:
            self.is_ready = True
            on_ready(self)
        self.process.wait()
        self.kill()  # what it has started and left
        os.close(self._status)
        on_exit(self)

    def order(self, order: bytes) -> None:
        self._send(order)

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed elsewhere
            os.write(self._orders, data)

    def kill(self) -> None:
        """With all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """After its end."""
        os.close(self._orders)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        status = self.process.returncode
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Orders:
    """The child's end: settings at once, then orders in a thread. Make it first of all."""

    def __init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._orders, self._status = int(sys.argv[1]), int(sys.argv[2])
        os.set_inheritable(self._orders, False)
        os.set_inheritable(self._status, False)
        _die_with_parent()
        self._obey: Callable[[bytes], None] = lambda order: os._exit(1)  # it has nothing to finish yet

    def settings(self, kind: type[Settings]) -> Settings:
        """What the supervisor sent; from now on its end is this process's."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        found = msgspec.msgpack.decode(self._read(length), type=kind)
        threading.Thread(target=self._listen, name="dsv4-orders", daemon=True).start()
        return found

    def obey(self, work: Callable[[bytes], None]) -> None:
        """Call `work` with each order from now on, in a thread."""
        self._obey = work

    def ready(self) -> None:
        """Tell the supervisor that this process does its work."""
        os.write(self._status, _READY)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = os.read(self._orders, size - len(data))
            if not piece:
                sys.exit("dsv4: a part of a server is started by `dsv4 serve`, with its settings on a pipe")
            data += piece
        return data

    def _listen(self) -> None:
        while order := os.read(self._orders, 1):
            self._obey(order)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with the processes this one has started
        os._exit(1)


def _die_with_parent() -> None:
    """Linux ends this process with its parent even if no thread of it can run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(status: int) -> None:
    """End the process without waiting for other threads: one may be inside a forward call."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
