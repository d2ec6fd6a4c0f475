"""`RanksEngine`: the engines of all ranks as one, on rank 0. It has the methods of `Engine`, and computes nothing.

Every rank runs an ordinary `Engine` over its own cache; they agree on the size of each step among themselves
(agreement.py). What is left for rank 0 is to give each new request to one of them (router.py), for good: to its own
engine, or over a connection to another rank's (remote.py), from which its tokens come back, one message a step.

If one rank fails, all end (`RankFailed`): every step needs its experts.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from math import inf
from types import FrameType
from typing import Any

from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.dist.control import Leader
from dsv4.dist.errors import RankFailed
from dsv4.engine.engine import Engine
from dsv4.engine.gate import Gate
from dsv4.engine.ranks.remote import RemoteRank, wait_for
from dsv4.engine.ranks.report import LoadReport
from dsv4.engine.ranks.router import Room, Router
from dsv4.engine.request import Request
from dsv4.engine.stats import DraftStats, EngineStats
from dsv4.engine.step.constraint import Constraint
from dsv4.engine.step.size import Sizes
from dsv4.engine.step.tokens import StepTokens, joined
from dsv4.model.transformer import Transformer
from dsv4.request import FinishReason, SamplingParams

_WAIT_SECONDS = 0.002  # for news of other ranks, in one go: callers have other things to do
_PATIENCE_SECONDS = 30.0  # for an answer that comes between two steps


class RanksEngine:
    """`own` is rank 0's engine, `remotes` are the others, `link` watches over them. Not for several threads at once."""

    def __init__(
        self, own: Engine, remotes: Sequence[RemoteRank], link: Leader, *, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self.own, self.remotes = own, tuple(remotes)
        self.observers: list[Callable[[Tensor], None]] = own.observers  # of rank 0's own tokens
        self._link, self._clock = link, clock
        self._router = Router(own.cache.limits.max_chunk_tokens)
        self._report = LoadReport(own)
        self._known: set[bytes] = set()  # of the own cache
        self._own_requests: set[Request] = set()
        self._kept: list[StepTokens] = []  # of the own engine, not yet returned
        self._ended: list[Request] = []  # that never got a rank
        self._pauses: list[Future[Any]] = []
        self._num_aborted = self._num_failed = 0
        self._answers([one.ask("stats") for one in self.remotes], inf)  # and their loads, with what their files hold

    # ---- as of an engine ----

    @property
    def model(self) -> Transformer:
        return self.own.model

    @property
    def cache(self) -> KVCacheManager:
        """Rank 0's."""
        return self.own.cache

    @property
    def gate(self) -> Gate:
        """Rank 0's; control.py sets the others' alike."""
        return self.own.gate

    @property
    def sizes(self) -> Sizes:
        return self.own.sizes

    @property
    def num_slots(self) -> int:
        return self.own.num_slots * (1 + len(self.remotes))

    @property
    def has_work(self) -> bool:
        has_results = bool(self._kept or self._ended) or any(one.has_results for one in self.remotes)
        if self.own.has_work or has_results or self._is_pausing():
            return True
        return not self.gate.is_still and (len(self._router) > 0 or any(one.requests for one in self.remotes))

    @property
    def has_idle_work(self) -> bool:
        return False

    def idle_step(self) -> None:
        raise AssertionError("ranks do nothing in idle time")

    def prepare(
        self, prompt: Iterable[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> Request:  # fmt: skip
        return self.own.prepare(prompt, params, constraint)

    def submit(self, request: Request, waited: float = 0.0) -> None:
        """Queue a prepared request. A rule without a `source` cannot be sent, so its request stays on this rank."""
        if request.constraint is not None and _source(request) is None:
            self._own_requests.add(request)
            self.own.submit(request, waited)
            return
        chain = request.chain = request.chain_by(self.cache.chain)
        self._router.add(request, self._clock() - waited, self.own.scheduler.num_steps, chain)

    def add(self, prompt: Iterable[int], params: SamplingParams) -> Request:
        request = self.prepare(prompt, params)
        self.submit(request)
        return request

    def resume(self) -> None:
        self.own.resume()

    def step(self) -> StepTokens:
        """See `Engine.step`. An interrupt (Ctrl-C) is seen between two steps: in the middle the others would wait."""
        with _interrupts_later(), self._ending():
            with self._link.working():
                pass  # `RankFailed` once there is nothing to work with
            self._ended += self._router.expire(self._clock())
            self._hear()
            self._give()
            if self.own.has_work:
                self._step()
            elif not any(one.has_results for one in self.remotes):
                self._wait(_WAIT_SECONDS)
            self._hear()
        return self.take_results()

    def take_results(self) -> StepTokens:
        """Rank 0's own, and in `rest` those of each other rank."""
        kept, self._kept = [*self._kept, self.own.take_results()], []
        own = joined(kept)
        self._own_requests.difference_update(own.ended)
        ended, self._ended = tuple(self._ended), []
        rest = tuple(one.take_results() for one in self.remotes)
        for request in (*own.ended, *(request for one in rest for request in one.ended)):
            self._router.remove(request)
        self._num_failed += sum(request.is_expired for request in ended)
        return replace(own, ended=(*own.ended, *ended), rest=rest)

    def abort(self, request: Request) -> None:
        if request.is_done:
            return
        home = self._home(request)
        if self._router.remove(request):
            request.is_aborted = True
            self._num_aborted += 1
        elif home is not None:
            home.cancel(request)
            request.is_aborted = True
        else:
            self._own_requests.discard(request)
            self.own.abort(request)

    def finish(self, request: Request, reason: FinishReason = FinishReason.STOP) -> None:
        if request.is_done:
            return
        home = self._home(request)
        if self._router.remove(request):
            request.finish_reason = reason
        elif home is not None:
            home.finish(request)
            request.finish_reason = reason
        else:
            self._own_requests.discard(request)
            self.own.finish(request, reason)

    def stats(self) -> EngineStats:
        """Of all ranks together. `seconds_waiting` is rank 0's."""
        own = self.own.stats()
        parts = [own] if self._link.is_lost else [own, *(_stats_of(found) for found in self.ask("stats"))]
        total = Counter[str]()
        for part in parts:
            total.update({one.name: getattr(part, one.name) for one in fields(part) if one.name != "drafts"})
        counts: dict[str, Any] = dict(total)
        counts |= {"seconds_waiting": own.seconds_waiting, "num_steps": own.num_steps, "drafts": _drafts_of(parts)}
        counts["num_waiting"] += len(self._router)
        counts["num_aborted"] += self._num_aborted
        counts["num_failed"] += self._num_failed
        return EngineStats(**counts)

    def check_integrity(self) -> None:
        """Every rank's own."""
        self.own.check_integrity()
        self.ask("check_integrity")

    # ---- other ranks ----

    def ask(self, what: str) -> list[Any]:
        """What every other rank answers, between two of its steps."""
        return self._answers([one.ask(what) for one in self.remotes])

    def tell(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Have every other rank obey a command; returns their answers or raises the first error."""
        return self._answers([one.control(verb, arguments) for one in self.remotes])

    def begin_pause(self, mode: str) -> None:
        """Tell every other rank to pause. That has come about once this engine `has_work` no more."""
        if mode == "wait":  # what waits was here before
            rooms = self._rooms()
            while (given := self._router.give_anyway(rooms)) is not None:
                self._given(*given)
        self._pauses = [one.control("pause", {"mode": mode}) for one in self.remotes]

    def forget_prefixes(self) -> None:
        """They go by another name from now on."""
        self._router.rename(self.cache.chain)

    def _is_pausing(self) -> bool:
        self._pauses = [one for one in self._pauses if not one.done()]
        return bool(self._pauses)

    def _answers(self, asked: list[Future[Any]], seconds: float = _PATIENCE_SECONDS) -> list[Any]:
        """Steps that other ranks have begun go on meanwhile."""
        until = time.monotonic() + seconds
        with self._ending():
            while not all(one.done() for one in asked):
                if self._link.failure is not None:
                    raise self._link.failure
                if time.monotonic() > until:
                    raise RankFailed(f"a rank has not answered within {seconds:g} s")
                if self.own.sizes.is_called:
                    self._step()
                self._wait(_WAIT_SECONDS)
                self._hear()
        return [one.result() for one in asked]

    def _step(self) -> None:
        found = self.own.step()
        if found:
            self._kept.append(found)

    def _hear(self) -> None:
        for one in self.remotes:
            one.receive()
            if one.is_lost:
                with self._link.working():
                    one.check()

    def _wait(self, seconds: float) -> None:
        wait_for([*(one.socket for one in self.remotes if not one.is_lost), *self.own.sizes.sockets], seconds)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Once ranks are lost, nothing that runs can go on."""
        try:
            yield
        except BaseException:
            if self._link.is_lost:
                self._give_up()
            raise

    def _give_up(self) -> None:
        self.own.give_up()
        lost = [*self._own_requests, *self._router.requests]
        for request in lost:
            self.abort(request)
        for one in self.remotes:
            for request in tuple(one.requests.values()):
                self.abort(request)
                lost.append(request)
        self._ended += lost
        self._pauses = []

    # ---- placing ----

    def _give(self) -> None:
        """Give away whoever finds room. While the engine is paused, they wait."""
        if not len(self._router) or self.gate.is_shut:
            return
        rooms = self._rooms()
        homes = [self._own_requests, *(one.requests.values() for one in self.remotes)]
        while (given := self._router.give(rooms, homes)) is not None:
            self._given(*given)

    def _given(self, waiting: Any, home: int, num_blocks: int, num_tokens: int) -> None:
        request, waited = waiting.request, self._clock() - waiting.since
        if home == 0:
            self._own_requests.add(request)
            self.own.submit(request, waited)
        else:
            remote = self.remotes[home - 1]
            remote.submit(request, waited, _source(request))
            remote.reserved[request] = num_blocks, num_tokens

    def _rooms(self) -> list[Room]:
        load, news = self._report.measure()
        self._known.difference_update(news.removed)
        self._known.update(news.added)
        rooms = [
            Room(
                load.num_free_slots - load.num_waiting, load.num_free_blocks, load.num_tokens, len(self._own_requests),
                load.num_waiting, self._known,
            )
        ]  # fmt: skip
        for one in self.remotes:
            load = one.load
            room = Room(
                load.num_free_slots, load.num_free_blocks, load.num_tokens, len(one.requests) - len(one.reserved),
                load.num_waiting, one.known,
            )  # fmt: skip
            for num_blocks, num_tokens in one.reserved.values():
                room.take(num_blocks, num_tokens)
                room.num_waiting += not num_blocks
            rooms.append(room)
        return rooms

    def _home(self, request: Request) -> RemoteRank | None:
        """The other rank that has it."""
        return next((one for one in self.remotes if one.has(request)), None)


def _source(request: Request) -> tuple[str, list[int]] | None:
    """What another rank makes the request's rule from; None without a rule, or where it has none."""
    return getattr(request.constraint, "source", None)


def _stats_of(found: dict[str, Any]) -> EngineStats:
    drafts = found["drafts"]
    return EngineStats(**(found | {"drafts": None if drafts is None else DraftStats(**drafts)}))


def _drafts_of(parts: Sequence[EngineStats]) -> DraftStats | None:
    found = [asdict(part.drafts) for part in parts if part.drafts is not None]
    if not found:
        return None
    places = {
        name: tuple(map(sum, zip(*(one[name] for one in found), strict=True)))
        for name in ("verified_by_place", "accepted_by_place")
    }
    return DraftStats(sum(one["num_steps"] for one in found), **places)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C inside is raised at the end. Only the main thread is interrupted; elsewhere there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            raise KeyboardInterrupt
