"""Prometheus metrics of one server. Each has its own registry: nothing is global."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsv4.engine.async_engine import AsyncEngine
from dsv4.engine.events import TokenEvent

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_DELIVERY = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """What is counted as requests go by; what the engine knows is read when the metrics are."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "dsv4_time_to_first_token_seconds", "From the arrival of a request to its first token.",
            buckets=_FIRST_TOKEN, registry=self.registry,
        )  # fmt: skip
        self.inter_token = Histogram(
            "dsv4_inter_token_seconds", "Between two tokens of a request, by the engine's clock.",
            buckets=_INTER_TOKEN, registry=self.registry,
        )  # fmt: skip
        self.delivery = Histogram(
            "dsv4_delivery_seconds", "The server's own share per token: from the end of a step to the socket.",
            buckets=_DELIVERY, registry=self.registry,
        )  # fmt: skip
        self.responses = Counter(
            "dsv4_http_responses", "Answers by route and status.", ("route", "status"), registry=self.registry
        )
        self.disconnects = Counter(
            "dsv4_disconnects", "Clients that went, or took nothing for too long, before their answer was complete.",
            registry=self.registry,
        )  # fmt: skip
        self.registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        gauges = (
            ("dsv4_requests_waiting", "Requests that wait for a slot.", stats.num_waiting),
            ("dsv4_requests_running", "Requests in the batch.", stats.num_running),
            ("dsv4_slots", "Requests that can be in the batch.", stats.num_slots),
            ("dsv4_cache_blocks_used", "Cache blocks (128 tokens of every layer) that requests hold.",
             stats.num_blocks_used),
            ("dsv4_cache_blocks", "Cache blocks there are.", stats.num_blocks),
        )  # fmt: skip
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counters = (
            ("dsv4_steps", "Forward calls.", stats.num_steps),
            ("dsv4_prompt_tokens", "Prompt tokens read.", stats.num_prompt_tokens),
            ("dsv4_generated_tokens", "Tokens written.", stats.num_output_tokens),
            ("dsv4_requests_finished", "Requests that came to their end.", stats.num_finished),
            ("dsv4_requests_aborted", "Requests dropped: cancelled, or in a forward call that failed.",
             stats.num_aborted),
            ("dsv4_requests_failed", "Requests that failed alone: no numbers, a constraint without a token, too late.",
             stats.num_failed),
            ("dsv4_preemptions", "Times a request gave its cache blocks to another and started again later.",
             stats.num_preemptions),
            ("dsv4_recomputed_tokens", "Tokens that went through the model again after a preemption.",
             stats.num_recomputed_tokens),
            ("dsv4_expert_hits", "Experts a layer chose that were on the device; counted with --offload-experts.",
             stats.num_expert_hits),
            ("dsv4_expert_misses", "Experts a layer chose that came from host memory.", stats.num_expert_misses),
            ("dsv4_expert_bytes_moved", "Bytes of experts copied from host memory to the device.",
             stats.num_expert_bytes),
        )  # fmt: skip
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)


class RequestTimer:
    """Feeds the histograms with one job's tokens."""

    def __init__(self, metrics: Metrics, num_choices: int, start: float) -> None:
        """`start` is `time.perf_counter()` at the request's arrival."""
        self._metrics = metrics
        self._start = start
        self._last: list[float | None] = [None] * num_choices

    def token(self, event: TokenEvent) -> None:
        last = self._last[event.choice]
        if last is None:
            self._metrics.first_token.observe(event.seconds - self._start)
        else:
            self._metrics.inter_token.observe(event.seconds - last)
        self._last[event.choice] = event.seconds

    def sent(self, event: TokenEvent) -> None:
        """Everything this token made certain has been handed to the socket."""
        self._metrics.delivery.observe(time.perf_counter() - event.seconds)
