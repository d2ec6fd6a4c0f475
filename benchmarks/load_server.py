"""Load on `dsv4 serve`: many streams at once, clients that go, requests that are nonsense. CPU; needs extra `serve`.

    python benchmarks/load_server.py --streams 64 --seconds 60

A random two-layer model is written, served by a process of its own, and asked the same few questions over and over.
Every stream that is read to its end must equal the same question asked alone; when the load is over, every slot and
block must be free. Printed: tokens/s, the server's own share per token (from the end of a step to the socket) as
median and p99, and what happened to the clients. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.synth import write_checkpoint
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
CHANCE_TO_LEAVE = 0.1
NONSENSE_EVERY = 100  # requests
NONSENSE = [b"{", b"\xff\xfe", b"[]", b'{"model": "model"}', b'{"model": "model", "messages": [{"role": "x"}]}']
CHAT = "/v1/chat/completions"


def question(kind: int) -> dict[str, object]:
    """One of the few requests; short, medium and long prompts and answers."""
    chance = random.Random(kind)
    text = "".join(chance.choice("abcdefgh ") for _ in range(chance.choice([4, 40, 300])))
    return {
        "model": "model", "messages": [{"role": "user", "content": text}], "seed": kind, "ignore_eos": True,
        "max_tokens": chance.choice([10, 30, 60]), "stream": True,
    }  # fmt: skip


def solo_answers(folder: Path) -> list[str]:
    """Every question asked alone, without a server."""
    llm = LLM(folder, numerics="exact", engine=EngineConfig(max_context_tokens=CONTEXT, max_concurrent_requests=1))
    assert llm.tokenizer is not None
    answers = []
    for kind in range(NUM_KINDS):
        body = question(kind)
        params = SamplingParams(max_tokens=body["max_tokens"], seed=kind, ignore_eos=True)  # type: ignore[arg-type]
        prompt = encode_chat(llm.tokenizer, body["messages"], ChatOptions())
        answers.append(parse_completion(llm.generate([prompt], params)[0].text or "", thinking=False).content)
    return answers


class Load:
    """The clients, and what became of them."""

    def __init__(self, url: str, expected: list[str], seconds: float) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None))
        self.expected = expected
        self.end = time.monotonic() + seconds
        self.outcomes: Counter[str] = Counter()
        self.num_asked = 0

    async def run(self, num_streams: int) -> None:
        async with self.client:
            await asyncio.gather(*(self._one(random.Random(place)) for place in range(num_streams)))

    async def _one(self, chance: random.Random) -> None:
        while time.monotonic() < self.end:
            self.num_asked += 1
            if self.num_asked % NONSENSE_EVERY == 1:
                body, headers = chance.choice(NONSENSE), {"content-type": "application/json"}
                response = await self.client.post(CHAT, content=body, headers=headers)
                self.outcomes["refused" if response.status_code == 400 else "WRONG STATUS"] += 1
            else:
                self.outcomes[await self._stream(chance)] += 1

    async def _stream(self, chance: random.Random) -> str:
        kind = chance.randrange(NUM_KINDS)
        leaves_after = chance.randrange(20) if chance.random() < CHANCE_TO_LEAVE else None
        text, num_events = "", 0
        async with self.client.stream("POST", CHAT, json=question(kind)) as response:
            if response.status_code != 200:
                return "WRONG STATUS"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "complete" if text == self.expected[kind] else "DIFFERENT FROM SOLO"
                if line:
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    text += choice["delta"].get("content", "")
                    num_events += 1
                if leaves_after is not None and num_events > leaves_after:
                    return "left"
        return "CUT OFF"


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


def start_server(folder: Path, num_slots: int) -> tuple[subprocess.Popen[bytes], str]:
    log = folder.parent / "server.log"
    command = [sys.executable, "-m", "dsv4", "serve", "--model", str(folder), "--port", "0", "--numerics", "exact"]
    command += ["--requests", str(num_slots), "--context", str(CONTEXT), "--max-waiting", "1024"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    while "running on http" not in (text := log.read_text()):
        if process.poll() is not None:
            sys.exit(f"the server did not start:\n{text}")
        time.sleep(0.05)
    return process, text.partition("running on ")[2].split()[0]


def wait_until_free(url: str, seconds: float = 30.0) -> bool:
    """Whether the engine comes to hold nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        view = httpx.get(f"{url}/live", timeout=30).json()
        if view["running"] == view["waiting"] == view["blocks_used"] == 0:
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--slots", type=int, default=64, help="requests in the batch at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        extra = {"tokenizer.json": json.dumps(byte_tokenizer(CONFIG.vocab_size))}
        write_checkpoint(folder, CONFIG, seed=0, extra_files=extra)
        expected = solo_answers(folder)
        process, url = start_server(folder, options.slots)
        try:
            load = Load(url, expected, options.seconds)
            began = time.monotonic()
            asyncio.run(load.run(options.streams))
            seconds = time.monotonic() - began
            is_free = wait_until_free(url)
            metrics, view = httpx.get(f"{url}/metrics").text, httpx.get(f"{url}/live").json()
        finally:
            process.terminate()
            code = process.wait(120)
    report(options, load, seconds, metrics, view)
    print(f"everything freed: {is_free}; the server's exit status: {code}")
    is_wrong = any(outcome.isupper() for outcome in load.outcomes) or not is_free or not load.outcomes["complete"]
    sys.exit(1 if is_wrong else 0)


def report(
    options: argparse.Namespace, load: Load, seconds: float, metrics: str, view: dict[str, float]
) -> None:  # fmt: skip
    print(f"{options.streams} streams, {seconds:.0f} s, {options.slots} slots, two-layer random model, exact numerics")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
    print(f"clients: {dict(sorted(load.outcomes.items()))}")
    print(f"{view['output_tokens']} tokens in {view['steps']} steps: {view['output_tokens'] / seconds:.0f} tokens/s")
    for name, title in (
        ("dsv4_delivery_seconds", "the server's own time per token"),
        ("dsv4_inter_token_seconds", "between two tokens of a stream"),
        ("dsv4_time_to_first_token_seconds", "to the first token"),
    ):
        middle, high = (1000 * quantile(metrics, name, share) for share in (0.5, 0.99))
        print(f"{title}: median {middle:.2f} ms, p99 {high:.2f} ms")


if __name__ == "__main__":
    main()
