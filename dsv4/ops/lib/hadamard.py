"""The orthonormal Walsh-Hadamard rotation in Sylvester order that precedes FP4 in the indexer.

Both forms are the butterfly, neighbours first: log2(N) additions a value instead of N, and an order of summation that
is written down, so that oracle, interpreter and GPU give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.invariant import accumulator


def hadamard_ref(x: Tensor) -> Tensor:
    """x [..., N], N a power of two -> x H / sqrt(N), in x's dtype."""
    size, rotated = x.shape[-1], x.to(accumulator(x))
    for _ in range(size.bit_length() - 1):  # sums of neighbours before their differences: see `hadamard_rows`
        left, right = rotated.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.cat((left + right, left - right), -1)
    return (rotated * size**-0.5).to(x.dtype)


@jit
def hadamard_rows(x, NUM_STAGES: tl.constexpr):
    """fp32 [R, N], N = 2^NUM_STAGES -> x H / sqrt(N) in fp32, not rounded further.

    Every stage pairs neighbours and puts all sums before all differences; after NUM_STAGES of them every value is back
    in its place. These are the additions of `hadamard_ref`.
    """
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    for _stage in tl.static_range(NUM_STAGES):
        left, right = tl.split(tl.reshape(x, [R, N // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), [R, N])
    return x * (N**-0.5)
