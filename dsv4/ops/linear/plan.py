"""Tiles of the linear layers' kernels, and into how many ranges K is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4.formats.layouts import TILE_ROWS


@dataclass(frozen=True)
class LinearTile:
    """How a launch is cut up: nothing here changes a bit of the result.

    `outputs` x `tokens`: the tile. `tokens_first`: tokens are the rows of the matrix product. `is_split`: every split
    of K is a program. `band`: token tiles that run beside each other. `quantize_rows`: up to this many rows a bf16
    input is quantised in the same launch. `max_registers`: a thread's, where the compiler's own limit (128 on sm_100)
    makes it spill.
    """

    outputs: int
    tokens: int
    num_warps: int
    stages: int
    plain_stages: int
    tokens_first: bool = False
    is_split: bool = True
    band: int = 8
    quantize_rows: int = 16
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.num_warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return options | {"maxnreg": self.max_registers}


@dataclass(frozen=True)
class WideConfig:
    """How `wide_linear_kernel` is launched on Hopper, from `min_rows` on: nothing here changes a bit of the result.

    `stages`: steps in shared memory. `band`: as of `LinearTile`; `band_in_turns`: where its groups of warps take turns.
    `registers`: of a thread that multiplies.
    """

    min_rows: int = 225
    stages: int = 6
    band: int = 32
    band_in_turns: int = 8
    registers: int = 232


# key: rows up to; chosen from timings on an H200 (docs/kernels/linear.md)
LINEAR_TILES = {
    16: LinearTile(64, 16, 4, 4, 4),
    32: LinearTile(64, 32, 4, 4, 4),
    64: LinearTile(64, 64, 4, 4, 3),
    224: LinearTile(128, 64, 4, 4, 2, tokens_first=True),
}
MANY_ROWS = LinearTile(128, 64, 4, 3, 2, tokens_first=True, is_split=False)
# a shuffled FP8 weight; for more rows than SHUFFLED_ROWS it is made bf16 first
HALF_WAVES = LinearTile(TILE_ROWS, 128, 4, 2, 2, max_registers=168)
WHOLE_WAVES = LinearTile(2 * TILE_ROWS, 128, 8, 2, 2, max_registers=128)
SHUFFLED_TILES = {
    16: LinearTile(TILE_ROWS, 16, 4, 4, 4),
    32: LinearTile(TILE_ROWS, 32, 4, 4, 4),
    64: LinearTile(TILE_ROWS, 64, 4, 3, 3),
}
SHUFFLED_ROWS = 512
CODED_ROWS = 16  # of a shuffled weight: up to this many rows become codes in the launch that makes them
# a bf16 weight
GROUPED_TILES = {
    16: LinearTile(64, 16, 4, 6, 6),
    64: LinearTile(64, 64, 4, 4, 4),
    512: LinearTile(128, 64, 4, 4, 4, tokens_first=True),
}
GROUPED_MANY_ROWS = LinearTile(128, 128, 8, 4, 4, tokens_first=True, is_split=False, max_registers=168)
WIDE = WideConfig()
# a weight of this many rows has tiles for every multiprocessor; below it K is cut into ranges of SPLIT_COLS or so
UNSPLIT_ROWS = {"fp8": 8192, "plain": 8192, "grouped": 16384}
SPLIT_COLS = {"fp8": 2048, "plain": 1024, "grouped": 2048}
# and into shorter ones where a weight has few rows
FEW_ROWS = 2048
FEW_ROWS_COLS = {"fp8": 1024, "plain": 1024, "grouped": 2048}
QUANTISE_GROUPS = 32


def num_splits(num_rows: int, width: int, kind: str) -> int:
    """Into how many ranges K is cut: by the weight's shape alone, because it decides the order of the sum."""
    cols = FEW_ROWS_COLS[kind] if num_rows <= FEW_ROWS else SPLIT_COLS[kind]
    return 1 if num_rows >= UNSPLIT_ROWS[kind] else max(1, -(-width // cols))


def pick_tile(table: dict[int, LinearTile], many: LinearTile, num_rows: int) -> LinearTile:
    return next((tile for limit, tile in sorted(table.items()) if num_rows <= limit), many)


def pick_shuffled_tile(num_tokens: int, multiprocessors: int) -> LinearTile:
    """Flash's weight has 128 of the larger tiles for every 128 tokens, and a multiprocessor two places for them. Twice
    as many smaller ones take half as long: they are faster where they leave less of the last wave empty.
    """
    if num_tokens <= max(SHUFFLED_TILES):
        return pick_tile(SHUFFLED_TILES, WHOLE_WAVES, num_tokens)
    num_tiles, places = -(-num_tokens // 128) * 128, 2 * multiprocessors
    return HALF_WAVES if -(-2 * num_tiles // places) < 2 * -(-num_tiles // places) else WHOLE_WAVES
