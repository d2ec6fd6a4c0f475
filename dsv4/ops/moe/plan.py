"""How the kernels of ops/moe divide their work, and which form serves how many tokens. No form and no tile changes a
bit; `Ranges` does, and is the same for every number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

from dsv4.ops.lib.arch import architecture, blackwell_registers
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.moe.kernel_rows import DIRECT_PAIRS

# orders in which the columns of x and hidden may lie in memory: `in_order` in kernel_products.py
NATURAL, PRODUCT, OPERAND = 0, 1, 2
BLOCK = 64  # weight rows of one matrix product, in all forms but TILES
PAIR_BLOCK = 128  # of a CTA of down, except in FEW: two products
FEW_ROWS = 8  # token rows of a tile in FEW
# token rows and weight rows of a tile in TILES; kernel_tiles.py and kernel_dense.py lay out shared memory for these
TILES_ROWS, TILES_OUTPUTS = 128, 256


class Form(Enum):
    """Which kernels a call launches.

    FEW (kernel_few.py): CTAs find their rows themselves, and each has one range of the columns of one matrix.
    NARROW (kernel_gate_up.py, kernel_down.py): a launch before sorts the pairs; tiles of 8 to 32 token rows, mma.sync.
    WIDE (kernel_wide.py): sorted too; tiles of 32 token rows (at most half full: computed as 16), wgmma. Hopper.
    TILES (kernel_tiles.py, kernel_dense.py): sorted too; persistent CTAs, tiles of up to 128 token rows. Hopper.
    """

    FEW, NARROW, WIDE, TILES = range(4)


@dataclass(frozen=True)
class GemmConfig:
    """One of the two products: column tiles that a step takes, warps, stages; registers of a thread at most."""

    unroll: int = 2
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        if self.max_registers is None:
            return options
        # ptxas for Blackwell needs a few more
        return options | {"maxnreg": self.max_registers} | blackwell_registers(self.max_registers + 16)


@dataclass(frozen=True)
class Ranges:
    """Into how many ranges the columns of a matrix are cut at most, each with a sum of its own: routed experts' and the
    shared one's, gate and up's and down's. Bits depend on it: it is the same for every number of tokens.

    A shared CTA reads twice the bytes of a routed one, hence twice the ranges.
    """

    gate_up: int = 1
    shared_gate_up: int = 2
    down: int = 1
    shared_down: int = 2

    def of(self, wanted: int, cols: int) -> int:
        """Ranges of equal numbers of column tiles."""
        tiles = cols // 128
        return next(count for count in range(min(wanted, tiles), 0, -1) if tiles % count == 0)


RANGES = Ranges()


@dataclass(frozen=True)
class MoeConfig:
    """The form, token rows of a tile of a routed expert and of the shared one (multiples of 8; in WIDE powers of two
    from 16 on), and the two products.

    `rounds_shared` (NARROW): a CTA of gate and up of the shared expert has 128 weight rows, and rounds hidden. Without
    it the reader does. Bits depend on `ranges` alone.
    """

    form: Form
    rows: int
    shared_rows: int
    gate_up: GemmConfig = GemmConfig()
    down: GemmConfig = GemmConfig()
    ranges: Ranges = RANGES
    rounds_shared: bool = False

    def __post_init__(self) -> None:
        if self.form is Form.FEW and (self.rows, self.shared_rows) != (FEW_ROWS, FEW_ROWS):
            raise KernelInputError(f"expected tiles of {FEW_ROWS} token rows for few tokens, found {self}")
        has_groups = all(one.num_warps % 4 == 0 and one.unroll == 1 for one in (self.gate_up, self.down))
        if self.form is Form.WIDE and not (has_groups and min(self.rows, self.shared_rows) >= 16):
            raise KernelInputError(f"expected whole warp groups, a column tile a step and 16 token rows, found {self}")


NARROW_ROWS = 511  # up to this many tokens or rows the narrow form
WIDE_COLUMNS = 1024  # from this many columns of every matrix on the wide one: fewer leave it nothing to overlap
WIDE_PAIRS = 32  # for each expert: up to here the wide form, beyond tiles where they can be
# token rows of a tile in NARROW, by pairs for each expert (at most half full it costs half); of a linear's, by rows
_ROWS = {3: 8, 1 << 30: 16}
_LINEAR_ROWS = {8: 8, 1 << 30: 16}
FEW_TOKENS = 5
FEW_CONFIG = MoeConfig(Form.FEW, FEW_ROWS, FEW_ROWS)
# `rows` of both are those of `_ROWS`; with 128 registers four CTAs of gate and up live on a multiprocessor
_SOME = partial(
    MoeConfig, Form.NARROW, shared_rows=8, gate_up=GemmConfig(max_registers=128), down=GemmConfig(max_registers=80)
)
# the shared expert's weights are decoded for many tokens at once
_MORE = partial(MoeConfig, Form.NARROW, shared_rows=32, gate_up=GemmConfig(max_registers=128), rounds_shared=True)
_NARROW = {11: _SOME, 1 << 30: _MORE}  # by tokens
# with 168 registers three CTAs of one warp group live on a multiprocessor with 32 token rows; 64 spill 952 bytes
_WIDE_GEMM = GemmConfig(unroll=1, max_registers=168)
WIDE_CONFIG = MoeConfig(Form.WIDE, 32, 32, _WIDE_GEMM, _WIDE_GEMM)
TILES_CONFIG = MoeConfig(Form.TILES, TILES_ROWS, TILES_ROWS)
# one linear
_LINEAR, _WIDE_LINEAR = GemmConfig(), GemmConfig(unroll=1, num_warps=8, num_stages=4)
_WIDE_LINEAR_ROWS = 128


def _at_most(table: Mapping[int, Any], size: int) -> Any:
    return next(entry for bound, entry in sorted(table.items()) if size <= bound)


def _is_wide(num_rows: int, num_columns: int) -> bool:
    """On Hopper (and in the interpreter). That Blackwell's instructions for large and small products agree in their
    bits is not known, so there one form serves all.
    """
    return num_rows > NARROW_ROWS and num_columns >= WIDE_COLUMNS and architecture().has_warp_groups


def pick_moe_config(
    num_tokens: int, top_k: int, num_experts: int, num_columns: int, *, has_tiles: bool = False
) -> MoeConfig:
    """`num_experts`: among which the tokens choose; `num_columns`: the fewest of any matrix; `has_tiles`: whether
    TILES can be used (`takes_tiles`).
    """
    per_expert = -(-num_tokens * top_k // num_experts)
    if _is_wide(num_tokens, num_columns):
        return TILES_CONFIG if has_tiles and per_expert > WIDE_PAIRS else WIDE_CONFIG
    if num_tokens <= FEW_TOKENS and num_tokens * top_k <= DIRECT_PAIRS:
        return FEW_CONFIG
    return cast(MoeConfig, _at_most(_NARROW, num_tokens)(rows=_at_most(_ROWS, per_expert)))


def pick_linear_config(num_rows: int, num_columns: int) -> tuple[int, GemmConfig, bool]:
    """Token rows of a tile, the product, and whether it is the wide form."""
    if _is_wide(num_rows, num_columns):
        return _WIDE_LINEAR_ROWS, _WIDE_LINEAR, True
    return _at_most(_LINEAR_ROWS, num_rows), _LINEAR, False
