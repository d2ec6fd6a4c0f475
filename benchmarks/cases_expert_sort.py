"""Cases of ops/moe/sort.py: Flash (256 experts) and Pro (384), six experts a token, tiles of 16 (decode) and 64
rows.
"""

from __future__ import annotations

import torch

from dsv4.ops.moe import SORT_CONFIG, SortConfig, launch_expert_sort, max_tiles
from dsv4.testing.bench import BenchCase, Work, nbytes

TOP_K = 6
VARIANTS = {"": SORT_CONFIG, "-chunk256": SortConfig(256, 512, num_warps=8)}


def _case(num_experts: int, tokens: int, tile_rows: int, variant: str = "") -> BenchCase:
    def build(device: torch.device) -> Work:
        experts = torch.randint(0, num_experts, (tokens, TOP_K), device=device)
        num_pairs = tokens * TOP_K
        written = 4 * (2 * num_experts + 1 + num_pairs + 2 * max_tiles(num_pairs, num_experts, tile_rows))
        config = VARIANTS[variant]
        return Work(lambda: launch_expert_sort(experts, num_experts, tile_rows, None, config), nbytes(experts), written)

    shape: dict[str, int | str] = {"experts": num_experts, "tokens": tokens, "tile_rows": tile_rows, "variant": variant}
    return BenchCase("expert_sort", f"{num_experts}-{tokens}x{TOP_K}{variant}", shape, build)


CASES = [
    *(_case(num_experts, tokens, 16) for num_experts in (256, 384) for tokens in (1, 16, 64)),
    *(_case(num_experts, tokens, 64) for num_experts in (256, 384) for tokens in (256, 4096)),
    *(_case(256, tokens, 64, variant) for tokens in (64, 4096) for variant in list(VARIANTS)[1:]),
]
