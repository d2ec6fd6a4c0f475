"""A decode step as the GPU's profiler sees it: which kernel ran when, for how long, on which stream.

    python -m benchmarks timeline --out benchmarks/results/nvidia-h200-timeline.json
    python -m benchmarks plots        # then draws docs/images/decode-timeline.svg from it

Four Flash layers with NVFP4 experts and synthetic weights; greedy requests with 2K of context, through the engine in
CUDA graphs. A step begins where its token ids are looked up and ends where the next one begins. Of the profiled ones
the median by length is kept. The time of a step without the profiler stands beside it (`wall_us`): where the two differ
much, the profiler is to blame.

`--preset tiny --device cpu` tries it without a GPU; there are no kernels in it then. The file of --out is replaced.
"""

import argparse
import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.engine.step import decode, submit
from benchmarks.runner import SCHEDULE, Record, Session, numbers
from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.tools.bench.profile import Launch, busy_us

FIRST_KERNEL = "_resolve_kernel"  # of a step
NUM_STEPS, NUM_PROFILED = 40, 13


# ---- from profile to record ----


class Step(NamedTuple):
    """What ran from one look-up to the next; `length` is the time between them."""

    length: float
    launches: list[Launch]


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
        "busy_us": round(busy_us(step.launches), 2),
        "kernels": [
            [one.name, round(one.start, 2), round(one.duration, 2), number[one.stream]] for one in step.launches
        ],
    }  # fmt: skip


def as_text(record: Record) -> str:
    """JSON with a line for each kernel."""
    return re.sub(r"\], \[", "],\n[", json.dumps(record)) + "\n"


# ---- on the device ----


def measure(llm: LLM, batch: int, context: int) -> Record:
    """Steady decode of `batch` requests with about `context` tokens each."""
    output = 2 * batch + NUM_STEPS + 2 * NUM_PROFILED + 40  # the first to decode goes on until all do
    requests = submit(llm, batch, context, output, "greedy", 100 + batch)
    seen = decode(llm, requests, NUM_STEPS, NUM_PROFILED, num_profiles=2)
    known = {"batch": batch, "running": seen.num_running, "context": context, "wall_us": round(1e6 * seen.wall, 1)}
    return {"kind": "timeline_step"} | step_record(seen.launches or [], **known)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=numbers, default=[1, 64])


def run(session: Session) -> None:
    context = 2048 if session.is_cuda else 32
    model = session.four_layers()
    limits = EngineConfig(
        max_context_tokens=context + 256, max_concurrent_requests=max(session.options.batches), prefix_cache_bytes=0
    )
    llm = LLM.from_params(model.config, model.params, engine=limits)
    out, session.out = session.out, None  # one record with a line for each kernel, not one line
    for batch in session.options.batches:
        session.attempt(f"batch {batch}", measure, llm, batch, context)
    llm.engine.check_integrity()
    steps = [{name: value for name, value in one.items() if name != "kind"} for one in session.records]
    record = {"kind": "timeline", "model": model.name, "schedule": SCHEDULE, "steps": steps} | session.origin
    if out is not None:
        out.write_text(as_text(record), encoding="utf-8")
