"""Several ranks on one GPU: the bits of one process through shared memory; a model of their speed.

    python -m benchmarks ranks --out benchmarks/results/nvidia-h200-ranks.jsonl [--section NAME ...]

| section | what | records (`kind`) |
|---|---|---|
| bits | 2 and 4 processes, Flash layers of each kind, NVFP4 and MXFP4: logits against one process | rank_bits |
| engine | the miniature through `LLM(gpus=2)`, with drafts too: tokens and log-probabilities of `LLM()` | rank_engine |
| speed | one rank's share of 2, 4 and 8 (rank_speed.py) | rank_decode, rank_prefill, rank_throughput |

Processes that share one GPU take turns, so the first two say nothing about speed. Each part runs in processes of its
own, with a time limit; one that fails leaves an `error` record. `--preset tiny --device cpu` tries everything without a
GPU, through gloo (`speed` needs TRITON_INTERPRET=1 there).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import rank_speed
from benchmarks.runner import Record, Session
from dsv4.cache.batch import TokenBatch, columns_of
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfer import to_device
from dsv4.config import EngineConfig, ModelConfig
from dsv4.dist.exchange import CollectiveExchange, Exchange
from dsv4.dist.group import gloo_group
from dsv4.dist.shares import expert_range
from dsv4.dist.symmetric import symmetric_exchange
from dsv4.engine.run.precompile import precompile
from dsv4.engine.run.runner import Runner
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import backend_for
from dsv4.request import SamplingParams
from dsv4.tools.bench.context import cut_config
from dsv4.tools.plan.targets import PRESETS

SECTIONS = ("bits", "engine", "speed")
SCHEDULE = ("swa", "csa", "hca")
FORMATS = ("nvfp4", "mxfp4")
RANKS = (2, 4)
STEPS = 3  # decode steps of a batch
_HOST = "127.0.0.1"
_ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # torch's own switch: several ranks on one GPU


@dataclass(frozen=True)
class Sizes:
    """What the ranks run: batches of short prompts and `STEPS` decode steps; one long prompt on every rank."""

    batches: tuple[int, ...]
    short: int
    long: int

    @classmethod
    def of(cls, preset: str) -> Sizes:
        return cls((1, 3, 5), 12, 40) if preset == "tiny" else cls((1, 16, 64), 24, 1024)

    @property
    def limits(self) -> EngineConfig:
        return EngineConfig(
            max_context_tokens=self.long + STEPS, max_concurrent_requests=self.batches[-1],
            max_chunk_tokens=self.batches[-1], prefix_cache_bytes=0,  # longer calls are compiled apart
        )  # fmt: skip

    @property
    def calls(self) -> list[int]:
        """Rows of every call that one process may make: ranks make some of them, and smaller ones."""
        powers = [1 << bit for bit in range(self.max_rows.bit_length())]
        return sorted({self.long, *(count * length for count in self.batches for length in (1, self.short)), *powers})

    @property
    def max_rows(self) -> int:
        return max(self.long, self.batches[-1] * self.short)

    def tokens(self, num_requests: int, length: int, vocab_size: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(num_requests)
        return torch.randint(1, vocab_size, (num_requests, length + STEPS), generator=generator).tolist()


# ---- one rank ----


class RankUnderTest:
    """A rank's share of the model, and requests on it. With one rank: all of it."""

    def __init__(self, size: int, rank: int, port: int, preset: str, experts: str, device: torch.device) -> None:
        self.size, self.rank, self.device = size, rank, device
        self.sizes = Sizes.of(preset)
        self.config = cut_config(PRESETS[preset](), schedule=SCHEDULE, hash_layers=1)
        backend = backend_for(device, "official")
        own = expert_range(self.config.n_routed_experts, size, rank)
        params = random_params(self.config, experts=experts, device=device, with_mtp=False, own=own)  # type: ignore[arg-type]
        params = prepare_params(params, backend)
        store = dist.TCPStore(_HOST, port, is_master=rank == 0, wait_for_workers=False)
        exchange = None if size == 1 else _exchange(store, size, rank, self.config, self.sizes.max_rows, device)
        self.model = Transformer(self.config, params, torch.bfloat16, backend=backend, exchange=exchange)
        self.cache = KVCacheManager(
            self.config, self.model.schedule, self.sizes.limits, device=device, plain_dtype=None
        )  # fmt: skip
        if device.type == "cuda":  # one process for all: the others find the kernels on disk
            if rank:
                store.wait(["compiled"])
            precompile(self.model, self.cache, self.sizes.calls)
            store.set("compiled", "1")
        self.runners = {"eager": Runner(self.model, self.cache, buckets=(), use_graphs=False)}
        if device.type == "cuda" and size > 1:
            captured = Runner(self.model, self.cache, buckets=self.sizes.batches, use_graphs=True)
            captured.warm_up()
            self.runners["graphs"] = captured

    def home(self, request: int) -> int:
        """Unevenly: rank 0 has twice as many as the others."""
        return request % (self.size + 1) % self.size

    def decode(self, runner: Runner, num_requests: int) -> list[Tensor]:
        """Logits of this rank's requests, [R, vocab]: after their prompts, and after every step."""
        given = self.sizes.tokens(num_requests, self.sizes.short, self.config.vocab_size)
        return self._feed(runner, given, [self.home(request) for request in range(num_requests)], self.sizes.short)

    def prefill(self, runner: Runner) -> list[Tensor]:
        """The same for a long prompt on each of the most ranks that are tried."""
        given = self.sizes.tokens(max(RANKS), self.sizes.long, self.config.vocab_size)
        if self.size == 1:  # one after the other: a call has room for one
            alone = [self._feed(runner, [tokens], [0], self.sizes.long) for tokens in given]
            return [torch.cat(parts) for parts in zip(*alone, strict=True)]
        return self._feed(runner, given[: self.size], list(range(self.size)), self.sizes.long)

    def _feed(self, runner: Runner, given: list[list[int]], homes: list[int], prompt_len: int) -> list[Tensor]:
        mine = [tokens for tokens, home in zip(given, homes, strict=True) if home == self.rank]
        most = max(homes.count(rank) for rank in range(self.size))
        slots = [self.cache.admit(len(tokens)) for tokens in mine]
        found, start = [], 0
        for length in [prompt_len] + [1] * STEPS:
            pieces = [tokens[start : start + length] for tokens in mine]
            self.cache.prepare_forward(slots, [start] * len(slots), [length] * len(slots))
            ids = [token for piece in pieces for token in piece]
            columns = columns_of(slots, [start] * len(slots), [length] * len(slots), ids, most * length)
            on_device = to_device(torch.from_numpy(columns), self.device)
            batch = TokenBatch.over(on_device, self.cache.block_table, most * length)
            rows = torch.arange(len(slots), device=self.device) * length + length - 1
            found.append(runner.forward(batch, rows).logits.float().cpu())
            start += length
        for slot in slots:
            self.cache.release(slot)
        return found

    def results(self, runner: Runner) -> dict[str, list[Tensor]]:
        found = {f"decode {count}": self.decode(runner, count) for count in self.sizes.batches}
        return found | {f"prefill {self.sizes.long}": self.prefill(runner)}

    def own_rows(self, case: str) -> list[int]:
        """Rows of the reference that are this rank's."""
        what, count = case.split()
        if what == "prefill":
            return [self.rank]
        return [request for request in range(int(count)) if self.home(request) == self.rank]


