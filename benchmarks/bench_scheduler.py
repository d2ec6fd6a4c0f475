"""Host cost of a decode step before and after the model: `schedule`, `build`, `commit` and `settle`, for a full batch.

    python benchmarks/bench_scheduler.py [--device cuda]

Prints microseconds, medians of 200 steps, wall time of one core; `build` holds the cache's own `prepare_forward`. A
thousand requests wait behind the batch. No model runs: every request draws the same token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.request import Request
from dsv4.engine.schedule.scheduler import Scheduler
from dsv4.engine.step.builder import StepBuilder
from dsv4.request import SamplingParams

NUM_STEPS, NUM_WAITING, PROMPT_LEN, TOKEN = 200, 1000, 200, 7


def bench(num_requests: int, device: str) -> dict[str, float]:
    """Median microseconds of each part of a decode step of `num_requests` requests."""
    config = ModelConfig.tiny()
    limits = EngineConfig(max_context_tokens=1024, max_concurrent_requests=num_requests, max_chunk_tokens=8192)
    cache = KVCacheManager(config, build_schedule(config), limits, device=device, plain_dtype=None)
    scheduler = Scheduler(cache, num_blocks=cache.schema.num_blocks, max_batched_tokens=limits.max_chunk_tokens)
    builder = StepBuilder(cache)
    params = SamplingParams(max_tokens=800, ignore_eos=True)
    for _ in range(num_requests + NUM_WAITING):
        scheduler.add(Request.start([TOKEN] * PROMPT_LEN, params, max_context_tokens=1024, eos_token_id=0))
    times: dict[str, list[float]] = {"schedule": [], "build": [], "commit": []}
    while scheduler.num_steps < NUM_STEPS + 20:
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        marks.append(time.perf_counter())
        step = builder.build(plan)
        marks.append(time.perf_counter())
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        scheduler.commit(plan)
        for request in step.drawing:
            request.append(TOKEN, None)
            scheduler.settle(request)
        end = time.perf_counter()
        if len(plan.pieces) == plan.num_tokens == num_requests:
            for name, seconds in zip(times, (marks[1] - marks[0], marks[2] - marks[1], end - marks[3]), strict=True):
                times[name].append(seconds)
    return {name: 1e6 * statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    print(f"{'requests':>8} {'schedule':>10} {'build':>10} {'commit':>10}   microseconds, {device}")
    for num_requests in (1, 16, 64, 256):
        row = bench(num_requests, device)
        print(f"{num_requests:>8} {row['schedule']:>10.1f} {row['build']:>10.1f} {row['commit']:>10.1f}")


if __name__ == "__main__":
    main()
