"""How a selection is divided over programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsv4.ops.lib.arch import num_multiprocessors
from dsv4.ops.select.kernel_long import COUNTERS

MAX_K = 1024
MAX_COLUMNS = 1 << 24  # an index takes 24 bits of the order in which the best come first
COUNTERS_OF_SPREAD = 4096  # arrival counters for each number of programs


class Spread(NamedTuple):
    """How a long row is divided."""

    programs: int  # a power of two
    resident: int  # programs of a multiprocessor, of this row or others

    @property
    def is_few(self) -> bool:
        return self.resident == 1


@dataclass(frozen=True)
class TopkConfig:
    """How the work is divided; results do not depend on it."""

    short_row: int = 16384  # rows up to here fit the registers of one program
    short_keys: int = 32  # a thread's share of a short row
    short_tile: int = 2048  # of its columns, written at once
    few_tile: int = 4096  # the same with a row for each multiprocessor or fewer: then programs have twice the registers
    long_row: int = 4096  # rows up to here are never spread
    long_keys: int = 1024  # a program of a spread row has at least this many
    long_tile: int = 2048  # read at once
    long_programs: int = 128  # of a row, at most
    long_warps: int = 8
    resident: int = 4  # programs of a multiprocessor: registers are limited so that they fit for certain
    lone_rows: int = 2  # up to here each program has a multiprocessor, and its keys in registers
    lone_keys: int = 512  # at least, and at most
    max_lone_keys: int = 4096

    def spread(self, num_rows: int, num_columns: int, device: torch.device) -> Spread | None:
        """On the GPU at hand."""
        return self.spread_over(num_rows, num_columns, num_multiprocessors(device))

    def spread_over(self, num_rows: int, num_columns: int, limit: int) -> Spread | None:
        """How rows are spread over programs that wait for each other, on `limit` multiprocessors; None where rows are
        short. All programs must run at once, unless each has a row of its own and waits for none.
        """
        if num_columns <= self.long_row:
            return None
        if num_rows <= min(self.lone_rows, limit):
            programs = self._power(limit // num_rows, num_columns // self.lone_keys)
            if num_columns <= programs * self.max_lone_keys:
                return Spread(programs, 1)
        at_once = self.resident * limit if COUNTERS * num_rows <= COUNTERS_OF_SPREAD else 0
        programs = self._power(at_once // num_rows, num_columns // self.long_keys)
        return None if programs == 1 and num_columns <= self.short_row else Spread(programs, self.resident)

    def _power(self, *limits: int) -> int:
        return 1 << max(min(*limits, self.long_programs).bit_length() - 1, 0)

    def short_warps(self, block: int) -> int:
        return min(max(block // (32 * self.short_keys), 4), 16)


TOPK_CONFIG = TopkConfig()
OPTIONS: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": False}
