"""An engine of this process as the target of a load: no server, no threads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dsv4.engine.serving import Serving
from dsv4.engine.stats import EngineStats
from dsv4.llm import LLM
from dsv4.request import SamplingParams
from dsv4.tools.bench.client_process import LAST_TOKEN_ID, prompt_ids
from dsv4.tools.bench.serve import measure_load
from dsv4.tools.bench.workload import INTRUDER_OUTPUT, Lengths, Load, Observed, Timeline


class EngineTarget:
    """Steps the engine itself."""

    def __init__(self, engine: Serving, name: str, vocab_size: int) -> None:
        self.name = name
        self._engine = engine
        self._last_id = min(LAST_TOKEN_ID, vocab_size - 1)

    def run(self, load: Load, on_done: Callable[[int], None] = lambda count: None) -> Observed:
        engine, arrivals = self._engine, load.arrivals()
        prepared = [
            self._prepare(load, prompt, output, place)
            for place, (prompt, (_, output)) in enumerate(zip(load.prompts(self._last_id), load.sizes(), strict=True))
        ]
        long = None
        if load.intruder is not None:
            prompt = prompt_ids(load.seed, -1, load.intruder, self._last_id)
            long = self._prepare(load, prompt, INTRUDER_OUTPUT, 0)
        timelines: dict[int, Timeline] = {}  # by the request's identity
        stamps: dict[int, list[float]] = defaultdict(list)
        waiting, started, waited = prepared[::-1], time.monotonic(), engine.stats().seconds_waiting
        num_ended = 0
        try:
            while waiting or engine.has_work:
                now = time.monotonic()
                if long is not None and id(long) not in timelines and now - started >= load.intruder_seconds:
                    timelines[id(long)] = Timeline(now)
                    engine.submit(long)
                while waiting and _may_start(load, arrivals, now - started, len(prepared) - len(waiting), num_ended):
                    place, request = len(prepared) - len(waiting), waiting.pop()
                    timelines[id(request)] = Timeline(now if arrivals is None else started + arrivals[place])
                    engine.submit(request)
                if not engine.has_work:
                    num_ended = len(prepared) - len(waiting)  # those that failed, too
                    if arrivals is not None:
                        time.sleep(max(0.0, started + arrivals[num_ended] - time.monotonic()))
                    continue
                num_ended += self._step(stamps, on_done, long)
        finally:
            for request in (*prepared, *([] if long is None else [long])):
                engine.abort(request)
        wall = time.monotonic() - started
        for request in (*prepared, *([] if long is None else [long])):
            if id(request) in timelines:
                timelines[id(request)].tokens = stamps[id(request)]
                timelines[id(request)].error = request.error
        return Observed(
            [timelines[id(request)] for request in prepared], None if long is None else timelines.get(id(long)),
            1 - (engine.stats().seconds_waiting - waited) / wall,
        )  # fmt: skip

    def _step(self, stamps: dict[int, list[float]], on_done: Callable[[int], None], long: Any) -> int:
        """Requests of the load that ended."""
        num_ended = 0
        results = self._engine.step()
        now = time.monotonic()
        for part in results.parts:
            for request in part.requests:
                stamps[id(request)].append(now)
            for request in part.ended:
                on_done(1)
                num_ended += request is not long
        return num_ended

    def _prepare(self, load: Load, prompt: list[int], output: int, seed: int) -> Any:
        return self._engine.prepare(prompt, SamplingParams(
            max_tokens=output, temperature=load.temperature, top_p=load.top_p, seed=seed, ignore_eos=True
        ))  # fmt: skip


def _may_start(
    load: Load, arrivals: Sequence[float] | None, elapsed: float, num_started: int, num_ended: int
) -> bool:  # fmt: skip
    return num_started - num_ended < load.streams if arrivals is None else elapsed >= arrivals[num_started]


def serve_requests(llm: LLM, concurrency: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """All at once: time to the first token, between tokens, tokens a second."""
    load = Load.of("fixed", prompt_tokens, output_tokens, requests=concurrency, streams=concurrency, temperature=1.0)
    target = EngineTarget(llm.engine, "engine", llm.config.vocab_size)
    if llm.cache.device.type == "cuda":
        target.run(replace(load, output=Lengths(min(output_tokens, 4)), seed=1))  # compiles, captures
    before = llm.engine.stats()
    report, _ = measure_load(target, load)
    first, between = report.first_token_ms, report.between_tokens_ms or {"p50": 0.0, "p99": 0.0}
    return {
        "kind": "serving", "concurrency": concurrency, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens,
        "first_token_ms": first["p50"], "first_token_ms_max": first["max"],
        "between_tokens_ms": between["p50"], "between_tokens_ms_p99": between["p99"],
        "tokens_per_second": report.tokens_per_second, "host_share": report.host_share,
    } | ({} if llm.pool is None else _moved(before, llm.engine.stats())) | _drafted(llm.engine.stats())  # fmt: skip


def _drafted(stats: EngineStats) -> dict[str, Any]:
    """What drafts did so far, where there were any."""
    if stats.drafts is None:
        return {}
    return {
        "tokens_per_step": round(stats.drafts.tokens_per_step, 3),
        "accepted_by_place": [round(share, 3) for share in stats.drafts.acceptance],
    }


def _moved(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """What offloaded experts did between two moments."""
    return {
        "expert_hits": after.num_expert_hits - before.num_expert_hits,
        "expert_misses": after.num_expert_misses - before.num_expert_misses,
        "expert_bytes": after.num_expert_bytes - before.num_expert_bytes,
    }
