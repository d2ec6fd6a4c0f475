"""What drafts cost and bring on one GPU: four Flash layers with an MTP block or a DSpark head, random weights.

    python -m benchmarks drafts --out benchmarks/results/nvidia-h200-drafts.jsonl

Requests of `--context` tokens decode together: without drafts, then with k drafts a step of which a fixed share is
made to come true (`ACCEPTANCE`, as reported for Flash). A run before says which drafts are right; the drafter runs all
the same. Every run must give the tokens of the first, bit for bit.

A record (`kind` drafts) has the median of a step and of its parts (forward call, draw, drafter: GPU time), the tokens a
request gets in a step, and `ms_per_token_43_layers`: head, draw, drafter and the host's part of a step as measured, and
43/4 of the layers. That is a model: a mean layer, and all experts on one GPU. `--preset tiny --device cpu` tries it.

Drafts made true are read by the host before the next step is planned; an engine's own need not be. A record `reading`
has the median step with the drafter's own drafts, of which hardly any comes true, read before and not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from benchmarks.runner import NUM_LAYERS, SCHEDULE, Record, Session, free_memory, numbers, random_prompts
from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.draft.policy import DraftPolicy, LearnedTimes
from dsv4.engine.engine import Engine
from dsv4.engine.request import Request
from dsv4.engine.run.graphs import capture_graph
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams
from dsv4.tools.bench.context import cut_config
from dsv4.tools.bench.model import time_calls
from dsv4.tools.plan.targets import PRESETS

ACCEPTANCE = {"mtp": (0.8, 0.64, 0.512), "dspark": (0.82, 0.67, 0.55, 0.45, 0.37)}  # by place, with all before it


def config_of(preset: str, drafter: str) -> ModelConfig:
    config = cut_config(PRESETS[preset](), schedule=SCHEDULE, hash_layers=1)
    if drafter == "dspark":
        return config.with_dspark(noise_token_id=config.vocab_size - 1, markov_rank=256)
    return replace(config, num_nextn_predict_layers=1, compress_ratios=(*config.compress_ratios, 0))


class MadeTrue(FixedDrafts):
    """`count` drafts a step, each place right as often as `ACCEPTANCE` says; 0 drafts nothing."""

    must_read = True

    def __init__(self, max_drafts: int, choices: Sequence[int], shares: Sequence[float]) -> None:
        super().__init__(max_drafts)
        self.choices = tuple(choices)
        self.count = 0
        self.truth: dict[tuple[int, ...], list[int]] = {}
        self._shares, self._random = shares, random.Random(0)

    def how_many(self, num_requests: int) -> int:
        return next((choice for choice in self.choices if choice >= self.count), 0) if self.count else 0

    def offer(self, request: Request, drafts: Sequence[int], confidences: Sequence[float] | None) -> None:
        place, luck = len(request.token_ids), self._random.random()
        text = self.truth[tuple(request.token_ids[: request.prompt_len])][place : place + self.count]
        right = [token if luck < share else token ^ 1 for token, share in zip(text, self._shares, strict=False)]
        super().offer(request, right, confidences)


class Stopwatch:
    """GPU milliseconds (on a CPU, the host's) of a runner's calls, by what they are; until the end of the `with`."""

    def __init__(self, engine: Engine) -> None:
        self._is_cuda, self._runner = engine.cache.device.type == "cuda", engine.runner
        self._spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ("forward", "draw", "draft")}

    def __enter__(self) -> Stopwatch:
        for name, spans in self._spans.items():
            setattr(self._runner, name, partial(self._timed, getattr(self._runner, name), spans))
        return self

    def __exit__(self, *raised: object) -> None:
        for name in self._spans:
            delattr(self._runner, name)

    def _timed(self, call: Callable[..., Any], spans: list[tuple[Any, Any]], *arguments: Any, **options: Any) -> Any:
        start = self._now()
        made = call(*arguments, **options)
        spans.append((start, self._now()))
        return made

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def medians(self) -> dict[str, float]:
        """Milliseconds; forgets what it knew."""
        if self._is_cuda:
            torch.cuda.synchronize()  # steps without drafts overlap: the last one is still on its way
        found = {}
        for name, spans in self._spans.items():
            if spans:
                taken = [a.elapsed_time(b) if self._is_cuda else 1e3 * (b - a) for a, b in spans]
                found[name] = statistics.median(taken)
            spans.clear()
        return found


def decode(
    engine: Engine, prompts: list[list[int]], num_tokens: int, watch: Stopwatch | None
) -> tuple[list[Any], float, dict[str, float]]:
    """Tokens, and medians of a step after all prompts are read and of its parts, in milliseconds."""
    requests = [
        engine.add(prompt, SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(prompts)
    ]
    while any(request.num_output == 0 for request in requests):
        engine.step()
    if watch is not None:
        watch.medians()
    stamps = [time.perf_counter()]
    while not any(request.is_done for request in requests):
        engine.step()
        stamps.append(time.perf_counter())
    parts = {} if watch is None else watch.medians()
    while engine.has_work:
        engine.step()
    times = [1e3 * (after - before) for before, after in pairwise(stamps)]
    return [request.completion().token_ids for request in requests], statistics.median(times or [0.0]), parts


def head_ms(llm: LLM, rows: int, repeats: int = 10) -> float:
    """Of a graph's replay on a GPU, as the forward call is."""
    config, context = llm.config, llm.model.context
    streams = torch.zeros(rows, config.hc_mult, config.hidden_size, dtype=context.dtype, device=llm.cache.device)
    with torch.no_grad():
        call: Callable[[], Any] = lambda: llm.model.logits(streams)  # noqa: E731
        timed = capture_graph(call) if llm.cache.device.type == "cuda" else call
        return 1e3 * statistics.median(time_calls(timed, llm.cache.device, repeats))


def measure(llm: LLM, drafter: str, batch: int, counts: Sequence[int], options: argparse.Namespace) -> list[Record]:
    engine, choice = llm.engine, llm.engine._drafts
    assert isinstance(choice, MadeTrue)
    prompts = random_prompts(llm.config.vocab_size, batch, options.context, batch)
    records, plain = [], None
    for count in counts:
        choice.count, before = count, choice.stats()
        with Stopwatch(engine) as watch:
            tokens, step_ms, parts = decode(engine, prompts, options.tokens, watch)
        if plain is None:
            plain = tokens
            choice.truth = {tuple(p): [*p, *t] for p, t in zip(prompts, plain, strict=True)}
        after, rows = choice.stats(), batch * (1 + count)
        num_steps = max(after.num_steps - before.num_steps, 1)
        per_step = 1 + (after.num_accepted - before.num_accepted) / num_steps
        head, forward = head_ms(llm, rows), parts.get("forward", 0.0)
        layers = max(0.0, forward - head) * NUM_LAYERS / len(SCHEDULE)
        records.append({
            "kind": "drafts", "drafter": drafter, "batch": batch, "drafts": count, "rows": rows,
            "context": options.context, "step_ms": round(step_ms, 4),
            **{f"{name}_ms": round(ms, 4) for name, ms in parts.items()}, "head_ms": round(head, 4),
            "tokens_per_step": round(per_step, 3),
            # beside head and layers: draw, drafter and host
            "ms_per_token_43_layers": round((head + layers + step_ms - forward) / per_step, 4),
            "is_same_as_without": tokens == plain,
        })  # fmt: skip
    return records


def measure_reading(
    llm: LLM, drafter: str, batch: int, counts: Sequence[int], options: argparse.Namespace
) -> list[Record]:  # fmt: skip
    """What it saves that the host plans while the drafter runs."""
    records = []
    prompts = random_prompts(llm.config.vocab_size, batch, options.context, batch)
    for count in counts:
        record = {"kind": "reading", "drafter": drafter, "batch": batch, "drafts": count, "context": options.context}
        for must_read, when in ((True, "before"), (False, "later")):
            choice = FixedDrafts(count)
            choice.must_read = must_read
            engine = Engine(llm.model, llm.cache, runner=llm.engine.runner, drafts=choice)
            record[f"step_ms_read_{when}"] = round(decode(engine, prompts, options.tokens, None)[1], 4)
        records.append(record)
    return records


def policy_choices(records: list[dict[str, Any]], drafter: str) -> dict[str, int]:
    """How many drafts the engine's policy would ask for with these times, by batch."""
    times = LearnedTimes(weight=1.0)
    for record in sorted(records, key=lambda record: record["rows"]):
        times.record(record["rows"], record["step_ms"])
    policy = DraftPolicy(times)
    batches = sorted({record["batch"] for record in records})
    return {str(batch): policy.ask(ACCEPTANCE[drafter], batch)[0] for batch in batches}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=320, help="that every request generates")


