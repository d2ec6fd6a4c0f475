"""`EngineClient`: an asynchronous client of one engine, over a Unix socket. No torch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from dsv4.engine.link import messages
from dsv4.engine.link.stream import RequestStream
from dsv4.engine.stats import EngineStats
from dsv4.request import FinishReason
from dsv4.text.output import TextOutput


class EngineClient(asyncio.Protocol):
    """Made by `connect`. Everything runs in the event loop it was made in.

    info       the engine's limits, and which weights it runs now
    on_lost    called when the engine's end of the socket is closed
    """

    info: messages.EngineInfo

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        self._on_lost = on_lost
        self._frames = messages.Frames()
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owners: dict[int, tuple[RequestStream, int]] = {}
        self._firsts: dict[RequestStream, int] = {}  # the handle of each group's first request
        self._next_handle = 0
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._num_asked = 0
        self.is_lost = False

    @classmethod
    async def connect(cls, where: str | socket.socket, on_lost: Callable[[], None] = lambda: None) -> EngineClient:
        """A client of the engine that listens at a path, or at the other end of a connected socket."""
        loop = asyncio.get_running_loop()
        if isinstance(where, str):
            _, client = await loop.create_unix_connection(lambda: cls(on_lost), where)
        else:
            _, client = await loop.create_unix_connection(lambda: cls(on_lost), sock=where)
        await client._hello
        return client

    # ---- requests ----

    @property
    def num_open(self) -> int:
        """Requests sent and not ended."""
        return len(self._owners)

    def submit(
        self, outputs: Sequence[TextOutput], *, grammar: str | None = None, opening: Sequence[int] = (), name: str = ""
    ) -> RequestStream:  # fmt: skip
        """Send the requests that these outputs are to answer, as one group; all follow the same grammar. `EngineLost`
        if the engine has gone; whether it takes them, `RequestStream.accepted` says. `name`: for `abort`."""
        stream = RequestStream(outputs, self._finish, self._cancel)
        if self.is_lost:
            raise messages.EngineLost("the engine has stopped")
        first = messages.free_handles(self._next_handle, len(outputs), self._owners)
        self._next_handle = first + len(outputs)
        self._firsts[stream] = first
        prompts: dict[int, int] = {}
        for choice, output in enumerate(outputs):
            self._owners[first + choice] = (stream, choice)
            prompts.setdefault(id(output.prompt_ids), len(prompts))
        different = {id(output.prompt_ids): output.prompt_ids for output in outputs}
        self._send(
            messages.Submit(
                first, [messages.pack_ids(prompt) for prompt in different.values()],
                [prompts[id(output.prompt_ids)] for output in outputs], [output.params for output in outputs], grammar,
                list(opening), name,
            )
        )  # fmt: skip
        return stream

    def drop_all(self, error: Exception) -> None:
        """End every request there is with this error."""
        streams = list(self._firsts)
        for stream in streams:
            stream.end(error)
            self._cancel(stream)

    def record(self, payload: bytes) -> None:
        """A line for the engine's record of answers."""
        self._send(messages.Record(payload))

    def _finish(self, stream: RequestStream, choice: int) -> None:
        handle = self._firsts[stream] + choice
        if handle in self._open_handles(stream):
            del self._owners[handle]
            self._send(messages.Finish([handle]))
            self._forget(stream)

    def _cancel(self, stream: RequestStream) -> None:
        if stream not in self._firsts:
            return
        handles = self._open_handles(stream)
        for handle in handles:
            del self._owners[handle]
        if handles:
            self._send(messages.Cancel(handles))
        self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        if not self._open_handles(stream):
            del self._firsts[stream]

    def _open_handles(self, stream: RequestStream) -> list[int]:
        """Handles of the group that still are its own: those that ended may be another group's."""
        first = self._firsts[stream]
        handles = range(first, first + len(stream.outputs))
        return [one for one in handles if one in self._owners and self._owners[one][0] is stream]

    # ---- questions ----

    async def control(self, verb: str, kind: Any = Any, **arguments: Any) -> Any:
        """Have the engine answer a question, or obey a command (`EngineControl`), between two steps: its answer, as
        `kind`, or its error."""
        if self.is_lost:
            raise messages.EngineLost("the engine has stopped")
        number, self._num_asked = self._num_asked, self._num_asked + 1
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._send(messages.Control(number, verb, arguments))
        try:
            return msgspec.msgpack.decode(await answer, type=kind)
        finally:
            self._asked.pop(number, None)

    async def stats(self) -> EngineStats:
        found: EngineStats = await self.control("stats", EngineStats)
        return found

    # ---- the socket ----

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, message: messages.ToEngine) -> None:
        if self._transport is not None and not self.is_lost:
            self._transport.write(messages.encode(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        lost = messages.EngineLost("the engine has stopped")
        if not self._hello.done():
            self._hello.set_exception(lost)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(lost)
        for stream in list(self._firsts):
            stream.end(lost)
        self._owners.clear()
        self._firsts.clear()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            message = messages.FROM_ENGINE.decode(body)
            if isinstance(message, messages.Step):
                self._take(message)
            elif isinstance(message, messages.Reply):
                answer = self._asked.get(message.number)
                error = messages.error_in(message)
                if answer is None or answer.done():
                    continue
                if error is None:
                    answer.set_result(message.payload)
                else:
                    answer.set_exception(error)
            elif isinstance(message, messages.Hello):
                self.info = message.info
                if not self._hello.done():
                    self._hello.set_result(None)

    def _take(self, step: messages.Step) -> None:
        """Hand a step's tokens, ends and errors to the streams of their requests."""
        owners, seconds = self._owners, step.seconds
        for first in step.accepted:
            if first in owners:
                owners[first][0].accept()
        for start in step.starts:
            found = owners.get(start.handle)
            if found is not None:
                messages.begin(found[0].outputs[found[1]], start)
        for replay in step.replays:
            found = owners.get(replay.handle)
            if found is not None:
                messages.add_replay(found[0].outputs[found[1]], replay)
        logprobs = messages.logprobs_by_row(step)
        ends = {end.handle: end for end in step.ends}
        handles = messages.unpack_ids(step.handles)
        token_ids = messages.unpack_ids(step.token_ids)
        last_rows = {handle: row for row, handle in enumerate(handles) if handle in ends} if ends else {}
        touched: dict[RequestStream, None] = {}
        for row, (handle, token_id) in enumerate(zip(handles, token_ids, strict=True)):
            found = owners.get(handle)
            if found is None:
                continue  # cancelled, or complete, meanwhile
            stream, choice = found
            reason = None
            if last_rows and last_rows.get(handle) == row and messages.error_of(ends[handle]) is None:
                reason = FinishReason(ends.pop(handle).kind)
            stream.push(choice, token_id, seconds, reason, logprobs.get(row) if logprobs else None)
            touched[stream] = None
            if reason is not None:
                self._ended(handle)
        for handle, end in ends.items():
            found = owners.get(handle)
            if found is None:
                continue
            stream, choice = found
            stream.push(choice, None, seconds, messages.error_of(end) or FinishReason(end.kind))
            touched[stream] = None
            self._ended(handle)
        for stream in touched:
            stream.notify()

    def _ended(self, handle: int) -> None:
        stream, _ = self._owners.pop(handle)
        self._forget(stream)
