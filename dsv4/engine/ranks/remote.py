"""`RemoteRank`: rank 0's end of the connection to another rank's engine: requests go out, tokens come back.

At the other end is an `EngineLoop` (serve.py), and the messages are those of any engine (engine/link/messages.py). A
request is known here by the `Request` that was made for it, which grows as its tokens arrive. No torch.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from dsv4.dist.errors import PeerLost
from dsv4.engine.link.messages import (
    FROM_ENGINE,
    Ask,
    Cancel,
    Control,
    End,
    Finish,
    Frames,
    Load,
    Reply,
    Step,
    Submit,
    ToEngine,
    add_replay,
    begin,
    encode,
    error_in,
    error_of,
    free_handles,
    logprobs_by_row,
    pack_ids,
)
from dsv4.engine.ranks.router import Rank
from dsv4.engine.request import DeadlinePassed, Request, RequestAborted
from dsv4.engine.step.tokens import Results, StepTokens
from dsv4.request import FinishReason

_READ_BYTES = 1 << 18


class RemoteRank(Rank):
    """`requests` by handle: given to the rank and not over."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        super().__init__()
        connection.setblocking(False)
        self.rank, self.socket = rank, connection
        self.requests: dict[int, Request] = {}
        self._handles: dict[Request, int] = {}
        self._next_handle = 0
        self._asked: dict[int, Future[Any]] = {}
        self._next_question = itertools.count()
        self._frames = Frames()
        self._unsent = bytearray()
        self._results = Results()
        self._last: tuple[bytes, tuple[Request, ...]] = b"", ()
        self.is_lost = False

    @property
    def num_open(self) -> int:
        return len(self.requests)

    # ---- what is said ----

    def submit(self, request: Request, waited: float) -> None:
        """Move a request that has waited `waited` seconds to that rank; it stays there, and its rule with it."""
        handle = free_handles(self._next_handle, 1, self.requests)
        self._next_handle = handle + 1
        self.requests[handle], self._handles[request] = request, handle
        text, opening = source_of(request) or (None, [])
        prompt = pack_ids(request.token_ids[: request.prompt_len])
        self._send(Submit(handle, [prompt], [0], [request.params], text, opening, request.name, waited))

    def abort(self, request: Request) -> None:
        """Its client has gone."""
        self._send(Cancel([self._forget(request)]))
        request.is_aborted = True

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Its text is complete."""
        self._send(Finish([self._forget(request)]))
        request.finish_reason = reason

    def ask(self, what: str) -> Future[Any]:
        return self._question(lambda number: Ask(number, what))

    def control(self, verb: str, arguments: dict[str, Any]) -> Future[Any]:
        return self._question(lambda number: Control(number, verb, arguments))

    def _question(self, make: Callable[[int], Ask | Control]) -> Future[Any]:
        number = next(self._next_question)
        answer = self._asked[number] = Future()
        self._send(make(number))
        return answer

    def _send(self, message: ToEngine) -> None:
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Whatever the connection takes now."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.is_lost = True

    def finish_sending(self, seconds: float) -> bool:
        """Whether nothing is left to send, or the rank has gone; waits for it: it reads between two steps."""
        if self._unsent and not self.is_lost:
            select.select([], [self.socket], [], seconds)
            self.flush()
        return not self._unsent or self.is_lost

    # ---- what is heard ----

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def take_results(self) -> StepTokens:
        return self._results.take()

    def hear(self) -> None:
        """Whatever has arrived."""
        if self._unsent:
            self.flush()
        while not self.is_lost:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_lost = True
            for body in self._frames.feed(data):
                message = FROM_ENGINE.decode(body)
                if isinstance(message, Step):
                    self._take(message)
                elif isinstance(message, Load):
                    self.note(message)
                elif isinstance(message, Reply):
                    self._answer(message)
            if len(data) < _READ_BYTES:
                return

    def check(self) -> None:
        """`PeerLost` once the connection is gone."""
        if self.is_lost:
            raise PeerLost(f"rank {self.rank} has closed its connection")

    def _answer(self, reply: Reply) -> None:
        answer, error = self._asked.pop(reply.number), error_in(reply)
        if error is None:
            answer.set_result(msgspec.msgpack.decode(reply.payload))
        else:
            answer.set_exception(error)

    def _take(self, step: Step) -> None:
        for handle in step.accepted:
            if handle in self.requests:
                self.reserved.pop(self.requests[handle], None)
        for start in step.starts:
            if start.handle in self.requests:
                begin(self.requests[start.handle], start)
        self._take_tokens(step)
        for replay in step.replays:
            if replay.handle in self.requests:
                add_replay(self.requests[replay.handle], replay)
        for end in step.ends:
            request = self.requests.get(end.handle)
            if request is not None:
                self._forget(request)
                _end(request, end)
                self._results.ended.append(request)

    def _take_tokens(self, step: Step) -> None:
        if not step.handles:
            return
        token_ids, logprobs = np.frombuffer(step.token_ids, dtype=np.int32), logprobs_by_row(step)
        if step.handles != self._last[0]:
            handles = np.frombuffer(step.handles, dtype=np.int32).tolist()
            if not all(handle in self.requests for handle in handles):  # some were dropped meanwhile
                is_here = np.array([handle in self.requests for handle in handles])
                token_ids = token_ids[is_here]
                logprobs = {int(is_here[:row].sum()): one for row, one in logprobs.items() if is_here[row]}
                handles = [handle for handle in handles if handle in self.requests]
            requests = tuple([self.requests[handle] for handle in handles])
            self._last = (step.handles if len(handles) * 4 == len(step.handles) else b""), requests
        requests = self._last[1]
        for request, token_id in zip(requests, token_ids.tolist(), strict=True):
            request.token_ids.append(token_id)
        self._results.add(requests, token_ids, [logprobs.get(row) for row in range(len(requests))] if logprobs else ())

    def _forget(self, request: Request) -> int:
        handle = self._handles.pop(request)
        del self.requests[handle]
        self.reserved.pop(request, None)
        self._last = b"", ()
        self._results.forget()
        return handle


def wait_for(sockets: list[socket.socket], seconds: float) -> None:
    """Until there is something to read on one of these, or so long."""
    select.select(sockets, [], [], seconds)


def source_of(request: Request) -> tuple[str, list[int]] | None:
    """What another rank makes the request's rule from; None without a rule, or where it has none."""
    return getattr(request.constraint, "source", None)


def _end(request: Request, end: End) -> None:
    error = error_of(end)
    if error is None:
        request.finish_reason = FinishReason(end.kind)
    elif isinstance(error, RequestAborted):
        request.is_aborted = True
    else:
        request.error, request.is_expired = str(error), isinstance(error, DeadlinePassed)
