"""The whole model on one GPU: four-layer Flash, Hugging Face's in the same run, all of Flash with offloaded experts.

    python benchmarks/model_gpu.py --out benchmarks/results/nvidia-h200-model.jsonl [--section NAME ...] [--seconds 280]

| section | what | records (`kind`) |
|---|---|---|
| decode | Flash layers SWA, CSA, HCA, CSA with NVFP4 experts: a step, each layer, by batch, context | decode, layer |
| prefill | the same model, prompts in one call | prefill |
| serving | the same model through the engine: latency and throughput | serving |
| memory | bytes held against the plan | memory |
| huggingface | transformers' DeepseekV4ForCausalLM, bf16, eager, four layers: decode and prefill | huggingface |
| offload | 43 layers, experts that do not fit in host memory | stream, offload |
| reproducibility | one request alone, batched, chunked, beside NaN padding, preempted | reproducibility, preemption |

Each section runs by itself: one that fails leaves an `error` record with its last lines, and the others go on. Nothing
is begun after `--seconds`. Records are appended one by one. A compact table is printed last.
`--preset tiny --device cpu` runs everything but the comparison with small sizes, to try the script without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from dsv4.config import EngineConfig
from dsv4.engine.run.bucket_sizes import decode_buckets
from dsv4.engine.run.runner import Runner
from dsv4.llm import LLM
from dsv4.request import SamplingParams
from dsv4.testing import bench as records_of
from dsv4.tools.bench import model as bench
from dsv4.tools.bench.context import BenchModel, build_model, build_offloaded, cut_config, make_context
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.targets import PRESETS

SCHEDULE = ("swa", "csa", "hca", "csa")
FLASH_COUNTS = {"swa": 2, "csa": 21, "hca": 20}  # layers of each kind in all of Flash
SECTIONS = ("decode", "prefill", "serving", "memory", "reproducibility", "huggingface", "offload")


@dataclass
class Session:
    """The options, the clock, and what was found."""

    options: argparse.Namespace
    origin: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    records: list[dict[str, Any]] = field(default_factory=list)

    def has_time(self) -> bool:
        return time.monotonic() - self.started < self.options.seconds

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self.options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | self.origin) + "\n")

    def attempt(self, what: str, measure: Callable[[], Any]) -> None:
        """Run one measurement; whatever goes wrong becomes a record."""
        if not self.has_time():
            self.add({"kind": "skipped", "what": what})
            return
        begun = time.monotonic()
        try:
            found = measure()
            for record in found if isinstance(found, list) else [found]:
                self.add(record)
            print(f"[{time.monotonic() - self.started:6.1f}] {what}: {time.monotonic() - begun:.1f} s", flush=True)
        except Exception as error:  # the next measurement may well work
            lines = traceback.format_exc().strip().splitlines()[-12:]
            self.add({"kind": "error", "what": what, "error": f"{type(error).__name__}: {error}"[:500], "lines": lines})
            print(f"[{time.monotonic() - self.started:6.1f}] {what}: FAILED {error}"[:400], flush=True)
        free_memory()

    @property
    def is_cuda(self) -> bool:
        return self.options.device != "cpu"


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# ---- sections of the four-layer model ----


def run_decode(session: Session, model: BenchModel) -> None:
    bandwidth = bench.read_bandwidth(session.origin["gpu"])

    def measure(batch: int, context: int) -> list[dict[str, Any]]:
        made = make_context(model, batch, context)
        step = bench.measure_decode(model, made, session.options.repeats)
        return [step, *bench.measure_layers(model, made, session.options.repeats, bandwidth)]

    grid = [(batch, context) for context in session.options.contexts for batch in session.options.batches]
    for batch, context in sorted(grid, key=lambda pair: pair[0] * pair[1]):
        session.attempt(f"decode, batch {batch}, context {context}", lambda b=batch, c=context: measure(b, c))


def run_prefill(session: Session, model: BenchModel) -> None:
    for count in session.options.prefill:
        session.attempt(f"prefill, {count} tokens", lambda n=count: bench.measure_prefill(model, n, 5))


def run_serving(session: Session, model: BenchModel) -> None:
    for count in session.options.concurrency:
        session.attempt(f"serving, {count} requests", lambda n=count: bench.measure_serving(model, n, 128, 32))


def run_memory(session: Session, model: BenchModel) -> None:
    batch, context = max(session.options.batches), min(session.options.contexts)
    session.attempt("memory", lambda: bench.measure_memory(model, batch, context))


def run_reproducibility(session: Session, model: BenchModel) -> None:
    session.attempt("reproducibility", lambda: measure_reproducibility(model, max(session.options.batches)))
    session.attempt("preemption", lambda: measure_preemption(model))


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
        cache = bench.KVCacheManager(
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


def run_huggingface(session: Session) -> None:
    session.attempt("huggingface", lambda: list(measure_huggingface(session)))


@torch.no_grad()
def measure_huggingface(session: Session) -> Iterator[dict[str, Any]]:
    """transformers' own model, random weights of its own, the same shapes."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    from dsv4.loader.config_write import config_to_dict

    options, device = session.options, torch.device(session.options.device)
    config = cut_config(PRESETS[options.preset](), schedule=SCHEDULE, hash_layers=1)
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
        _wait(device)
        if batch == 1:
            again = DynamicCache(config=model.config)
            began = time.perf_counter()
            model(ids, past_key_values=again, use_cache=True, logits_to_keep=1)
            _wait(device)
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
            _wait(device)
            times.append(time.perf_counter() - began)
        step = statistics.median(times[3:])
        yield common | {
            "what": "decode", "batch": batch, "context": context, "ms": 1e3 * step,
            "ms_per_layer": 1e3 * step / len(SCHEDULE),
        }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- all of Flash, experts offloaded ----


