"""fp64 operands whose products add up without rounding, so that no order of summation can matter.

A run is up to RUN neighbouring columns. The values of a row in one run are taken to a grid: integers of at most
GRID_BITS bits, times one power of two. A product of two such has 46 bits and a sum of 128 of them 53, which fp64 holds:
whatever kernel, instruction set or number of threads adds them, the sum over a run has the same bits. Runs are then
added first to last.

What the grid costs: nothing for E4M3 with one scale in a run, nothing for bf16 values above 2^-13 of the largest; a
smaller one moves by at most 2^-21 of the largest, as it would in an fp32 sum over a long row.
"""

import torch
from torch import Tensor

RUN = 128
GRID_BITS = 23  # 2 * GRID_BITS + log2(RUN) = 53, the bits of fp64

_EXPONENT_MASK = 0x7FF << 52  # of fp64


def num_runs(width: int) -> int:
    return -(-width // RUN)


def in_runs(x: Tensor) -> Tensor:
    """x [..., K] -> fp64 [..., C, R]: C runs of R columns, the last filled up with zeros. Nothing is rounded."""
    width = x.shape[-1]
    wide = x.double()
    if width <= RUN:
        return wide.unsqueeze(-2)
    if width % RUN:
        wide = torch.nn.functional.pad(wide, (0, -width % RUN))
    return wide.reshape(*x.shape[:-1], num_runs(width), RUN)


def largest_of(x: Tensor) -> Tensor:
    """[..., R] -> [..., 1]: the largest absolute value."""
    return x.abs().amax(-1, keepdim=True)


def power_below(x: Tensor) -> Tensor:
    """fp64, not negative -> the largest power of two in each, 0 for 0; infinity for infinity and NaN."""
    return (x.view(torch.int64) & _EXPONENT_MASK).view(torch.float64)


def on_grid(x: Tensor, bits: int = GRID_BITS, largest: Tensor | None = None) -> Tensor:
    """fp64 [..., R] -> the same as integers of at most `bits` bits times one power of two for all R, and of at least
    `bits` - 2. A run that holds NaN or infinity is all NaN. `largest`: `largest_of` x, where that is known.

    Adding a large number and taking it away again rounds to its last place, ties to even.
    """
    shift = (largest_of(x) if largest is None else largest) * 2.0 ** (54 - bits)
    return x + shift - shift


def weight_operand(weight: Tensor) -> Tensor:
    """weight [..., N, K] in any float dtype -> fp64 [..., C, R, N] on the grid."""
    return on_grid(in_runs(weight)).movedim(-3, -1).contiguous()