def _exchange(
    store: Any, size: int, rank: int, config: ModelConfig, max_rows: int, device: torch.device
) -> Exchange:  # fmt: skip
    if device.type != "cuda":
        return CollectiveExchange(gloo_group(store, rank, size, _HOST), config.n_routed_experts)
    dist.init_process_group("gloo", store=dist.PrefixStore("default", store), rank=rank, world_size=size)
    return symmetric_exchange(
        dist.group.WORLD, max_rows=max_rows, num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok, dim=config.hidden_size, device=device,
    )  # fmt: skip


def run_rank(given: Record) -> list[Record]:
    """Rank `given["rank"]` of `given["size"]` against the logits in `given["reference"]`; one rank of 1 writes them."""
    rank = RankUnderTest(
        given["size"], given["rank"], given["port"], given["preset"], given["experts"], torch.device(given["device"])
    )
    reference = Path(given["reference"])
    if rank.size == 1:
        torch.save(rank.results(rank.runners["eager"]), reference)
        return []
    expected = torch.load(reference, mmap=True)
    records = []
    for mode, runner in rank.runners.items():
        began = time.perf_counter()
        for case, found in rank.results(runner).items():
            rows = rank.own_rows(case)
            wanted = [logits[rows] for logits in expected[case]]
            pairs = list(zip(found, wanted, strict=True))
            same = sum(int((one == other).all(1).sum()) for one, other in pairs)
            furthest = max([0.0, *(float((one - other).abs().max()) for one, other in pairs if len(one))])
            record = {
                "kind": "rank_bits", "experts": given["experts"], "ranks": rank.size, "rank": rank.rank, "mode": mode,
                "case": case, "rows": sum(map(len, found)), "rows_equal": same,
                "is_same": same == sum(map(len, found)), "largest_difference": furthest,
                "is_finite": all(bool(one.isfinite().all()) for one in found),
            }  # fmt: skip
            records.append(record)
        seconds = round(time.perf_counter() - began, 2)
        replays = {"replays": runner.num_replays, "direct": runner.num_direct, "late": list(runner.compiled_late)}
        records.append({"kind": "rank_run", "rank": rank.rank, "mode": mode, "seconds": seconds, **replays})
    return records


# ---- the engine, and speed ----


