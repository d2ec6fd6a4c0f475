"""A storm on `dsv4 serve`: many clients, some of them badly behaved, and a restart in the middle. CPU; extra `serve`.

    python -m benchmarks storm                                   # a minute, a random model of two layers
    python -m benchmarks storm --seconds 600 --restarts 1 --model flash-mini --out benchmarks/results/storm
    python -m benchmarks storm --seconds 600 --kills 30          # of the engine and of front ends, at random

A process of its own serves the model; clients (`storm_clients.py`) ask the same few questions over and over, leave,
dawdle, send half of something or nonsense. Processes that are killed are started again (`--restart`). Every answer that
comes whole must equal the same question asked alone; at the end every slot and block must be free; memory, descriptors
and threads must have stayed what they were; the log must hold no traceback and about a line a request. Printed: what
became of the clients, tokens/s, the server's own share per token. With --out also a JSON record and, where matplotlib
is there, a plot. Exit status 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.records import current_commit
from benchmarks.serving import Sample, ServerProcess
from benchmarks.storm_clients import Storm
from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.shipped import find_checkpoint
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import SamplingParams
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.chat import ChatOptions
from dsv4.text.parse import parse_completion
from dsv4.text.tokenizer import encode_chat

CONFIG = ModelConfig.tiny(
    vocab_size=300, hidden_size=128, num_hidden_layers=2, num_hash_layers=1, compress_ratios=(4, 128, 0),
    num_attention_heads=2, q_lora_rank=128, o_lora_rank=64, n_routed_experts=4, moe_intermediate_size=128,
    index_n_heads=2, max_position_embeddings=4096,
)  # fmt: skip
CONTEXT = 1024
NUM_KINDS = 12
DRAIN_SECONDS = 20.0
MOST_GROWTH_BYTES = 64 * 2**20  # of the memory, from the first half of a server's life to its last tenth
LOG_BYTES_PER_REQUEST = 400


def question(kind: int, model: str) -> dict[str, Any]:
    """One of the few requests; short, medium and long prompts and answers."""
    chance = random.Random(kind)
    text = "".join(chance.choice("abcdefgh ") for _ in range(chance.choice([4, 40, 200])))
    return {
        "model": model, "messages": [{"role": "user", "content": text}], "seed": kind, "ignore_eos": True,
        "max_tokens": chance.choice([4, 10, 20]),
    }  # fmt: skip


def solo_answers(folder: Path, numerics: str) -> list[str]:
    """Every question asked alone, without a server."""
    limits = EngineConfig(max_context_tokens=CONTEXT, max_concurrent_requests=1)
    llm = LLM(folder, numerics="exact" if numerics == "exact" else "official", engine=limits)
    assert llm.tokenizer is not None
    answers = []
    for kind in range(NUM_KINDS):
        body = question(kind, "model")
        params = SamplingParams(max_tokens=body["max_tokens"], seed=kind, ignore_eos=True)
        prompt = encode_chat(llm.tokenizer, body["messages"], ChatOptions())
        answers.append(parse_completion(llm.generate([prompt], params)[0].text or "", thinking=False).content)
    return answers


# ---- the storm ----


async def storm(process: ServerProcess, clients: Storm, options: argparse.Namespace) -> None:
    """Clients, a look at the server now and then, and restarts at even distances."""

    async def look() -> None:
        while True:
            await asyncio.to_thread(process.look)
            await asyncio.sleep(max(options.seconds / 240, 0.5))

    async def restart() -> None:
        for _ in range(options.restarts):
            await asyncio.sleep(options.seconds / (options.restarts + 1))
            clients.begin_restart()
            await asyncio.to_thread(process.stop)
            await asyncio.to_thread(process.start)
            await asyncio.sleep(1.0)
            clients.is_restarting = False

    async def kill() -> None:
        chance = random.Random(options.seed)
        for _ in range(options.kills):
            await asyncio.sleep(options.seconds / (options.kills + 1) * chance.uniform(0.5, 1.2))
            clients.begin_restart()
            clients.killed[await asyncio.to_thread(process.kill_one, chance)] += 1
            await asyncio.to_thread(wait_until_ready, clients.url)
            clients.is_restarting = False

    looking = asyncio.create_task(look())
    changing = [asyncio.create_task(restart()), asyncio.create_task(kill())]
    await clients.run(options.workers)
    await asyncio.gather(*changing)
    looking.cancel()


def wait_until_ready(url: str, seconds: float = 60.0) -> None:
    """Until every front end says that requests are taken, and what died has been noticed."""
    end, num_good = time.monotonic() + seconds, 0
    time.sleep(1.0)
    while num_good < 10 and time.monotonic() < end:
        time.sleep(0.1)
        with suppress(httpx.TransportError):
            num_good = num_good + 1 if httpx.get(f"{url}/ready", timeout=30).status_code == 200 else 0


def wait_until_free(url: str, seconds: float = 60.0) -> dict[str, Any] | None:
    """The live view once the engine holds nothing; None if it never does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        view: dict[str, Any] = httpx.get(f"{url}/live", timeout=30).json()
        if view["running"] == view["waiting"] == view["blocks_used"] == 0:
            return view
        time.sleep(0.1)
    return None


