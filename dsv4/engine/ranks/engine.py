"""`RanksEngine`: the engines of all ranks as one, on rank 0. It has the methods of `Engine`, and computes nothing.

Every rank runs an ordinary `Engine` over its own cache; they agree on the size of each step among themselves
(agreement.py). What is left for rank 0 is to give each new request to one of them (router.py), for good: to its own
engine, or over a connection to another rank's (remote.py), from which its tokens come back, one message a step.

If one rank fails, all end (`RankFailed`): every step needs its experts.
"""

from __future__ import annotations

import operator
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import reduce
from types import FrameType
from typing import Any

from dsv4.dist.control import Leader
from dsv4.dist.errors import RankFailed
from dsv4.engine.engine import Engine
from dsv4.engine.ranks.agreement import Agreement
from dsv4.engine.ranks.own import OwnRank
from dsv4.engine.ranks.remote import RemoteRank, source_of, wait_for
from dsv4.engine.ranks.router import Router, Waiting
from dsv4.engine.request import Request
from dsv4.engine.stats import EngineStats
from dsv4.engine.step.constraint import Constraint
from dsv4.engine.step.tokens import StepTokens
from dsv4.request import FinishReason, SamplingParams

_WAIT_SECONDS = 0.002  # for news of other ranks, in one go: callers have other things to do
_PATIENCE_SECONDS = 30.0  # for an answer that comes between two steps


