"""The prefix cache under an agent's trace: conversations that resend their history, a common system prompt, branches.

    python -m benchmarks trace --out benchmarks/results/prefix-trace.json [--minutes 40]

A round is 50 conversations of 20 turns, by default. Four conversations ask at once, in random order; some go back and
take another way; half-way through a round the engine is made anew and finds its prefixes in the files. With `--minutes`
rounds follow one another, each with another system prompt, until the time is over, in the middle of one if need be. A
random model with one layer of each kind answers on the CPU: what is measured is the cache, not the model.

After every group of turns, what each tier really holds is compared with its budget: snapshots on the device, units in
host memory, bytes of files in the folder. A share of the groups is asked again without a cache: answers must be equal,
tokens and log-probabilities, and the time of both says what the cache saves. The record has a sample of everything
every few seconds; the picture beside it (FILE.svg) is drawn from the record.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.plots import Picture
from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.synth import random_params
from dsv4.request import Completion, SamplingParams

CONFIG = ModelConfig.tiny(
    vocab_size=300, hidden_size=128, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128),
    num_nextn_predict_layers=0, num_attention_heads=2, q_lora_rank=128, o_lora_rank=64, n_routed_experts=4,
    moe_intermediate_size=128, index_n_heads=2, max_position_embeddings=4096,
)  # fmt: skip
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS, GROUP = 700, (20, 90), 4, 4
NUM_BLOCKS, SECONDS_BETWEEN_SAMPLES, MAX_SAMPLES = 96, 5.0, 400
COUNTED = {  # ours: the engine's
    "hits": "num_prefix_hits", "host_hits": "num_prefix_host_hits", "disk_hits": "num_prefix_disk_hits",
    "misses": "num_prefix_misses", "tokens_saved": "num_cached_tokens", "evictions": "num_prefix_evictions",
    "bad_files": "num_prefix_bad_files",
}  # fmt: skip
TIERS = {"device": "#c0392b", "host": "#2471a3", "disk": "#1e8449"}


@dataclass
class Totals:
    """Counts of the whole run; those of engines that were closed are added up."""

    rounds: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    tokens_saved: int = 0
    hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    evictions: int = 0
    bad_files: int = 0
    restarts: int = 0
    seconds: float = 0.0
    answers_checked: int = 0
    answers_wrong: int = 0
    checked_seconds_warm: float = 0.0
    checked_seconds_cold: float = 0.0
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))


class Trace:
    """Rounds of conversations over one model, with and without a prefix cache."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.totals = Totals()
        self.samples: list[dict[str, float]] = []
        self._params = random_params(CONFIG)
        self._cold = self._make(prefix_cache_bytes=0)
        one = self._make().cache.schema.bytes_per_snapshot
        self.budgets = {
            "device": options.snapshots * one + 2**14, "host": options.host_mib * 2**20,
            "disk": options.disk_mib * 2**20,
        }  # fmt: skip
        self._warm = self._start()
        self._draw = random.Random(7)
        self._began = time.perf_counter()
        self._next_sample = 0.0

    def run(self) -> dict[str, Any]:
        first: dict[str, Any] = {}
        while self._round():
            self._count()
            first = first or self._numbers()
            print(json.dumps(self._numbers()), flush=True)
            if self.options.minutes is None:
                break
        self._count()
        self._warm.engine.check_integrity()
        self._warm.close()
        return {
            "trace": {
                "conversations": self.options.conversations, "turns": self.options.turns, "system": SYSTEM_TOKENS,
                "minutes": round((time.perf_counter() - self._began) / 60, 1),
            },
            "budgets": self.budgets, "first_round": first, "all_rounds": self._numbers(),
            "samples": thinned(self.samples),
            "versions": {
                "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
                "threads": torch.get_num_threads(),
            },
        }  # fmt: skip

    def _round(self) -> bool:
        """Whether it was finished."""
        system = self._tokens(SYSTEM_TOKENS)
        histories = [list(system) for _ in range(self.options.conversations)]
        for turn in range(self.options.turns):
            if turn == self.options.turns // 2:
                self._restart()
            order = list(range(len(histories)))
            self._draw.shuffle(order)
            for start in range(0, len(order), GROUP):
                if self.options.minutes is not None and time.perf_counter() - self._began > 60 * self.options.minutes:
                    return False
                self._ask([histories[place] for place in order[start : start + GROUP]], is_first=turn == 0)
        self.totals.rounds += 1
        return True

    def _ask(self, histories: list[list[int]], *, is_first: bool) -> None:
        for history in histories:
            if not is_first and self._draw.random() < 0.05:
                del history[max(SYSTEM_TOKENS, len(history) - self._draw.randrange(1, 200)) :]  # another way
            history += self._tokens(self._draw.randint(*TURN_TOKENS))
        params = SamplingParams(max_tokens=ANSWER_TOKENS, seed=self._draw.randrange(99), ignore_eos=True, logprobs=0)
        seconds, done = timed(self._warm, histories, params)
        totals = self.totals
        totals.turns += len(histories)
        totals.prompt_tokens += sum(map(len, histories))
        totals.answer_tokens += ANSWER_TOKENS * len(histories)
        totals.seconds += seconds
        if self._draw.random() < self.options.check:
            cold_seconds, expected = timed(self._cold, histories, params)
            totals.answers_checked += len(done)
            totals.answers_wrong += sum(ours != theirs for ours, theirs in zip(done, expected, strict=True))
            totals.checked_seconds_warm += seconds
            totals.checked_seconds_cold += cold_seconds
        for history, completion in zip(histories, done, strict=True):
            history += completion.token_ids
        self._sample()

    def _sample(self) -> None:
        """What the tiers hold, by their own allocations and by the folder, whatever they have counted."""
        stats, cache = self._warm.engine.stats(), self._warm.cache
        held = {
            "device": cache._snapshots.memory_bytes(), "host": cache.tiers.host.nbytes,
            "disk": folder_bytes(self.folder), "used.device": stats.num_snapshot_bytes,
            "used.host": stats.num_prefix_host_bytes, "used.disk": stats.num_prefix_disk_bytes,
        }  # fmt: skip
        for tier, budget in self.budgets.items():
            if max(held[tier], held[f"used.{tier}"]) > budget:
                raise SystemExit(f"{tier}: {held[tier]} bytes held, {held[f'used.{tier}']} in use, of {budget}")
            self.totals.most[tier] = max(self.totals.most[tier], held[f"used.{tier}"], held[tier] * (tier == "disk"))
        now = time.perf_counter() - self._began
        if now >= self._next_sample:
            self._next_sample = now + SECONDS_BETWEEN_SAMPLES
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            sample = {tier: held[f"used.{tier}"] if tier != "disk" else held[tier] for tier in TIERS}
            self.samples.append({"seconds": round(now, 1), "process": rss, "turns": self.totals.turns, **sample})

    def _numbers(self) -> dict[str, Any]:
        totals = self.totals
        asked, saved = totals.hits + totals.misses, totals.tokens_saved
        checked = totals.checked_seconds_cold
        return asdict(totals) | {
            "hit_rate": round(totals.hits / asked, 4),
            "share_of_tokens_saved": round(saved / totals.prompt_tokens, 4),
            "turns_per_second": round(totals.turns / totals.seconds, 3),
            "times_faster_than_cold": round(checked / totals.checked_seconds_warm, 2) if checked else None,
        }

    def _count(self) -> None:
        """Add what this engine has counted, and start it anew: its own counts begin at 0."""
        stats = self._warm.engine.stats()
        for ours, theirs in COUNTED.items():
            setattr(self.totals, ours, getattr(self.totals, ours) + getattr(stats, theirs))
        self._warm.engine.check_integrity()
        self._warm.close()
        self._warm = self._start()

    def _restart(self) -> None:
        self._count()
        self.totals.restarts += 1

    def _start(self) -> LLM:
        return self._make(
            prefix_cache_bytes=self.budgets["device"], cache_host_bytes=self.budgets["host"], num_blocks=NUM_BLOCKS,
            cache_dir=str(self.folder), cache_disk_bytes=self.budgets["disk"],
        )  # fmt: skip

    def _make(self, **changes: Any) -> LLM:
        limits = EngineConfig(
            max_context_tokens=4096, max_concurrent_requests=GROUP, snapshot_interval_tokens=1024, **changes
        )
        return LLM.from_params(CONFIG, self._params, engine=limits, fingerprint="trace")

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(2, CONFIG.vocab_size) for _ in range(count)]


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[Completion]]:
    began = time.perf_counter()
    done = llm.generate(prompts, params)
    return time.perf_counter() - began, done


