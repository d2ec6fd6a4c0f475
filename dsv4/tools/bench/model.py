"""How fast a model runs on this machine: decode by batch and context, prefill, latency, throughput, memory.

A section gives records (plain dicts, one `kind` each); `Report` holds them all. Times are medians with the 10th and
90th percentile. On a GPU a decode step is the runner's own replay, timed by events; a layer is a graph of its own.

Bytes of a layer: every weight it must read (of the routed experts those the step chose), and of the cache the window,
the picked or all entries, and all index keys. `floor` is those bytes at the chip's measured read speed.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import ConfigError, EngineConfig
from dsv4.config.layers import AttentionKind, LayerSpec
from dsv4.engine.draft.options import Drafts
from dsv4.engine.run.graphs import RunnerError, capture_graph
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import tensors_of
from dsv4.llm import LLM
from dsv4.loader.shipped import find_checkpoint
from dsv4.model.block import block, enter
from dsv4.model.transformer import Transformer
from dsv4.tools.bench.context import BenchModel, Context, make_context
from dsv4.tools.bench.engine_target import serve_requests
from dsv4.tools.bench.profile import launches_of
from dsv4.tools.plan.plan import READ_BYTES_PER_SECOND, plan
from dsv4.tools.plan.targets import PRESETS

SECTIONS = ("decode", "layers", "stream", "prefill", "serving", "memory")

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What to measure. Contexts beyond the model's are an error; `repeats` calls are timed after two that are not."""

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (2048,)
    prefill_tokens: tuple[int, ...] = (512,)
    concurrencies: tuple[int, ...] = (1,)
    prompt_tokens: int = 64
    output_tokens: int = 16
    repeats: int = 20
    sections: tuple[str, ...] = SECTIONS
    bandwidth: float | None = None  # bytes a second; None looks the device up
    drafts: Drafts = "off"  # of the requests that are served
    chunk: int | None = None  # tokens of a call of prefill, at most


@dataclass(frozen=True)
class Report:
    """Everything `dsv4 bench model` says."""

    model: str
    origin: dict[str, str]
    records: tuple[Record, ...]

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "origin": self.origin, "records": list(self.records)}


# ---- timing ----


def time_calls(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls; two more before them are not timed."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times
    torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in pairs]


