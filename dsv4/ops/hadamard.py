"""The orthonormal Walsh-Hadamard rotation in Sylvester order that precedes FP4 in the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.invariant import accumulator, rows_matmul


def hadamard_ref(x: Tensor) -> Tensor:
    """x [..., N], N a power of two -> x H / sqrt(N), in x's dtype."""
    size = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=accumulator(x), device=x.device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    rotated = rows_matmul(x.reshape(-1, size), matrix) * size**-0.5
    return rotated.to(x.dtype).view(x.shape)
