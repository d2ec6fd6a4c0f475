"""How the kernels of sampling divide their work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampleConfig:
    """How the work is divided; results do not depend on it."""

    max_chunks: int = 64  # of a row
    programs: int = 2048  # of a launch, about: a launch in which rows have nothing to do costs its programs
    num_warps: int = 4

    def chunk_tiles(self, num_rows: int, num_tiles: int) -> int:
        """How many tiles a chunk has."""
        wanted = min(max(self.programs // num_rows, 1), self.max_chunks)
        return -(-num_tiles // wanted)


SAMPLE_CONFIG = SampleConfig()
OPTIONS: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": False}
LOGPROB_TILE = 2048  # decides the order of a sum: never a function of the batch
RESOLVE_BLOCK = 256
