"""The host's part of a decode step, by itself: allocator, `prepare_forward`, `schedule`, `build`, `commit`.

    python -m benchmarks host --device cpu --out benchmarks/results/cache.jsonl

Wall time of one core, device work included; `build` holds the cache's own `prepare_forward`. No model runs: every
request draws the same token, and a thousand requests wait behind the batch of the scheduler.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.runner import Record, Session, wait
from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.request import Request
from dsv4.engine.schedule.scheduler import Scheduler
from dsv4.engine.step.builder import StepBuilder
from dsv4.request import SamplingParams
from dsv4.tools.bench.model import time_calls

NUM_REQUESTS, NUM_BLOCKS, NUM_STEPS = 256, 65536, 200
NUM_WAITING, PROMPT_LEN, TOKEN = 1000, 200, 7
CPU = torch.device("cpu")
CONFIG = ModelConfig.tiny()  # the cost is the host's and the table's: it does not depend on the model's size
SECTIONS = ("allocator", "cache", "scheduler")


def run(session: Session) -> None:
    torch.set_num_threads(1)
    for count in (1, 16, 1024) if session.wants("allocator") else ():
        session.attempt(f"allocator, {count} at once", allocator, count)
    for count in (1, 4, 64) if session.wants("cache") else ():
        session.attempt(f"prepare_forward, {count} tokens", prepare_forward, session.device, count)
    for count in (1, 16, 64, 256) if session.wants("scheduler") else ():
        session.attempt(f"scheduler, {count} requests", scheduler_step, session.device, count)


def allocator(num_at_once: int) -> Record:
    """Acquire and release `num_at_once` blocks; one pair is one block acquired and released."""
    blocks = BlockAllocator(NUM_BLOCKS)
    calls = max(1, 20000 // num_at_once)

    def call() -> None:
        for _ in range(calls):
            blocks.release(blocks.acquire(num_at_once))

    seconds = time_calls(call, CPU, 20)
    rate = calls * num_at_once / statistics.median(seconds)
    return spread("allocator", {"blocks_at_once": num_at_once}, seconds) | {"pairs_per_s": round(rate, 1)}


def prepare_forward(device: torch.device, num_new_tokens: int) -> Record:
    """One step of 256 requests at different phases of their blocks, `num_new_tokens` each."""
    manager = make_cache(
        device, CONFIG.max_position_embeddings, NUM_REQUESTS,
        num_blocks=NUM_REQUESTS * (2 + NUM_STEPS * 2 * num_new_tokens // 128),
    )  # fmt: skip
    slots = [manager.admit(CONFIG.max_position_embeddings) for _ in range(NUM_REQUESTS)]
    for slot in slots:
        manager.prepare_forward([slot], [0], [1 + slot % 128])

    def step() -> None:
        positions = [manager.position(slot) for slot in slots]
        manager.prepare_forward(slots, positions, [num_new_tokens] * NUM_REQUESTS)
        wait(device)

    max_steps = (CONFIG.max_position_embeddings - 256) // num_new_tokens
    seconds = time_calls(step, CPU, min(NUM_STEPS, max_steps - 5))
    manager.check_integrity()
    return spread("prepare_forward", {"requests": NUM_REQUESTS, "new_tokens": num_new_tokens}, seconds)


def scheduler_step(device: torch.device, num_requests: int) -> list[Record]:
    """Each part of a decode step of `num_requests` requests."""
    cache = make_cache(device, 1024, num_requests, max_chunk_tokens=8192)
    scheduler = Scheduler(cache, num_blocks=cache.schema.num_blocks, max_batched_tokens=8192)
    builder, params = StepBuilder(cache), SamplingParams(max_tokens=800, ignore_eos=True)
    for _ in range(num_requests + NUM_WAITING):
        scheduler.add(Request.start([TOKEN] * PROMPT_LEN, params, max_context_tokens=1024, eos_token_id=0))
    times: dict[str, list[float]] = {"schedule": [], "build": [], "commit": []}
    while scheduler.num_steps < NUM_STEPS + 20:
        marks = [time.perf_counter()]
        plan = scheduler.schedule()
        marks.append(time.perf_counter())
        step = builder.build(plan)
        marks.append(time.perf_counter())
        wait(device)
        begun = time.perf_counter()
        scheduler.commit(plan)
        for request in step.drawing:
            request.num_unread -= 1
            request.append(TOKEN, None)
            scheduler.settle(request)
        taken = (marks[1] - marks[0], marks[2] - marks[1], time.perf_counter() - begun)
        if len(plan.pieces) == plan.num_tokens == num_requests:
            for name, seconds in zip(times, taken, strict=True):
                times[name].append(seconds)
    return [spread(name, {"requests": num_requests}, seconds) for name, seconds in times.items()]


def make_cache(device: torch.device, context: int, num_requests: int, **limits: Any) -> KVCacheManager:
    engine = EngineConfig(max_context_tokens=context, max_concurrent_requests=num_requests, **limits)
    return KVCacheManager(CONFIG, build_schedule(CONFIG), engine, device=device, plain_dtype=None)


def spread(op: str, shapes: dict[str, Any], seconds: list[float]) -> Record:
    deciles = [1e6 * value for value in statistics.quantiles(seconds, n=10)]
    return {
        "kind": "host", "op": op, "shapes": shapes, "median_us": round(1e6 * statistics.median(seconds), 2),
        "p10_us": round(deciles[0], 2), "p90_us": round(deciles[-1], 2), "repeats": len(seconds),
    }  # fmt: skip


def line(record: Record) -> str:
    rate = f", {record['pairs_per_s']:,.0f} pairs/s" if "pairs_per_s" in record else ""
    times = f"{record['median_us']:10,.1f} us ({record['p10_us']:,.1f} to {record['p90_us']:,.1f})"
    return f"{record['op']:16} {record['shapes']!s:40} {times}{rate}"
