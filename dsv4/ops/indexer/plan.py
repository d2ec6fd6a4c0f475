"""How scoring is divided over programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from dsv4.ops.indexer.kernel_index import MAX_GROUP
from dsv4.ops.lib.arch import H200_MULTIPROCESSORS, num_multiprocessors

WORKSPACE_BYTES = 256 << 20  # scores and lists of the tokens handled at once
INDEX_FLAGS = {"ASCENDING": True, "DROP": False, "HAS_LENGTHS": True}


@dataclass(frozen=True)
class ScoreConfig:
    """How scoring is divided; scores do not depend on it.

    Up to `few_tokens` a program has one token; beyond, a group of neighbours, that share a decoded tile of keys.
    """

    tile: int = 64
    num_warps: int = 4
    stages: int = 4
    multiprocessors: int = H200_MULTIPROCESSORS
    programs: int = 4  # of one token, that share a multiprocessor
    few_tokens: int = 256
    group_tile: int = 128
    group_warps: int = 4
    group_stages: int = 3
    group_programs: int = 8  # for each multiprocessor, where there is work for them
    max_group: int = MAX_GROUP
    shares: int = 32
    start_tiles: int = 3  # a program takes as long to begin as for this many tiles
    max_waves: int = 4

    def group(self, num_tokens: int) -> int:
        """Tokens of one program, one for each `shares` of the batch: many share more, few leave more programs. 0: one
        token.
        """
        return 0 if num_tokens <= self.few_tokens else min(max(num_tokens // self.shares, 1), self.max_group)

    def grid(self, num_tokens: int, capacity: int) -> tuple[int, int]:
        """Programs of a token or group, and how many of these there are.

        Of one token: as many as make waves (`programs` on every multiprocessor) times tiles of each the least: a few
        more than a wave holds would double the time. Groups differ in what they see: several waves even that out.
        """
        group = self.group(num_tokens)
        if group:
            num_groups = -(-num_tokens // group)
            num_programs = self.multiprocessors * self.group_programs
            return min(-(-capacity // self.group_tile), max(-(-num_programs // num_groups), 1)), num_groups
        num_tiles, at_once = -(-capacity // self.tile), self.multiprocessors * self.programs

        def cost(share: int) -> int:
            return -(-share * num_tokens // at_once) * (-(-num_tiles // share) + self.start_tiles)

        most = max(min(num_tiles, self.max_waves * at_once // num_tokens), 1)
        return min(range(1, most + 1), key=cost), num_tokens

    def options(self, is_group: bool) -> dict[str, Any]:
        num_warps, num_stages = (self.group_warps, self.group_stages) if is_group else (self.num_warps, self.stages)
        # relu times weight and the sum over heads are one rounding: the same bits in both kernels
        return {"num_warps": num_warps, "num_stages": num_stages, "STAGES": num_stages, "enable_fp_fusion": True}


SCORE_CONFIG = ScoreConfig()
FEW_QUERIES = 256  # up to here a token's heads are shared by several programs


@cache
def score_config(device: torch.device) -> ScoreConfig:
    """For the GPU at hand."""
    return replace(SCORE_CONFIG, multiprocessors=num_multiprocessors(device))
