"""The host's part of a decode step: allocator, `prepare_forward`, and a whole step of the engine without a model.

    python -m benchmarks host --device cpu --out benchmarks/results/cache.jsonl

Time of one core. No model runs (`free_model.py`).
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.free_model import free_engine
from benchmarks.rank_host import measure
from benchmarks.runner import Record, Session, wait
from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.engine import Engine
from dsv4.engine.step.constraint import Constraint, Words
from dsv4.loader.write.synth import random_params
from dsv4.model.transformer import Transformer
from dsv4.request import SamplingParams
from dsv4.tools.bench.model import time_calls

NUM_REQUESTS, NUM_BLOCKS, NUM_STEPS = 256, 65536, 200
NUM_WAITING, ANSWER_LEN, TOKEN = 1000, 500, 7
CPU = torch.device("cpu")
CONFIG = ModelConfig.tiny()  # the cost is the host's and the table's: it does not depend on the model's size
SECTIONS = ("allocator", "cache", "engine", "ranks")


def run(session: Session) -> None:
    torch.set_num_threads(1)
    for count in (1, 16, 1024) if session.wants("allocator") else ():
        session.attempt(f"allocator, {count} at once", allocator, count)
    for count in (1, 4, 64) if session.wants("cache") else ():
        session.attempt(f"prepare_forward, {count} tokens", prepare_forward, session.device, count)
    for count in (1, 16, 64, 256, 1024) if session.wants("engine") else ():
        session.attempt(f"engine, {count} requests", engine_step, count)
    for count, waiting in ((2, 0), (4, 0), (4, NUM_REQUESTS)) if session.wants("ranks") else ():
        session.attempt(f"{count} ranks, {waiting} requests wait", measure, count, NUM_REQUESTS, waiting)


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


def make_engine(num_requests: int, *, overlap: bool = True) -> Engine:
    """An engine of `num_requests` slots over a tiny model that never runs."""
    limits = EngineConfig(
        max_context_tokens=2048, max_concurrent_requests=num_requests, max_chunk_tokens=8192, prefix_cache_bytes=0,
        num_blocks=num_requests * 8,
    )  # fmt: skip
    cache = KVCacheManager(CONFIG, build_schedule(CONFIG), limits, device="cpu", plain_dtype=None)
    model = Transformer(CONFIG, random_params(CONFIG), torch.bfloat16)
    return free_engine(model, cache, overlap=overlap)


def engine_step(num_requests: int) -> list[Record]:
    """A whole step of the engine, CPU time: a batch that decodes, the same while a thousand requests wait, and one
    whose requests end after 500 tokens and others begin."""
    ends = NUM_STEPS * num_requests // ANSWER_LEN + 100
    loads: dict[str, dict[str, Any]] = {
        "decoding": {}, "others wait": {"num_waiting": NUM_WAITING},
        "come and go": {"num_waiting": ends, "length": ANSWER_LEN}, "log-probabilities": {"logprobs": 1},
        "64 with rules": {"num_rules": 64},
    }  # fmt: skip
    return [
        spread("engine_step", {"requests": num_requests, "load": name}, _steps(num_requests, **load))
        for name, load in loads.items()
    ]


class FreeGroup:
    """As grammars are: asked for the masks of all at once."""

    def allowed(self, rules: Sequence[Constraint], words: Words) -> dict[int, Exception]:
        words.fill(-1)
        return {}


class FreeRule:
    """A rule that allows everything at no cost: what is measured is what rules cost the engine."""

    group = FreeGroup()

    def allowed(self) -> Words:
        raise AssertionError("the group is asked")

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, count: int) -> None:
        pass


def _steps(
    num_requests: int, *, num_waiting: int = 0, length: int | None = None, logprobs: int | None = None,
    num_rules: int = 0,
) -> list[float]:  # fmt: skip
    engine = make_engine(num_requests)
    for place in range(num_requests + num_waiting):
        tokens = 900 if length is None else 1 + place % length if place < num_requests else length
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, logprobs=logprobs)
        rule = FreeRule() if place < num_rules else None
        engine.submit(engine.prepare([TOKEN] * 20, params, rule))
    seconds = []
    for _ in range(NUM_STEPS + 20):
        started = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - started)
    return seconds[20:]


def make_cache(device: torch.device, context: int, num_requests: int, **limits: Any) -> KVCacheManager:
    engine = EngineConfig(max_context_tokens=context, max_concurrent_requests=num_requests, **limits)
    return KVCacheManager(CONFIG, build_schedule(CONFIG), engine, device=device, plain_dtype=None)


def spread(op: str, shapes: dict[str, Any], seconds: list[float]) -> Record:
    deciles = [1e6 * value for value in statistics.quantiles(seconds, n=10)]
    return {
        "kind": "host", "op": op, "shapes": shapes, "median_us": round(1e6 * statistics.median(seconds), 2),
        "p10_us": round(deciles[0], 2), "p90_us": round(deciles[-1], 2), "repeats": len(seconds),
    }  # fmt: skip
