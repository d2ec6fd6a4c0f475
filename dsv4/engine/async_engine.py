"""`AsyncEngine`: one thread that steps an `Engine`, for any number of asynchronous callers.

The thread alone touches the engine and the cache. Callers leave commands (queue this, drop that) which it carries out
between two steps, and it leaves events in their streams. Nobody waits for anybody: a caller that does not read, or has
gone, costs the others nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from dsv4.cache.errors import NoFreeSlot
from dsv4.dist.errors import RankFailed
from dsv4.engine.engine import Engine
from dsv4.engine.engine import TokenEvent as EngineEvent
from dsv4.engine.events import EndEvent, ErrorEvent, RequestEvent, RequestStream, TokenEvent
from dsv4.engine.request import Request, RequestAborted
from dsv4.engine.stats import EngineStats
from dsv4.errors import Dsv4Error
from dsv4.text.output import TextOutput

_LOG = logging.getLogger("dsv4.engine")


class EngineBusy(Dsv4Error, RuntimeError):
    """The queue is full; try again later."""


class EngineStopped(RequestAborted):
    """The engine takes no more requests, or did not finish this one: it is shutting down, or has."""


class AsyncEngine:
    """`start`, `submit` prepared requests, read their streams, `stop`.

    max_waiting  requests that may wait for a slot before further ones are refused (`EngineBusy`)
    on_step      called in the engine's thread after every step, with its statistics
    on_failure   called in the engine's thread when a rank has failed and the engine with it; it ends then
    """

    def __init__(
        self, engine: Engine, *, max_waiting: int = 256, on_step: Callable[[EngineStats], None] | None = None,
        on_failure: Callable[[RankFailed], None] = lambda error: None,
    ) -> None:  # fmt: skip
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, found {max_waiting}")
        self.engine = engine
        self._max_waiting = max_waiting
        self._on_step = on_step
        self._on_failure = on_failure
        self._has_lost_rank = False
        engine.when_failed(self._note_failure)
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_draining = False
        self._owners: dict[Request, tuple[RequestStream, int]] = {}
        self._requests: dict[RequestStream, tuple[Request, ...]] = {}
        self._streams: set[RequestStream] = set()  # with a request that has not ended; guarded by _changed
        self._num_open = 0  # submitted and not ended; guarded by _changed
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="dsv4-engine", daemon=True)
        self.last_error: Exception | None = None

    # ---- callers, any thread ----

    @property
    def stats(self) -> EngineStats:
        """As of the last step or command."""
        return self._stats

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended."""
        return self._num_open

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether a rank was lost, or the thread has ended without being told to."""
        return self._has_lost_rank or (not self.is_alive and not self._is_draining)

    @property
    def is_accepting(self) -> bool:
        return self.is_alive and not self._is_draining

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(self, requests: Sequence[Request], outputs: Sequence[TextOutput]) -> RequestStream:
        """Queue prepared requests (`Engine.prepare`) as one group; call it in the event loop that reads the stream.
        `outputs` take their tokens."""
        with self._changed:
            if not self.is_accepting:
                raise EngineStopped("the engine is shutting down and takes no more requests")
            num_waiting = self._num_open - self.engine.num_slots
            if num_waiting > 0 and num_waiting + len(requests) > self._max_waiting:
                raise EngineBusy(f"{num_waiting} requests wait already; at most {self._max_waiting} may")
            stream = RequestStream(outputs, self._cancel)
            self._num_open += len(requests)
            self._streams.add(stream)
            self._commands.append(lambda: self._add(stream, tuple(requests)))
            self._changed.notify()
        return stream

    def stop(self, timeout: float | None = None, *, join_timeout: float | None = None) -> bool:
        """Take no more requests, finish those there are, end the thread. After `timeout` seconds what still runs is
        dropped; the step that runs then is waited for, `join_timeout` seconds at most (None: as long as it takes).
        Blocks; returns whether everything was finished."""
        self.drain()
        if not self.is_alive:
            return True
        self._thread.join(timeout)
        if not self.is_alive:
            return True
        self.drop_all()
        self._thread.join(join_timeout)
        return False

    def drain(self) -> None:
        """Take no more requests from now on; does not wait."""
        with self._changed:
            self._is_draining = True
            self._changed.notify()

    def drop_all(self) -> None:
        """End every request there is with `EngineStopped`: readers are told at once, what the requests hold is free
        after the step that runs. Does not wait."""
        error = EngineStopped("the engine was stopped before this request was finished")
        event = ErrorEvent(0, error, time.perf_counter())
        with self._changed:
            for stream in self._streams:
                _call(stream, lambda stream=stream: stream.end(event))  # type: ignore[misc]
            self._commands.append(self._drop_all)
            self._changed.notify()

    def _cancel(self, stream: RequestStream) -> None:
        with self._changed:
            self._commands.append(lambda: self._drop(stream))
            self._changed.notify()

    # ---- the engine's thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (
                    self._commands or self.engine.has_work or self._is_draining or self.engine.has_idle_work
                ):  # fmt: skip
                    self._changed.wait()
                commands, self._commands = self._commands, deque()
                if self._is_draining and not commands and not self.engine.has_work:
                    return
            for command in commands:
                command()
            self._stats = self.engine.stats()
            if self.engine.has_work:
                self._step()
            elif self.engine.has_idle_work and not self._is_draining:
                self._idle_step()

    def _idle_step(self) -> None:
        try:
            self.engine.idle_step()
        except Exception:  # nobody waits for it
            _LOG.exception("a forward call in idle time failed")

    def _step(self) -> None:
        results: list[EngineEvent] = []
        try:
            results = self.engine.step()
        except NoFreeSlot as error:  # slots held outside this engine: waiting for them could take for ever
            self.last_error = error
            self._drop_all()
        except RankFailed as error:
            self._fail(error)
        except Exception as error:  # whatever it was, its requests are told and the next ones get their chance
            _LOG.exception("a forward call failed; its requests are dropped")
            self.last_error = error
            results = self.engine.take_results()
        seconds = time.perf_counter()
        self._stats = self.engine.stats()  # first: whoever reads an event may look at them
        if self._on_step is not None:
            self._on_step(self._stats)
        self._publish(results, seconds)

    def _publish(self, results: Sequence[EngineEvent], seconds: float) -> None:
        """Events of a step to their streams: the new tokens, then the requests that ended without one."""
        events: dict[RequestStream, list[RequestEvent]] = defaultdict(list)
        for result in results:
            request = result.request
            stream, choice = self._owners[request]
            output = stream.outputs[choice]
            if output.finish_reason is not None:
                continue
            output.num_cached_tokens, output.prompt_logprobs = request.num_cached_tokens, request.prompt_logprobs
            text = output.take(result.token_id, result.logprobs, result.finish_reason)
            if output.finish_reason is not None:
                self.engine.finish(request)
            token = TokenEvent(choice, result.token_id, text, result.logprobs, output.finish_reason, seconds)
            events[stream].append(token)
        for request in [one for one in self._owners if one.is_done]:
            stream, choice = self._owners[request]
            if request.error is not None:
                events[stream].append(ErrorEvent(choice, request.failure(), seconds))
            elif request.is_aborted:
                dropped = RequestAborted(f"the forward call of this request failed: {self.last_error}")
                events[stream].append(ErrorEvent(choice, dropped, seconds))
            elif request.finish_reason is not None and request.draws_nothing:
                output = stream.outputs[choice]
                output.finish_reason, output.prompt_logprobs = request.finish_reason, request.prompt_logprobs
                events[stream].append(EndEvent(choice, request.finish_reason, seconds))
            self._forget(request)
        for stream, produced in events.items():
            _deliver(stream, produced)

    def _note_failure(self, error: RankFailed) -> None:
        """Called in any thread, perhaps while nothing runs."""
        with self._changed:
            self._commands.append(lambda: self._fail(error))
            self._changed.notify()

    def _fail(self, error: RankFailed) -> None:
        """The model is gone: nothing that runs or waits can go on, and nothing more is taken."""
        if self._has_lost_rank:
            return
        self._has_lost_rank = self._is_draining = True
        self.last_error = error
        for request in self._owners:
            self.engine.abort(request)
        self._publish([], time.perf_counter())
        self._on_failure(error)

    def _add(self, stream: RequestStream, requests: tuple[Request, ...]) -> None:
        self._requests[stream] = requests
        for choice, request in enumerate(requests):
            self._owners[request] = (stream, choice)
            self.engine.submit(request)

    def _drop(self, stream: RequestStream) -> None:
        """Free what a stream still holds, and end it for whoever may still be reading."""
        seconds = time.perf_counter()
        ended: list[RequestEvent] = []
        for choice, request in enumerate(self._requests.get(stream, ())):
            if request in self._owners:
                self.engine.abort(request)
                self._forget(request)
                ended.append(ErrorEvent(choice, RequestAborted("the request was cancelled"), seconds))
        if ended:
            _deliver(stream, ended)

    def _drop_all(self) -> None:
        for stream in {stream for stream, _ in self._owners.values()}:
            self._drop(stream)

    def _forget(self, request: Request) -> None:
        stream, _ = self._owners.pop(request)
        with self._changed:
            self._num_open -= 1
            if not any(one in self._owners for one in self._requests[stream]):
                self._streams.discard(stream)
                del self._requests[stream]


def _deliver(stream: RequestStream, events: list[RequestEvent]) -> None:
    """Hand events to the stream's own loop."""
    _call(stream, lambda: stream.push(events))


def _call(stream: RequestStream, action: Callable[[], None]) -> None:
    """Run something in the stream's own loop. A loop that is closed has no reader left."""
    if not stream.loop.is_closed():
        try:
            stream.loop.call_soon_threadsafe(action)
        except RuntimeError:
            return
