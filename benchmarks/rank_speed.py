"""A model of several GPUs' speed from one: one rank's share of the layers, measured; links and barriers, computed.

One rank of N holds E / N experts and runs its own T rows of attention, and its experts for the rows of all ranks. Here
the buffers of all ranks are on one GPU, so that everything a rank stores is stored; no byte crosses a link, nobody is
waited for. What comes from other ranks is made up: rows and parts at random, and a routing drawn as often as `_DRAWS`
says, of which the one with a median load of its busiest rank is taken, and that rank is measured.

    step = sum over 43 layers (measured) + head (measured) + 43 x (2 barriers + bytes sent / link speed)

In decode the shared expert runs beside the exchange, in prefill, which is not captured, before it; both are measured
for all (`beside_ms`, `in_line_ms`), and their results compared.

A step that verifies k drafts of one request has 1 + k rows. Its drafter is taken to be the swa layer: MTP runs it on
1 + k rows and then k - 1 times on one, with a head each time; DSpark three times on 1 + k rows, with one head.

Barrier and link speed are from the literature, and the links' time is added in full: nothing overlaps. Drawing tokens
is left out. Used by ranks.py.

`served` adds the host and HTTP, from records of a CPU with a model that costs nothing (rank_host.py, server.py). It
needs no GPU: `python -m benchmarks.rank_speed` prints it from the committed records.

    rank 0 = its step with 256 requests on each rank + what a server's engine takes a token, for the tokens of all ranks
    step   = the larger of the GPU's and rank 0's: the host works while the GPU does; with drafts their sum
    front end = CPU a token + CPU a prompt's token, as if all of its work on a request were reading the prompt
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import FLASH_COUNTS, Record
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import AttentionKind
from dsv4.dist.exchange import NO_EXPERT, Rows
from dsv4.dist.shares import expert_range
from dsv4.dist.symmetric import Layout, SymmetricExchange
from dsv4.engine.run.graphs import capture_graph
from dsv4.engine.run.precompile import precompile
from dsv4.formats.trees import tensors_of
from dsv4.loader.write.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import backend_for
from dsv4.tools.bench.context import BenchModel, Context, cut_config, make_context
from dsv4.tools.bench.model import layer_call, one_of_each, time_calls
from dsv4.tools.plan.targets import PRESETS

SCHEDULE = ("swa", "csa", "hca")
COUNTS = {AttentionKind(kind): count for kind, count in FLASH_COUNTS.items()}
BARRIER_SECONDS = 5e-6  # NVLink, small data: 4 to 6 us
LINK_BYTES_PER_SECOND = 350e9  # what copies reach of NVLink 4's 450 GB/s in one direction
PUBLISHED = {  # SGLang, Flash on 4 H200, 8K in and 1K out; tokens/s count both
    "one request, MTP, ms a token": 3.37, "saturated, MTP, tokens/s a GPU": 4546,
    "saturated, DSpark, tokens/s a GPU": 4872,
}  # fmt: skip
DRAFTS = {  # what is drafted, and the tokens a step then gives (reported acceptance: 0.8 a draft; 82-67-55-45-37 %)
    ("mtp", 1): 1.8, ("mtp", 3): 2.952, ("dspark", 5): 3.86,
}  # fmt: skip
_DRAWS = 51


class LocalExchange:
    """As the busiest of `size` ranks sees it. `num_rows` of the rows of all ranks belong to requests."""

    can_capture = True

    def __init__(self, size: int, config: ModelConfig, max_rows: int, device: torch.device) -> None:
        self.size = size
        self._experts, self._top_k, self._dim = config.n_routed_experts, config.num_experts_per_tok, config.hidden_size
        layout = Layout.of(size, max_rows, self._top_k, self._dim)
        values = torch.randn(layout.size // 2 + 1, device=device, dtype=torch.bfloat16)
        self._buffers = [values.clone().view(torch.uint8)[: layout.size] for _ in range(size)]
        pointers = torch.tensor([buffer.data_ptr() for buffer in self._buffers], dtype=torch.int64, device=device)
        self._inner = SymmetricExchange(
            self._buffers[0], pointers, lambda: None, 0, layout, max_rows=max_rows, num_experts=self._experts,
            top_k=self._top_k, dim=self._dim,
        )  # fmt: skip
        self.take(size * max_rows, max_rows)

    def take(self, num_requests: int, num_tokens: int) -> None:
        """Make up the routing of calls of `num_tokens` rows a rank, `num_requests` of them real."""
        drawn = [self._draw(num_requests, num_tokens, seed) for seed in range(_DRAWS if num_tokens < 2048 else 1)]
        self._chosen, self.bytes_sent, self.num_choices = sorted(drawn, key=lambda one: one[2])[len(drawn) // 2]
        self._chosen = self._chosen.to(self._buffers[0].device)
        self._weights = torch.full(self._chosen.shape, 1 / self._top_k, device=self._chosen.device)

    def _draw(self, num_requests: int, num_tokens: int, seed: int) -> tuple[Tensor, int, int]:
        """The busiest rank's places, [N T, k]; the bytes it sends in a layer; how many of the choices are its own."""
        size, dim = self.size, self._dim
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(size * num_tokens, self._experts, generator=generator)
        routing = scores.topk(self._top_k).indices.sort(1).values
        is_real = torch.arange(size * num_tokens).view(num_tokens, size).T.flatten() < num_requests  # spread evenly
        routing[~is_real] = NO_EXPERT
        owners = [expert_range(self._experts, size, rank) for rank in range(size)]
        is_of = [(routing >= own.start) & (routing < own.stop) for own in owners]
        busiest = max(range(size), key=lambda rank: int(is_of[rank].sum()))
        own_rows = slice(busiest * num_tokens, (busiest + 1) * num_tokens)
        rows_out = sum(int(is_of[rank][own_rows].any(1).sum()) for rank in range(size) if rank != busiest)
        num_own = int(is_of[busiest].sum())
        parts_back = num_own - int(is_of[busiest][own_rows].sum())
        places = torch.where(is_of[busiest], routing - owners[busiest].start, NO_EXPERT)
        places = places.clamp_max(len(owners[0]) - 1)  # shares may differ by one expert
        return places, 2 * dim * (rows_out + parts_back), num_own

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Rows:
        rows = self._inner.dispatch(x, experts, weights, slots)
        return rows._replace(experts=self._chosen, weights=self._weights)

    def collect(self, parts: Tensor | None, rows: Rows) -> Tensor:
        return self._inner.collect(parts, rows)


