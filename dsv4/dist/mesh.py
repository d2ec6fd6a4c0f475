"""`Mesh`: connections between ranks: one between every two for what a step needs (engine/ranks/agreement.py), and two
between rank 0 and every other, for requests (engine/ranks/remote.py) and to watch one another (control.py).

Every rank listens at a port of its own and connects to those before it. Only who knows the token is let in.
"""

import hmac
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from dsv4.dist.errors import PeerLost

_HELLO = struct.Struct("<qq")
_CONNECT_SECONDS = 120.0
_HELLO_SECONDS = 5.0
_LOOK_UP_SECONDS = 0.2


class _Purpose(IntEnum):
    STEPS = 0
    REQUESTS = 1
    WATCH = 2


@dataclass
class Mesh:
    """This rank's ends by rank: for `steps` of all others; else of all others on rank 0, of rank 0 elsewhere."""

    steps: dict[int, socket.socket] = field(default_factory=dict)
    requests: dict[int, socket.socket] = field(default_factory=dict)
    watch: dict[int, socket.socket] = field(default_factory=dict)

    def add(self, other: int, purpose: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        (self.steps, self.requests, self.watch)[purpose][other] = connection

    def close(self) -> None:
        for one in (*self.steps.values(), *self.requests.values(), *self.watch.values()):
            one.close()


def meet(
    store: Any, rank: int, size: int, host: str, token: bytes, check: Callable[[], None] = lambda: None
) -> Mesh:  # fmt: skip
    """Connect with every other rank. `host`: the address this rank is reached at; `store`: torch's, where ranks leave
    their ports. `PeerLost` if others do not come, or what `check` raises if they never will."""
    mesh = Mesh()
    with socket.create_server((host, 0), backlog=2 * size) as listener:
        store.set(f"mesh/{rank}", f"{host}:{listener.getsockname()[1]}")
        for other in range(rank):
            address, port = store.get(f"mesh/{other}").decode().rsplit(":", 1)
            for purpose in [_Purpose.STEPS] if other else _Purpose:
                try:
                    one = socket.create_connection((address, int(port)), timeout=_CONNECT_SECONDS)
                    one.sendall(token + _HELLO.pack(rank, purpose))
                except OSError as error:
                    raise PeerLost(f"rank {other} cannot be reached: {error}") from error
                mesh.add(other, purpose, one)
        expected = (size - 1 - rank) * (1 if rank else len(_Purpose))
        _accept(listener, mesh, expected, token, check)
    return mesh


def _accept(listener: socket.socket, mesh: Mesh, expected: int, token: bytes, check: Callable[[], None]) -> None:
    until = time.monotonic() + _CONNECT_SECONDS
    listener.settimeout(_LOOK_UP_SECONDS)
    while expected:
        check()
        if time.monotonic() > until:
            raise PeerLost("ranks that were to connect never came")
        try:
            one, _ = listener.accept()
        except TimeoutError:
            continue
        said = _read(one, len(token) + _HELLO.size)
        if not hmac.compare_digest(said[: len(token)], token) or len(said) != len(token) + _HELLO.size:
            one.close()  # a stranger
            continue
        other, purpose = _HELLO.unpack(said[len(token) :])
        mesh.add(other, purpose, one)
        expected -= 1


def _read(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or those that came in time."""
    connection.settimeout(_HELLO_SECONDS)
    data = b""
    try:
        while len(data) < size and (piece := connection.recv(size - len(data))):
            data += piece
    except OSError:
        return b""
    return data
