"""An engine of this process as the target of a load: no server, no threads."""

from __future__ import annotations

import time
from array import array
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
        requests = [
            self._prepare(load, prompt, output, place)
            for place, (prompt, (_, output)) in enumerate(zip(load.prompts(self._last_id), load.sizes(), strict=True))
        ]
        long = None
        if load.intruder is not None:
            prompt = prompt_ids(load.seed, -1, load.intruder, self._last_id)
            long = self._prepare(load, prompt, INTRUDER_OUTPUT, 0)
        tokens: dict[int, list[float]] = defaultdict(list)  # by the request's identity, as those below
        begun: dict[int, float] = {}
        host = array("d")  # seconds of each step in which the host did something else than wait
        started, waited = time.monotonic(), engine.seconds_waiting
        num_begun = num_ended = 0
        try:
            while num_begun < len(requests) or engine.has_work:
                now = time.monotonic()
                if long is not None and id(long) not in begun and now - started >= load.intruder_seconds:
                    begun[id(long)] = now
                    engine.submit(long)
                while num_begun < len(requests) and _may_start(load, arrivals, now - started, num_begun, num_ended):
                    begun[id(requests[num_begun])] = now if arrivals is None else started + arrivals[num_begun]
                    engine.submit(requests[num_begun])
                    num_begun += 1
                if not engine.has_work:
                    num_ended = num_begun  # those that failed, too
                    if arrivals is not None:
                        time.sleep(max(0.0, started + arrivals[num_ended] - time.monotonic()))
                    continue
                before, began = engine.seconds_waiting, time.perf_counter()
                parts, now = engine.step().parts, time.monotonic()
                host.append(time.perf_counter() - began - (engine.seconds_waiting - before))
                for request in (request for part in parts for request in part.requests):
                    tokens[id(request)].append(now)
                for request in (request for part in parts for request in part.ended):
                    on_done(1)
                    num_ended += request is not long
        finally:
            for request in (*requests, *([] if long is None else [long])):
                engine.abort(request)
        host_share = 1 - (engine.seconds_waiting - waited) / (time.monotonic() - started)

        def seen(request: Any) -> Timeline:
            return Timeline(begun[id(request)], tokens[id(request)], request.error)

        intruder = None if id(long) not in begun else seen(long)
        return Observed([seen(request) for request in requests], intruder, host_share, host)

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
