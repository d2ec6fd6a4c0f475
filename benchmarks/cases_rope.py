"""Cases of ops/rows: query heads and attention outputs of Flash (64 x 512) and Pro (128 x 512), index heads (64 x
128).
"""

from __future__ import annotations

import torch

from dsv4.ops.rows import head_norm_rope, rope
from dsv4.testing.bench import BenchCase, Work, nbytes

EPS = 1e-6
ROPE_DIM = 64


def _case(op: str, tokens: int, heads: int, head_dim: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = torch.randn(tokens, heads, head_dim, device=device, dtype=torch.bfloat16)
        positions = torch.randint(0, 1 << 20, (tokens,), device=device)
        freqs = torch.rand(ROPE_DIM // 2, device=device)

        def call() -> torch.Tensor:
            if op == "head_norm_rope":
                return head_norm_rope(x, positions, freqs, EPS)
            return rope(x, positions, freqs, inverse=op == "rope_inverse")

        return Work(call, nbytes(x, positions, freqs), nbytes(x))

    return BenchCase(op, f"{tokens}x{heads}x{head_dim}", {"tokens": tokens, "heads": heads, "dim": head_dim}, build)


CASES = [
    *(_case("head_norm_rope", tokens, heads, 512) for heads in (64, 128) for tokens in (1, 16, 256, 4096)),
    *(_case("rope_inverse", tokens, heads, 512) for heads in (64, 128) for tokens in (1, 16, 256, 4096)),
    *(_case("rope", tokens, 64, 128) for tokens in (1, 4096)),
]
