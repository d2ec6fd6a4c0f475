"""Prompt tokens of a step where no number is given: one rule for a server, `LLM`, and the plan of either. No torch.

A longer chunk reads prompts faster, and whoever streams beside it waits longer for the next token (docs/serving.md).
"""

from __future__ import annotations

from collections.abc import Callable

from dsv4.config import CPU_CHUNK_TOKENS

# tokens/s of a prompt by the tokens of a chunk: Flash's layers, MXFP4, on an H200 (the last records of kind
# `prefill` in benchmarks/results/nvidia-h200-model.jsonl)
CHUNK_SPEEDS = {2048: 138964.0, 8192: 174768.4, 16384: 178375.6}
GOOD_SPEED = 0.95  # of the best: more would keep the other requests waiting
RESERVE_SHARE = 1 / 8  # of what the weights leave: the rest is the cache's
SHORT_CHUNK = 512  # where little memory is left


def pick_chunk(
    reserve_bytes: Callable[[int], int], cache_bytes: int, room: int, *, has_kernels: bool = True
) -> tuple[int, str]:  # fmt: skip
    """The shortest chunk about as fast as the best, or the longest slower one, whose reserve fits a GPU; and why.
    Without kernels, whose reserves and speeds are meant, a CPU's.

    `reserve_bytes`: what a call of that many tokens needs besides weights and cache. `room`: what the weights leave.
    """
    best = max(CHUNK_SPEEDS.values())
    fast = min(chunk for chunk, speed in CHUNK_SPEEDS.items() if speed >= GOOD_SPEED * best)
    slower = sorted((chunk for chunk in CHUNK_SPEEDS if chunk < fast), reverse=True)
    for chunk in (fast, *slower) if has_kernels else (CPU_CHUNK_TOKENS,):
        reserve = reserve_bytes(chunk)
        if reserve <= room * RESERVE_SHARE and reserve + cache_bytes <= room:
            return chunk, f"{CHUNK_SPEEDS[chunk] / best:.0%} of the fastest measured" if has_kernels else "not measured"
    return SHORT_CHUNK, "little memory is left"
