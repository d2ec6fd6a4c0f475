"""The whole model on one GPU: four-layer Flash, as many layers as fit, and all of Flash with offloaded experts.

    python -m benchmarks model --out benchmarks/results/nvidia-h200-model.jsonl [--section NAME ...]
    python -m benchmarks model --experts mxfp4,nvfp4 --section prefill --prefill 2048,8192,32768,131072
    python -m benchmarks model --layers 34 --contexts 2048 --section decode --section serving --concurrency 1,16,64,256

| section | what | records (`kind`) |
|---|---|---|
| decode | layers SWA, CSA, HCA, CSA, or the first --layers: a step, its layers, by batch, context | decode, layer |
| prefill | the same model, prompts in calls of at most --chunk tokens | prefill |
| serving | the same model through the engine: latency and throughput | serving |
| memory | bytes held against the plan | memory |
| offload | 43 layers, experts that do not fit in host memory | stream, offload |

`dsv4 bench model` measures the first four of any model; here they have Flash's sizes, and stand beside the others.
`--preset tiny --device cpu` tries it without a GPU, with small sizes.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.runner import FLASH_COUNTS, SCHEDULE, Record, Session, free_memory, numbers, used_bytes
from dsv4.config import EngineConfig
from dsv4.config.layers import build_schedule
from dsv4.tools.bench import model as bench
from dsv4.tools.bench.context import BenchModel, build_offloaded, cut_config
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.targets import PRESETS

OF_FOUR = ("decode", "prefill", "serving", "memory")
SECTIONS = (*OF_FOUR, "offload")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experts", type=lambda text: text.split(","), default=["nvfp4"], help="nvfp4, mxfp4, or both")
    parser.add_argument("--layers", type=int, help="the first of the preset, in place of the four; an H200 holds 34")
    parser.add_argument("--batches", type=numbers, default=[1, 6, 16, 64, 256])
    parser.add_argument("--contexts", type=numbers, default=[2048, 65536, 1048576])
    parser.add_argument("--prefill", type=numbers, default=[2048, 8192, 16384])
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a call of prefill, at most")
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64])


def run(session: Session) -> None:
    options = session.options
    wanted = [section for section in OF_FOUR if session.wants(section)]
    settings = bench.Settings(
        tuple(options.batches), tuple(options.contexts), tuple(options.prefill), tuple(options.concurrency),
        prompt_tokens=128, output_tokens=32, repeats=options.repeats, chunk=options.chunk,
        sections=(*wanted, *(["layers"] if "decode" in wanted else [])),
    )  # fmt: skip
    for experts in options.experts if wanted else ():
        model = session.four_layers(experts, options.layers)
        kinds = Counter(layer.attention.value for layer in build_schedule(model.config, with_mtp=False))
        session.facts = {"experts": experts, "layers_of": dict(kinds)}
        for what, measure in bench.jobs(model, settings):
            session.attempt(what, measure)
        del model
        free_memory()
    session.facts = {}
    if session.wants("offload"):
        session.attempt("offload", measure_offload, session)


# ---- all of Flash, experts offloaded ----


def measure_offload(session: Session) -> list[dict[str, Any]]:
    options = session.options
    context = 8192 if session.is_cuda else 256
    began = time.monotonic()
    if session.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    config = cut_config(PRESETS[options.preset]())
    engine = EngineConfig(max_context_tokens=context, max_concurrent_requests=1, max_chunk_tokens=2048)
    gib = str(torch.cuda.get_device_properties(0).total_memory / 2**30) if session.is_cuda else "h200"
    planned = plan(config, engine, experts="nvfp4", gpu=gib, offload_experts=True, with_draft=False)
    model = build_offloaded(options.preset, experts="nvfp4", device=options.device, context=context)
    built = time.monotonic() - began
    speeds = host_speed(model) if session.is_cuda else None
    stream = bench.measure_stream(model, context, 48 if session.is_cuda else 4)
    assert planned.forecast is not None
    record: dict[str, Any] = {
        "kind": "offload", "layers": config.num_hidden_layers, "seconds_to_build": round(built, 1),
        "host_bytes_per_second": speeds, "planned_tokens_per_second": planned.forecast.tokens_per_second,
        "planned_bytes_per_token": planned.forecast.bytes_per_token,
        "planned_device_bytes": planned.budget.total
        + planned.forecast.num_slots * planned.weights.routed_expert_bytes // config.n_routed_experts,
    }  # fmt: skip
    if speeds is not None:
        again = plan(
            config, engine, experts="nvfp4", gpu=gib, offload_experts=True, with_draft=False, host_speed=speeds
        )
        assert again.forecast is not None
        record["planned_tokens_per_second_at_measured_speed"] = again.forecast.tokens_per_second
        record |= {"device_bytes_used": used_bytes(), "peak_allocated": torch.cuda.max_memory_allocated()}
    prefill = bench.measure_prefill(model, 2048 if session.is_cuda else 32, 2)
    return [stream, record, prefill | {"kind": "offload_prefill"}]


def host_speed(model: BenchModel) -> float:
    """Bytes a second from this pool's host memory to the device, an expert's largest matrix at a time."""
    assert model.pool is not None
    device_part, host_part = max(model.pool.layers[0]._parts, key=lambda parts: parts[1].numel())
    rows = min(len(host_part), model.pool.placement.num_cached)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    scratch = torch.empty_like(device_part[0])
    start.record()
    for row in range(rows):
        scratch.copy_(host_part[row], non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return rows * scratch.numel() * scratch.element_size() / (1e-3 * start.elapsed_time(end))


def conclusions(records: list[Record]) -> Iterator[str]:
    """43 layers from the measured ones, the rest of the step (embedding, head) as in the measured step; and where the
    measured layers are the first of a model, a step beside their sum."""
    for step in records:
        if step["kind"] != "decode":
            continue
        here = {
            r["attention"]: r["ms"]
            for r in records
            if r["kind"] == "layer" and all(r[name] == step[name] for name in ("batch", "context", "experts"))
        }
        if step["layers"] != len(SCHEDULE):
            alone = sum(count * here[kind] for kind, count in step["layers_of"].items())
            yield (
                f"{step['layers']} layers, batch {step['batch']}, ctx {step['context']}: a step {step['ms']:.2f} ms, "
                f"its layers alone {alone:.2f} ms"
            )
            continue
        if set(here) == set(FLASH_COUNTS):
            rest = max(0.0, step["ms"] - sum(here[kind] for kind in SCHEDULE))
            total = rest + sum(count * here[kind] for kind, count in FLASH_COUNTS.items())
            yield f"sum of 43 layers, batch {step['batch']}, ctx {step['context']}: {total:.2f} ms (head {rest:.3f})"
