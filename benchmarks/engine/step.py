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
from itertools import pairwise
from typing import Any

import torch

from benchmarks.runner import Record, Session, free_memory, numbers, random_prompts, used_bytes
from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.request import SamplingParams
from dsv4.tools.bench.context import BenchModel
from dsv4.tools.bench.profile import busy_us, launches_of
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
    return submit_all(llm, random_prompts(llm.config.vocab_size, count, length, seed), output, kind)


def submit_all(llm: LLM, prompts: list[list[int]], output: int, kind: str) -> list[Any]:
    settings = KINDS[kind] | {"max_tokens": output, "min_tokens": output if kind == "rules" else 0}
    sequences = [
        llm.engine.prepare(prompt, SamplingParams(ignore_eos=True, seed=index, **settings))
        for index, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        llm.engine.submit(sequence)
    return sequences


def finish(llm: LLM, sequences: list[Any]) -> None:
    for sequence in sequences:
        llm.engine.abort(sequence)
    while llm.engine.has_work:
        llm.engine.step()


def measure_steps(llm: LLM, batch: int, kind: str, *, num_steps: int, watched: bool = False, seed: int = 0) -> Record:
    """Steady decode of `batch` requests."""
    engine, num_profiled = llm.engine, 10
    engine.observers[:] = [lambda chosen: None] * watched
    sequences = submit(llm, batch, 64, num_steps + num_profiled + 40, kind, 1000 * batch + seed)
    while not all(len(sequence.token_ids) > sequence.prompt_len + 4 for sequence in sequences):
        engine.step()
    waited, started = engine.stats().seconds_waiting, time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall = (time.perf_counter() - started) / num_steps
    host = wall - (engine.stats().seconds_waiting - waited) / num_steps
    launches = launches_of(lambda: [engine.step() for _ in range(num_profiled)], llm.cache.device)
    finish(llm, sequences)
    engine.observers.clear()
    record: Record = {
        "kind": "step", "batch": batch, "requests": kind, "watched": watched, "wall_ms": round(1e3 * wall, 4),
        "host_ms": round(1e3 * host, 4), "compiled_late": list(engine.runner.compiled_late),
    }  # fmt: skip
    if launches is not None:
        busy_ms = 1e-3 * busy_us(launches) / num_profiled
        record |= {"busy_ms": round(busy_ms, 4), "wall_over_busy": round(1e3 * wall / busy_ms, 3)}
    return record


def measure_first(llm: LLM) -> list[Record]:
    """Each kind for the first time, and once more after all of them; and the tenth of the first kind."""
    records = []

    def one(kind: str, which: str, seed: int) -> None:
        stamps, started = [], time.perf_counter()
        (sequence,) = submit(llm, 1, 40, 12, kind, seed)
        while not sequence.is_done:
            for _ in llm.engine.step().requests:
                stamps.append(time.perf_counter() - started)
        finish(llm, [sequence])
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


def measure_load(llm: LLM, count: int, prompt: int, output: int) -> Record:
    """All at once. The prompts are new: nothing of them is cached. Busy is that of as many requests once more."""

    def run(prompts: list[list[int]]) -> None:
        sequences = submit_all(llm, prompts, output, "top-p 0.9")
        while not all(sequence.is_done for sequence in sequences):
            llm.engine.step()
        finish(llm, sequences)

    first, second = (random_prompts(llm.config.vocab_size, count, prompt, seed) for seed in (77, 78))
    before, started = llm.engine.stats(), time.perf_counter()
    run(first)
    seconds, after = time.perf_counter() - started, llm.engine.stats()
    launches = launches_of(lambda: run(second), llm.cache.device)
    return {
        "kind": "load", "requests": count, "prompt": prompt, "output": output,
        "chunk": llm.cache.limits.max_chunk_tokens, "seconds": round(seconds, 4),
        "output_tokens_per_second": round(count * output / seconds, 1),
        "busy_seconds": None if launches is None else round(1e-6 * busy_us(launches), 4),
        "host_share": round(1 - (after.seconds_waiting - before.seconds_waiting) / seconds, 3),
        "steps": after.num_steps - before.num_steps, "compiled_late": list(llm.engine.runner.compiled_late),
    }  # fmt: skip


def measure_memory(model: BenchModel, limits: EngineConfig, base: int) -> Record:
    """`base` is what was taken before the weights: the context."""
    weights = torch.cuda.memory_allocated()
    llm = LLM.from_params(model.config, model.params, engine=limits)
    ready = used_bytes()
    graphs = ready - base - torch.cuda.memory_reserved()
    sequences = submit(llm, limits.max_concurrent_requests, min(512, limits.max_context_tokens // 2), 8, "penalties", 3)
    while not all(sequence.is_done for sequence in sequences):
        llm.engine.step()
    finish(llm, sequences)
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
        session.attempt("load", measure_load, llm, most, prompt, 64)
    llm.engine.check_integrity()
    del llm
    gc.unfreeze()
    free_memory()
