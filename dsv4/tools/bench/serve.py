"""A load of requests, against an engine in this process or any server that speaks OpenAI's completions. No torch.

Closed loop: `concurrency` requests are always under way. Open loop: requests arrive at `rate` a second, at random
(Poisson) but the same moments for a seed, whether the others are done or not: what users do. Times are those of the
caller: until the first token, between tokens, and to the end.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol
from urllib.parse import urlsplit

from dsv4.config import ConfigError
from dsv4.engine.stats import EngineStats
from dsv4.engine.step.tokens import StepTokens

_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 10, 999  # in the vocabulary of every model
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send: `requests` random prompts of `prompt_tokens`, each continued for exactly `output_tokens`."""

    requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    prompt_tokens: int = 128
    output_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate must be a positive number of requests a second, found {self.rate}")

    def prompts(self) -> list[list[int]]:
        chance = random.Random(self.seed)
        return [
            [chance.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]

    def arrivals(self) -> list[float] | None:
        """Seconds after the start at which each request comes; None in a closed loop."""
        if self.rate is None:
            return None
        chance = random.Random(self.seed + 1)
        return list(accumulate(chance.expovariate(self.rate) for _ in range(self.requests)))


@dataclass
class Timeline:
    """One request as its caller saw it: clock at the start and at each token, or why it failed."""

    started: float
    tokens: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class ServeReport:
    """A load and what came of it. Milliseconds; None where nothing was measured."""

    load: Load
    target: str
    seconds: float
    failed: int
    first_error: str | None
    tokens_per_second: float
    total_tokens_per_second: float
    first_token_ms: dict[str, float]
    between_tokens_ms: dict[str, float]
    request_ms: dict[str, float]
    host_share: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "serve", **asdict(self)}


class Target(Protocol):
    """Where a load goes."""

    name: str

    def run(self, load: Load, on_done: Callable[[], None]) -> list[Timeline]: ...

    def host_share(self) -> float | None:
        """Of the time of the last run, the part in which this process did something else than wait for the device."""


def measure_load(
    target: Target, load: Load, on_done: Callable[[], None] = lambda: None
) -> tuple[ServeReport, list[Timeline]]:
    """Send the load; `on_done` hears of every request that has ended."""
    timelines = target.run(load, on_done)
    good = [one for one in timelines if one.error is None and one.tokens]
    errors = [one.error for one in timelines if one.error is not None]
    ends = [one.tokens[-1] for one in good]
    seconds = max(ends) - min(one.started for one in timelines) if ends else 0.0
    num_tokens = sum(len(one.tokens) for one in good)
    rate = num_tokens / seconds if seconds else 0.0
    report = ServeReport(
        load=load, target=target.name, seconds=seconds, failed=len(timelines) - len(good),
        first_error=errors[0] if errors else None, tokens_per_second=rate,
        total_tokens_per_second=rate + (len(good) * load.prompt_tokens / seconds if seconds else 0.0),
        first_token_ms=_spread([one.tokens[0] - one.started for one in good]),
        between_tokens_ms=_spread([after - before for one in good for before, after in pairwise(one.tokens)]),
        request_ms=_spread([one.tokens[-1] - one.started for one in good]),
        host_share=target.host_share(),
    )  # fmt: skip
    return report, timelines


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    values = {"p50": statistics.median(ordered), "p99": p99, "max": ordered[-1], "mean": statistics.fmean(ordered)}
    return {name: round(1e3 * value, 3) for name, value in values.items()}


# ---- the engine of this process ----


class SteppingEngine(Protocol):
    """What is needed of `dsv4.engine.engine.Engine`."""

    def prepare(self, prompt: list[int], params: Any) -> Any: ...

    def submit(self, sequence: Any) -> None: ...

    def step(self) -> StepTokens: ...

    def stats(self) -> EngineStats: ...

    @property
    def has_work(self) -> bool: ...


