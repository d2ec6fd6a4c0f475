"""Host cost of the cache: allocator throughput and `prepare_forward` for a full decode batch.

    python benchmarks/bench_cache.py [--device cuda] [--out benchmarks/results/cache.jsonl]

Prints a table; `--out` appends one JSON record per row. Times are wall time of one core, device work included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule

NUM_REQUESTS = 256
NUM_BLOCKS = 65536


def time_calls(call: Callable[[], object], *, repeats: int, warmup: int = 5) -> list[float]:
    """Seconds of each of `repeats` calls."""
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def bench_allocator(num_at_once: int) -> dict[str, Any]:
    """Acquire and release `num_at_once` blocks; one pair is one block acquired and released."""
    allocator = BlockAllocator(NUM_BLOCKS)
    calls = max(1, 20000 // num_at_once)

    def run() -> None:
        for _ in range(calls):
            allocator.release(allocator.acquire(num_at_once))

    seconds = time_calls(run, repeats=20)
    pairs = calls * num_at_once
    return record("allocator", {"blocks_at_once": num_at_once}, seconds, {"pairs_per_s": pairs / median(seconds)})


def bench_prepare_forward(device: str, num_new_tokens: int) -> dict[str, Any]:
    """One step of 256 requests at different phases of their blocks, `num_new_tokens` each."""
    config = ModelConfig.tiny()  # the cost is the host's and the table's: it does not depend on the model's size
    num_steps = 200
    engine = EngineConfig(
        max_context_tokens=config.max_position_embeddings,
        max_concurrent_requests=NUM_REQUESTS,
        num_blocks=NUM_REQUESTS * (2 + num_steps * 2 * num_new_tokens // 128),
    )
    manager = KVCacheManager(config, build_schedule(config), engine, device=device, plain_dtype=None)
    slots = [manager.admit(config.max_position_embeddings) for _ in range(NUM_REQUESTS)]
    counts = [num_new_tokens] * NUM_REQUESTS
    for slot in slots:
        manager.prepare_forward([slot], [0], [1 + slot % 128])
    free_before, steps_done = manager.num_free_blocks, 0

    def step() -> None:
        nonlocal steps_done
        manager.prepare_forward(slots, [manager.position(slot) for slot in slots], counts)
        steps_done += 1
        if device != "cpu":
            torch.cuda.synchronize()

    max_steps = (config.max_position_embeddings - 256) // num_new_tokens
    seconds = time_calls(step, repeats=min(num_steps, max_steps - 5))
    manager.check_integrity()
    changed = (free_before - manager.num_free_blocks) / steps_done
    shapes = {"requests": NUM_REQUESTS, "new_tokens": num_new_tokens, "new_blocks_per_step": round(changed, 1)}
    return record("prepare_forward", shapes, seconds, {"us_per_call": median(seconds) * 1e6})


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def record(op: str, shapes: dict[str, Any], seconds: list[float], result: dict[str, float]) -> dict[str, Any]:
    deciles = statistics.quantiles(seconds, n=10)
    return {
        "op": op,
        "shapes": shapes,
        **{name: round(value, 1) for name, value in result.items()},
        "median_us": round(median(seconds) * 1e6, 2),
        "p10_us": round(deciles[0] * 1e6, 2),
        "p90_us": round(deciles[-1] * 1e6, 2),
        "repeats": len(seconds),
    }


def origin(device: str) -> dict[str, str]:
    """Where the numbers come from."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the block table lives: cpu or cuda")
    parser.add_argument("--out", type=Path, help="append one JSON record per row to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    records = [bench_allocator(num) for num in (1, 16, 1024)]
    records += [bench_prepare_forward(arguments.device, num) for num in (1, 4, 64)]
    table = Table("op", "shapes", "result", "median us", "p10 us", "p90 us")
    for row in records:
        shapes = ", ".join(f"{name} {value}" for name, value in row["shapes"].items())
        name, unit = ("pairs_per_s", "pairs/s") if "pairs_per_s" in row else ("us_per_call", "us a call")
        result = f"{row[name]:,.0f} {unit}"
        table.add_row(row["op"], shapes, result, *(f"{row[key]:,.1f}" for key in ("median_us", "p10_us", "p90_us")))
    Console().print(table)
    if arguments.out is not None:
        where = origin(arguments.device)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | where) + "\n" for row in records)


if __name__ == "__main__":
    main()
