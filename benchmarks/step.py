"""What a user waits for: steps of four Flash layers through the engine, against the GPU's busy time of the same steps.

    python benchmarks/step_gpu.py --out benchmarks/results/nvidia-h200-step.jsonl [--section NAME ...]

| section | what | records (`kind`) |
|---|---|---|
| first | requests of each kind right after warm-up, each once more: seconds to the last token | first |
| steps | decode steps by batch and kind of request: wall, GPU busy, host's share | step |
| observed | 64 streams with and without somebody watching the experts | step |
| load | 256 requests of 512 + 64 tokens | load |
| memory | bytes held against the plan's, three configurations | memory |

Wall is the time of many steps over their number; busy is the union of everything the GPU ran in other steps of the same
requests, by its profiler. `--preset tiny --device cpu` tries the script without a GPU. A table is printed last.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.request import SamplingParams
from dsv4.testing import bench as records_of
from dsv4.tools.bench import model as bench
from dsv4.tools.bench.context import BenchModel, build_model
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.targets import PRESETS

SCHEDULE = ("swa", "csa", "hca", "csa")
SECTIONS = ("first", "steps", "observed", "load", "memory")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p 0.9": {"top_p": 0.9},
    "penalties": {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "log-probabilities": {"top_p": 0.9, "logprobs": 20},
    "100 log-probabilities": {"top_p": 0.9, "logprobs": 100},
    "bias": {"logit_bias": {7: 1.0}},
    "rules": {},  # min_tokens of all of them: a mask at every step
}
Record = dict[str, Any]


def make_prompts(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, llm.config.vocab_size, (count, length), generator=generator).tolist()


def submit(llm: LLM, count: int, length: int, output: int, kind: str, seed: int) -> list[Any]:
    return submit_all(llm, make_prompts(llm, count, length, seed), output, kind)


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
    engine.on_experts = (lambda chosen: None) if watched else None
    sequences = submit(llm, batch, 64, num_steps + num_profiled + 40, kind, 1000 * batch + seed)
    while not all(len(sequence.token_ids) > sequence.prompt_len + 4 for sequence in sequences):
        engine.step()
    waited, started = engine.stats().seconds_waiting, time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    wall = (time.perf_counter() - started) / num_steps
    host = wall - (engine.stats().seconds_waiting - waited) / num_steps
    busy = busy_seconds(lambda: [engine.step() for _ in range(num_profiled)], llm.cache.device)
    finish(llm, sequences)
    engine.on_experts = None
    record: Record = {
        "kind": "step", "batch": batch, "requests": kind, "watched": watched, "wall_ms": round(1e3 * wall, 4),
        "host_ms": round(1e3 * host, 4), "compiled_late": list(engine.runner.compiled_late),
    }  # fmt: skip
    if busy is not None:
        busy_ms = 1e3 * busy / num_profiled
        record |= {"busy_ms": round(busy_ms, 4), "wall_over_busy": round(1e3 * wall / busy_ms, 3)}
    return record


def busy_seconds(call: Callable[[], Any], device: torch.device) -> float | None:
    """The union of the intervals in which the GPU ran something; None where that cannot be seen."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1e-6 * total


def measure_first(llm: LLM) -> list[Record]:
    """Each kind for the first time, and once more after all of them; and the tenth of the first kind."""
    records = []

    def one(kind: str, which: str, seed: int) -> None:
        stamps, started = [], time.perf_counter()
        (sequence,) = submit(llm, 1, 40, 12, kind, seed)
        while not sequence.is_done:
            for _ in llm.engine.step():
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

    first, second = make_prompts(llm, count, prompt, 77), make_prompts(llm, count, prompt, 78)
    before, started = llm.engine.stats(), time.perf_counter()
    run(first)
    seconds, after = time.perf_counter() - started, llm.engine.stats()
    busy = busy_seconds(lambda: run(second), llm.cache.device)
    return {
        "kind": "load", "requests": count, "prompt": prompt, "output": output,
        "chunk": llm.cache.limits.max_chunk_tokens, "seconds": round(seconds, 4),
        "output_tokens_per_second": round(count * output / seconds, 1),
        "busy_seconds": None if busy is None else round(busy, 4),
        "host_share": round(1 - (after.seconds_waiting - before.seconds_waiting) / seconds, 3),
        "steps": after.num_steps - before.num_steps, "compiled_late": list(llm.engine.runner.compiled_late),
    }  # fmt: skip


