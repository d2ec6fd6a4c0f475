"""What a user waits for: steps of four Flash layers through the engine, against the GPU's busy time of the same steps.

    python -m benchmarks step --out benchmarks/results/nvidia-h200-step.jsonl [--section NAME ...]

| section | what | records (`kind`) |
|---|---|---|
| first | requests of each kind right after warm-up, each once more: seconds to the last token | first |
| steps | decode steps by batch and kind of request: wall, GPU busy, host's share | step |
| observed | 64 streams with and without an observer of the experts | step |
| load | 256 requests of 512 + 64 tokens | load |
| memory | bytes held against the plan's, three configurations | memory |

Wall is the time of many steps over their number; busy is the union of everything the GPU ran in other steps of the same
requests, by its profiler. `--preset tiny --device cpu` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.runner import Record, Session, free_memory, numbers, random_prompts, used_bytes
from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.request import SamplingParams
from dsv4.tools.bench.context import BenchModel
from dsv4.tools.bench.engine_target import EngineTarget
from dsv4.tools.bench.profile import Launch, busy_us, launches_of
from dsv4.tools.bench.serve import measure_load
from dsv4.tools.bench.workload import Load
from dsv4.tools.plan.plan import plan

SECTIONS = ("first", "steps", "observed", "load", "memory")
MEMORY = ((1, 65536, 2048), (64, 8192, 8192), (256, 2048, 2048))  # requests, context, chunk
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p 0.9": {"top_p": 0.9},
    "penalties": {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "log-probabilities": {"top_p": 0.9, "logprobs": 20},
    "100 log-probabilities": {"top_p": 0.9, "logprobs": 100},
    "bias": {"logit_bias": {7: 1.0}},
    "rules": {},  # min_tokens of all of them: a mask at every step
}


def submit(llm: LLM, count: int, length: int, output: int, kind: str, seed: int) -> list[Any]:
    """Random prompts; the requests."""
    settings = KINDS[kind] | {"max_tokens": output, "min_tokens": output if kind == "rules" else 0}
    return [
        llm.engine.add(prompt, SamplingParams(ignore_eos=True, seed=index, **settings))
        for index, prompt in enumerate(random_prompts(llm.config.vocab_size, count, length, seed))
    ]


def finish(llm: LLM, requests: list[Any]) -> None:
    for request in requests:
        llm.engine.abort(request)
    while llm.engine.has_work:
        llm.engine.step()


class Steady(NamedTuple):
    """Decode steps: seconds of one, the host's part of them, and what the GPU ran in the profiled ones."""

    wall: float
    host: float
    num_running: int
    launches: list[Launch] | None


def decode(llm: LLM, requests: list[Any], num_steps: int, num_profiled: int, num_profiles: int = 1) -> Steady:
    """Once all of them decode. They need `num_steps` and the profiled steps, and end after that."""
    engine = llm.engine
    while not all(len(request.token_ids) > request.prompt_len + 4 for request in requests):
        engine.step()
    waited, started = engine.seconds_waiting, time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall = (time.perf_counter() - started) / num_steps
    host = wall - (engine.seconds_waiting - waited) / num_steps
    for _ in range(num_profiles):  # the first profile of a process starts slowly
        launches = launches_of(lambda: [engine.step() for _ in range(num_profiled)], llm.cache.device)
    num_running = sum(not request.is_done for request in requests)
    finish(llm, requests)
    return Steady(wall, host, num_running, launches)


def measure_steps(llm: LLM, batch: int, kind: str, *, num_steps: int, watched: bool = False, seed: int = 0) -> Record:
    num_profiled = 10
    llm.engine.observers[:] = [lambda chosen: None] * watched
    requests = submit(llm, batch, 64, num_steps + num_profiled + 40, kind, 1000 * batch + seed)
    seen = decode(llm, requests, num_steps, num_profiled)
    llm.engine.observers.clear()
    record: Record = {
        "kind": "step", "batch": batch, "requests": kind, "watched": watched, "wall_ms": round(1e3 * seen.wall, 4),
        "host_ms": round(1e3 * seen.host, 4), "compiled_late": list(llm.engine.runner.compiled_late),
    }  # fmt: skip
    if seen.launches is not None:
        busy_ms = 1e-3 * busy_us(seen.launches) / num_profiled
        record |= {"busy_ms": round(busy_ms, 4), "wall_over_busy": round(1e3 * seen.wall / busy_ms, 3)}
    return record


