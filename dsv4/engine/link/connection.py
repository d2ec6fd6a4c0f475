"""`ClientConnection`: the engine's end of a client's socket, the client's requests, and its unsent news. No torch."""

import socket
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsv4.engine.link import messages
from dsv4.engine.request import Request
from dsv4.replay import ReplayLog
from dsv4.request import FinishReason, TokenLogprobs

_READ_BYTES = 1 << 18
_ID_BYTES = 4


class ClientConnection:
    """requests   by handle
    compiling  handles whose grammar is being compiled, and the names of their requests
    started    handles whose `Start` is on its way
    unsent     bytes that the socket has not taken
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.frames = messages.Frames()
        self.unsent = bytearray()
        self.requests: dict[int, Request] = {}
        self.compiling: dict[int, str] = {}
        self.started: set[int] = set()
        self._replaying: dict[int, ReplayLog] = {}
        self.replies: list[messages.Reply | messages.Hello | messages.Load] = []
        self._clear()

    def _clear(self) -> None:
        self._handles = bytearray()
        self._token_ids = bytearray()
        self.accepted: list[int] = []
        self.starts: list[messages.Start] = []
        self._logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = {}  # with their rows, by how many they list
        self.ends: list[messages.End] = []
        self._replays: list[messages.Replay] = []

    @property
    def has_news(self) -> bool:
        return bool(self._handles or self.ends or self.accepted or self.replies or self.starts)

    @property
    def num_tokens(self) -> int:
        """Of the news."""
        return len(self._token_ids) // _ID_BYTES

    def add_tokens(self, handles: bytes, token_ids: NDArray[np.int32]) -> None:
        """A token for each handle (int32)."""
        self._handles += handles
        self._token_ids += token_ids.tobytes()

    def add_logprobs(self, row: int, request: Request, logprobs: TokenLogprobs) -> None:
        """Of the token in this row of the news."""
        self._logprobs.setdefault(len(logprobs.top), []).append((row, logprobs))
        request.logprobs.clear()  # the client has it

    def start(self, handle: int, request: Request) -> None:
        """Tell the client that the request has started, with its cached tokens and prompt log-probabilities."""
        scores: messages.PackedLogprobs | None = None
        if request.params.prompt_logprobs is not None and handle not in self.started:
            scores = messages.pack_logprobs([one for one in request.prompt_logprobs if one is not None])
        if request.replay is not None:
            self._replaying[handle] = request.replay
        self.started.add(handle)
        versions = [*request.weight_versions]
        self.starts.append(
            messages.Start(handle, request.num_cached_tokens, scores, versions, request.admitted_seconds)
        )

    def forget(self, handle: int) -> None:
        """The request is over, and all its tokens are among the news."""
        self._add_replay(handle)
        self._replaying.pop(handle, None)
        self.started.discard(handle)
        del self.requests[handle]

    def _add_replay(self, handle: int) -> None:
        log = self._replaying.get(handle)
        found = None if log is None else log.take_new()
        if found is not None:
            position, experts, picks = found
            self._replays.append(
                messages.Replay(handle, position, messages.pack_rows(experts), messages.pack_rows(picks))
            )

    def announce(self, info: messages.EngineInfo) -> None:
        """Other weights run from now on, for requests that have begun too."""
        self.replies.append(messages.Hello(info))
        for handle in self.started:
            self.start(handle, self.requests[handle])

    def end_compiling(self, is_meant: Callable[[str], bool]) -> None:
        """End requests whose grammars are not ready, by their names."""
        for handle in [handle for handle, name in self.compiling.items() if is_meant(name)]:
            del self.compiling[handle]
            self.ends.append(messages.End(handle, FinishReason.ABORT.value))

    def pack(self, seconds: float) -> None:
        """The news become one message, after the answers to questions."""
        for reply in self.replies:
            self.unsent += messages.encode(reply)
        self.replies.clear()
        if self._handles or self.ends or self.accepted or self.starts:
            for handle in self._replaying:
                self._add_replay(handle)
            handles, token_ids = bytes(self._handles), bytes(self._token_ids)
            logprobs = [
                (messages.pack_ids([row for row, _ in found]), messages.pack_logprobs([one for _, one in found]))
                for found in self._logprobs.values()
            ]
            step = messages.Step(
                seconds, handles, token_ids, self.accepted, self.starts, logprobs, self.ends, self._replays
            )  # fmt: skip
            self.unsent += messages.encode(step)
            self._clear()

    def receive(self) -> bytes | None:
        """What has arrived; empty if the client is gone, None if nothing has."""
        try:
            return self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def send(self) -> bool:
        """Give the socket what it takes now; whether the client is still there."""
        try:
            del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self, flush_seconds: float = 0.0) -> None:
        """Close the socket, after giving the client some time to take what is left."""
        if self.unsent and flush_seconds:
            self.socket.settimeout(flush_seconds)
            try:
                self.socket.sendall(self.unsent)
            except OSError:
                self.unsent.clear()
        self.socket.close()