class RanksEngine:
    """`own` is rank 0's engine, `agreement` its sizes, `remotes` are the others, `link` watches over them. Not for
    several threads at once.

    The model, the cache, the runner, the scheduler and the observers are rank 0's. So is the gate; control.py sets the
    others' alike.
    """

    def __init__(
        self, own: Engine, agreement: Agreement, remotes: Sequence[RemoteRank], link: Leader, *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.own, self.sizes, self.remotes = own, agreement, tuple(remotes)
        self.model, self.cache, self.runner, self.scheduler = own.model, own.cache, own.runner, own.scheduler
        self.gate, self.observers = own.gate, own.observers
        self.num_slots = own.num_slots * (1 + len(remotes))
        self.ranks: tuple[OwnRank | RemoteRank, ...] = (OwnRank(own), *remotes)
        self._link, self._clock = link, clock
        self._router = Router(own.cache.limits.max_chunk_tokens)
        self._homes: dict[Request, OwnRank | RemoteRank] = {}  # of the requests that have a rank
        self._ended: list[Request] = []  # that never got a rank
        self._pauses: list[Future[Any]] = []
        self._num_aborted = self._num_failed = 0
        while not all(one.load.stats for one in self.remotes):  # what it has in files takes a while
            if self._link.failure is not None:
                raise self._link.failure
            self._wait(_WAIT_SECONDS)
            self._hear()

    # ---- as of an engine ----

    @property
    def has_work(self) -> bool:
        if self._ended or any(one.has_results for one in self.ranks):
            return True
        if self._link.is_lost:  # a step says so to those that are here
            return bool(len(self._router) or self._homes)
        self._pauses = [one for one in self._pauses if not one.done()]
        is_running = not self.gate.is_still and (len(self._router) > 0 or any(one.num_open for one in self.remotes))
        return is_running or bool(self._pauses) or self.own.has_work

    @property
    def seconds_waiting(self) -> float:
        return self.own.seconds_waiting

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
        if request.constraint is not None and source_of(request) is None:
            self._homes[request] = self.ranks[0]
            self.ranks[0].submit(request, waited)
            return
        chain = request.chain = request.chain_by(self.cache.chain)
        self._router.add(request, self._clock() - waited, self.sizes.num_rounds, chain)

    def add(self, prompt: Iterable[int], params: SamplingParams) -> Request:
        request = self.prepare(prompt, params)
        self.submit(request)
        return request

    def step(self) -> StepTokens:
        """See `Engine.step`. An interrupt (Ctrl-C) is seen between two steps: in the middle the others would wait."""
        with _interrupts_later(), self._ending():
            with self._link.working():
                pass  # `RankFailed` once there is nothing to work with
            self._ended += self._router.expire(self._clock())
            self._hear()
            self._give()
            if self.own.has_work:
                self.own.run_step()
            elif not any(one.has_results for one in self.remotes):
                self._wait(_WAIT_SECONDS)
            self._hear()
        return self.take_results()

    def take_results(self) -> StepTokens:
        """Rank 0's own, and in `rest` those of each other rank."""
        own, *rest = [one.take_results() for one in self.ranks]
        for request in (*own.ended, *(request for one in rest for request in one.ended)):
            self._homes.pop(request, None)
            self._router.remove(request)
        ended, self._ended = tuple(self._ended), []
        self._num_failed += sum(request.is_expired for request in ended)
        return replace(own, ended=(*own.ended, *ended), rest=tuple(rest))

    def abort(self, request: Request) -> None:
        if request.is_done:
            return
        home = self._homes.pop(request, None)
        if self._router.remove(request):
            request.is_aborted = True
            self._num_aborted += 1
        elif home is not None:
            home.abort(request)

    def finish(self, request: Request, reason: FinishReason = FinishReason.STOP) -> None:
        if request.is_done:
            return
        home = self._homes.pop(request, None)
        if self._router.remove(request):
            request.finish_reason = reason
        elif home is not None:
            home.finish(request, reason)

    def stats(self) -> EngineStats:
        """Of all ranks together, as they said last. `seconds_waiting` is rank 0's."""
        for one in self.remotes:
            one.hear()
        own = self.own.stats()
        total = reduce(operator.add, [one.load.stats for one in self.remotes if one.load.stats is not None], own)
        return replace(
            total, seconds_waiting=self.seconds_waiting, num_steps=self.sizes.num_rounds,
            num_waiting=total.num_waiting + len(self._router), num_aborted=total.num_aborted + self._num_aborted,
            num_failed=total.num_failed + self._num_failed,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Every rank's own."""
        self.own.check_integrity()
        self.answers([one.ask("check_integrity") for one in self.remotes])

    # ---- commands to all ranks ----

    def begin_pause(self, mode: str) -> None:
        """Tell every other rank to pause. That has come about once this engine `has_work` no more."""
        if mode == "wait":  # what waits was here before
            rooms = [one.room() for one in self.ranks]
            while (given := self._router.give_anyway(rooms)) is not None:
                self._given(*given)
        self._pauses = [one.control("pause", {"mode": mode}) for one in self.remotes]

    def resume(self) -> None:
        self.tell("resume")
        self.own.resume()

    def start_anew(self, name: str, *, clears: bool = False) -> None:
        self.tell("reset_prefix_cache", running=clears, name=name)
        self.own.start_anew(name, clears=clears)
        self._router.rename(self.cache.chain)

    def tell(self, verb: str, *, patience: float = _PATIENCE_SECONDS, **arguments: Any) -> list[Any]:
        """Have every other rank obey a command; returns their answers or raises the first error."""
        return self.answers(self.ask_all(verb, **arguments), patience)

    def ask_all(self, verb: str, **arguments: Any) -> list[Future[Any]]:
        """`answers` are for later. All of it is sent: what follows may wait for the others."""
        asked = [one.control(verb, arguments) for one in self.remotes]
        with self._ending():
            for one in self.remotes:
                while not one.finish_sending(_WAIT_SECONDS):
                    if self._link.failure is not None:
                        raise self._link.failure
        return asked

    def working(self) -> AbstractContextManager[None]:
        """Around what ranks do together, besides steps."""
        return self._link.working()

    def answers(self, asked: Sequence[Future[Any]], patience: float = _PATIENCE_SECONDS) -> list[Any]:
        """One of each other rank. Steps that they have begun go on meanwhile."""
        until = time.monotonic() + patience
        with self._ending():
            while silent := [one.rank for one, answer in zip(self.remotes, asked, strict=True) if not answer.done()]:
                if self._link.failure is not None:
                    raise self._link.failure
                if time.monotonic() > until:
                    raise RankFailed(f"ranks {silent} have not answered within {patience:g} s")
                if self.sizes.is_called:
                    self.own.run_step()
                self._wait(_WAIT_SECONDS)
                self._hear()
        return [one.result() for one in asked]

    # ---- other ranks ----

    def _hear(self) -> None:
        for one in self.remotes:
            one.hear()
            if one.is_lost:
                with self._link.working():
                    one.check()

    def _wait(self, seconds: float) -> None:
        wait_for([*(one.socket for one in self.remotes if not one.is_lost), *self.sizes.sockets], seconds)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Once ranks are lost, nothing that runs can go on."""
        try:
            yield
        except BaseException:
            if self._link.is_lost:
                lost = [one for one in (*self._homes, *self._router.requests) if not one.is_done]
                for request in lost:
                    self.abort(request)
                self._ended += lost
                self._pauses = []
            raise

    # ---- placing ----

    def _give(self) -> None:
        """Give away whoever finds room. While the engine is paused, they wait."""
        if not len(self._router) or self.gate.is_shut:
            return
        self.ranks[0].hear()
        rooms = [one.room() for one in self.ranks]
        while (given := self._router.give(rooms)) is not None:
            self._given(*given)

    def _given(self, waiting: Waiting, home: int, num_blocks: int, num_tokens: int) -> None:
        request, rank = waiting.request, self.ranks[home]
        self._homes[request] = rank
        rank.submit(request, self._clock() - waiting.since)
        if home:  # rank 0 looks at its own load itself
            rank.reserved[request] = num_blocks, num_tokens


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
