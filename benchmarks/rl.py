"""What rollouts for a trainer cost: new weights, sleep, routed experts in answers, scores. Four layers, random weights.

    python -m benchmarks rl                    # a GPU: four layers of Flash
    python -m benchmarks rl --small --out FILE # a CPU: tries all of it on four layers of a miniature

| section | what | records (`kind`) |
|---|---|---|
| update | from a folder, from tensors on the device, and rounded from BF16 tensors there | update |
| sleep | device memory before, asleep, awake; first token after waking, beside one at rest | sleep |
| replay | 64 requests with and without their routed experts, in turn | replay |
| score | a prompt's log-probabilities against its prefill (goal 1.15) | score |

After each update the answers must be those of a fresh engine (`same_bits`). The model of all layers
(`modelled_seconds`) takes as long a byte as four layers do. Memory is that of a GPU; on a CPU it is not measured.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.runner import SCHEDULE, Record, Session, free_memory, random_prompts, used_bytes, wait
from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.names import expected_tensors
from dsv4.loader.write.config_file import ExpertFormat
from dsv4.loader.write.random_weights import Recipe, random_weight
from dsv4.loader.write.synth import stored_tensors, write_checkpoint
from dsv4.request import SamplingParams
from dsv4.tools.bench.context import cut_config
from dsv4.tools.plan.sizes import count_weights
from dsv4.tools.plan.targets import PRESETS

SECTIONS = ("update", "sleep", "replay", "score")
EXPERTS: ExpertFormat = "nvfp4"
NUM_REQUESTS = 64
ANSWER = SamplingParams(max_tokens=8, seed=3, logprobs=0, ignore_eos=True)
FIRST = replace(ANSWER, max_tokens=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--small", dest="device", action="store_const", const="cpu", help="a miniature's layers, on a CPU"
    )
    parser.add_argument("--tokens", type=int, help="of the prompt that is scored; 8192, small: 1024")
    parser.add_argument("--disk", help="folder for checkpoints; by default the system's for temporary ones")


def run(session: Session) -> None:
    whole = PRESETS[session.options.preset if session.is_cuda else "tiny"]()
    config = cut_config(whole, schedule=SCHEDULE, hash_layers=1)
    num_tokens = session.options.tokens or (8192 if session.is_cuda else 1024)
    limits = EngineConfig(
        max_context_tokens=num_tokens + 1024, max_concurrent_requests=NUM_REQUESTS,
        max_chunk_tokens=8192 if session.is_cuda else 256,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=session.options.disk) as root:
        folders = [
            write_checkpoint(Path(root) / name, config, experts=EXPERTS, seed=seed, device=session.device)
            for seed, name in enumerate("AB")
        ]
        expected = []
        if session.wants("update"):
            with LLM(folders[1], device=session.device, engine=replace(limits, max_concurrent_requests=4)) as fresh:
                expected = answers(fresh)
            del fresh
            free_memory()
        llm = LLM(folders[0], device=session.device, engine=limits)
        if session.wants("update"):
            for source in ("folder", "tensors", "BF16 tensors"):
                session.attempt(f"update, {source}", measure_update, session, llm, folders, source, whole, expected)
        if session.wants("sleep"):
            session.attempt("sleep", measure_sleep, session, llm)
        if session.wants("replay"):
            session.attempt("replay", measure_replay, session, llm)
        if session.wants("score"):
            session.attempt("score", measure_score, session, llm, num_tokens)
        llm.close()
    free_memory()


def answers(llm: LLM) -> list[Any]:
    prompts = random_prompts(llm.config.vocab_size, 4, 200, seed=5)
    return [(one.token_ids, one.logprobs) for one in llm.generate(prompts, ANSWER)]


def weights_of(
    config: ModelConfig, experts: ExpertFormat, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Those that `write_checkpoint` writes, as a trainer on the same device has them."""
    recipe = Recipe(config, experts, seed=seed)
    for tensor in expected_tensors(config, with_mtp=False):
        weight = random_weight(tensor, recipe, device)
        parts = (weight,) if isinstance(weight, Tensor) else weight.parts
        for stored, part in zip(stored_tensors(tensor, recipe), parts, strict=False):  # no scale of inputs
            yield stored.name, part.view(torch.float8_e8m0fnu) if stored.dtype == "F8_E8M0" else part


def measure_update(
    session: Session, llm: LLM, folders: list[Path], source: str, whole: ModelConfig, expected: list[Any]
) -> Record:
    """A to B; what comes from B's own values gives `expected`: the bits of an engine that starts with B."""
    device = session.device
    given: Any = folders[1]
    if source != "folder":
        given = dict(weights_of(llm.config, "bf16" if source == "BF16 tensors" else EXPERTS, 1, device))
    num_bytes = sum(file.stat().st_size for file in folders[1].glob("*.safetensors"))
    if isinstance(given, dict):
        num_bytes = sum(one.nbytes for one in given.values())
    times, same = [], []
    extra = 0
    for _ in range(3 if source != "BF16 tensors" else 1):
        llm.update_weights(folders[0])
        gc.collect()
        wait(device)
        if session.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        llm.update_weights(given)
        wait(device)
        times.append(time.perf_counter() - began)
        if session.is_cuda:
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        same.append(answers(llm))
    del given
    free_memory()
    seconds = statistics.median(times)
    record = {
        "kind": "update", "source": source, "experts": EXPERTS, "num_layers": len(SCHEDULE), "seconds": seconds,
        "bytes": num_bytes, "gb_per_s": num_bytes / seconds / 1e9,
        "peak_extra_bytes": extra if session.is_cuda else None,
        "modelled_layers": whole.num_hidden_layers, "modelled_seconds": seconds * _ratio(llm.config, whole),
    }  # fmt: skip
    if source == "BF16 tensors":  # rounded from other values than the folder's, which were never BF16
        return record | {"same_bits_each_time": all(one == same[0] for one in same)}
    return record | {"same_bits": all(one == expected for one in same)}


