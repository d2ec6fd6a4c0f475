"""How the gate product is cut: along D by constants, over programs by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4.ops.lib.arch import overlapping

# Both decide the bits of a logit: never a function of the batch.
SPLIT_LEN = 256
BLOCK_K = 128


@dataclass(frozen=True)
class GateConfig:
    """How the gate product is divided over programs; results do not depend on it."""

    expert_tile: int
    row_tile: int
    is_split: bool  # one program per split
    num_warps: int = 4
    num_stages: int = 1
    is_fused: bool = True  # if split: the choice in the same launch

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return options | overlapping()


# by the largest number of rows
GATE_CONFIGS = {
    64: GateConfig(expert_tile=64, row_tile=16, is_split=True),
    512: GateConfig(expert_tile=64, row_tile=64, is_split=True),
    1 << 31: GateConfig(expert_tile=128, row_tile=64, is_split=False, num_warps=8, num_stages=2),
}
