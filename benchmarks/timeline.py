"""A decode step as the GPU's profiler sees it: which kernel ran when, for how long, on which stream.

    python benchmarks/timeline_gpu.py --out benchmarks/results/nvidia-h200-timeline.json
    python benchmarks/plots.py       # then draws docs/images/decode-timeline.svg from it

Four Flash layers with NVFP4 experts and synthetic weights; greedy requests with 2K of context, through the engine in
CUDA graphs. A step begins where its token ids are looked up and ends where the next one begins. Of the profiled ones
the median by length is kept. The time of a step without the profiler stands beside it (`wall_us`): where the two differ
much, the profiler is to blame.

`--preset tiny --device cpu` tries the script without a GPU; there is nothing to record there, and no kernels in it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from benchmarks.step_gpu import SCHEDULE, finish, submit
from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.testing import bench as records_of
from dsv4.tools.bench import model as bench
from dsv4.tools.bench.context import build_model
from dsv4.tools.plan.targets import PRESETS

FIRST_KERNEL = "_resolve_kernel"  # of a step
NUM_STEPS, NUM_PROFILED = 40, 13
Record = dict[str, Any]


class Launch(NamedTuple):
    """One kernel or copy: microseconds, from the step's start where it is part of one."""

    name: str
    start: float
    duration: float
    stream: int

    @property
    def end(self) -> float:
        return self.start + self.duration


# ---- from profile to record ----


def plain_name(name: str) -> str:
    """The function's own name: no return type, namespaces, template or call arguments."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = shorter
    return name.split()[-1].split("::")[-1]


class Step(NamedTuple):
    """What ran from one look-up to the next; `length` is the time between them."""

    length: float
    launches: list[Launch]

    @property
    def busy(self) -> float:
        """The union of all intervals, those of copies too."""
        total, reached = 0.0, 0.0
        for launch in self.launches:
            total += max(0.0, launch.end - max(launch.start, reached))
            reached = max(reached, launch.end)
        return total


def cut_steps(launches: list[Launch]) -> list[Step]:
    """Whole steps, with launches in the order of their start, which is 0 for the first."""
    launches = sorted(launches, key=lambda launch: launch.start)
    starts = [launch.start for launch in launches if launch.name == FIRST_KERNEL]
    return [
        Step(after - begin, [one._replace(start=one.start - begin) for one in launches if begin <= one.start < after])
        for begin, after in pairwise(starts)
    ]


def step_record(launches: list[Launch], **known: Any) -> Record:
    """The median step; its streams are numbered by the time they were busy, longest first."""
    steps = sorted(cut_steps(launches), key=lambda step: step.length)
    step = steps[len(steps) // 2] if steps else Step(0.0, [])
    spent: Counter[int] = Counter()
    for launch in step.launches:
        spent[launch.stream] += round(1000 * launch.duration)
    number = {stream: place for place, (stream, _) in enumerate(spent.most_common())}
    return known | {
        "length_us": round(step.length, 2),
        "lengths_us": [round(one.length, 2) for one in steps],
        "busy_us": round(step.busy, 2),
        "kernels": [
            [one.name, round(one.start, 2), round(one.duration, 2), number[one.stream]] for one in step.launches
        ],
    }  # fmt: skip


def as_text(record: Record) -> str:
    """JSON with a line for each kernel."""
    return re.sub(r"\], \[", "],\n[", json.dumps(record)) + "\n"


# ---- on the device ----


def profile(llm: LLM, num_steps: int) -> list[Launch]:
    """Everything the GPU ran in so many steps; nothing on a CPU."""
    if llm.cache.device.type != "cuda":
        for _ in range(num_steps):
            llm.engine.step()
        return []
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            llm.engine.step()
        torch.cuda.synchronize()
    return [
        Launch(plain_name(event.name), event.time_range.start, event.time_range.elapsed_us(), event.device_resource_id)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and event.time_range.elapsed_us() > 0
    ]


def measure(llm: LLM, batch: int, context: int) -> Record:
    """Steady decode of `batch` requests with about `context` tokens each."""
    output = 2 * batch + NUM_STEPS + 2 * NUM_PROFILED + 40  # the first to decode goes on until all do
    requests = submit(llm, batch, context, output, "greedy", 100 + batch)
    while not all(len(request.token_ids) > request.prompt_len + 4 for request in requests):
        llm.engine.step()
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        llm.engine.step()
    wall_us = 1e6 * (time.perf_counter() - began) / NUM_STEPS
    profile(llm, NUM_PROFILED)  # the first profile of a process starts slowly
    launches = profile(llm, NUM_PROFILED)
    running = sum(not request.is_done for request in requests)
    finish(llm, requests)
    return step_record(launches, batch=batch, running=running, context=context, wall_us=round(wall_us, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("timeline.json"))
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="flash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    options = parser.parse_args()
    is_cuda = options.device != "cpu"
    origin = records_of.provenance(options.commit) if is_cuda else bench.describe_machine(torch.device("cpu"))
    batches = [int(batch) for batch in options.batches.split(",")]
    context = 2048 if is_cuda else 32
    began = time.perf_counter()
    model = build_model(options.preset, schedule=SCHEDULE, hash_layers=1, experts="nvfp4", device=options.device)
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    limits = EngineConfig(
        max_context_tokens=context + 256, max_concurrent_requests=max(batches), prefix_cache_bytes=0
    )  # fmt: skip
    llm = LLM.from_params(model.config, model.params, engine=limits)
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    steps = [measure(llm, batch, context) for batch in batches]
    llm.engine.check_integrity()
    record = {"kind": "timeline", "model": model.name, "schedule": SCHEDULE, "steps": steps} | origin
    options.out.write_text(as_text(record), encoding="utf-8")
    for step in steps:
        streams = Counter(kernel[3] for kernel in step["kernels"])
        print(
            f"batch {step['batch']} ({step['running']} running): {step['length_us']:.1f} us (of {step['lengths_us']}), "
            f"busy {step['busy_us']:.1f}, {len(step['kernels'])} launches by stream {dict(streams)}; "
            f"{step['wall_us']:.1f} us without the profiler"
        )
    print(f"done after {time.perf_counter() - began:.1f} s, {options.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
