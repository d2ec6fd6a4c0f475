"""`ThroughputLog`: a line every ten seconds in which the engine worked. No torch."""

import logging
import time

from dsv4.engine.stats import EngineStats

_LOG = logging.getLogger("dsv4.engine")


class ThroughputLog:
    """Call `wants` after a step, and `update` with the statistics where it says so."""

    def __init__(self, stats: EngineStats, seconds: float = 10.0) -> None:
        self._period = seconds
        self.restart(stats)

    def restart(self, stats: EngineStats) -> None:
        """Count from now on: the engine was idle."""
        self._before, self._start = stats, time.perf_counter()

    def wants(self, seconds: float) -> bool:
        return seconds - self._start > self._period

    def update(self, now: EngineStats, seconds: float) -> None:
        before, elapsed = self._before, seconds - self._start
        self._before, self._start = now, seconds
        fields = {
            "running": now.num_running,
            "waiting": now.num_waiting,
            "prompt_tokens_per_second": round((now.num_prompt_tokens - before.num_prompt_tokens) / elapsed, 1),
            "output_tokens_per_second": round((now.num_output_tokens - before.num_output_tokens) / elapsed, 1),
            "cache_used": round(now.num_blocks_used / now.num_blocks, 4),
        }
        _LOG.info(
            "%d running, %d waiting, %.1f prompt tokens/s, %.1f output tokens/s, %.1f %% of the cache",
            fields["running"], fields["waiting"], fields["prompt_tokens_per_second"],
            fields["output_tokens_per_second"], 100 * fields["cache_used"], extra={"fields": fields},
        )  # fmt: skip
