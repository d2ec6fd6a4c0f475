"""The whole model on one GPU: four-layer Flash, Hugging Face's in the same run, all of Flash with offloaded experts.

    python -m benchmarks model --out benchmarks/results/nvidia-h200-model.jsonl [--section NAME ...]

| section | what | records (`kind`) |
|---|---|---|
| decode | Flash layers SWA, CSA, HCA, CSA with NVFP4 experts: a step, each layer, by batch, context | decode, layer |
| prefill | the same model, prompts in one call | prefill |
| serving | the same model through the engine: latency and throughput | serving |
| memory | bytes held against the plan | memory |
| reproducibility | one request alone, batched, chunked, beside NaN padding, preempted | reproducibility, preemption |
| huggingface | transformers' DeepseekV4ForCausalLM, bf16, eager, four layers: decode and prefill | huggingface |
| offload | 43 layers, experts that do not fit in host memory | stream, offload |

`dsv4 bench model` measures the first four of any model; here they have Flash's sizes, and stand beside the others.
`--preset tiny --device cpu` tries it without a GPU, with small sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import FLASH_COUNTS, SCHEDULE, Record, Session, free_memory, numbers, used_bytes, wait
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.run.bucket_sizes import decode_buckets
from dsv4.engine.run.runner import Runner
from dsv4.llm import LLM
from dsv4.request import SamplingParams
from dsv4.tools.bench import model as bench
from dsv4.tools.bench.context import BenchModel, build_offloaded, cut_config, make_context
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.targets import PRESETS

OF_FOUR = ("decode", "prefill", "serving", "memory", "reproducibility")
SECTIONS = (*OF_FOUR, "huggingface", "offload")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=numbers, default=[2048, 65536, 1048576])
    parser.add_argument("--prefill", type=numbers, default=[2048, 8192, 16384])
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64])


def run(session: Session) -> None:
    if any(session.wants(section) for section in OF_FOUR):
        run_four(session, session.four_layers())
        free_memory()
    if session.wants("huggingface"):
        session.attempt("huggingface", measure_huggingface, session)
    if session.wants("offload"):
        session.attempt("offload", measure_offload, session)


def run_four(session: Session, model: BenchModel) -> None:
    options, attempt = session.options, session.attempt
    grid = [(batch, context) for context in options.contexts for batch in options.batches]
    for batch, context in sorted(grid, key=lambda pair: pair[0] * pair[1]) if session.wants("decode") else ():
        attempt(f"decode, batch {batch}, context {context}", measure_steps, session, model, batch, context)
    for count in options.prefill if session.wants("prefill") else ():
        attempt(f"prefill, {count} tokens", bench.measure_prefill, model, count, 5)
    for count in options.concurrency if session.wants("serving") else ():
        attempt(f"serving, {count} requests", bench.measure_serving, model, count, 128, 32)
    if session.wants("memory"):
        attempt("memory", bench.measure_memory, model, max(options.batches), min(options.contexts))
    if session.wants("reproducibility"):
        attempt("reproducibility", measure_reproducibility, model, max(options.batches))
        attempt("preemption", measure_preemption, model)


def measure_steps(session: Session, model: BenchModel, batch: int, context: int) -> list[Record]:
    made, repeats = make_context(model, batch, context), session.options.repeats
    bandwidth = bench.read_bandwidth(session.origin["gpu"])
    return [bench.measure_decode(model, made, repeats), *bench.measure_layers(model, made, repeats, bandwidth)]


def measure_reproducibility(model: BenchModel, batch_size: int, num_steps: int = 6) -> dict[str, Any]:
    """Logits of one request, bit for bit: alone and in a batch, in graphs and directly, its prompt cut differently,
    beside padded rows whose embedding is NaN.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(1, model.config.vocab_size, (batch_size, 40), generator=generator).tolist()
    embed = model.params.embed.clone()
    embed[0] = float("nan")  # padded rows carry token 0
    poisoned = dataclasses.replace(model, params=dataclasses.replace(model.params, embed=embed))

    def run(model: BenchModel, count: int, chunks: list[int], use_graphs: bool) -> torch.Tensor:
        limits = EngineConfig(max_context_tokens=128, max_concurrent_requests=count, max_chunk_tokens=64)
        transformer = model.transformer()
        cache = KVCacheManager(
            model.config, transformer.schedule, limits, device=model.device, plain_dtype=None
        )  # fmt: skip
        runner = Runner(transformer, cache, buckets=decode_buckets(count + 3)[-1:], use_graphs=use_graphs)
        runner.warm_up()
        slots = [cache.admit(100) for _ in range(count)]
        start = 0
        for length in chunks:
            pieces = [prompt[start : start + length] for prompt in prompts[:count]]
            batch = cache.make_batch(slots, pieces)
            rows = torch.arange(count, device=model.device) * length + length - 1
            logits = runner.forward(batch, rows).logits
            start += length
        found = [logits[0].clone()]
        for _ in range(num_steps):
            tokens = logits.argmax(-1).clamp_min(1).tolist()
            batch = cache.make_batch(slots, [[token] for token in tokens])
            logits = runner.forward(batch, torch.arange(count, device=model.device)).logits
            found.append(logits[0].clone())
        return torch.stack(found).cpu()

    alone = run(model, 1, [40], False)
    others = {
        f"batch {batch_size}": run(model, batch_size, [40], False),
        "chunked": run(model, 1, [7, 1, 32], False),
    }
    if model.device.type == "cuda":
        others["graph, poisoned padding"] = run(poisoned, 1, [40], True)
        others[f"graph, batch {batch_size}, poisoned padding"] = run(poisoned, batch_size, [40], True)
    return {
        "kind": "reproducibility", "steps": num_steps, "is_finite": bool(alone.isfinite().all()),
        "same_bits": {name: bool(torch.equal(alone, other)) for name, other in others.items()},
    }  # fmt: skip


