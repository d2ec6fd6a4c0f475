"""Arithmetic of the oracles whose result for one row never depends on the other rows, nor on how many there are.

A plain `x @ w.T` picks its kernel by the number of rows, and vectorised exp or sigmoid treat the last few elements of a
tensor differently; both move results by an ulp when a request is batched or chunked differently. Here matrix products
run in tiles of a fixed number of rows, transcendental functions go through fp64 (so that an ulp there vanishes in the
final rounding), and short sums have a written order.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_TILE = 16
KEY_TILE = 128  # keys per product in attention and index scoring
QUERY_TILE = 64  # queries handled at once where a [queries, keys, dim] gather would be too large


def accumulator(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def rows_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, in the accumulator dtype, ROW_TILE rows per product."""
    acc = accumulator(x)
    weight = weight.to(acc)
    num_rows = x.shape[0]
    padded = torch.nn.functional.pad(x.to(acc), (0, 0, 0, -num_rows % ROW_TILE))
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, num_rows, ROW_TILE):
        out[start : start + ROW_TILE] = torch.nn.functional.linear(padded[start : start + ROW_TILE], weight)
    return out[:num_rows]


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension, first element first (a running sum has no other order)."""
    return x.cumsum(dim).select(dim, -1)


def exp(x: Tensor) -> Tensor:
    return torch.exp(x.double()).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.double()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    wide = x.double()
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + e^x)), the router's score; softplus is the identity above 20."""
    return torch.nn.functional.softplus(x.double()).sqrt().to(x.dtype)
