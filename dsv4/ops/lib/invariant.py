"""Arithmetic of the oracles whose result for one row depends neither on the other rows nor on the machine.

A plain `x @ w.T` picks its kernel by the number of rows and by the CPU, and vectorised exp or sigmoid treat the last
few elements of a tensor differently; both move results by an ulp. Here products of bf16 and FP8 are exact sums
(formats/exact_sums.py), transcendental functions go through fp64 (so that an ulp there vanishes in the final rounding),
and other sums have a written order. Products of fp32 and fp64 run in tiles of a fixed number of rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dsv4.formats.exact_sums import in_runs, on_grid, power_below
from dsv4.formats.tensors import AnyWeight, dequantize, operand_of

ROW_TILE = 16
WEIGHT_BITS, VALUE_BITS, MAX_KEYS = 20, 19, 1 << 14  # of a query's keys in attention
PRODUCT_BYTES = 1 << 26  # of the sums over runs that are held at once
QUERY_TILE = 64  # queries of a request handled at once


def accumulator(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_dtype(x: Tensor) -> torch.dtype:
    """What to compute in where a result is rounded once, at the end: fp64, but fp32 for fp32 input."""
    return torch.float32 if x.dtype == torch.float32 else torch.float64


def is_short(dtype: torch.dtype) -> bool:
    """Whether values of a dtype have few enough bits for exact sums (formats/exact_sums.py): bf16 and fp16."""
    return dtype.itemsize < torch.float32.itemsize


def rows_matmul(x: Tensor, weight: AnyWeight) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N].

    bf16 and fp16: exact sums, in fp64. Wider inputs, which have too many bits for that: in their own dtype, ROW_TILE
    rows per product.
    """
    if is_short(x.dtype):
        return exact_matmul(on_grid(in_runs(x)), operand_of(weight))
    plain = dequantize(weight, x.dtype)
    num_rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
    out = padded.new_empty(padded.shape[0], plain.shape[0])
    for start in range(0, num_rows, ROW_TILE):
        out[start : start + ROW_TILE] = torch.nn.functional.linear(padded[start : start + ROW_TILE], plain)
    return out[:num_rows]


def exact_matmul(x: Tensor, operand: Tensor) -> Tensor:
    """x fp64 [T, C, R] on the grid, a weight's operand [C, R, N] -> fp64 [T, N]. The sum over a run is exact, runs are
    added first to last.
    """
    num_runs, _, num_columns = operand.shape
    at_once = max(1, PRODUCT_BYTES // (num_runs * num_columns * operand.element_size()))
    if x.shape[0] <= at_once:
        return _sum_of_runs(torch.bmm(x.transpose(0, 1), operand))
    return torch.cat([exact_matmul(rows, operand) for rows in x.split(at_once)])


def _sum_of_runs(products: Tensor) -> Tensor:
    """[C, ...] -> [...], first run first, from 0 on: a sum of zeros has the sign that its kernel likes."""
    if products.shape[0] <= 2:
        return products.sum(0)  # two numbers have one sum
    if products.shape[1] <= 2:
        return ordered_sum(products, 0)  # one call, but slow where there are many rows
    first, *others = products.unbind(0)
    return functools.reduce(torch.add, others, first + 0.0)


def exact_dots(x: Tensor, keys: Tensor, largest: Tensor) -> Tensor:
    """x [Q, H, d], keys fp64 [N, d] and their largest values [N, 1] -> fp64 [Q, H, N]. Exact sums for bf16 and fp16;
    wider inputs are rounded.
    """
    if not is_short(x.dtype):
        return x.double() @ keys.t()
    rows = on_grid(in_runs(x)).flatten(0, 1)  # [Q H, C, R]
    return exact_matmul(rows, in_runs(on_grid(keys, largest=largest)).movedim(0, -1)).unflatten(0, x.shape[:2])


def exact_average(weights: Tensor, keys: Tensor, largest: Tensor) -> Tensor:
    """Weights fp64 [Q, H, N] of at most MAX_KEYS keys, finite fp64 [N, d] and their largest values [N, 1] -> fp64
    [Q, H, d], without rounding.

    WEIGHT_BITS + VALUE_BITS + log2(MAX_KEYS) = 53. A key's own power of two goes to its weight, so that the grid of a
    query does not depend on keys that weigh nothing for it.
    """
    power = power_below(largest).clamp_min(2.0**-900)
    values = on_grid(keys / power, VALUE_BITS, largest / power)
    return on_grid(weights * power.squeeze(-1), WEIGHT_BITS) @ values + 0.0


def ordered_sum(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Sum over one dimension, first element first (a running sum has no other order)."""
    running = x.cumsum(dim)
    return running.narrow(dim, -1, 1) if keepdim else running.select(dim, -1)


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
