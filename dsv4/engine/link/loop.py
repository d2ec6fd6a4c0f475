"""`EngineLoop`: steps an engine for clients at the other end of Unix sockets, in one thread and nothing else.

Between two steps it reads what clients have sent, and after each step writes one message to every client that has
tokens in it. It never waits for a client: what a socket does not take at once is kept, and a client that lets more than
`MAX_UNSENT_BYTES` pile up, or closes its socket, loses its requests. Grammars are compiled in threads beside it.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from dsv4.cache.errors import NoFreeSlot
from dsv4.dist.errors import RankFailed
from dsv4.engine.control import EngineControl
from dsv4.engine.link.connection import ClientConnection
from dsv4.engine.link.control_desk import ControlDesk, reply_to
from dsv4.engine.link.grammars import Constrain, GrammarQueue
from dsv4.engine.link.messages import (
    TO_ENGINE,
    Ask,
    Cancel,
    Control,
    End,
    EngineBusy,
    EngineInfo,
    EngineStopped,
    Finish,
    Hello,
    Load,
    RejectedGrammar,
    Submit,
    ToEngine,
    encode,
    end_of,
    pack_reply,
    unpack_ids,
)
from dsv4.engine.link.routes import TokenRoutes
from dsv4.engine.link.throughput import ThroughputLog
from dsv4.engine.request import Request, RequestAborted, WeightsIncomplete
from dsv4.engine.serving import Serving
from dsv4.engine.step.constraint import Constraint
from dsv4.engine.step.tokens import StepTokens
from dsv4.request import FinishReason, RequestError

MAX_UNSENT_BYTES = 256 * 1024 * 1024
TURN_SECONDS = 1.0
_FLUSH_SECONDS = 1.0  # for the last words to a client whose socket is full
_LOG = logging.getLogger("dsv4.engine")


class EngineLoop:
    """`attach` sockets or `listen`, then `run` until `stop`. All other methods may be called from any thread.

    constrain    compiles a grammar; `RequestError` says what is wrong with it
    control      obeys commands (`Control`)
    answers      what clients may `Ask`, by name; called between two steps
    on_record    takes what clients want recorded
    on_step      called after every step
    load         returns the engine's load for the only client, after each step and at least every `TURN_SECONDS`; None
                 if nothing is new
    max_waiting  requests that may wait for a slot before further ones are refused

    step_start is the clock (`time.monotonic`) at the beginning of the step that runs, None between two.
    """

    step_start: float | None = None

    def __init__(
        self, engine: Serving, info: EngineInfo, control: EngineControl, *, max_waiting: int = 256,
        constrain: Constrain | None = None, answers: Mapping[str, Callable[[], Any]] | None = None,
        on_record: Callable[[bytes], None] | None = None, on_step: Callable[[], None] | None = None,
        load: Callable[[], Load | None] | None = None,
    ) -> None:  # fmt: skip
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, found {max_waiting}")
        self.engine, self.info = engine, info
        self._max_waiting = max_waiting
        self._grammars = None if constrain is None else GrammarQueue(constrain, self._call)
        self._answers = {"stats": engine.stats, **(answers or {})}
        self._on_record, self._on_step, self._load = on_record, on_step, load
        self._longest_sleep = None if load is None else TURN_SECONDS
        self._clients: set[ClientConnection] = set()
        self._owners: dict[Request, tuple[ClientConnection, int]] = {}
        self._routes = TokenRoutes(self._owners)
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._commands: deque[Callable[[], None]] = deque()
        self._is_draining = self._is_over = self._is_closed = False
        self.failure: Exception | None = None
        self.last_error: Exception | None = None
        self._desk = ControlDesk(control, self._end_early, self._announce, self._call)
        self._throughput = ThroughputLog(engine.stats())
        engine.sizes.when_failed(lambda error: self._call(lambda: self._fail(error)))
        for one in engine.sizes.sockets:
            self._selector.register(one, selectors.EVENT_READ, engine.sizes)

    # ---- any thread ----

    @property
    def num_open(self) -> int:
        """Requests taken and not ended."""
        return len(self._owners) + (self._grammars.num_requests if self._grammars else 0)

    def attach(self, connection: socket.socket) -> None:
        """Serve the client at the other end. Once the loop has ended, the client finds its socket closed."""
        if not self._is_closed:
            self._call(lambda: self._open(connection))
        if self._is_closed:
            connection.close()

    def listen(self, listener: socket.socket) -> None:
        """Serve whoever connects."""
        listener.setblocking(False)
        self._call(lambda: self._selector.register(listener, selectors.EVENT_READ, listener) and None)

    def stop(self, *, drains: bool = False) -> None:
        """End `run` between two steps, and every request with `EngineStopped`; with `drains`, once all are done."""
        self._call(lambda: self._stop(drains))

    def control(self, verb: str, **arguments: Any) -> Future[Any]:
        """Tell the engine something (`EngineControl`); done between two steps."""
        answer: Future[Any] = Future()
        self._call(lambda: self._desk.obey(verb, arguments, answer))
        return answer

    def _call(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if not self._is_closed:  # afterwards the descriptor may be another file's
            with suppress(OSError):  # it is awake
                os.write(self._wake_writer, b"!")

    def _stop(self, drains: bool) -> None:
        self._is_draining = True
        self._is_over = not drains or self.engine.gate.is_shut  # what is paused would never end

    # ---- the engine's thread ----

    def run(self) -> None:
        """Until stopped."""
        try:
            while not self._is_over and not (self._is_draining and self.num_open == 0):
                has_work = self.engine.has_work
                self._read(0.0 if has_work or self.engine.has_idle_work else self._longest_sleep)
                if not has_work and self._throughput.wants(time.perf_counter()):
                    self._throughput.restart(self.engine.stats())
                if self.engine.has_work:
                    self._step()
                elif self.engine.has_idle_work and not self._is_draining:
                    self._idle_step()
        finally:
            self._close()

    def _read(self, timeout: float | None) -> None:
        """What clients and other threads want."""
        for key, events in self._selector.select(timeout):
            if isinstance(key.data, ClientConnection):
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
            elif key.data is None:
                os.read(self._wake_reader, 4096)
            elif isinstance(key.data, socket.socket):
                try:
                    self._open(key.data.accept()[0])
                except OSError as error:
                    _LOG.warning("a client could not be accepted: %s", error.strerror)
        while self._commands:
            self._commands.popleft()()
        self._flush(time.perf_counter())

    def _open(self, connection: socket.socket) -> None:
        client = ClientConnection(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        client.unsent += encode(Hello(self.info))
        self._send(client)

    def _receive(self, client: ClientConnection) -> bool:
        """Whether there was something."""
        data = client.receive()
        if not data:
            if data is not None:
                self._lose(client)
            return False
        try:
            for body in client.frames.feed(data):
                self._obey(client, TO_ENGINE.decode(body))
        except (ValueError, msgspec.DecodeError) as error:
            _LOG.error("a client sent a malformed message and is disconnected: %s", error)
            self._lose(client)
        return client in self._clients

    def _obey(self, client: ClientConnection, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(client, message)
        elif isinstance(message, Cancel):
            for handle in message.handles:
                self._drop(client, handle)
        elif isinstance(message, Finish):
            for handle in message.handles:
                if (request := client.requests.get(handle)) is not None:
                    self.engine.finish(request)
                    self._forget(request)
        elif isinstance(message, Ask):
            answer = self._answers.get(message.what)
            if answer is None:
                raise ValueError(f"what can be asked for is {', '.join(self._answers)}, found {message.what!r}")
            client.replies.append(pack_reply(message.number, answer()))
        elif isinstance(message, Control):
            self._desk.obey(message.verb, message.arguments, reply_to(client, message.number))
        elif self._on_record is not None:
            self._on_record(message.payload)

    # ---- requests ----

    def _submit(self, client: ClientConnection, message: Submit) -> None:
        message.check()
        handles = message.handles
        if any(handle in client.requests or handle in client.compiling for handle in handles):
            raise ValueError(f"handles {handles} are in use")
        problem: Exception | None = None
        num_waiting = self.num_open - self.engine.num_slots
        if self._is_draining:
            problem = EngineStopped("the engine is shutting down and takes no more requests")
        elif num_waiting > 0 and num_waiting + len(handles) > self._max_waiting:
            problem = EngineBusy(f"{num_waiting} requests wait already; at most {self._max_waiting} may")
        elif message.grammar is not None:
            if self._grammars is not None:
                self._grammars.compile(client, message, self._compiled)
                return
            problem = RejectedGrammar("this engine has no grammars")
        if problem is not None:
            self._refuse(client, handles, problem)
        else:
            self._begin(client, message, None)

    def _compiled(self, client: ClientConnection, message: Submit, made: list[Constraint] | Exception) -> None:
        if isinstance(made, Exception):
            self._refuse(client, message.handles, made)
        else:
            self._begin(client, message, made)

    def _begin(self, client: ClientConnection, message: Submit, constraints: list[Constraint] | None) -> None:
        prompts = [unpack_ids(prompt) for prompt in message.prompts]
        prepared: list[Request] = []
        try:
            for place, (owner, params) in enumerate(zip(message.owners, message.params, strict=True)):
                constraint = None if constraints is None else constraints[place]
                prepared.append(self.engine.prepare(prompts[owner], params, constraint))
        except (RequestError, WeightsIncomplete) as error:
            self._refuse(client, message.handles, error)
            return
        client.accepted.append(message.first)
        for handle, request in zip(message.handles, prepared, strict=True):
            client.requests[handle], request.name = request, message.name
            self._owners[request] = (client, handle)
            self.engine.submit(request, message.waited)

    def _refuse(self, client: ClientConnection, handles: range, problem: Exception) -> None:
        client.ends += [end_of(handle, problem) for handle in handles]

    def _drop(self, client: ClientConnection, handle: int) -> None:
        client.compiling.pop(handle, None)
        if (request := client.requests.get(handle)) is not None:
            self.engine.abort(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        client, handle = self._owners.pop(request)
        client.forget(handle)

    def _lose(self, client: ClientConnection) -> None:
        """A client is gone, and what it waited for with it."""
        if client in self._clients:
            self._clients.discard(client)
            self._selector.unregister(client.socket)
            client.socket.close()
            for handle in (*client.compiling, *client.requests):
                self._drop(client, handle)

    # ---- steps ----

    def _idle_step(self) -> None:
        try:
            self.engine.idle_step()
        except Exception:  # no request depends on it
            _LOG.exception("a forward call in idle time failed")

    def _step(self) -> None:
        tokens = StepTokens()
        self.step_start = time.monotonic()
        try:
            tokens = self.engine.step()
        except NoFreeSlot as error:  # slots held outside this engine: waiting for them could take for ever
            self.last_error = error
            for request in list(self._owners):
                self.engine.abort(request)
                self._end(request)
        except RankFailed as error:
            self._fail(error)
        except Exception as error:  # its requests fail with it; later ones may succeed
            _LOG.exception("a forward call failed; its requests are dropped")
            self.last_error = error
            tokens = self.engine.take_results()
        seconds, self.step_start = time.perf_counter(), None
        for rank, part in enumerate(tokens.parts):
            if part.requests:
                self._routes.deliver(rank, part)
            for request in part.ended:
                if request in self._owners:
                    self._end(request)
        if self._on_step is not None:
            self._on_step()
        self._flush(seconds)
        if self._throughput.wants(seconds):
            self._throughput.update(self.engine.stats(), seconds)

    def _end(self, request: Request) -> None:
        client, handle = self._owners[request]
        problem = request.problem()
        if problem is not None and request.is_aborted and self.last_error is not None:
            problem = RequestAborted(f"the forward call of this request failed: {self.last_error}")
        if problem is not None:
            client.ends.append(end_of(handle, problem))
        else:
            assert request.finish_reason is not None
            if handle not in client.started:  # its prompt was only scored
                client.start(handle, request)
            client.ends.append(End(handle, request.finish_reason.value))
        self._forget(request)

    def _fail(self, error: Exception) -> None:
        """The model is gone: nothing that runs or waits can go on, and nothing more is taken."""
        if self.failure is None:
            self.failure = self.last_error = error
            for request in list(self._owners):
                self.engine.abort(request)
                self._end(request)
            self._is_over = True

    # ---- commands ----

    def _end_early(self, is_meant: Callable[[str], bool]) -> int:
        """End requests by their names, with what they have; how many there were."""
        meant = [request for request in self._owners if is_meant(request.name)]
        for request in meant:
            self.engine.finish(request, FinishReason.ABORT)
            self._end(request)
        for client in self._clients:
            client.end_compiling(is_meant)
        return len(meant)

    def _announce(self, fingerprint: str, version: str) -> None:
        """Other weights run from now on."""
        self.info = msgspec.structs.replace(self.info, fingerprint=fingerprint, weight_version=version)
        for client in self._clients:
            client.announce(self.info)

    # ---- sockets ----

    def _flush(self, seconds: float) -> None:
        self._desk.settle(has_work=self.engine.has_work)
        if self._load is not None and self._clients and (load := self._load()) is not None:
            for client in self._clients:
                client.replies.append(load)
        for client in [one for one in self._clients if one.has_news]:
            client.pack(seconds)
            self._send(client)

    def _send(self, client: ClientConnection) -> None:
        if not client.send():
            self._lose(client)
            return
        if len(client.unsent) > MAX_UNSENT_BYTES:
            _LOG.error("a client reads nothing: %d bytes wait for it; it is disconnected", len(client.unsent))
            self._lose(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.socket).events != wanted:
            self._selector.modify(client.socket, wanted, client)

    def _close(self) -> None:
        """Read what clients have sent (lines for the record), tell them that nothing more comes, let them go."""
        self._is_draining = self._is_closed = True
        while self._commands:
            self._commands.popleft()()
        for client in list(self._clients):
            while self._receive(client):
                pass
        problem: Exception = EngineStopped("the engine was stopped before this request was finished")
        if self.failure is not None:
            problem = RequestAborted(str(self.failure))
        for request, (client, handle) in list(self._owners.items()):
            client.ends.append(end_of(handle, problem))
            self.engine.abort(request)
            self._forget(request)
        self._desk.close(problem)
        for client in self._clients:
            client.ends += [end_of(handle, problem) for handle in client.compiling]
        self._flush(time.perf_counter())
        for client in self._clients:
            client.close(_FLUSH_SECONDS)
        self._clients.clear()
        if self._grammars:
            self._grammars.close()
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
