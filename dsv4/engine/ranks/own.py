"""Rank 0's engine as the router sees a rank, and `LoadReport`: what any rank tells the router of its engine."""

import time
from collections.abc import Callable

from dsv4.engine.engine import Engine
from dsv4.engine.link.messages import Load
from dsv4.engine.ranks.router import Rank
from dsv4.engine.request import Request
from dsv4.engine.schedule.plan_builder import starts_block
from dsv4.engine.step.tokens import StepTokens
from dsv4.request import FinishReason

_STATS_SECONDS = 1.0  # between two statistics of a rank in the middle of its requests


class LoadReport:
    """One for an engine: it tells what has changed since it was last asked. Statistics come when a request has ended,
    and otherwise once a second. `on_asked` is called whenever it is."""

    def __init__(self, engine: Engine, on_asked: Callable[[], None] = lambda: None) -> None:
        self._engine, self._on_asked = engine, on_asked
        self._watch = engine.cache.watch_prefixes()
        self._last: Load | None = None
        self._num_over, self._stats_at = -1, 0.0

    def news(self) -> Load | None:
        """None if nothing has changed."""
        self._on_asked()
        engine = self._engine
        scheduler, cache, rows = engine.scheduler, engine.cache, engine.scheduler.rows
        num_tokens = num_growing = 0
        for request in scheduler.running:
            if request.rows is None:
                num_tokens += request.num_pending
                num_growing += starts_block(request.num_processed)
        num_growing += rows.to_feed().num_new_blocks
        prefixes = self._watch.news()
        last, num_over = self._last, scheduler.num_finished + scheduler.num_aborted + scheduler.num_failed
        stats, now = None if last is None else last.stats, time.monotonic()
        if num_over != self._num_over or now - self._stats_at > _STATS_SECONDS:
            stats, self._num_over, self._stats_at = engine.stats(), num_over, now
        load = Load(
            scheduler.num_waiting + len(engine.gate.held), cache.num_free_slots, cache.num_free_blocks - num_growing,
            num_tokens, stats=stats,
        )  # fmt: skip
        if load == last and not prefixes:
            return None
        self._last = load
        return Load(
            load.num_waiting, load.num_free_slots, load.num_free_blocks, load.num_tokens, b"".join(prefixes.added),
            b"".join(prefixes.removed), None if last is not None and stats == last.stats else stats,
        )  # fmt: skip


class OwnRank(Rank):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine, self._report = engine, LoadReport(engine)
        self._requests: set[Request] = set()

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def has_results(self) -> bool:
        return bool(self._engine.results)

    def submit(self, request: Request, waited: float) -> None:
        self._requests.add(request)
        self._engine.submit(request, waited)

    def abort(self, request: Request) -> None:
        self._requests.discard(request)
        self._engine.abort(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        self._requests.discard(request)
        self._engine.finish(request, reason)

    def take_results(self) -> StepTokens:
        found = self._engine.take_results()
        self._requests.difference_update(found.ended)
        return found

    def hear(self) -> None:
        """How the engine stands now."""
        load = self._report.news()
        if load is not None:
            self.note(load)
