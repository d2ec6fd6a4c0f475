"""Host time of an engine's step over a model that costs nothing: plan, step inputs, launch, collection and results.

    python benchmarks/bench_scheduler.py [--waiting 1000]

Prints microseconds of CPU, medians of 200 steps: for batches that only decode, the same with requests that wait, and
batches of which each request ends after `--length` steps and another begins.
Every request draws the same token. No kernel runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.engine import Engine
from dsv4.engine.run.bucket import Draws, Forwarded
from dsv4.engine.run.runner import Runner
from dsv4.loader.synth import random_params
from dsv4.model.transformer import Transformer
from dsv4.ops.sampling import SamplingRows
from dsv4.request import SamplingParams

NUM_STEPS, PROMPT_LEN, TOKEN = 200, 20, 7


class FreeRunner(Runner):
    """Computes nothing; every row draws the same token."""

    def forward(self, batch: TokenBatch, draw_rows: Tensor) -> Forwarded:
        nothing = torch.empty(0)
        return Forwarded(nothing, nothing, ())

    def draw(self, forwarded: Forwarded, rows: SamplingRows, num_top: int | None = None) -> Draws:
        return Draws(torch.full_like(rows.slots, TOKEN))


def make_engine(num_requests: int, *, overlap: bool = True) -> Engine:
    """An engine of `num_requests` slots over a tiny model that never runs."""
    config = ModelConfig.tiny()
    limits = EngineConfig(
        max_context_tokens=2048, max_concurrent_requests=num_requests, max_chunk_tokens=8192, prefix_cache_bytes=0,
        num_blocks=num_requests * 8,
    )  # fmt: skip
    cache = KVCacheManager(config, build_schedule(config), limits, device="cpu", plain_dtype=None)
    model = Transformer(config, random_params(config), torch.bfloat16)
    return Engine(model, cache, runner=FreeRunner(model, cache, buckets=(), use_graphs=False), overlap=overlap)


def bench(num_requests: int, num_waiting: int, length: int | None) -> float:
    """Median microseconds of a step. `length`: tokens of an answer, so that requests come and go; None: none ends."""
    engine = make_engine(num_requests)
    for place in range(num_requests + num_waiting):
        tokens = 900 if length is None else 1 + place % length if place < num_requests else length
        engine.add([TOKEN] * PROMPT_LEN, SamplingParams(max_tokens=tokens, ignore_eos=True))
    seconds = []
    for _ in range(NUM_STEPS + 20):
        started = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - started)
    return 1e6 * statistics.median(seconds[20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait behind the batch")
    parser.add_argument("--length", type=int, default=500, help="tokens of an answer where requests come and go")
    arguments = parser.parse_args()
    print(f"{'requests':>8} {'decoding':>10} {'they wait':>10} {'come & go':>10}   microseconds of CPU a step")
    for num_requests in (1, 16, 64, 256, 1024):
        row = [
            bench(num_requests, 0, None), bench(num_requests, arguments.waiting, None),
            bench(num_requests, NUM_STEPS * num_requests // arguments.length + 100, arguments.length),
        ]  # fmt: skip
        print(f"{num_requests:>8} " + " ".join(f"{value:>10.1f}" for value in row))


if __name__ == "__main__":
    main()
