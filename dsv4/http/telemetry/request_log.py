"""A line for every request that reached the engine, once it is over."""

import logging
import time

from dsv4.http.apis.request_builder import Job
from dsv4.http.telemetry.metrics import RequestTimer

_LOG = logging.getLogger("dsv4.serve")


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
