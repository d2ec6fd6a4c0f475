"""`LoadReport`: how much room an engine has and which prefixes it knows, for the router."""

from __future__ import annotations

from dsv4.cache.prefix.watch import PrefixNews
from dsv4.engine.engine import Engine
from dsv4.engine.link.messages import Load
from dsv4.engine.schedule.plan_builder import starts_block


class LoadReport:
    """One for an engine: it tells what has changed since it was last asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch = engine.cache.watch_prefixes()
        self._last: Load | None = None

    def measure(self) -> tuple[Load, PrefixNews]:
        engine = self._engine
        scheduler, cache, rows = engine.scheduler, engine.cache, engine.scheduler.rows
        num_tokens = num_growing = 0
        for request in scheduler.running:
            if request.rows is None:
                num_tokens += request.num_pending
                num_growing += starts_block(request.num_processed)
        num_growing += rows.to_feed().num_new_blocks
        return Load(
            scheduler.num_waiting + len(engine.gate.held), cache.num_free_slots, cache.num_free_blocks - num_growing,
            num_tokens,
        ), self._watch.news()  # fmt: skip

    def news(self) -> Load | None:
        """For rank 0; None if nothing has changed."""
        load, prefixes = self.measure()
        if load == self._last and not prefixes:
            return None
        self._last = load
        return Load(
            load.num_waiting, load.num_free_slots, load.num_free_blocks, load.num_tokens, b"".join(prefixes.added),
            b"".join(prefixes.removed),
        )  # fmt: skip
