"""A trace of every request for OpenTelemetry: its time in the queue, in prefill and in decode, as spans of one request.

There are traces where OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) names a collector and the
extra `traces` is installed; else this costs nothing. A client's `traceparent` header is the parent. Spans are made when
the request is over, from the times that were taken anyway, and sent by a thread of the SDK's own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from dsv4 import __version__
from dsv4.http.apis.request_builder import Job
from dsv4.http.telemetry.metrics import RequestTimer
from dsv4.loader.shipped import how_to_install

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_FLUSH_MILLISECONDS = 3000
_LOG = logging.getLogger("dsv4.serve")


class Tracer:
    """`record` each request, `close` at the end. `make` gives one where there are to be traces."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("dsv4", __version__)
        self._model = model
        self._offset = time.time_ns() - time.perf_counter_ns()  # spans have the time of day

    @classmethod
    def make(cls, model: str) -> Tracer | None:
        """None where no collector is named, or the SDK is missing: the log then says so."""
        if not any(os.environ.get(name) for name in ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
            return None
        if any(not _is_installed(name) for name in _NEEDED):
            _LOG.warning("no traces are sent, although %s is set: %s", ENDPOINTS[0], how_to_install("traces"))
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "dsv4"), "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(about))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, model)

    def record(
        self, request_id: str, route: str, headers: Mapping[str, str], job: Job, timer: RequestTimer,
        problem: str | None,
    ) -> None:  # fmt: skip
        """A request is over; `problem` says what ended it early."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.perf_counter()
        parent = TraceContextTextMapPropagator().extract(dict(headers))
        about = {
            "http.route": route, "dsv4.request_id": request_id, "gen_ai.system": "dsv4",
            "gen_ai.request.model": self._model, "gen_ai.usage.input_tokens": job.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(output.num_output for output in job.outputs),
            "gen_ai.response.finish_reasons": sorted(timer.finish_reasons),
            "dsv4.cached_tokens": job.num_cached_tokens,
        }  # fmt: skip
        span = self._tracer.start_span(
            f"POST {route}", context=parent, kind=SpanKind.SERVER, attributes=about, start_time=self._ns(timer.start)
        )
        if problem is not None:
            span.set_status(Status(StatusCode.ERROR, problem))
        inside = set_span_in_context(span)
        for name, since, until in _phases(job, timer, end):
            self._tracer.start_span(name, context=inside, start_time=self._ns(since)).end(self._ns(until))
        span.end(self._ns(end))

    def close(self) -> None:
        """Send what is left, for at most a few seconds."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset


def _phases(job: Job, timer: RequestTimer, end: float) -> list[tuple[str, float, float]]:
    """What the request went through, in order. With several answers: until the first of them got on."""
    admitted = min((output.admitted_seconds for output in job.outputs if output.admitted_seconds), default=None)
    first = None if timer.first_token_seconds is None else timer.start + timer.first_token_seconds
    if admitted is None:
        return [("queue", timer.start, end)]
    admitted = min(max(admitted, timer.start), end)
    phases = [("queue", timer.start, admitted), ("prefill", admitted, end if first is None else first)]
    return phases if first is None else [*phases, ("decode", first, end)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False
