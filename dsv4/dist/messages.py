"""What ranks say while they watch over one another (control.py): lines of JSON over TCP. No torch."""

import json
import socket
import threading
from contextlib import suppress
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    READY = "ready"  # follower: it is loaded
    FAILED = "failed"  # follower: it cannot go on; whether another rank is to blame, and why
    BEAT = "beat"  # both: alive; the follower's progress
    STOP = "stop"  # leader: the end


class Channel:
    """One connection. Sending is safe from several threads; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, kind: Kind, *values: Any) -> None:
        line = json.dumps([kind, *values]).encode() + b"\n"
        with self._sending:
            self._connection.sendall(line)

    def receive(self) -> tuple[Kind, list[Any]] | None:
        """The next message; None when the other side has gone, or says what no rank says."""
        try:
            kind, *values = json.loads(self._lines.readline())
            return Kind(kind), values
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()