def measure_first(llm: LLM) -> list[Record]:
    """Each kind for the first time, and once more after all of them; and the tenth of the first kind."""
    records = []

    def one(kind: str, which: str, seed: int) -> None:
        stamps, started = [], time.perf_counter()
        (request,) = submit(llm, 1, 40, 12, kind, seed)
        while not request.is_done:
            stamps += [time.perf_counter() - started for _ in llm.engine.step().requests]
        finish(llm, [request])
        gaps = [after - before for before, after in pairwise(stamps)]
        records.append({
            "kind": "first", "requests": kind, "which": which, "first_token_ms": round(1e3 * stamps[0], 3),
            "slowest_gap_ms": round(1e3 * max(gaps), 3), "all_ms": round(1e3 * stamps[-1], 3),
            "compiled_late": list(llm.engine.runner.compiled_late),
        })  # fmt: skip

    for kind in KINDS:
        one(kind, "first", 1)
    for index in range(2, 10):
        one("greedy", f"{index}", index)
    for kind in KINDS:
        one(kind, "again", 20)
    return records


def measure_requests(llm: LLM, count: int, prompt: int, output: int) -> Record:
    """All at once, their prompts new: nothing of them is cached. Busy is that of as many requests once more."""
    target = EngineTarget(llm.engine, "engine", llm.config.vocab_size)
    load = Load.of("fixed", prompt, output, requests=count, streams=count, temperature=1.0, top_p=0.9, seed=77)
    before = llm.engine.stats().num_steps
    report, _ = measure_load(target, load)
    num_steps = llm.engine.stats().num_steps - before
    launches = launches_of(lambda: target.run(replace(load, seed=78)), llm.cache.device)
    return {
        "kind": "load", "requests": count, "prompt": prompt, "output": output,
        "chunk": llm.cache.limits.max_chunk_tokens, "seconds": report.seconds,
        "output_tokens_per_second": report.tokens_per_second,
        "busy_seconds": None if launches is None else round(1e-6 * busy_us(launches), 4),
        "host_share": report.host_share, "steps": num_steps, "compiled_late": list(llm.engine.runner.compiled_late),
    }  # fmt: skip


def measure_memory(model: BenchModel, limits: EngineConfig, base: int) -> Record:
    """`base` is what was taken before the weights: the context."""
    weights = torch.cuda.memory_allocated()
    llm = LLM.from_params(model.config, model.params, engine=limits)
    ready = used_bytes()
    graphs = ready - base - torch.cuda.memory_reserved()
    submit(llm, limits.max_concurrent_requests, min(512, limits.max_context_tokens // 2), 8, "penalties", 3)
    while llm.engine.has_work:
        llm.engine.step()
    planned = plan(model.config, limits, experts=model.experts, with_draft=False).budget
    used = used_bytes()
    return {
        "kind": "memory", "requests": limits.max_concurrent_requests, "context": limits.max_context_tokens,
        "chunk": limits.max_chunk_tokens, "prefix_cache": limits.prefix_cache_bytes,
        "used": used, "planned": planned.total,
        "planned_over_used": round(planned.total / used, 4), "ready": ready, "context_bytes": base, "weights": weights,
        "cache": llm.cache.memory_bytes(), "outside_torch": graphs,
        "peak_allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved(),
        "plan": {name: getattr(planned, name) for name in ("weights", "cache", "workspace", "graphs", "context")},
    }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a step, at most")
    parser.add_argument("--steps", type=int, default=60)


def run(session: Session) -> None:
    base = 0
    if session.is_cuda:
        torch.zeros(1, device="cuda")
        base = used_bytes()
    model = session.four_layers()
    if any(session.wants(section) for section in SECTIONS[:-1]):
        run_engine(session, model)
    for requests, context, chunk in MEMORY if session.wants("memory") and session.is_cuda else ():
        limits = EngineConfig(max_context_tokens=context, max_concurrent_requests=requests, max_chunk_tokens=chunk)
        session.attempt(f"memory, {requests} requests", measure_memory, model, limits, base)


def run_engine(session: Session, model: BenchModel) -> None:
    options, prompt = session.options, 512 if session.is_cuda else 32
    most = max(options.batches)
    some = min(64, most)
    limits = EngineConfig(
        max_context_tokens=prompt + 64, max_concurrent_requests=most, max_chunk_tokens=options.chunk
    )  # fmt: skip
    llm = LLM.from_params(model.config, model.params, engine=limits)
    gc.collect()
    gc.freeze()  # as the server does
    print(f"[{session.elapsed:6.1f}] warm", flush=True)
    if session.wants("first"):
        session.attempt("first", measure_first, llm)
    steps = [(batch, kind, {}) for batch in options.batches for kind in ("greedy", "top-p 0.9")]
    steps += [(some, kind, {}) for kind in ("penalties", "log-probabilities", "rules")]
    watched = [(some, "top-p 0.9", {"watched": is_watched, "seed": 9}) for is_watched in (False, True)]
    for batch, kind, more in [*(steps * session.wants("steps")), *(watched * session.wants("observed"))]:
        session.attempt(
            f"step, {batch} x {kind}", measure_steps, llm, batch, kind, num_steps=options.steps, **more
        )  # fmt: skip
    if session.wants("load"):
        session.attempt("load", measure_requests, llm, most, prompt, 64)
    llm.engine.check_integrity()
    del llm
    gc.unfreeze()
    free_memory()