def _spread(times: Sequence[float], unit: float = 1e3) -> Record:
    ordered = sorted(times)
    return {
        "ms": round(unit * statistics.median(ordered), 4),
        "ms_p10": round(unit * ordered[len(ordered) // 10], 4),
        "ms_p90": round(unit * ordered[-1 - len(ordered) // 10], 4),
    }


def kernels_of(call: Callable[[], Any], device: torch.device) -> list[tuple[str, float]] | None:
    """Launches of one call in order, copies included, each with its microseconds; None where they cannot be seen."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    launches = launches_of(call, device)
    return None if launches is None else [(one.name[:60], round(one.duration, 2)) for one in launches]


# ---- sections ----


def measure_decode(model: BenchModel, made: Context, repeats: int) -> Record:
    """One decode step of the whole model, the same one again and again."""
    batch_size = made.batch.num_tokens
    transformer = model.transformer()
    runner, mode = _make_runner(model, transformer, made)
    times = time_calls(lambda: runner.forward(made.batch, made.rows), model.device, repeats)
    step = statistics.median(times)
    return {
        "kind": "decode", "batch": batch_size, "context": made.context, "layers": model.config.num_hidden_layers,
        "mode": mode, **_spread(times), "tokens_per_second": round(batch_size / step, 2),
        "ms_per_layer": round(1e3 * step / model.config.num_hidden_layers, 4),
        "compiled_late": list(runner.compiled_late),
    }  # fmt: skip


def measure_stream(model: BenchModel, context: int, num_steps: int) -> Record:
    """One request that gets a new random token every step: what offloaded experts cost when routing changes."""
    made = make_context(model, 1, context, spare=num_steps + 2)
    runner, mode = _make_runner(model, model.transformer(), made)
    tokens = torch.randint(0, model.config.vocab_size, (num_steps + 2,), generator=torch.Generator().manual_seed(3))
    times = []
    for step, token in enumerate(tokens.tolist()):
        if step == 2 and model.pool is not None:
            model.pool.stats.reset()
        started = time.perf_counter()
        runner.forward(made.cache.make_batch(made.slots, [[token]]), made.rows)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    record: Record = {
        "kind": "stream", "context": context, "steps": num_steps, "mode": mode, **_spread(times[2:]),
        "tokens_per_second": round(num_steps / sum(times[2:]), 2), "compiled_late": list(runner.compiled_late),
    }  # fmt: skip
    if model.pool is not None:
        stats, placement = model.pool.stats, model.pool.placement
        record |= {
            "slots": placement.num_fixed + placement.num_cached, "fixed": placement.num_fixed,
            "misses_per_token": round(stats.num_misses / num_steps, 2),
            "bytes_per_token": stats.bytes_moved // num_steps,
            "device_bytes": model.pool.device_bytes(), "host_bytes": model.pool.host_bytes(),
        }  # fmt: skip
    return record


def _make_runner(model: BenchModel, transformer: Transformer, made: Context) -> tuple[Runner, str]:
    """With graphs where the ops allow it; otherwise direct, and the record says why."""
    size = made.batch.num_tokens
    if model.device.type != "cuda":
        return Runner(transformer, made.cache, buckets=(size,), use_graphs=False), "direct"
    runner = Runner(transformer, made.cache, buckets=(size,), use_graphs=True, experts=model.pool)
    try:
        runner.warm_up()
    except RunnerError as error:
        torch.cuda.synchronize()
        runner = Runner(transformer, made.cache, buckets=(size,), use_graphs=False, experts=model.pool)
        return runner, f"direct: {str(error)[:160]}"
    return runner, "graph" if runner.captured else "direct: the experts of such a batch may not fit the slots"


def measure_layers(model: BenchModel, made: Context, repeats: int, bandwidth: float | None) -> list[Record]:
    """One layer of each kind by itself, against the bytes it must read."""
    transformer = model.transformer()
    records = []
    for layer in one_of_each(transformer.schedule[: model.config.num_hidden_layers]):
        call = layer_call(transformer, made, layer)
        timed, mode = call, "direct"
        if model.device.type == "cuda":
            try:
                timed, mode = capture_graph(partial(_streams_of, call), experts=model.pool), "graph"
            except RunnerError as error:
                mode = f"direct: {str(error)[:160]}"
                torch.cuda.synchronize()
        times = time_calls(timed, model.device, repeats)
        experts = call().experts
        num_bytes = layer_bytes(model, layer, made, len(experts.unique()))
        kernels = kernels_of(timed, model.device)
        record = {
            "kind": "layer", "layer": layer.layer_idx, "attention": layer.attention.value,
            "router": layer.router.value, "batch": made.batch.num_tokens, "context": made.context, "mode": mode,
            **_spread(times),
            "bytes": num_bytes, "experts_read": len(experts.unique()),
            "launches": None if kernels is None else len(kernels), "kernels": kernels,
        }  # fmt: skip
        if bandwidth is not None:
            floor = num_bytes / bandwidth
            record |= {"floor_ms": round(1e3 * floor, 4), "times_floor": round(statistics.median(times) / floor, 2)}
        records.append(record)
    return records


def layer_call(transformer: Transformer, made: Context, layer: LayerSpec) -> Callable[[], Any]:
    """From one block's attention input to the next one's, as inside the model."""
    params, context = transformer.weights.layers[layer.layer_idx], transformer.context
    cache = made.cache.handle(layer.layer_idx)
    embedding = transformer.weights.embed[made.batch.token_ids].to(context.dtype)
    start = enter(embedding, params, context)
    return lambda: block(start, params, layer, cache, made.batch, context, params)[0]


def _streams_of(call: Callable[[], Any]) -> Tensor:
    return call().streams


def one_of_each(schedule: Sequence[LayerSpec]) -> Iterator[LayerSpec]:
    """The last layer of every kind of attention: routers of later layers are the common kind."""
    last = {layer.attention: layer for layer in schedule}
    yield from sorted(last.values(), key=lambda layer: layer.layer_idx)


def layer_bytes(model: BenchModel, layer: LayerSpec, made: Context, num_experts_read: int) -> int:
    """Weights and cache rows one layer of one decode step must read."""
    params = model.params.layers[layer.layer_idx]
    stack = params.ffn.experts.matrices if model.pool is None else model.pool.layers[layer.layer_idx].stack
    always = (params.attn, params.hc_attn, params.hc_ffn, params.ffn.shared, params.ffn.gate)
    weights = _nbytes(always) + _nbytes(stack) * num_experts_read // len(tensors_of(stack)[0])
    handle, cached = made.cache.handle(layer.layer_idx), 0
    for position in made.batch.positions.tolist():
        cached += min(position + 1, model.config.sliding_window) * handle.window.rows.format.row_bytes
        if handle.entries is not None:
            num_entries = (position + 1) // layer.ratio
            picked = min(num_entries, model.config.index_topk) if layer.attention is AttentionKind.CSA else num_entries
            cached += picked * handle.entries.rows.format.row_bytes
            if handle.index_keys is not None:
                cached += num_entries * handle.index_keys.rows.format.row_bytes
    return weights + cached


def _nbytes(weights: Any) -> int:
    return sum(part.numel() * part.element_size() for part in tensors_of(weights))


def measure_prefill(model: BenchModel, num_tokens: int, repeats: int, chunk: int | None = None) -> Record:
    """One prompt of `num_tokens` from an empty cache, in calls of at most `chunk` tokens."""
    chunk = min(chunk or num_tokens, num_tokens)
    limits = EngineConfig(max_context_tokens=num_tokens, max_concurrent_requests=1, max_chunk_tokens=chunk)
    transformer = model.transformer()
    cache = KVCacheManager(
        model.config, transformer.schedule, limits, device=model.device, plain_dtype=None
    )  # fmt: skip
    runner = Runner(transformer, cache, buckets=(1,), use_graphs=False, experts=model.pool)
    tokens = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1))
    slot, calls = cache.admit(num_tokens), []
    for part in tokens.split(chunk):
        last = torch.full((1,), len(part) - 1, device=model.device)
        calls.append((cache.make_batch([slot], [part.tolist()]), last))

    def prefill() -> None:
        for batch, rows in calls:
            runner.forward(batch, rows)

    times = time_calls(prefill, model.device, repeats)
    return {
        "kind": "prefill", "tokens": num_tokens, "chunk": chunk, "layers": model.config.num_hidden_layers,
        **_spread(times), "tokens_per_second": round(num_tokens / statistics.median(times), 1),
    }  # fmt: skip


def measure_serving(model: BenchModel, concurrency: int, settings: Settings) -> Record:
    """Requests through the engine, all at once: time to the first token, between tokens, tokens a second."""
    context = settings.prompt_tokens + settings.output_tokens
    limits = EngineConfig(max_context_tokens=context, max_concurrent_requests=concurrency)
    llm = LLM.from_params(model.config, model.params, engine=limits, pool=model.pool, drafts=settings.drafts)
    return serve_requests(llm, concurrency, settings.prompt_tokens, settings.output_tokens)


def measure_memory(model: BenchModel, batch_size: int, context: int) -> Record:
    """Bytes really held against the plan's."""
    engine = EngineConfig(max_context_tokens=context, max_concurrent_requests=batch_size, max_chunk_tokens=batch_size)
    has_draft = bool(model.params.draft_blocks)
    planned = plan(model.config, engine, experts=model.experts, with_draft=has_draft)
    made = make_context(model, batch_size, context)
    weights = _nbytes(_everything(model))
    record: Record = {
        "kind": "memory", "batch": batch_size, "context": context,
        "weights": weights, "weights_planned": planned.weights.total_bytes,
        "cache": made.cache.memory_bytes(), "cache_planned": planned.schema.total_bytes,
    }  # fmt: skip
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        record |= {"used": total - free, "peak_allocated": torch.cuda.max_memory_allocated(model.device)}
        record["planned"] = planned.budget.total
    return record


def _everything(model: BenchModel) -> list[Any]:
    if model.pool is None:
        return [model.params]
    resident = [replace(layer, ffn=replace(layer.ffn, experts=None)) for layer in model.params.layers]  # type: ignore[arg-type]
    return [replace(model.params, layers=resident), [layer.stack for layer in model.pool.layers]]


def jobs(model: BenchModel, settings: Settings) -> Iterator[tuple[str, Callable[[], Record | list[Record]]]]:
    """Every measurement of the sections asked for, by what is measured; the larger ones of a section last."""
    sections = set(settings.sections)
    if unknown := sorted(sections - set(SECTIONS)):
        raise ConfigError(f"sections are {', '.join(SECTIONS)}, found {', '.join(unknown)}")
    bandwidth = settings.bandwidth or read_bandwidth(describe_machine(model.device)["device"])

    def steps(batch: int, context: int) -> list[Record]:
        made = make_context(model, batch, context)  # filled once for both
        found = [measure_decode(model, made, settings.repeats)] if "decode" in sections else []
        return found + (measure_layers(model, made, settings.repeats, bandwidth) if "layers" in sections else [])

    grid = [(batch, context) for context in settings.contexts for batch in settings.batches]
    for batch, context in sorted(grid, key=lambda pair: pair[0] * pair[1]) if {"decode", "layers"} & sections else ():
        yield f"decode, batch {batch}, context {context}", partial(steps, batch, context)
    for context in settings.contexts if "stream" in sections else ():
        yield f"stream, context {context}", partial(measure_stream, model, context, settings.repeats)
    for count in settings.prefill_tokens if "prefill" in sections else ():
        repeats = max(3, settings.repeats // 4)
        yield f"prefill, {count} tokens", partial(measure_prefill, model, count, repeats, settings.chunk)
    for count in settings.concurrencies if "serving" in sections else ():
        yield f"serving, {count} requests", partial(measure_serving, model, count, settings)
    if "memory" in sections:
        yield "memory", partial(measure_memory, model, max(settings.batches), min(settings.contexts))


def run_bench(model: BenchModel, settings: Settings, note: Callable[[str], None] = lambda what: None) -> Report:
    """Every section asked for. One that fails leaves a record of kind `error` instead, and the others go on."""
    records: list[Record] = []
    for what, measure in jobs(model, settings):
        note(what)
        try:
            found = measure()
            records.extend(found if isinstance(found, list) else [found])
        except RuntimeError as error:  # out of memory, a kernel that fails
            records.append({"kind": "error", "what": what, "error": str(error).splitlines()[0][:300]})
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return Report(model.name, describe_machine(model.device), tuple(records))


def bench_ranks(
    target: str | None, gpus: int, device: str, settings: Settings, note: Callable[[str], None] = lambda what: None
) -> Report:
    """The section `serving` of a checkpoint on `gpus` ranks: single calls and layers are one rank's."""
    if target is not None and target.lower() in PRESETS:
        raise ConfigError(f"--gpus needs a checkpoint (`dsv4 synth` writes one), found the preset {target!r}")
    if settings.sections not in (SECTIONS, ("serving",)):
        raise ConfigError(f"--gpus measures the section serving, found {', '.join(settings.sections)}")
    folder = find_checkpoint(target)
    most = settings.prompt_tokens + settings.output_tokens
    limits = EngineConfig(max_context_tokens=most, max_concurrent_requests=max(settings.concurrencies))
    note(f"serving on {gpus} ranks")
    llm = LLM(folder, device=device, engine=limits, gpus=gpus)
    try:
        sizes = settings.prompt_tokens, settings.output_tokens
        records = [serve_requests(llm, count, *sizes) | {"gpus": gpus} for count in settings.concurrencies]
    finally:
        llm.close()
    return Report(folder.name, describe_machine(torch.device(device)), tuple(records))


def read_bandwidth(device_name: str) -> float | None:
    return next((speed for name, speed in READ_BYTES_PER_SECOND.items() if name in device_name.lower()), None)


def describe_machine(device: torch.device) -> dict[str, str]:
    """Where the numbers are from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}