def _ratio(config: ModelConfig, whole: ModelConfig) -> float:
    """Bytes of the whole model for each byte of four layers."""
    many, few = (count_weights(one, EXPERTS, with_draft=False).total_bytes for one in (whole, config))
    return many / few


def measure_sleep(session: Session, llm: LLM) -> list[Record]:
    """Level 1 keeps the weights in host memory; the second time that memory is warm."""
    records = []
    prompts = iter(random_prompts(llm.config.vocab_size, 8, 16, seed=7))
    expected = answers(llm)
    for attempt in range(2):
        at_rest = _seconds(session, partial(llm.generate, next(prompts), FIRST))
        memory = [used_bytes() if session.is_cuda else None]
        falling_asleep = _seconds(session, llm.sleep)
        memory.append(used_bytes() if session.is_cuda else None)
        waking = _seconds(session, llm.wake)
        memory.append(used_bytes() if session.is_cuda else None)
        first = _seconds(session, partial(llm.generate, next(prompts), FIRST))
        records.append({
            "kind": "sleep", "attempt": attempt, "bytes_before": memory[0], "bytes_asleep": memory[1],
            "bytes_awake": memory[2], "sleep_seconds": falling_asleep, "wake_seconds": waking,
            "first_token_seconds": first, "first_token_at_rest_seconds": at_rest, "same_bits": answers(llm) == expected,
        })  # fmt: skip
    return records


def _seconds(session: Session, call: Any) -> float:
    wait(session.device)
    began = time.perf_counter()
    call()
    wait(session.device)
    return time.perf_counter() - began


def measure_replay(session: Session, llm: LLM) -> Record:
    """Mean step of a batch of 64, by turns without and with routed experts."""
    num_tokens = 64 if session.is_cuda else 16
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * max(2, session.options.repeats // 5)):
        wants = bool(turn % 2)
        params = SamplingParams(max_tokens=num_tokens, seed=1, ignore_eos=True, routed_experts=wants)
        prompts = random_prompts(llm.config.vocab_size, NUM_REQUESTS, 4, seed=turn // 2)
        before = llm.engine.stats().num_steps
        took = _seconds(session, partial(llm.generate, prompts, params))
        times[wants].append(took / (llm.engine.stats().num_steps - before))
    one = llm.generate(prompts[0], replace(params, routed_experts=True))[0]
    assert one.routed_experts is not None
    num_bytes = one.routed_experts.nbytes
    plain, with_experts = statistics.median(times[False]), statistics.median(times[True])
    return {
        "kind": "replay", "requests": NUM_REQUESTS, "step_us": 1e6 * plain, "step_with_experts_us": 1e6 * with_experts,
        "cost_percent": 100 * (with_experts / plain - 1), "bytes_per_token": num_bytes / len(one.routed_experts),
    }  # fmt: skip


def measure_score(session: Session, llm: LLM, num_tokens: int) -> Record:
    """Other prompts each time: nothing is cached."""
    count = max(3, session.options.repeats // 4) if session.is_cuda else 3
    prompts = random_prompts(llm.config.vocab_size, 2 * count, num_tokens, seed=11)
    prefill = [_seconds(session, partial(llm.generate, one, FIRST)) for one in prompts[::2]]
    scores = [_seconds(session, partial(llm.score, one)) for one in prompts[1::2]]
    plain, scored = statistics.median(prefill), statistics.median(scores)
    return {
        "kind": "score", "tokens": num_tokens, "prefill_seconds": plain, "score_seconds": scored,
        "times_prefill": scored / plain,
    }  # fmt: skip


def line(record: Record) -> str:
    kind = record["kind"]
    if kind == "update":
        extra = record["peak_extra_bytes"]
        memory = "" if extra is None else f", {extra / 2**30:.2f} GiB extra"
        return (
            f"update from {record['source']:14} {record['seconds']:8.2f} s, {record['gb_per_s']:6.2f} GB/s{memory}; "
            f"{record['modelled_layers']} layers {record['modelled_seconds']:.1f} s"
        )
    if kind == "sleep":
        first, rest = (1e3 * record[name] for name in ("first_token_seconds", "first_token_at_rest_seconds"))
        return (
            f"sleep {record['sleep_seconds']:.2f} s, wake {record['wake_seconds']:.2f} s, first token after it "
            f"{first:.0f} ms (at rest {rest:.0f}); "
            f"bytes {record['bytes_before']}, {record['bytes_asleep']}, {record['bytes_awake']}"
        )
    if kind == "replay":
        return (
            f"routed experts of {record['requests']} requests: step {record['step_us']:.0f} us, with them "
            f"{record['step_with_experts_us']:.0f} us ({record['cost_percent']:+.1f} %), "
            f"{record['bytes_per_token']:.0f} bytes a token"
        )
    return f"scoring {record['tokens']} tokens: {record['times_prefill']:.3f} times their prefill"
