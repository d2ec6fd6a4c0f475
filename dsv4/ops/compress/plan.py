"""How the compressors' kernels divide their work, by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4.ops.lib.launch import LaunchConfig, next_power_of_2


@dataclass(frozen=True)
class CompressPlan:
    """How a launch is cut: `config.rows` tokens a program, `tail_rows` rows of a ring written at a time.

    HCA columns are spread over programs, `cols` each; CSA ones are taken all at once. `max_registers` makes room for
    more programs on a multiprocessor. A CSA program may first ask for its first `prefetch_rows` tokens (a power of two,
    or none): in HCA programs, and where tokens are few, it costs more than it brings. CSA entries are pooled side by
    side as long as they have no more than `pool_cols` columns together. No plan changes a bit.
    """

    config: LaunchConfig
    tail_rows: int
    cols: int | None = None
    max_registers: int | None = None
    prefetch_rows: int = 0
    pool_cols: int = 0

    @property
    def options(self) -> dict[str, Any]:
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return self.config.options | limit

    def columns(self, dim: int) -> int:
        return dim if self.cols is None else min(self.cols, dim)

    def finish_rows(self, dim: int) -> int:
        """Rows of a tile that gives each thread at least 8 values of a row, as `rms_norm`'s does: the same order of
        sums.
        """
        return max(256 * self.config.num_warps // dim, 4)

    def candidates(self, reach: int) -> int:
        """Tokens a program looks at. The same for every small number of rows: one compiled kernel serves them all."""
        return next_power_of_2(max(self.config.rows, 16) + reach - 1)


# By the number of tokens: few (decode) get a program each, or one per 16 or 64 columns; many (prefill) share one: then
# 16 tokens of a CSA chunk close the four entries that one tile finishes together, and 128 of an HCA chunk close one.
CSA_FEW_TOKENS, HCA_ONE_WAVE_TOKENS, HCA_FEW_TOKENS = 512, 8, 256
CSA_FEW = CompressPlan(LaunchConfig(rows=1, num_warps=4), tail_rows=2, max_registers=168)
CSA_MANY = CompressPlan(
    LaunchConfig(rows=16, num_warps=4), tail_rows=2, max_registers=168, prefetch_rows=8, pool_cols=512
)
HCA_ONE_WAVE = CompressPlan(LaunchConfig(rows=1, num_warps=4), tail_rows=4, cols=16)
HCA_FEW = CompressPlan(LaunchConfig(rows=1, num_warps=4), tail_rows=4, cols=64)
HCA_MANY = CompressPlan(LaunchConfig(rows=128, num_warps=4), tail_rows=16, cols=32, max_registers=168)


def pick_plan(num_tokens: int, is_overlapping: bool) -> CompressPlan:
    if is_overlapping:
        return CSA_FEW if num_tokens <= CSA_FEW_TOKENS else CSA_MANY
    if num_tokens <= HCA_ONE_WAVE_TOKENS:
        return HCA_ONE_WAVE
    return HCA_FEW if num_tokens <= HCA_FEW_TOKENS else HCA_MANY
