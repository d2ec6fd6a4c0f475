"""The prefix cache under an agent's trace: conversations that resend their history, a common system prompt, branches.

    python benchmarks/bench_prefix.py --out benchmarks/results/prefix-trace.json

50 conversations of 20 turns, by default. Turns of different conversations alternate; some conversations go back a turn
and take another way. A one-layer-of-each-kind random model answers on the CPU: what is measured is the cache, not the
model. Every byte counted by the cache is checked against its budget after every turn, and a share of the answers
against a run without a cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from pathlib import Path

import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.synth import random_params
from dsv4.request import SamplingParams

CONFIG = ModelConfig.tiny(
    vocab_size=300, hidden_size=64, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128),
    num_nextn_predict_layers=0, num_attention_heads=2, q_lora_rank=64, o_lora_rank=32, n_routed_experts=4,
    moe_intermediate_size=64, index_n_heads=2, max_position_embeddings=4096,
)  # fmt: skip
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 700, (20, 90), 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--snapshots", type=int, default=24, help="on the device")
    parser.add_argument("--host-mib", type=int, default=16)
    parser.add_argument("--check", type=float, default=0.02, help="share of answers compared with a cold run")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run(arguments)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """The whole trace, one turn after another."""
    params = random_params(CONFIG, dequantize_to=torch.float32)
    plain = EngineConfig(max_context_tokens=4096, max_concurrent_requests=1)
    cold = LLM.from_params(CONFIG, params, numerics="exact", engine=_limits(prefix_cache_bytes=0))
    snapshot = LLM.from_params(CONFIG, params, numerics="exact", engine=plain).cache.schema.bytes_per_snapshot
    budget = arguments.snapshots * snapshot + 2**14
    warm = LLM.from_params(
        CONFIG, params, numerics="exact",
        engine=_limits(prefix_cache_bytes=budget, cache_host_bytes=arguments.host_mib * 2**20, num_blocks=96),
    )  # fmt: skip
    draw = random.Random(7)
    system = [draw.randrange(2, 300) for _ in range(SYSTEM_TOKENS)]
    histories = [list(system) for _ in range(arguments.conversations)]
    num_tokens = num_checked = 0
    most_host = most_device = 0
    start = time.perf_counter()
    for turn in range(arguments.turns):
        for place, history in enumerate(histories):
            if turn and draw.random() < 0.05:
                del history[len(history) - draw.randrange(1, 120) :]  # back, and another way
            history += [draw.randrange(2, 300) for _ in range(draw.randint(*TURN_TOKENS))]
            asked = SamplingParams(max_tokens=ANSWER_TOKENS, seed=place, ignore_eos=True, logprobs=0)
            done = warm.generate([history], asked)[0]
            num_tokens += len(history)
            if draw.random() < arguments.check:
                num_checked += 1
                if cold.generate([history], asked)[0] != done:
                    raise SystemExit(f"conversation {place}, turn {turn}: a hit differs from a cold run")
            history += done.token_ids
            stats = warm.engine.stats()
            most_host, most_device = (
                max(most_host, stats.num_prefix_host_bytes), max(most_device, stats.num_snapshot_bytes),
            )  # fmt: skip
            if most_host > arguments.host_mib * 2**20 or most_device > budget:
                raise SystemExit("the cache holds more than its budget")
    seconds = time.perf_counter() - start
    warm.engine.check_integrity()
    stats = warm.engine.stats()
    return {
        "trace": {"conversations": arguments.conversations, "turns": arguments.turns, "prompt_tokens": num_tokens},
        "hits": stats.num_prefix_hits, "host_hits": stats.num_prefix_host_hits, "misses": stats.num_prefix_misses,
        "hit_rate": round(stats.num_prefix_hits / (stats.num_prefix_hits + stats.num_prefix_misses), 4),
        "tokens_saved": stats.num_cached_tokens, "share_saved": round(stats.num_cached_tokens / num_tokens, 4),
        "tokens_read": stats.num_prompt_tokens, "evictions": stats.num_prefix_evictions,
        "device_budget": budget, "most_device_bytes": most_device,
        "host_budget": arguments.host_mib * 2**20, "most_host_bytes": most_host,
        "answers_checked": num_checked, "answers_wrong": 0, "seconds": round(seconds, 1),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
    }  # fmt: skip


def _limits(**changes: int) -> EngineConfig:
    return EngineConfig(max_context_tokens=4096, max_concurrent_requests=2, snapshot_interval_tokens=1024, **changes)


if __name__ == "__main__":
    main()