def build_share(preset: str, size: int, max_rows: int, device: torch.device) -> BenchModel:
    """Layers of every kind with one rank's share of NVFP4 experts."""
    config = cut_config(PRESETS[preset](), schedule=SCHEDULE, hash_layers=0)
    backend = backend_for(device, "official")
    own = expert_range(config.n_routed_experts, size, 0)
    params = random_params(config, experts="nvfp4", device=device, with_mtp=False, own=own)
    exchange = None if size == 1 else LocalExchange(size, config, max_rows, device)
    return BenchModel(preset, config, prepare_params(params, backend), "nvfp4", device, backend, exchange=exchange)


def measure_share(
    preset: str, size: int, requests: list[int], context: int, prefill: int, repeats: int, device: torch.device
) -> list[Record]:
    """Decode steps of so many requests in all, and a prompt of `prefill` tokens on every rank."""
    sizes = [-(-count // size) for count in requests]
    verified = [1 + count for count in sorted({count for _, count in DRAFTS})]
    model = build_share(preset, size, max(*sizes, *verified, prefill), device)
    if device.type == "cuda":
        made = make_context(model, max(*sizes, *verified), context)
        precompile(model.transformer(), made.cache, sorted({*sizes, *verified, prefill}))
        del made
    records = []
    for count, rows in zip(requests, sizes, strict=True):
        made = make_context(model, rows, context)
        records.append(_step(model, made, count, repeats) | {"kind": "rank_decode", "ranks": size, "requests": count})
    for rows in verified:
        found = _step(model, make_context(model, rows, context), rows, repeats)
        records.append(found | {"kind": "rank_verify", "ranks": size, "drafts": rows - 1})
    made = _prompt(model, prefill)
    found = _step(model, made, size * prefill, max(3, repeats // 4), is_prefill=True)
    records.append(found | {"kind": "rank_prefill", "ranks": size, "tokens": prefill})
    return records


def _prompt(model: BenchModel, num_tokens: int) -> Context:
    limits = EngineConfig(
        max_context_tokens=num_tokens, max_concurrent_requests=1, max_chunk_tokens=num_tokens, prefix_cache_bytes=0
    )
    transformer = model.transformer()
    cache = KVCacheManager(model.config, transformer.schedule, limits, device=model.device, plain_dtype=None)
    slot = cache.admit(num_tokens)
    tokens = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1))
    return Context(cache, [slot], cache.make_batch([slot], [tokens.tolist()]), num_tokens)


@torch.no_grad()
def _step(model: BenchModel, made: Context, num_requests: int, repeats: int, is_prefill: bool = False) -> Record:
    """Milliseconds of all of Flash's layers and its head: measured, and with what is between GPUs."""
    transformer, exchange, rows = model.transformer(), model.exchange, made.batch.num_tokens
    in_line = replace(model, backend=replace(model.backend, cuts_calls=True)).transformer()
    if isinstance(exchange, LocalExchange):
        exchange.take(num_requests, rows)
    head, _ = _time(_head_call(transformer, 1 if is_prefill else rows), model.device, repeats)
    layers_of, totals, is_same = [], [], True
    for layer in one_of_each(transformer.schedule):
        calls = [layer_call(each, made, layer) for each in (transformer, in_line)]
        (beside, one), (before, other) = (_time(call, model.device, repeats) for call in calls)
        layers_of.append((layer.attention, (beside, before)))
        is_same &= all(map(torch.equal, tensors_of(one), tensors_of(other)))
    for place in (0, 1):
        totals.append(head + sum(COUNTS[kind] * seconds[place] for kind, seconds in layers_of))
    layers = {kind: seconds[is_prefill] for kind, seconds in layers_of}
    measured = totals[is_prefill]
    added, sent, choices = 0.0, 0, num_requests * model.config.num_experts_per_tok
    if isinstance(exchange, LocalExchange):
        sent, choices = exchange.bytes_sent, exchange.num_choices
        added = sum(COUNTS.values()) * (2 * BARRIER_SECONDS + sent / LINK_BYTES_PER_SECOND)
    layer_us = {kind.value: round(1e6 * seconds, 1) for kind, seconds in layers.items()}
    return {
        "rows": rows, "context": made.context, "layer_us": layer_us,
        "head_us": round(1e6 * head, 1), "measured_ms": round(1e3 * measured, 3), "added_ms": round(1e3 * added, 3),
        "ms": round(1e3 * (measured + added), 3), "beside_ms": round(1e3 * totals[0], 3),
        "in_line_ms": round(1e3 * totals[1], 3), "same": is_same, "bytes_sent_a_layer": sent,
        "choices_of_this_rank": choices,
    }  # fmt: skip


def _head_call(transformer: Transformer, num_rows: int) -> Callable[[], Any]:
    config = transformer.config
    streams = torch.randn(
        num_rows, config.hc_mult, config.hidden_size, dtype=torch.bfloat16, device=transformer.weights.embed.device
    )
    return lambda: transformer.logits(streams)


def _time(call: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, Any]:
    """Median seconds: of a graph's replay on a GPU, of a call elsewhere. And what it gives."""
    timed = capture_graph(call) if device.type == "cuda" else call
    return statistics.median(time_calls(timed, device, repeats)), timed()


def conclusions(records: list[Record], prompt_tokens: int = 8192, output_tokens: int = 1024) -> list[Record]:
    """Tokens a second of a GPU that is never idle: every request costs its prompt, and its part of `output_tokens`
    steps."""
    found = []
    for step in (record for record in records if record["kind"] == "rank_decode"):
        prefill = next((r for r in records if r["kind"] == "rank_prefill" and r["ranks"] == step["ranks"]), None)
        if prefill is None:
            continue
        on_each = step["requests"] / step["ranks"]
        seconds = 1e-3 * (prefill["ms"] * prompt_tokens / prefill["tokens"] + output_tokens * step["ms"] / on_each)
        record = {
            "kind": "rank_throughput", "ranks": step["ranks"], "requests": step["requests"],
            "prompt_tokens": prompt_tokens, "output_tokens": output_tokens,
            "tokens_per_second_per_gpu": round((prompt_tokens + output_tokens) / seconds, 1),
        }  # fmt: skip
        found.append(record)
    return found + _with_drafts(records)


def _with_drafts(records: list[Record]) -> list[Record]:
    """Milliseconds a token of one request whose drafts come true as often as is reported."""
    found = []
    for step in (record for record in records if record["kind"] == "rank_verify"):
        alone = next(r for r in records if r["kind"] == "rank_decode" and (r["ranks"], r["rows"]) == (step["ranks"], 1))
        for (drafter, count), tokens in DRAFTS.items():
            if count != step["drafts"]:
                continue
            block_us, one_us = step["layer_us"]["swa"], alone["layer_us"]["swa"]
            drafter_us = (
                block_us + (count - 1) * one_us + count * alone["head_us"]
                if drafter == "mtp"
                else 3 * block_us + step["head_us"]
            )
            record = {
                "kind": "rank_drafts", "ranks": step["ranks"], "drafter": drafter, "drafts": count,
                "step_ms": step["ms"], "drafter_ms": round(1e-3 * drafter_us, 3), "tokens_per_step": tokens,
                "ms_per_token": round((step["ms"] + 1e-3 * drafter_us) / tokens, 3),
            }  # fmt: skip
            found.append(record)
    return found


def served(ranks: list[Record], host: list[Record], http: list[Record]) -> list[Record]:
    """Four ranks through a server: of each load the newest record; and rounds with drafts of one request."""
    routing = [r for r in host if r["op"] == "rank_step" and "rank 0" in r["shapes"]["of"]]
    steps = {r["shapes"]["ranks"]: r for r in routing if "waiting" not in r["shapes"]}
    streams = [r for r in http if r["section"] == "streams" and r["load"]["kind"] == "chat"]
    chats = next(r for r in streams if r["load"]["streams"] == 256)
    engine_s, front_s = chats["cpu_seconds"]["0 benchmarks"], chats["cpu_seconds"]["1 front_end"]
    engine_ms, front_us = 1e3 * engine_s / chats["output_tokens"], 1e6 * front_s / chats["output_tokens"]
    prompt_us = 1e6 * front_s / chats["prompt_tokens"]
    step_ms = 1e-3 * steps[4]["median_us"]
    newest = {(r["requests"]): r for r in ranks if r["kind"] == "rank_decode" and r["ranks"] == 4}
    prefill = [r for r in ranks if r["kind"] == "rank_prefill" and r["ranks"] == 4][-1]
    found: list[Record] = []
    for requests, step in newest.items():
        host_ms = step_ms + engine_ms * requests
        slower = step | {"ms": max(step["ms"], host_ms)}
        (rate,) = (r for r in conclusions([slower, prefill]) if r["kind"] == "rank_throughput")
        per_gpu = rate["tokens_per_second_per_gpu"]
        prompts, outputs = (4 * per_gpu * rate[name] / (8192 + 1024) for name in ("prompt_tokens", "output_tokens"))
        found.append({
            "kind": "rank_served", "requests": requests, "gpu_ms": step["measured_ms"], "links_ms": step["added_ms"],
            "host_ms": round(host_ms, 2), "ms": round(slower["ms"], 2), "tokens_per_second_per_gpu": per_gpu,
            "front_end_cores": round(1e-6 * (prompts * prompt_us + outputs * front_us), 2),
        })  # fmt: skip
    drafts = {(r["drafter"], r["drafts"]): r for r in ranks if r["kind"] == "rank_drafts" and r["ranks"] == 4}
    for one in drafts.values():
        round_ms = one["step_ms"] + one["drafter_ms"] + step_ms + engine_ms * one["tokens_per_step"]
        names = {name: one[name] for name in ("drafter", "drafts", "tokens_per_step")}
        gpu_ms, per_token = one["step_ms"] + one["drafter_ms"], round_ms / one["tokens_per_step"]
        times = {"gpu_ms": round(gpu_ms, 2), "ms": round(round_ms, 2), "ms_per_token": round(per_token, 2)}
        found.append({"kind": "rank_round", **names, **times})
    return found


def committed() -> list[Record]:
    """`served` of the committed records."""
    folder = Path(__file__).parent / "results"
    files = ("nvidia-h200-ranks.jsonl", "rank-host.jsonl", "cpu-server.jsonl")
    return served(*([json.loads(line) for line in (folder / name).read_text().splitlines()] for name in files))


def table(records: list[Record]) -> str:
    titles = {"ranks": 5, "what": 22, "rows": 6, "measured": 9, "+ links": 8, "= ms": 9, "tokens/s/GPU": 13}
    titles |= {"in line": 8, "beside": 8}  # the shared expert
    lines = [" ".join(f"{title:>{width}}" for title, width in titles.items())]
    for record in records:
        if record["kind"] == "rank_throughput":
            what = f"{record['prompt_tokens']}+{record['output_tokens']}, {record['requests']} req."
            lines.append(f"{record['ranks']:5} {what:>22} {'':35} {record['tokens_per_second_per_gpu']:13.0f}")
        elif record["kind"] == "rank_drafts":
            what = f"{record['drafter']}, {record['drafts']} drafts"
            times = f"{record['step_ms']:9.2f} {record['drafter_ms']:8.2f} {record['ms_per_token']:9.2f}"
            lines.append(f"{record['ranks']:5} {what:>22} {1 + record['drafts']:6} {times} a token")
        elif record["kind"] in ("rank_decode", "rank_prefill"):
            is_decode = record["kind"] == "rank_decode"
            what = f"decode, {record['requests']} requests" if is_decode else f"prefill, {record['tokens']} each"
            tokens = record["requests"] / record["ranks"] if is_decode else record["tokens"]
            lines.append(
                f"{record['ranks']:5} {what:>22} {record['rows']:6} {record['measured_ms']:9.2f} "
                f"{record['added_ms']:8.2f} {record['ms']:9.2f} {1e3 * tokens / record['ms']:13.0f} "
                f"{record['in_line_ms']:8.2f} {record['beside_ms']:8.2f}{'' if record['same'] else ' DIFFERENT'}"
            )
    published = "; ".join(f"{what} {value}" for what, value in PUBLISHED.items())
    return "\n".join([*lines, f"SGLang's published 4 x H200: {published}"])


if __name__ == "__main__":
    print(*map(json.dumps, committed()), sep="\n")
