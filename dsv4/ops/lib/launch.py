"""Launch tables.

Kernels that promise bits are launched with fp fusion off (`LaunchConfig.options`): a * b + c is then two roundings on
every machine, in the interpreter and in torch alike, and the compiler cannot fuse one kernel differently from another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.ops.lib.arch import overlapping
from dsv4.ops.lib.guard import KernelInputError


@dataclass(frozen=True)
class LaunchConfig:
    """One row of an op's launch table: rows of the tile, and Triton's options.

    `launch_pdl`: the launch may begin while the one before it still runs; its kernel calls `pdl_wait`.
    """

    rows: int
    num_warps: int
    num_stages: int = 1
    launch_pdl: bool = False

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return options | overlapping(self.launch_pdl)


def pick_config(table: Mapping[int, LaunchConfig], size: int, what: str) -> tuple[int, LaunchConfig]:
    """The smallest key of the table that holds `size`, with its configuration.

    The key must be a property of the layer (a width), never of the batch: the tile decides the order of a reduction.
    """
    for block in sorted(table):
        if size <= block:
            return block, table[block]
    raise KernelInputError(f"{what} must be at most {max(table)}, found {size}")


def next_power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