def run_engine(given: Record) -> list[Record]:
    """Requests of several kinds through one process, which leaves what it found, or through two ranks."""
    texts = ["SCENE I.", "And it came to pass", "A street in Verona. Enter", "The", "What light through yonder"]
    params = [
        SamplingParams(max_tokens=24, seed=seed, temperature=0.8 * (seed % 2), logprobs=2, ignore_eos=True)
        for seed in range(len(texts))
    ]
    limits = EngineConfig(max_context_tokens=128, max_concurrent_requests=4, max_chunk_tokens=32)
    gpus, drafts, reference = given["gpus"], given["drafts"], Path(given["reference"])
    began = time.perf_counter()
    llm = LLM(device=given["device"], gpus=gpus, engine=limits, drafts=drafts)
    found, stats = llm.generate(texts, params), llm.engine.stats().drafts
    captured = len(llm.engine.runner.captured)
    llm.close()
    if gpus == 1:
        reference.write_bytes(pickle.dumps(found))
    return [{
        "kind": "rank_engine", "ranks": gpus, "drafts": drafts, "requests": len(texts),
        "same": found == pickle.loads(reference.read_bytes()),
        "tokens_per_step": None if stats is None else round(stats.tokens_per_step, 3), "captured": captured,
        "seconds": round(time.perf_counter() - began, 1), "text": found[0].text[:60],
    }]  # fmt: skip


def run_speed(given: Record) -> list[Record]:
    requests, context, prefill = [1, 64, 256, 1024], 8192, 8192
    if given["preset"] == "tiny":
        requests, context, prefill = [1, 5], 200, 16
    return rank_speed.measure_share(
        given["preset"], given["size"], requests, context, prefill, given["repeats"], torch.device(given["device"])
    )


WORK = {"rank": run_rank, "engine": run_engine, "speed": run_speed}


# ---- processes ----


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experts", action="append", choices=FORMATS, help="of the section bits; may be repeated")


def run(session: Session) -> None:
    options = session.options
    common = {"preset": options.preset, "device": options.device}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def attempt(what: str, seconds: float, *works: Record) -> None:
            session.attempt(what, run_processes, folder, what, [common | work for work in works], seconds)

        for experts in (options.experts or FORMATS) if session.wants("bits") else ():
            one = {"work": "rank", "experts": experts, "reference": str(folder / f"{experts}.pt")}
            attempt(f"{experts}, one process", 150, one | {"size": 1, "rank": 0, "port": 0})
            for size in RANKS:
                port = _free_port()
                works = [one | {"size": size, "rank": rank, "port": port} for rank in range(size)]
                attempt(f"{experts}, {size} ranks", 150, *works)
        for gpus, drafts in ((1, "off"), (2, "off"), (2, 2)) if session.wants("engine") else ():
            work = {"work": "engine", "reference": str(folder / "engine.pickle"), "gpus": gpus, "drafts": drafts}
            attempt(f"engine, gpus {gpus}, drafts {drafts}", 200, work)
        for size in (4, 1, 2, 8) if session.wants("speed") else ():
            work = {"work": "speed", "size": size, "repeats": options.repeats}
            attempt(f"speed of one rank of {size}", 120, work)
        session.add(rank_speed.conclusions(session.records))


def run_processes(folder: Path, what: str, works: list[Record], seconds: float) -> list[Record]:
    """All of `works` at once, one process each. Any that fails ends the others."""
    until = time.monotonic() + seconds
    processes, outputs = [], []
    for place, work in enumerate(works):
        out, log = folder / f"out-{place}.json", folder / f"log-{place}.txt"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.ranks", json.dumps(work | {"out": str(out)})]
        with log.open("wb") as file:
            processes.append(
                subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | _ONE_GPU)
            )
        outputs.append((out, log))
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(3)  # the others may have something to say
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    records: list[Record] = []
    for process, (out, log) in zip(processes, outputs, strict=True):
        if out.exists():
            records += json.loads(out.read_text(encoding="utf-8"))
        else:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-60:]
            records.append({"kind": "error", "what": what, "code": process.returncode, "lines": lines})
    return records


def _free_port() -> int:
    """Of a store that is gone when this returns; the ranks' own takes it."""
    return int(dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False).port)


def conclusions(records: list[Record]) -> list[str]:
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record["kind"] == "rank_bits":
            key = tuple(record[name] for name in ("experts", "ranks", "mode", "case"))
            grouped.setdefault(key, []).append(record)
    lines = [f"{'experts':8} {'ranks':>5} {'mode':7} {'case':14} {'rows':>5} {'equal':>5} {'furthest':>9}"]
    for (experts, ranks, mode, case), parts in grouped.items():
        rows, same = sum(part["rows"] for part in parts), sum(part["rows_equal"] for part in parts)
        furthest = max(part["largest_difference"] for part in parts)
        mark = "" if all(part["is_same"] and part["is_finite"] for part in parts) else "  DIFFERENT"
        lines.append(f"{experts:8} {ranks:5} {mode:7} {case:14} {rows:5} {same:5} {furthest:9.2g}{mark}")
    return [*lines, rank_speed.table(records)]


def work_in_this_process(given: Record) -> None:
    found = WORK[given["work"]](given)
    Path(given["out"]).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # nothing of a rank is taken down: the others may be gone


if __name__ == "__main__":
    work_in_this_process(json.loads(sys.argv[1]))
