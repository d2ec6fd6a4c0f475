"""Cases of ops/sampling over the vocabulary of 129,280: greedy, plain draws, each filter, everything at once, and
rows that leave a search nothing to hold on to: equal logits, nearly equal ones, two values.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.sampling import (
    HAS_BIAS,
    HAS_PENALTIES,
    SAMPLE_CONFIG,
    SampleConfig,
    SamplingRows,
    SamplingState,
    launch_sample,
)
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

VOCABULARY = 129280


class Settings(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    flags: int = 0
    is_masked: bool = False
    logits: str = "spread"


LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": lambda x: x * 4,
    "equal": torch.zeros_like,
    "near": lambda x: x * 1e-3,
    "two": lambda x: (x > 0).float(),
}
SETTINGS = {
    "greedy": Settings(temperature=0.0),
    "plain": Settings(),
    "top-p": Settings(top_p=0.95),
    "top-k": Settings(top_k=50),
    "all": Settings(0.7, 50, 0.95, 0.01, HAS_PENALTIES | HAS_BIAS, True),
    "equal": Settings(top_p=0.9, logits="equal"),
    "near": Settings(top_p=0.9, logits="near"),
    "two": Settings(top_p=0.9, logits="two"),
    "equal-k-p": Settings(top_k=100_000, top_p=0.9, logits="equal"),
}
VARIANTS = {
    "": SAMPLE_CONFIG,
    "-warps8": SampleConfig(num_warps=8),
    "-programs4096": SampleConfig(programs=4096),
}


def sample_case(name: str, rows: int, variant: str = "", vocabulary: int = VOCABULARY) -> BenchCase:
    chosen, config = SETTINGS[name], VARIANTS[variant]

    def build(device: torch.device) -> Work:
        logits = LOGITS[chosen.logits](torch.randn(rows, vocabulary, device=device))
        state = SamplingState.empty(rows, vocabulary, device)
        for field in ("temperature", "top_k", "top_p", "min_p", "flags"):
            getattr(state, field).fill_(getattr(chosen, field))
        # every token counted already, and no penalty by frequency: one count more changes no draw of a repeated call
        state.token_counts.fill_(1)
        state.repetition_penalty.fill_(1.1)
        state.presence_penalty.fill_(0.2)
        slots = torch.arange(rows, device=device)
        mask = torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device)
        is_masked = torch.full((rows,), int(chosen.is_masked), dtype=torch.int32, device=device)
        call_rows = SamplingRows(slots, slots + 100, mask, is_masked)
        read = [logits]
        read += [state.token_counts] * bool(chosen.flags & HAS_PENALTIES) + [state.bias] * bool(chosen.flags & HAS_BIAS)
        read += [mask] * chosen.is_masked

        def call() -> tuple[Tensor, Tensor]:
            return launch_sample(logits, call_rows, state, config), state.last_tokens

        op = None if variant else op_call("sample", logits=logits, rows=call_rows, state=state)
        return Work(call, nbytes(*read), rows * 16, op=op)

    shape: dict[str, int | str] = {"rows": rows, "vocabulary": vocabulary, "settings": name, "variant": variant}
    return BenchCase("sample", f"{name}-{rows}{variant}", shape, build)


def _logprobs(rows: int, num_top: int, vocabulary: int = VOCABULARY) -> BenchCase:
    def build(device: torch.device) -> Work:
        logits = torch.randn(rows, vocabulary, device=device) * 4
        token_ids = torch.randint(0, vocabulary, (rows,), device=device)
        written = rows * (4 + 12 * num_top)
        call = op_call("sampled_logprobs", logits=logits, token_ids=token_ids, num_top=num_top)
        return Work(call, nbytes(logits, token_ids), written)

    return BenchCase("sampled_logprobs", f"{rows}-top{num_top}", {"rows": rows, "top": num_top}, build)


def _resolve(tokens: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        token_ids = torch.full((tokens,), -1, device=device)
        slots, last_tokens = torch.arange(tokens, device=device), torch.randint(0, VOCABULARY, (tokens,), device=device)
        read = nbytes(token_ids, slots, last_tokens)
        call = op_call("resolve_tokens", token_ids=token_ids, slots=slots, last_tokens=last_tokens)
        return Work(call, read, tokens * 8)

    return BenchCase("resolve_tokens", str(tokens), {"tokens": tokens}, build)


CASES = [
    *(sample_case(name, rows) for name in SETTINGS for rows in (1, 16, 64, 256)),
    *(
        sample_case(name, rows, variant)
        for variant in list(VARIANTS)[1:]
        for name, rows in (("top-p", 1), ("near", 256))
    ),
    *(_logprobs(rows, num_top) for rows in (1, 64) for num_top in (0, 20)),
    *(_resolve(tokens) for tokens in (1, 256)),
]
SMALL = [
    *(sample_case(name, 3, vocabulary=500) for name in ("greedy", "plain", "all")),
    *(_logprobs(3, num_top, vocabulary=500) for num_top in (0, 20)),
    _resolve(5),
]