# ---- judging ----


def growth(samples: list[Sample], field: str) -> list[float]:
    """Per life of the server: the median of its last tenth less the largest value of its first half."""
    found = []
    for number in sorted({one.process for one in samples}):
        values = [getattr(one, field) for one in samples if one.process == number]
        if len(values) >= 40:  # below that it has hardly started
            found.append(statistics.median(values[-(len(values) // 10) :]) - max(values[: len(values) // 2]))
    return found


def judge(process: ServerProcess, clients: Storm, log: str, is_free: bool) -> list[str]:
    """What was wrong; empty if nothing was."""
    wrong = [f"a client: {text}" for text in sorted(set(clients.wrong))]
    if not clients.outcomes["complete"]:
        wrong.append("no answer was complete")
    if not is_free:
        wrong.append("the engine still holds something")
    if any(process.exit_codes):
        wrong.append(f"exit codes {process.exit_codes}")
    if "Traceback" in log:
        wrong.append("a traceback in the log")
    num_requests = sum(clients.outcomes.values())
    if len(log) > LOG_BYTES_PER_REQUEST * num_requests + 20_000:
        wrong.append(f"{len(log)} bytes of log for {num_requests} requests")
    for field, most in (("memory_bytes", MOST_GROWTH_BYTES), ("descriptors", 8), ("threads", 1)):
        if any(one > most for one in growth(process.samples, field)):
            wrong.append(f"{field} grew: {growth(process.samples, field)}")
    return wrong


def quantile(text: str, name: str, share: float) -> float:
    """A quantile of a Prometheus histogram, linear within its bucket."""
    buckets = sorted(
        (float(sample.labels["le"]), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{name}_bucket"
    )
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for high, count in buckets:
        if count >= wanted:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / max(count - below, 1)
        low, below = high, count
    return low


LATENCIES = {
    "the server's own time per token": "dsv4_delivery_seconds",
    "between two tokens of a stream": "dsv4_inter_token_latency_seconds",
    "to the first token": "dsv4_time_to_first_token_seconds",
}


def make_record(
    options: argparse.Namespace, process: ServerProcess, clients: Storm, seconds: float, metrics: str,
    view: dict[str, Any], wrong: list[str], log: str,
) -> dict[str, Any]:  # fmt: skip
    """Everything there is to know about the run. Latencies and tokens are of the last server."""
    return {
        "what": "storm on dsv4 serve", "model": options.model or "random, two layers", "numerics": options.numerics,
        "workers": options.workers, "slots": options.slots, "seconds": round(seconds, 1), "restarts": options.restarts,
        "kills": dict(clients.killed), "front_ends": options.front_ends,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(), "torch": torch.__version__, "uvicorn": uvicorn.__version__,
        "commit": current_commit(), "load_average": os.getloadavg()[0],
        "outcomes": dict(sorted(clients.outcomes.items())), "wrong": wrong, "exit_codes": process.exit_codes,
        "last_server": {"steps": view["steps"], "output_tokens": view["output_tokens"]},
        "milliseconds": {
            title: {str(share): round(1000 * quantile(metrics, name, share), 2) for share in (0.5, 0.99)}
            for title, name in LATENCIES.items()
        },
        "log_bytes": len(log), "log_lines": log.count("\n"),
        "growth": {field: growth(process.samples, field) for field in ("memory_bytes", "descriptors", "threads")},
    }  # fmt: skip


def plot(samples: list[Sample], file: Path) -> None:
    """Memory, descriptors, threads and log over time, a colour for each life of the server."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(4, 1, figsize=(8, 8), sharex=True, layout="constrained")
    titles = {
        "memory_bytes": "memory, MiB",
        "descriptors": "descriptors",
        "threads": "threads",
        "log_bytes": "log, KiB",
    }
    scale = {"memory_bytes": 2**20, "log_bytes": 2**10}
    for axes, (field, title) in zip(rows, titles.items(), strict=True):
        for number in sorted({one.process for one in samples}):
            mine = [one for one in samples if one.process == number]
            axes.plot([one.seconds for one in mine], [getattr(one, field) / scale.get(field, 1) for one in mine])
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
    rows[-1].set_xlabel("seconds")
    figure.savefig(file, dpi=80)
    plt.close(figure)


# ---- running ----


def run(options: argparse.Namespace, workspace: Path) -> tuple[dict[str, Any], ServerProcess]:
    """The whole storm; its record, and the process with its samples."""
    if options.model is None:
        folder = workspace / "model"
        extra = {"tokenizer.json": json.dumps(byte_tokenizer(CONFIG.vocab_size))}
        write_checkpoint(folder, CONFIG, seed=0, extra_files=extra)
    else:
        folder = find_checkpoint(options.model)
    expected = solo_answers(folder, options.numerics)
    log_file = workspace / "server.log"
    process = ServerProcess(folder, log_file, [
        "--requests", str(options.slots), "--max-waiting", "1024", "--numerics", options.numerics, "--context",
        str(CONTEXT), "--drain-seconds", str(DRAIN_SECONDS), "--front-ends", str(options.front_ends),
        *(["--restart"] if options.kills else []),
    ])  # fmt: skip
    url = process.start()
    try:
        questions = [question(kind, "model") for kind in range(NUM_KINDS)]
        clients = Storm(url, questions, expected, options.seconds)
        began = time.monotonic()
        asyncio.run(storm(process, clients, options))
        seconds = time.monotonic() - began
        view = wait_until_free(url)
        metrics = httpx.get(f"{url}/metrics").text
        last_view = view or httpx.get(f"{url}/live", timeout=30).json()
        process.stop()
    finally:
        process.process.kill()
    log = log_file.read_text()
    wrong = judge(process, clients, log, is_free=view is not None)
    return make_record(options, process, clients, seconds, metrics, last_view, wrong, log), process


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--slots", type=int, default=64, help="requests in the batch at most")
    parser.add_argument("--restarts", type=int, default=0, help="times the server is stopped and started meanwhile")
    parser.add_argument("--kills", type=int, default=0, help="processes of the server that are killed meanwhile")
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed and when")
    parser.add_argument("--model", help="a checkpoint folder or a shipped one; default: random, two layers")
    parser.add_argument("--numerics", default="exact", choices=["exact", "official"])
    parser.add_argument("--out", type=Path, help="write FILE.json and, with matplotlib, FILE.png")


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        record, process = run(options, Path(name))
    print(*(f"{name}: {value}" for name, value in record.items()), sep="\n")
    if options.out is not None:
        step = max(len(process.samples) // 120, 1)
        samples = [asdict(one) for one in process.samples[::step]]
        options.out.with_suffix(".json").write_text(json.dumps({**record, "samples": samples}) + "\n")
        try:
            plot(process.samples, options.out.with_suffix(".png"))
        except ImportError:
            print("matplotlib is not there: no plot")
    return int(bool(record["wrong"]))