def measure_memory(model: BenchModel, limits: EngineConfig, base: int) -> Record:
    """`base` is what was taken before the weights: the context."""
    weights = torch.cuda.memory_allocated()
    llm = LLM.from_params(model.config, model.params, engine=limits)
    ready = _used()
    graphs = ready - base - torch.cuda.memory_reserved()
    sequences = submit(llm, limits.max_concurrent_requests, min(512, limits.max_context_tokens // 2), 8, "penalties", 3)
    while not all(sequence.is_done for sequence in sequences):
        llm.engine.step()
    finish(llm, sequences)
    planned = plan(model.config, limits, experts=model.experts, with_draft=False).budget
    used = _used()
    return {
        "kind": "memory", "requests": limits.max_concurrent_requests, "context": limits.max_context_tokens,
        "chunk": limits.max_chunk_tokens, "prefix_cache": limits.prefix_cache_bytes,
        "used": used, "planned": planned.total,
        "planned_over_used": round(planned.total / used, 4), "ready": ready, "context_bytes": base, "weights": weights,
        "cache": llm.cache.memory_bytes(), "outside_torch": graphs,
        "peak_allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved(),
        "plan": {name: getattr(planned, name) for name in ("weights", "cache", "workspace", "graphs", "context")},
    }  # fmt: skip


def _used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def summary(records: list[Record]) -> str:
    lines = []
    for r in records:
        late = f"  LATE {','.join(r['compiled_late'])[:80]}" if r.get("compiled_late") else ""
        if r["kind"] == "step":
            lines.append(
                f"step {r['requests']:22} batch {r['batch']:4}{' watched' if r['watched'] else '        '}:"
                f" wall {r['wall_ms']:8.3f} busy {r.get('busy_ms', 0):8.3f} ms: {r.get('wall_over_busy', 0):.3f};"
                f" host {r['host_ms']:.3f}{late}"
            )
        elif r["kind"] == "first":
            lines.append(
                f"first {r['requests']:22} {r['which']:6}: first token {r['first_token_ms']:9.2f} ms, slowest gap"
                f" {r['slowest_gap_ms']:8.2f}, all {r['all_ms']:9.2f}{late}"
            )
        else:
            lines.append(f"{r['kind']}: {json.dumps({key: value for key, value in r.items() if key != 'kind'})[:900]}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("step.jsonl"))
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this; may be repeated")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of a step, at most")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="flash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    options = parser.parse_args()
    wanted, records = options.section or list(SECTIONS), []
    is_cuda = options.device != "cpu"
    origin = records_of.provenance(options.commit) if is_cuda else bench.describe_machine(torch.device("cpu"))

    def add(found: Record | list[Record]) -> None:
        for record in found if isinstance(found, list) else [found]:
            records.append(record)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record | origin) + "\n")
            print(summary([record]), flush=True)

    base = 0
    if is_cuda:
        torch.zeros(1, device="cuda")
        base = _used()
    began = time.perf_counter()
    model = build_model(options.preset, schedule=SCHEDULE, hash_layers=1, experts="nvfp4", device=options.device)
    free_memory()
    batches = [int(batch) for batch in options.batches.split(",")]
    most, prompt = max(batches), 512 if is_cuda else 32
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    if set(wanted) - {"memory"}:
        limits = EngineConfig(
            max_context_tokens=prompt + 64, max_concurrent_requests=most, max_chunk_tokens=options.chunk
        )
        began = time.perf_counter()
        llm = LLM.from_params(model.config, model.params, engine=limits)
        gc.collect()
        gc.freeze()  # as the server does
        print(f"warm-up {time.perf_counter() - began:.1f} s", flush=True)
        if "first" in wanted:
            add(measure_first(llm))
        for batch in batches if "steps" in wanted else ():
            for kind in ("greedy", "top-p 0.9"):
                add(measure_steps(llm, batch, kind, num_steps=options.steps))
        for kind in ("penalties", "log-probabilities", "rules") if "steps" in wanted else ():
            add(measure_steps(llm, min(64, most), kind, num_steps=options.steps))
        for watched in (False, True) if "observed" in wanted else ():
            add(measure_steps(llm, min(64, most), "top-p 0.9", num_steps=options.steps, watched=watched, seed=9))
        if "load" in wanted:
            add(measure_load(llm, most, prompt, 64))
        llm.engine.check_integrity()
        del llm
        gc.unfreeze()
        free_memory()
    for requests, context, chunk in (
        ((1, 65536, 2048), (64, 8192, 8192), (256, 2048, 2048)) if "memory" in wanted else ()
    ):
        limits = EngineConfig(max_context_tokens=context, max_concurrent_requests=requests, max_chunk_tokens=chunk)
        if is_cuda:
            add(measure_memory(model, limits, base))
        free_memory()
    print("\n" + summary(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
