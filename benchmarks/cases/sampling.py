"""Cases of ops/sampling over the vocabulary of 129,280: greedy, plain draws, each filter, everything at once."""

from __future__ import annotations

import torch

from dsv4.ops.sampling import SAMPLE_CONFIG, SampleConfig, SamplingBatch, launch_sample, sampled_logprobs
from dsv4.testing.bench import BenchCase, Work, nbytes

VOCABULARY = 129280
# temperature, top_k, top_p, min_p, whether there are penalties
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0, False),
    "plain": (1.0, 0, 1.0, 0.0, False),
    "top-p": (1.0, 0, 0.95, 0.0, False),
    "top-k": (1.0, 50, 1.0, 0.0, False),
    "all": (0.7, 50, 0.95, 0.01, True),
}
VARIANTS = {
    "": SAMPLE_CONFIG,
    "-warps8": SampleConfig(tile=2048, num_warps=8, max_chunks=64),
    "-tile4096": SampleConfig(tile=4096, max_chunks=32),
}


def _sample(name: str, rows: int, variant: str = "") -> BenchCase:
    temperature, top_k, top_p, min_p, has_penalties = SETTINGS[name]

    def build(device: torch.device) -> Work:
        logits = torch.randn(rows, VOCABULARY, device=device) * 4

        def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        seeds, steps = (torch.arange(rows, device=device) + offset for offset in (7, 100))
        batch = SamplingBatch(
            temperature=column(temperature), top_k=column(top_k, torch.int64), top_p=column(top_p), min_p=column(min_p),
            repetition_penalty=column(1.1), presence_penalty=column(0.2), frequency_penalty=column(0.1),
            seeds=seeds, steps=steps,
            prompt_mask=torch.rand(logits.shape, device=device) < 0.01 if has_penalties else None,
            output_counts=torch.randint(0, 2, logits.shape, device=device).int() if has_penalties else None,
        )  # fmt: skip
        masks = [t for t in (batch.prompt_mask, batch.output_counts) if t is not None]
        config = VARIANTS[variant]
        return Work(lambda: launch_sample(logits, batch, config), nbytes(logits, *masks), rows * 8)

    shape: dict[str, int | str] = {"rows": rows, "vocabulary": VOCABULARY, "settings": name, "variant": variant}
    return BenchCase("sample", f"{name}-{rows}{variant}", shape, build)


def _logprobs(rows: int, num_top: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        logits = torch.randn(rows, VOCABULARY, device=device) * 4
        token_ids = torch.randint(0, VOCABULARY, (rows,), device=device)
        written = rows * (4 + 12 * num_top)
        return Work(lambda: sampled_logprobs(logits, token_ids, num_top), nbytes(logits, token_ids), written)

    return BenchCase("sampled_logprobs", f"{rows}-top{num_top}", {"rows": rows, "top": num_top}, build)


CASES = [
    *(_sample(name, rows) for name in SETTINGS for rows in (1, 16, 64, 256)),
    *(_sample(name, rows, variant) for variant in list(VARIANTS)[1:] for name, rows in (("top-p", 1), ("all", 64))),
    *(_logprobs(rows, num_top) for rows in (1, 64) for num_top in (0, 20)),
]
