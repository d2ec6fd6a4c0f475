"""A line for every request that reached the engine, once it is over, and one every ten seconds for all of them."""

from __future__ import annotations

import asyncio
import logging
import time

from dsv4.engine.async_engine import AsyncEngine
from dsv4.http.apis.request_builder import Job
from dsv4.http.metrics import RequestTimer

_LOG = logging.getLogger("dsv4.serve")
THROUGHPUT_SECONDS = 10.0


def log_request(request_id: str, route: str, job: Job, timer: RequestTimer, problem: str | None) -> None:
    """The line of one request. `problem` says what ended it early; None if it came to its end."""
    reason = problem or ",".join(sorted(timer.finish_reasons))
    output = sum(output.num_output for output in job.outputs)
    first, rate = timer.first_token_seconds, timer.tokens_per_second
    fields = {
        "request_id": request_id,
        "route": route,
        "prompt_tokens": job.num_prompt_tokens,
        "cached_tokens": job.num_cached_tokens,
        "output_tokens": output,
        "first_token_seconds": None if first is None else round(first, 4),
        "tokens_per_second": None if rate is None else round(rate, 2),
        "seconds": round(time.perf_counter() - timer.start, 4),
        "reason": reason,
    }
    _LOG.info(
        "%s %s: %d prompt (%d cached) + %d tokens in %.2f s, first %s, %s tokens/s, %s",
        request_id, route, job.num_prompt_tokens, job.num_cached_tokens, output, fields["seconds"],
        "-" if first is None else f"{first:.3f} s", "-" if rate is None else f"{rate:.1f}", reason,
        extra={"fields": fields},
    )  # fmt: skip


async def log_throughput(engine: AsyncEngine, seconds: float = THROUGHPUT_SECONDS) -> None:
    """For ever: what the engine did in the last seconds. Nothing while it does nothing."""
    before, start = engine.stats, time.perf_counter()
    while True:
        await asyncio.sleep(seconds)
        now, end = engine.stats, time.perf_counter()
        if now.num_steps != before.num_steps or now.num_running or now.num_waiting:
            elapsed = end - start
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
        before, start = now, end
