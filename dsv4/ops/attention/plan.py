"""What a program of attention takes, by counts that the host knows."""

from __future__ import annotations

from typing import NamedTuple

from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, IN_PAIRS, WHOLE
from dsv4.ops.lib.arch import H200_MULTIPROCESSORS, Architecture


class ColumnsPlan(NamedTuple):
    """How the two launches by columns are cut. `wide`, `ahead`: as in AttentionPlan, of the first; `slice`: 64-wide
    groups that a program of the second sums. Of both two programs share a multiprocessor.
    """

    wide: int = 2
    ahead: int = 4
    slice: int = 2
    num_warps: int = 4


class AttentionPlan(NamedTuple):
    """How the work is cut; no choice here changes a bit.

    `heads`: of a program. `has_tiles_only`: programs take a tile each, however many there are. `max_states`: no more
    states than this are stored at a time, of 128 KB each with 64 heads. `multiprocessors`: of the GPU. `wide`: 64-wide
    groups of a row in one matrix, `run_wide` where a query has several runs; `ahead`: groups fetched a tile ahead.
    `combine_rows`: heads a program folds of tiles, `combine_run_rows` of runs, `combine_runs` at a time. `overlap`: a
    launch may begin before the one before it has ended. `columns`: how it is done by columns, if it is; `pairs`:
    whether in pairs of tiles.
    """

    heads: int = 64
    has_tiles_only: bool = False
    max_states: int = 32 * H200_MULTIPROCESSORS
    multiprocessors: int = H200_MULTIPROCESSORS
    num_warps: int = 8
    wide: int = 2
    run_wide: int = 2
    ahead: int = 2
    combine_rows: int = 8
    combine_run_rows: int = 16
    combine_warps: int = 4
    combine_runs: int = 8
    overlap: bool = True
    columns: ColumnsPlan | None = ColumnsPlan()
    pairs: bool = False

    def cut(self, num_programs: int, num_tiles: int, run_tiles: int) -> int:
        """What a program takes, by counts that the host knows: `num_tiles` is what a block table has room for."""
        if self.has_tiles_only:
            return BY_TILE
        num_runs = -(-num_tiles // run_tiles)
        times = self.predicted_us(num_programs, num_tiles, run_tiles)
        if num_programs * num_tiles > self.max_states:
            del times[BY_TILE]
        if num_runs > 1:
            del times[WHOLE]
        else:
            del times[BY_RUN]
        if num_runs > 1 or self.columns is None:
            del times[BY_COLUMNS]
        if not self.pairs:
            del times[IN_PAIRS]
        return min(times, key=times.__getitem__)

    def predicted_us(self, num_programs: int, num_tiles: int, run_tiles: int) -> dict[int, float]:
        """Times on an H200, within 12 % of what was measured: few programs are worth a state stored for every tile or
        run, which takes as long as 1/40 or 1/80 of a tile on a chip that is full. In pairs of tiles that is so at
        decode; a prompt's queries take a fifth less, and have no better cut.
        """
        runs_at_once = run_tiles * self.multiprocessors
        all_tiles = num_programs * num_tiles
        tile_us = 5.2 if num_tiles > run_tiles else 6.0
        return {
            BY_TILE: 15 + all_tiles * (0.05 if all_tiles <= self.multiprocessors else 0.125),
            BY_RUN: 15
            + tile_us * run_tiles * -(-all_tiles // runs_at_once)
            + 0.06 * num_programs * -(-num_tiles // run_tiles),
            WHOLE: 6 + tile_us * num_tiles * -(-num_programs // self.multiprocessors),
            IN_PAIRS: 12 + 3.6 * num_tiles * -(-num_programs // self.multiprocessors),
            BY_COLUMNS: 7
            + self._softmax_us(num_programs, num_tiles, self.share(num_programs, num_tiles))
            + num_tiles * max(1.0, 0.9 * -(-4 * num_programs // self.multiprocessors)),
        }

    def share(self, num_programs: int, num_tiles: int) -> int:
        """Tiles of a CTA that computes their probabilities."""
        return min(range(1, num_tiles + 1), key=lambda share: self._softmax_us(num_programs, num_tiles, share))

    def _softmax_us(self, num_programs: int, num_tiles: int, share: int) -> float:
        """Two programs at once take 6 us for a tile each, one alone 5; to begin takes as long as 0.8 tiles."""
        all_programs = num_programs * -(-num_tiles // share)
        tile_us = 5.0 if all_programs <= self.multiprocessors else 6.0
        return -(-all_programs // (2 * self.multiprocessors)) * (share + 0.8) * tile_us

    def range_tokens(self, token_states: int) -> int:
        """Tokens of a launch that stores this many states a token; in fours, so that pointers keep the alignment that a
        kernel is compiled for.
        """
        most = max(self.max_states // token_states, 1)
        return most if most < 4 else most // 4 * 4


# Hopper: 64 heads are the smallest matrix that a warp group multiplies
PLAN = AttentionPlan()
# and a kernel in Gluon
PAIRS_PLAN = PLAN._replace(pairs=True)
# products by single warps: half the heads leave registers for all of a row (Blackwell's own products spill 2.3 KB), and
# 164 KB of shared memory suffice
HALVES_PLAN = AttentionPlan(heads=32, ahead=1, run_wide=4, columns=None)
# 99 KB: a tile's program needs 98 of them
TILES_PLAN = AttentionPlan(heads=16, num_warps=4, has_tiles_only=True, columns=None)


def pick_plan(architecture: Architecture, num_multiprocessors: int = H200_MULTIPROCESSORS) -> AttentionPlan:
    if architecture.has_warp_groups:
        plan = PAIRS_PLAN if architecture.has_wide_kernels else PLAN
    else:
        plan = HALVES_PLAN if architecture.shared_bytes > 128 * 1024 else TILES_PLAN
    return plan._replace(multiprocessors=num_multiprocessors, max_states=32 * num_multiprocessors)