def run_offload(session: Session) -> None:
    session.attempt("offload", lambda: measure_offload(session))


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
        free, total = torch.cuda.mem_get_info()
        record |= {"device_bytes_used": total - free, "peak_allocated": torch.cuda.max_memory_allocated()}
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


# ---- the table ----


def summary(records: list[dict[str, Any]]) -> str:
    lines = []
    for r in records:
        kind = r["kind"]
        if kind == "decode":
            lines.append(
                f"decode   batch {r['batch']:4} ctx {r['context']:8}: {r['ms']:9.3f} ms, {r['ms_per_layer']:7.3f} a"
                f" layer  [{r['mode'][:60]}] {'LATE ' if r['compiled_late'] else ''}{','.join(r['compiled_late'])[:80]}"
            )
        elif kind == "layer":
            lines.append(
                f"  {r['attention']}    batch {r['batch']:4} ctx {r['context']:8}: {1e3 * r['ms']:9.1f} us"
                f" x {r.get('times_floor', 0):6.2f} floor, {r['launches']} launches [{r['mode'][:40]}]"
            )
        elif kind in ("prefill", "offload_prefill"):
            lines.append(f"{kind}  {r['tokens']} tokens: {r['ms']:.2f} ms, {r['tokens_per_second']:.0f} tokens/s")
        elif kind in ("error", "skipped"):
            lines.append(f"{kind.upper()}: {r['what']}: {r.get('error', '')[:200]}")
        else:
            shown = {key: value for key, value in r.items() if key not in ("kind", "lines")}
            lines.append(f"{kind}: {json.dumps(shown)[:420]}")
    return "\n".join([*lines, *whole_flash(records)])


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


# ---- the command ----


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("model.jsonl"))
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this; may be repeated")
    parser.add_argument("--seconds", type=float, default=280.0, help="begin nothing after so many")
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=numbers, default=[2048, 65536, 1048576])
    parser.add_argument("--prefill", type=numbers, default=[2048, 8192, 16384])
    parser.add_argument("--experts", choices=("nvfp4", "mxfp4"), default="nvfp4", help="of the four layers")
    parser.add_argument("--concurrency", type=numbers, default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="flash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = options.section or list(SECTIONS)
    is_cuda = options.device != "cpu"
    origin = records_of.provenance(options.commit) if is_cuda else bench.describe_machine(torch.device("cpu"))
    session = Session(options, {"gpu": "none", "experts": options.experts} | origin)
    of_four = {
        "decode": run_decode, "prefill": run_prefill, "serving": run_serving, "memory": run_memory,
        "reproducibility": run_reproducibility,
    }  # fmt: skip
    if any(name in of_four for name in wanted):
        built: list[BenchModel] = []
        session.attempt("four layers", lambda: built.append(four_layers(options)) or [])
        for name in wanted:
            if built and name in of_four:
                of_four[name](session, built[0])
        built.clear()
        free_memory()
    if "huggingface" in wanted:
        run_huggingface(session)
    if "offload" in wanted:
        run_offload(session)
    print(summary(session.records))
    return int(any(record["kind"] == "error" for record in session.records))


def four_layers(options: argparse.Namespace) -> BenchModel:
    return build_model(options.preset, schedule=SCHEDULE, hash_layers=1, experts=options.experts, device=options.device)


if __name__ == "__main__":
    sys.exit(main())
