"""How the kernels of ops/moe divide their work, and which division serves how many tokens. No division changes a
bit; `Ranges` does, and is the same for every number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from dsv4.ops.lib.arch import architecture, blackwell_registers
from dsv4.ops.lib.guard import KernelInputError

# orders in which the columns of x and hidden may lie in memory: `in_order` in kernel_products.py
NATURAL, PRODUCT, OPERAND = 0, 1, 2


@dataclass(frozen=True)
class GemmConfig:
    """One of the two products: weight rows a program has, column tiles a step takes, warps, stages. `split`: programs
    have one range of columns (and one of the two matrices of gate and up), and the last to arrive adds up.
    `max_registers`: a thread's. `pair` (down): the rows are two halves, each a product of its own: side by side in the
    wide form, one after the other in the narrow one (halves of 64, not with `split`). Bits depend on none of it.
    """

    block: int = 64
    unroll: int = 2
    num_warps: int = 4
    num_stages: int = 3
    split: bool = False
    max_registers: int | None = None
    pair: bool = False

    @property
    def at_once(self) -> int:
        """Rows of one product."""
        return self.block // (1 + self.pair)

    @property
    def is_wide(self) -> bool:
        """Whether the wide form can have it: a column tile a step, and what the compiler takes wgmma for."""
        has_groups = self.num_warps % 4 == 0 and self.at_once % 64 == 0
        return has_groups and self.unroll == 1 and not self.split

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

    A shared program reads twice the bytes of a routed one, hence twice the ranges.
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
    """How the work is divided: token rows of a tile of a routed expert and of the shared one (multiples of 8 in the
    narrow form; in the wide one 16 to 128, powers of two or three times one), and the two products. `smaller` (wide):
    one or two sizes as which a tile is computed that has no more rows than that; half of `rows` if none. `tiles`: the
    products are those of kernel_tiles.py and, of the shared expert, kernel_dense.py.

    Narrow: `ordered`: x and hidden lie in operand order (kernel_products.py), where a launch before wrote them so.
    `shared_block`: weight rows of a program of the shared expert in gate and up; 128 of them are rounded there.
    `direct`: where pairs are few, no launch sorts them: programs look for their rows themselves, and each waits for
    that. Bits depend on none of it, but on `ranges`.
    """

    rows: int
    shared_rows: int
    gate_up: GemmConfig = GemmConfig()
    down: GemmConfig = GemmConfig()
    ranges: Ranges = RANGES
    wide: bool = False
    tiles: bool = False
    smaller: tuple[int, ...] = ()
    ordered: bool = False
    shared_block: int | None = None
    direct: bool = False

    def __post_init__(self) -> None:
        if self.wide and not (self.gate_up.is_wide and self.down.is_wide and min(*self.sizes, self.shared_rows) >= 16):
            raise KernelInputError(f"expected whole warp groups, 64 weight rows and 16 token rows, found {self}")

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the middle and the small form of a tile of the wide form."""
        smaller = self.smaller or (max(self.rows // 2, 16),)
        return (smaller[0] if len(smaller) > 1 else self.rows), smaller[-1]


NARROW_ROWS = 511  # up to this many tokens or rows the narrow form
WIDE_COLUMNS = 1024  # from this many columns of every matrix on the wide one: fewer leave it nothing to overlap
# token rows of a tile, by pairs for each expert (a tile at most half full costs half); of a tile of a linear, by rows
_ROWS = {3: 8, 1 << 30: 16}
_LINEAR_ROWS = {8: 8, 1 << 30: 16}
# the narrow form, by tokens. One or a few: programs enough to fill the chip. Some: with 128 registers four programs of
# gate and up live on a multiprocessor; down's are short, so each has two blocks of rows. More: the shared expert's
# weights are decoded for many tokens at once
_FEW = MoeConfig(8, 8, GemmConfig(split=True), GemmConfig(split=True), direct=True)
_SOME = MoeConfig(8, 8, GemmConfig(max_registers=128), GemmConfig(block=128, pair=True, max_registers=80), ordered=True)
_MORE = MoeConfig(
    16, 32, GemmConfig(max_registers=128), GemmConfig(block=128, pair=True), ordered=True, shared_block=128
)
FEW_TOKENS = 5
_NARROW = {FEW_TOKENS: _FEW, 11: _SOME, 1 << 30: _MORE}
# the wide form, by pairs for each expert: with 168 registers three programs of one warp group live on a multiprocessor;
# with many rows two warp groups share a tile of tokens
_WIDE_FEW = MoeConfig(
    32, 32, GemmConfig(unroll=1, max_registers=168), GemmConfig(block=128, unroll=1, max_registers=168, pair=True),
    wide=True,
)  # fmt: skip
_WIDE_MANY = MoeConfig(
    128, 64, GemmConfig(block=128, unroll=1, num_warps=8, num_stages=4),
    GemmConfig(block=256, unroll=1, num_warps=8, num_stages=4, pair=True), wide=True, smaller=(96, 64),
)  # fmt: skip
_WIDE = {32: _WIDE_FEW, 1 << 30: _WIDE_MANY}
WIDE_CONFIGS = tuple(_WIDE.values())
# in place of the last, where kernel_tiles.py is used (launch_tiles.py)
TILES_CONFIG = replace(_WIDE_MANY, tiles=True)
# one linear
_LINEAR, _WIDE_LINEAR = GemmConfig(), GemmConfig(block=128, unroll=1, num_warps=8, num_stages=4)
_WIDE_LINEAR_ROWS = 128


def _at_most(table: Mapping[int, Any], size: int) -> Any:
    return next(entry for bound, entry in sorted(table.items()) if size <= bound)


def _is_wide(num_rows: int, num_columns: int) -> bool:
    """On Hopper (and in the interpreter). That Blackwell's instructions for large and small products agree in their
    bits is not known, so there one form serves all.
    """
    return num_rows > NARROW_ROWS and num_columns >= WIDE_COLUMNS and architecture().has_warp_groups


def pick_moe_config(num_tokens: int, top_k: int, num_experts: int, num_columns: int) -> MoeConfig:
    """`num_experts`: among which the tokens choose; `num_columns`: the fewest of any matrix."""
    per_expert = -(-num_tokens * top_k // num_experts)
    if _is_wide(num_tokens, num_columns):
        return cast(MoeConfig, _at_most(_WIDE, per_expert))
    return replace(_at_most(_NARROW, num_tokens), rows=_at_most(_ROWS, per_expert))


def pick_linear_config(num_rows: int, num_columns: int) -> tuple[int, GemmConfig, bool]:
    """Token rows of a tile, the product, and whether it is the wide form."""
    if _is_wide(num_rows, num_columns):
        return _WIDE_LINEAR_ROWS, _WIDE_LINEAR, True
    return _at_most(_LINEAR_ROWS, num_rows), _LINEAR, False
