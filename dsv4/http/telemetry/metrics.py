"""Prometheus metrics of one front end, and of the engine. Each has its own registry: nothing is global."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dsv4.engine.link.stream import RequestEvent, TokenEvent
from dsv4.engine.stats import DraftStats, EngineStats

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_DELIVERY = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288, 1048576)
_LABEL = "model_name"


class Metrics:
    """Counted as requests go by. `shared_metrics.py` adds up those of several front ends.

    Names and labels are vLLM's where it has such a metric, with `dsv4_` for `vllm:` (docs/serving.md has the table).
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", _FIRST_TOKEN
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request, by the engine's clock.", _INTER_TOKEN
        )
        self.whole_request = self._histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its last token.", _WHOLE
        )
        self.prompt_len = self._histogram("request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS)
        self.output_len = self._histogram("request_generation_tokens", "Tokens a finished request wrote.", _TOKENS)
        self.delivery = self._histogram(
            "delivery_seconds", "The server's own share per token: from the end of a step to the socket.", _DELIVERY
        )
        self._success = Counter(
            "dsv4_request_success", "Requests that came to their end, by reason.", (_LABEL, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._responses = Counter(
            "dsv4_http_responses", "Answers by route and status.", (_LABEL, "route", "status"), registry=self.registry
        )
        self.disconnects = Counter(
            "dsv4_disconnects", "Clients that went, or took nothing for too long, before their answer was complete.",
            (_LABEL,), registry=self.registry,
        ).labels(model_name)  # fmt: skip

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Tally:
        made = Tally(f"dsv4_{name}", text, self._model, buckets)
        self.registry.register(made)
        return made

    def responded(self, route: str, status: int) -> None:
        self._responses.labels(self._model, route, str(status)).inc()

    def finished(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()


class Tally(Collector):
    """A histogram for one thread, where an observation is an addition; Prometheus reads it when it asks."""

    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._model = name, text, model_name
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=(_LABEL,))
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric((self._model,), buckets, self._sum)
        yield family


class EngineMetrics(Collector):
    """The engine's statistics as metrics."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        drafts = stats.drafts or DraftStats(0, (), ())
        gauges = (
            ("num_requests_waiting", "Requests that wait for a slot.", stats.num_waiting),
            ("num_requests_running", "Requests in the batch.", stats.num_running),
            ("slots", "Requests that can be in the batch.", stats.num_slots),
            ("kv_cache_usage_perc", "Share of the cache blocks that requests hold, from 0 to 1.",
             stats.num_blocks_used / stats.num_blocks),
            ("cache_blocks_used", "Cache blocks (128 tokens of every layer) that requests hold.",
             stats.num_blocks_used),
            ("cache_blocks", "Cache blocks there are.", stats.num_blocks),
            ("prefix_idle_blocks", "Cache blocks that hold known prefixes and any request may take.",
             stats.num_idle_blocks),
            ("prefix_snapshot_bytes", "Bytes of snapshots on the device.", stats.num_snapshot_bytes),
            ("prefix_host_bytes", "Bytes of prefixes in host memory.", stats.num_prefix_host_bytes),
            ("prefix_disk_bytes", "Bytes of prefixes in files.", stats.num_prefix_disk_bytes),
        )  # fmt: skip
        counters = (
            ("steps", "Forward calls.", stats.num_steps),
            ("prompt_tokens", "Prompt tokens read.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens written.", stats.num_output_tokens),
            ("requests_finished", "Requests that came to their end.", stats.num_finished),
            ("requests_aborted", "Requests dropped: cancelled, or in a forward call that failed.",
             stats.num_aborted),
            ("requests_failed", "Requests that failed alone: no numbers, a constraint without a token, too late.",
             stats.num_failed),
            ("num_preemptions", "Times a request gave its cache blocks to another and started again later.",
             stats.num_preemptions),
            ("recomputed_tokens", "Tokens that went through the model again after a preemption.",
             stats.num_recomputed_tokens),
            ("expert_hits", "Experts a layer chose that were on the device; counted with --offload-experts.",
             stats.num_expert_hits),
            ("expert_misses", "Experts a layer chose that came from host memory.", stats.num_expert_misses),
            ("expert_bytes_moved", "Bytes of experts copied from host memory to the device.",
             stats.num_expert_bytes),
            ("prefix_cached_tokens", "Tokens that were not read because the prefix cache had them.",
             stats.num_cached_tokens),
            ("prefix_misses", "Requests of more than a block that found no prefix.", stats.num_prefix_misses),
            ("prefix_evictions", "Snapshots given up on the device for others.", stats.num_prefix_evictions),
            ("prefix_bad_files", "Files of the prefix cache that were not used; the log names them.",
             stats.num_prefix_bad_files),
            ("prefix_verified", "Hits read again without the cache.", stats.num_verified_hits),
            ("prefix_wrong", "Hits that differed from a cold run.", stats.num_wrong_hits),
            ("spec_decode_num_drafts", "Requests' steps in which drafts were verified.", drafts.num_steps),
            ("spec_decode_num_draft_tokens", "Drafts verified.", drafts.num_verified),
            ("spec_decode_num_accepted_tokens", "Drafts that came true.", drafts.num_accepted),
        )  # fmt: skip
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                made = family(f"dsv4_{name}", text, labels=(_LABEL,))
                made.add_metric((self._model,), value)
                yield made
        hits = CounterMetricFamily(
            "dsv4_prefix_hits", "Requests that started from a known prefix.", labels=(_LABEL, "tier")
        )
        below = stats.num_prefix_host_hits + stats.num_prefix_disk_hits
        for tier, number in (
            ("device", stats.num_prefix_hits - below), ("host", stats.num_prefix_host_hits),
            ("disk", stats.num_prefix_disk_hits),
        ):  # fmt: skip
            hits.add_metric((self._model, tier), number)
        yield hits
        places = CounterMetricFamily(
            "dsv4_spec_decode_num_accepted_tokens_per_pos", "Drafts that came true, by their place behind the token.",
            labels=(_LABEL, "position"),
        )  # fmt: skip
        for place, accepted in enumerate(drafts.accepted_by_place):
            places.add_metric((self._model, str(place)), accepted)
        yield places


class RequestTimer:
    """Feeds the histograms with one job's tokens, and keeps what its line in the log needs."""

    def __init__(self, metrics: Metrics, num_choices: int, start: float) -> None:
        """`start` is `time.perf_counter()` at the request's arrival."""
        self._metrics = metrics
        self.start = start
        self._first: float | None = None
        self._num_tokens = [0] * num_choices
        self._last: list[float | None] = [None] * num_choices
        self.finish_reasons: set[str] = set()

    @property
    def first_token_seconds(self) -> float | None:
        """From the arrival to the first token; None without one."""
        return None if self._first is None else self._first - self.start

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after each choice's first; None if there are none."""
        later = sum(max(number - 1, 0) for number in self._num_tokens)
        last = max((seconds for seconds in self._last if seconds is not None), default=None)
        if not later or last is None or self._first is None or last <= self._first:
            return None
        return later / (last - self._first)

    def token(self, event: TokenEvent, prompt_len: int) -> None:
        """A token, or an end without one, came out of the engine: of a request whose prompt has `prompt_len` tokens."""
        if event.token_id is not None:
            last = self._last[event.choice]
            if last is None:
                self._metrics.first_token.add(event.seconds - self.start)
                if self._first is None:
                    self._first = event.seconds
            else:
                self._metrics.inter_token.add(event.seconds - last)
            self._last[event.choice] = event.seconds
            self._num_tokens[event.choice] += 1
        if event.finish_reason is not None:
            self.finish_reasons.add(str(event.finish_reason))
            self._metrics.finished(str(event.finish_reason))
            self._metrics.whole_request.add(event.seconds - self.start)
            self._metrics.prompt_len.add(prompt_len)
            self._metrics.output_len.add(self._num_tokens[event.choice])

    def sent(self, events: Sequence[RequestEvent], seconds: float) -> None:
        """What these tokens made certain was handed to the socket at `seconds`."""
        for event in events:
            self._metrics.delivery.add(seconds - event.seconds)