def folder_bytes(folder: Path) -> int:
    """Of all files, half-written ones too. A thread may rename or delete one while we look."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += 0 if file.is_dir() else file.stat().st_size
    return total


def thinned(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    step = -(-len(samples) // MAX_SAMPLES)
    return samples[::step]


def draw(record: dict[str, Any]) -> str:
    """Share of its budget that each tier uses, over the minutes of the run."""
    left, right, top, bottom = 50, 690, 40, 220
    picture = Picture(720, 280, "Prefix cache under an agent's trace")
    samples, budgets = record["samples"], record["budgets"]
    last = max(samples[-1]["seconds"], 1.0)
    for share in (0, 0.5, 1):
        height = bottom - share * (bottom - top)
        picture.line([(left, height), (right, height)], "#ddd" if share < 1 else "#333")
        picture.words(left - 5, height + 4, f"{100 * share:.0f} %", "end")
    for tier, colour in TIERS.items():
        points = [
            (left + one["seconds"] / last * (right - left), bottom - one[tier] / budgets[tier] * (bottom - top))
            for one in samples
        ]
        picture.line(points, colour, 1.2)
    for place, (tier, colour) in enumerate(TIERS.items()):
        picture.dot(left + 200 * place, 262, colour, tier)
        picture.words(left + 8 + 200 * place, 266, f"{tier}: at most {budgets[tier] / 2**20:.1f} MiB")
    totals = record["all_rounds"]
    title = (
        f"{totals['turns']} turns in {last / 60:.0f} minutes: {100 * totals['hit_rate']:.1f} % hits, "
        f"{100 * totals['share_of_tokens_saved']:.1f} % of the prompts' tokens not read again"
    )
    picture.words(left, 20, title)
    picture.words((left + right) / 2, bottom + 18, f"0 to {last / 60:.1f} minutes", "middle")
    return picture.svg()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--minutes", type=float, help="rounds follow one another for so long; by default one is run")
    parser.add_argument("--snapshots", type=int, default=24, help="on the device")
    parser.add_argument("--host-mib", type=int, default=16)
    parser.add_argument("--disk-mib", type=int, default=48)
    parser.add_argument("--check", type=float, default=0.05, help="share of groups compared with cold runs")
    parser.add_argument("--out", type=Path, help="write FILE.json and FILE.svg")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        record = Trace(options, Path(folder)).run()
    print(json.dumps({key: value for key, value in record.items() if key != "samples"}, indent=2))
    if options.out is not None:
        samples = ",\n    ".join(json.dumps(one) for one in record["samples"])
        text = json.dumps(record | {"samples": []}, indent=2).replace(
            '"samples": []', f'"samples": [\n    {samples}\n  ]'
        )
        options.out.write_text(text + "\n", encoding="utf-8")
        options.out.with_suffix(".svg").write_text(draw(json.loads(text)), encoding="utf-8")
    return int(record["all_rounds"]["answers_wrong"] > 0)
