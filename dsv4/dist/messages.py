"""Messages between ranks over TCP: a kind, a length, bytes. Numbers travel as int64, floats as their 64 bits."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from array import array
from collections.abc import Iterable
from enum import IntEnum

_HEADER = struct.Struct("<BQ")
_MAX_BYTES = 1 << 32  # more is no message of ours


class Kind(IntEnum):
    HELLO = 1  # follower: token and rank
    ANSWER = 3  # follower: it is ready
    FAILED = 4  # follower: it cannot go on; whether another rank is to blame, and why
    BEAT = 5  # both: alive; the follower's progress
    STOP = 6  # leader: the end


class Channel:
    """One connection. Sending is safe from several threads; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        with self._sending:
            self._connection.sendall(_HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[Kind, bytes] | None:
        """The next message; None when the other side has gone."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        kind, length = _HEADER.unpack(header)
        if kind not in set(Kind) or length > _MAX_BYTES:
            return None
        payload = self._read(length)
        return None if payload is None else (Kind(kind), payload)

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        self._connection.close()

    def _read(self, length: int) -> bytes | None:
        pieces = []
        while length:
            try:
                piece = self._connection.recv(min(length, 1 << 20))
            except OSError:
                return None
            if not piece:
                return None
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)


def pack(numbers: Iterable[int]) -> bytes:
    values = array("q", numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack(payload: bytes) -> list[int]:
    values = array("q")
    values.frombytes(payload)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def text_numbers(text: str) -> list[int]:
    """A text as its length in bytes and its bytes."""
    data = text.encode()
    return [len(data), *data]
