"""How the kernels of the hyper-connections divide their work."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.ops.hyper.kernel_few import FEW_ROWS
from dsv4.ops.hyper.kernel_many import SUB_ROWS
from dsv4.ops.lib.launch import LaunchConfig, next_power_of_2

HC_POST_CONFIG = LaunchConfig(rows=4, num_warps=4, launch_pdl=True)
HC_POST_COLS = 256  # four rows of 256: a warp reads 512 bytes of a row
MAX_ROWS = 4096  # per launch: bounds the workspace, which is NUM_SPLITS * MIX_COLS fp32 a row
# columns of a stream per program, by hidden size: at most 128 programs read fn, and each has little enough of it to ask
# for all at once (ptxas delays loads when registers run short)
SPLIT_COLS = {4096: 32, 8192: 64, 16384: 128}


NUM_WORKERS = 32  # programs that share step 2 of few tokens once they have arrived
MANY_REGISTERS = 128  # per thread: four programs of four warps on a multiprocessor, two of eight


def padded_splits(num_splits: int) -> int:
    """Rows of the tile in which a token's partials are summed: a power of two, and no tile of step 1.

    The compiler gives tiles of one shape one layout. With as many splits as step 1 has rows, the sum would take the
    layout of step 1's stores, in one kernel and not in the other, and add in another order there (H200, 384 columns).
    Splits that are not there add nothing, and do not change the order of the others.
    """
    block = next_power_of_2(num_splits)
    return 2 * SUB_ROWS if block in (FEW_ROWS, SUB_ROWS) else block


@dataclass(frozen=True)
class HyperTiles:
    """How a launch for many tokens is cut up. Results do not depend on it: the order of sums follows from SPLIT_COLS
    alone."""

    tile_rows: int  # tokens of a program in step 1, a multiple of SUB_ROWS: fn is read and taken apart once for them
    finish_rows: int  # tokens of a program in step 2
    lag: int  # tiles whose step 1 is started before the first one's step 2


# key: the largest number of tokens; up to FEW_ROWS there is nothing to choose
TILES = {
    512: HyperTiles(tile_rows=64, finish_rows=2, lag=8),
    MAX_ROWS: HyperTiles(tile_rows=128, finish_rows=2, lag=4),
}


def pick_tiles(num_tokens: int) -> HyperTiles | None:
    """None: the kernel for few tokens."""
    if num_tokens <= FEW_ROWS:
        return None
    return next(tiles for limit, tiles in TILES.items() if num_tokens <= limit)