class EngineTarget:
    """Steps the engine itself: no server, no threads."""

    def __init__(self, engine: SteppingEngine, name: str) -> None:
        self.name = name
        self._engine = engine
        self._host_share: float | None = None

    def run(self, load: Load, on_done: Callable[[], None]) -> list[Timeline]:
        engine, arrivals = self._engine, load.arrivals()
        sequences = [engine.prepare(prompt, _params(load, seed)) for seed, prompt in enumerate(load.prompts())]
        timelines: dict[int, Timeline] = {}
        waiting, started, waited = list(range(load.requests)), time.perf_counter(), engine.stats().seconds_waiting
        num_ended = 0
        while waiting or engine.has_work:
            now = time.perf_counter()
            while waiting and _may_start(waiting[0], load, arrivals, now - started, len(timelines) - num_ended):
                place = waiting.pop(0)
                due = now if arrivals is None else started + arrivals[place]
                timelines[place] = Timeline(due)
                engine.submit(sequences[place])
            if not engine.has_work:
                assert arrivals is not None
                time.sleep(max(0.0, started + arrivals[waiting[0]] - time.perf_counter()))
                continue
            results = engine.step()
            now = time.perf_counter()
            places = {id(sequence): place for place, sequence in enumerate(sequences)} if results else {}
            for request in results.requests:
                timelines[places[id(request)]].tokens.append(now)
            for _ in results.last_tokens():
                num_ended += 1
                on_done()
        wall = time.perf_counter() - started
        self._host_share = 1 - (engine.stats().seconds_waiting - waited) / wall
        for place, timeline in timelines.items():
            timeline.error = sequences[place].error
        return [timelines[place] for place in sorted(timelines)]

    def host_share(self) -> float | None:
        return self._host_share


def _may_start(
    place: int, load: Load, arrivals: Sequence[float] | None, elapsed: float, num_running: int
) -> bool:  # fmt: skip
    return num_running < load.concurrency if arrivals is None else elapsed >= arrivals[place]


def _params(load: Load, seed: int) -> Any:
    from dsv4.request import SamplingParams

    return SamplingParams(
        max_tokens=load.output_tokens, temperature=load.temperature, top_p=load.top_p, seed=seed, ignore_eos=True
    )


# ---- any server ----


class UrlTarget:
    """OpenAI's `/v1/completions` at a base URL, streamed; one thread and connection for each request under way."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000, found {url!r}")
        self.name = url
        self._parts, self._key = parts, api_key
        self._model = model or self._first_model()

    def host_share(self) -> float | None:
        return None

    def run(self, load: Load, on_done: Callable[[], None]) -> list[Timeline]:
        prompts, arrivals = load.prompts(), load.arrivals()
        timelines: list[Timeline | None] = [None] * load.requests
        started, lock, places = time.perf_counter(), threading.Lock(), iter(range(load.requests))

        def work() -> None:
            while True:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                if arrivals is not None:
                    time.sleep(max(0.0, started + arrivals[place] - time.perf_counter()))
                timelines[place] = self._ask(prompts[place], load, place)
                with lock:
                    on_done()

        count = load.concurrency if arrivals is None else load.requests
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(count, load.requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [one for one in timelines if one is not None]

    def _ask(self, prompt: list[int], load: Load, seed: int) -> Timeline:
        timeline = Timeline(time.perf_counter())
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": load.output_tokens, "stream": True,
            "temperature": load.temperature, "top_p": load.top_p, "seed": seed, "ignore_eos": True,
        }  # fmt: skip
        try:
            for chunk in self._stream("/v1/completions", body):
                if "error" in chunk:
                    timeline.error = str(chunk["error"])[:300]
                elif any(
                    choice.get("text") or choice.get("finish_reason") is None for choice in chunk.get("choices", ())
                ):
                    timeline.tokens.append(time.perf_counter())
        except (OSError, http.client.HTTPException, ValueError) as error:
            timeline.error = f"{type(error).__name__}: {error}"[:300]
        return timeline

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = self._connect()
        try:
            connection.request("POST", self._parts.path.rstrip("/") + path, json.dumps(body), self._headers())
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read(300).decode(errors='replace')}")
            for line in answer:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", self._parts.path.rstrip("/") + "/v1/models", headers=self._headers())
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise ConfigError(f"{self.name}/v1/models answers {answer.status}; name a model with --model")
            return str(json.loads(content)["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.name} does not answer as an OpenAI server: {error}") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=_TIMEOUT_SECONDS)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
