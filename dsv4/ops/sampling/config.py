"""How the kernels of sampling divide their work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampleConfig:
    """How the work is divided; results do not depend on it."""

    tile: int = 2048
    num_warps: int = 4
    max_chunks: int = 64

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


SAMPLE_CONFIG = SampleConfig()
# left alone, ptxas stops at 96 of its own accord and spills a few bytes
_DRAW_REGISTERS, _GATHER_REGISTERS = 128, 224
_LOGPROB_TILE = 2048  # decides the order of a sum: never a function of the batch