def measure_preemption(model: BenchModel, count: int = 8) -> dict[str, Any]:
    """Tokens and logprobs of requests served alone, and together with too few blocks for all of them."""
    generator = torch.Generator().manual_seed(6)
    lengths = [90 + 13 * index for index in range(count)]
    prompts = [torch.randint(1, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    params = [SamplingParams(max_tokens=48, seed=index, logprobs=3, ignore_eos=True) for index in range(count)]

    def serve(groups: list[list[int]], **limits: int) -> tuple[list[Any], int]:
        llm = LLM.from_params(model.config, model.params, engine=EngineConfig(max_context_tokens=256, **limits))
        done = [
            completion
            for group in groups
            for completion in llm.generate([prompts[i] for i in group], [params[i] for i in group])
        ]
        llm.engine.check_integrity()
        return done, llm.engine.stats().num_preemptions

    alone, _ = serve([[index] for index in range(count)], max_concurrent_requests=1)
    together, num_preemptions = serve([list(range(count))], max_concurrent_requests=count, num_blocks=count + 2)
    return {
        "kind": "preemption", "requests": count, "preemptions": num_preemptions,
        "same_tokens_and_logprobs": together == alone and num_preemptions > 0,
    }  # fmt: skip


# ---- Hugging Face ----


@torch.no_grad()
def measure_huggingface(session: Session) -> Iterator[dict[str, Any]]:
    """transformers' own model, random weights of its own, the same shapes."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    from dsv4.loader.config_write import config_to_dict

    device = session.device
    config = cut_config(PRESETS[session.options.preset](), schedule=SCHEDULE, hash_layers=1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_to_dict(config, "bf16")))
        their_config = AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if session.is_cuda else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(
            their_config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # left at zero by transformers
            buffer.copy_(torch.rand(len(buffer), config.n_routed_experts, device=device).topk(buffer.shape[1]).indices)
    common = {"kind": "huggingface", "transformers": transformers.__version__, "layers": len(SCHEDULE)}
    context = 2048 if session.is_cuda else 64
    for batch in (1, 16):
        ids = torch.randint(0, config.vocab_size, (batch, context), device=device)
        cache = DynamicCache(config=model.config)
        began = time.perf_counter()
        for piece in ids.split(max(1, 2048 // batch), dim=1):
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        wait(device)
        if batch == 1:
            again = DynamicCache(config=model.config)
            began = time.perf_counter()
            model(ids, past_key_values=again, use_cache=True, logits_to_keep=1)
            wait(device)
            seconds = time.perf_counter() - began
            yield common | {
                "what": "prefill",
                "tokens": context,
                "ms": 1e3 * seconds,
                "tokens_per_second": context / seconds,
            }
        times = []
        for _ in range(8):
            began = time.perf_counter()
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            wait(device)
            times.append(time.perf_counter() - began)
        step = statistics.median(times[3:])
        yield common | {
            "what": "decode", "batch": batch, "context": context, "ms": 1e3 * step,
            "ms_per_layer": 1e3 * step / len(SCHEDULE),
        }  # fmt: skip


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


# ---- what is printed ----


def line(record: Record) -> str:
    kind, late = record["kind"], ",".join(record.get("compiled_late", ()))[:80]
    if kind == "decode":
        return (
            f"decode   batch {record['batch']:4} ctx {record['context']:8}: {record['ms']:9.3f} ms, "
            f"{record['ms_per_layer']:7.3f} a layer  [{record['mode'][:60]}] {late and 'LATE ' + late}"
        )
    if kind == "layer":
        return (
            f"  {record['attention']}    batch {record['batch']:4} ctx {record['context']:8}: "
            f"{1e3 * record['ms']:9.1f} us x {record.get('times_floor', 0):6.2f} floor, "
            f"{record['launches']} launches [{record['mode'][:40]}]"
        )
    return json.dumps(record)


def conclusions(records: list[Record]) -> Iterator[str]:
    return whole_flash(records)


def whole_flash(records: list[dict[str, Any]]) -> Iterator[str]:
    """43 layers from the measured ones, the rest of the step (embedding, head) as in the four-layer step."""
    theirs = next(
        (r for r in records if r["kind"] == "huggingface" and r["what"] == "decode" and r["batch"] == 1), None
    )
    for step in records:
        if step["kind"] != "decode":
            continue
        here = {
            r["attention"]: r["ms"]
            for r in records
            if r["kind"] == "layer" and (r["batch"], r["context"]) == (step["batch"], step["context"])
        }
        if set(here) == set(FLASH_COUNTS):
            rest = max(0.0, step["ms"] - sum(here[kind] for kind in SCHEDULE))
            total = rest + sum(count * here[kind] for kind, count in FLASH_COUNTS.items())
            ratio = f", {theirs['ms_per_layer'] / step['ms_per_layer']:.1f}x Hugging Face" if theirs else ""
            yield (
                f"sum of 43 layers, batch {step['batch']}, ctx {step['context']}: {total:.2f} ms "
                f"(head {rest:.3f}){ratio if step['batch'] == 1 else ''}"
            )