SECTIONS = tuple(ACCEPTANCE)  # the drafters


def run(session: Session) -> None:
    for drafter in SECTIONS:
        if session.wants(drafter):
            run_drafter(drafter, session)
            free_memory()


def run_drafter(drafter: str, session: Session) -> None:
    options = session.options
    config = config_of(options.preset, drafter)
    shares = ACCEPTANCE[drafter][: config.max_drafts]
    params = random_params(config, experts="nvfp4", mtp_experts="mxfp4", device=session.device)
    limits = EngineConfig(
        max_context_tokens=options.context + options.tokens, max_concurrent_requests=max(options.batches),
        max_chunk_tokens=max(2048, 6 * max(options.batches)), prefix_cache_bytes=0,
    )  # fmt: skip
    llm = LLM.from_params(config, params, engine=limits, drafts="auto")
    print(f"[{session.elapsed:6.1f}] {drafter}: ready", flush=True)
    drafting = llm.engine.runner.drafting
    assert drafting is not None
    choice = MadeTrue(drafting.max_drafts, drafting.choices, shares)
    counts = [0, *(count for count in (1, 3, 5) if count <= drafting.max_drafts)]
    for batch in options.batches:
        llm.engine = Engine(llm.model, llm.cache, runner=llm.engine.runner, drafts=choice)
        session.attempt(f"{drafter}, batch {batch}", measure, llm, drafter, batch, counts, options)
        some = sorted({*drafting.choices[:1], counts[-1]})
        session.attempt(f"{drafter}, reading, batch {batch}", measure_reading, llm, drafter, batch, some, options)
    found = [record for record in session.records if record["kind"] == "drafts" and record["drafter"] == drafter]
    if found:
        late = list(llm.engine.runner.compiled_late)
        session.add({"kind": "policy", "drafter": drafter, "asks_for": policy_choices(found, drafter), "late": late})
