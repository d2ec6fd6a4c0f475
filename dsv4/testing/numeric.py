"""How far a result may be from its oracle. Every tolerance of the project is here; a test file holds none.

| what | rule | function |
|---|---|---|
| indices, packing, casts, codes, fused against unfused, batched against single | the same bits | `assert_bitwise` |
| float ops | at most twice the oracle's own error in the working dtype, against fp64 | `assert_close_to_oracle` |
| quantised products against the unquantised product | one bound per number format | `assert_within_format` |
| a kernel against its oracle in the working dtype, any op (the self-test) | limits by number format | `KERNEL_LIMITS` |
| greedy tokens against those of another device | the same token, near-ties excepted | `assert_greedy` |
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ORACLE_FACTOR = 2.0
FP32_STEP = torch.finfo(torch.float32).eps
# Hopper's tensor cores add bf16 products by truncation, not rounding. Measured on an H200: fp32 results of bf16
# products are off by up to 1.8e-6 of the row's largest value, at K from 1024 to 7168.
TENSOR_CORE_STEP = 2.0**-19

# `product_difference` between a product of quantised operands and the same product in fp64 without quantisation, for
# normally distributed operands. bf16: both operands rounded; fp8: E4M3 per 128 on both sides; fp4: E2M1 weights
# (MXFP4 or NVFP4) with E4M3 or wider activations. An error of one step in a scale, or swapped nibbles, is far outside.
FORMAT_BOUNDS = {"bf16": 1e-5, "fp8": 1e-3, "mxfp4": 1e-2, "nvfp4": 1e-2}

# Two tokens whose log-probabilities are closer than this (nats) may change places on another device. Measured on
# flash-mini and its NVFP4 sibling, official numerics: other instruction sets of the CPU moved a gap of less than 1 by
# 0.46 at most in flash-mini (703 steps) and by 1.1 in its sibling (705 steps, one of them beyond what the bound allows;
# it is in no recorded text); one bf16 last place in 1 % of the outputs of linear and norm moved gaps by 0.75 at most
# (252 steps of earlier weights).
NEAR_TIE_NATS = 1.0


class Limits(NamedTuple):
    """How far a result may be from the oracle's: relative L2 of all of it, largest error of a row in units of its
    largest value."""

    whole: float
    row: float


# A kernel against the oracle in the working dtype, by the format of the result. Both round, in another order of sums,
# so single results lie a step of the format apart; a step of E4M3 is an eighth of a value, of E2M1 a third or a half.
KERNEL_LIMITS = {
    "fp32": Limits(2.0**-14, 2.0**-11),
    "bf16": Limits(2.0**-8, 2.0**-6),
    "fp8": Limits(2.0**-6, 2.0**-3),
    "fp4": Limits(2.0**-4, 0.5),
}
# Ops that round in between, whatever their result has: the tensor cores' FP8 sums have 14 bits, hidden values are
# rounded to E4M3, probabilities to bf16.
KERNEL_LIMITS_OF = {
    "linear": KERNEL_LIMITS["bf16"],
    "linears": KERNEL_LIMITS["bf16"],
    "moe": Limits(2.0**-7, 2.0**-5),
    "moe_parts": Limits(2.0**-7, 2.0**-5),
    "moe_shared": Limits(2.0**-7, 2.0**-5),
    "sparse_attention": Limits(2.0**-6, 2.0**-4),
}
# Share of the choices of an op that near-ties may decide otherwise; every other integer is the same.
CHOICE_LIMITS = {"route": 0.01, "activation_topk": 0.01, "index_topk": 0.02, "sample": 0.02, "sampled_logprobs": 0.02}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """x's bit patterns as integers, with one pattern for all NaNs: which NaN comes out of an operation is not
    defined.
    """
    if not x.dtype.is_floating_point:
        return x
    bits = x.contiguous().view(_INTEGERS[x.element_size()])
    is_nan = x.isnan() if x.element_size() > 1 else x.float().isnan()
    return bits.masked_fill(is_nan, 0x7F if x.element_size() == 1 else -1)  # patterns that are NaNs themselves


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """The same shape, dtype and bits; any NaN equals any NaN, and -0 differs from 0."""
    assert actual.dtype == expected.dtype, f"{what}: expected {expected.dtype}, found {actual.dtype}"
    assert actual.shape == expected.shape, f"{what}: expected shape {expected.shape}, found {actual.shape}"
    differs = bits_of(actual) != bits_of(expected.to(actual.device))
    if not differs.any():
        return
    where = tuple(differs.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, the first at {where}: "
        f"expected {expected[where].item()!r}, found {actual[where].item()!r}"
    )


def row_errors(actual: Tensor, exact: Tensor) -> Tensor:
    """Largest error of each row (last dimension) in units of the row's largest exact value: small rows count like
    large.
    """
    scale = exact.abs().amax(-1)
    error = (actual.double() - exact).abs().amax(-1)
    return error / torch.where(scale > 0, scale, torch.ones_like(scale))


def assert_close_to_oracle(
    actual: Tensor, oracle: Callable[[torch.dtype], Tensor], what: str = "result", step: float = FP32_STEP
) -> None:
    """`oracle(dtype)` computes the expected result from inputs converted to `dtype`; it is asked for actual's dtype
    and fp64.

    The worst row may be at most ORACLE_FACTOR times as wrong as the oracle's worst row. Both are measured against fp64.
    Everything must be finite where fp64 is. `step` is the last place of the sums inside: where the oracle was lucky,
    one of those is forgiven.
    """
    working = oracle(actual.dtype)
    exact = oracle(torch.float64)
    assert exact.dtype == torch.float64, f"{what}: the oracle must give fp64 for fp64, found {exact.dtype}"
    assert working.dtype == actual.dtype and working.shape == actual.shape, (
        f"{what}: expected {working.dtype} {tuple(working.shape)}, found {actual.dtype} {tuple(actual.shape)}"
    )
    if actual.numel() == 0:
        return
    # rounding the exact result is unavoidable, too
    rounding = row_errors(exact.to(actual.dtype), exact).max().item()
    allowed = max(row_errors(working, exact).max().item(), rounding, step)
    error = row_errors(actual, exact).max().item()
    if not error <= ORACLE_FACTOR * allowed:  # a NaN must not pass
        raise AssertionError(
            f"{what}: error {error:.3e} of the row's largest value, expected at most {ORACLE_FACTOR} * {allowed:.3e}, "
            "the oracle's own"
        )


def product_difference(actual: Tensor, expected: Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2): half the squared relative error, whatever the scale; 0 for two zero tensors."""
    a, b = actual.double().flatten(), expected.double().flatten()
    norms = (a.square().sum() + b.square().sum()).item()
    return 1 - 2 * (a @ b).item() / norms if norms else 0.0


def assert_within_format(actual: Tensor, exact: Tensor, number_format: str, what: str = "product") -> None:
    """A product of operands in `number_format` against the fp64 product of the unquantised operands."""
    assert actual.shape == exact.shape, f"{what}: expected shape {exact.shape}, found {actual.shape}"
    difference = product_difference(actual, exact)
    bound = FORMAT_BOUNDS[number_format]
    if not difference <= bound:
        raise AssertionError(f"{what}: difference {difference:.3e}, expected at most {bound:.0e} for {number_format}")


def assert_greedy(logits: Tensor, token_ids: Sequence[int], gaps: Sequence[float], what: str = "tokens") -> None:
    """Greedy tokens recorded elsewhere, step by step, given the recorded tokens before each step.

    logits [n, vocab] are those the n tokens are chosen from; gaps are the recorded distances (nats) of each from the
    second best. A gap of NEAR_TIE_NATS or more: the token must be the best here too. A smaller one: what it lacks
    to the best may be no more than what the gap lacks to NEAR_TIE_NATS.
    """
    assert logits.shape[0] == len(token_ids) == len(gaps), f"{what}: {logits.shape[0]}, {len(token_ids)}, {len(gaps)}"
    for step, (row, token_id, gap) in enumerate(zip(logits.double(), token_ids, gaps, strict=True)):
        lacking = (row.max() - row[token_id]).item()  # a difference of logits is one of log-probabilities
        allowed = max(0.0, NEAR_TIE_NATS - gap)
        if not lacking <= allowed:  # a NaN must not pass
            raise AssertionError(
                f"{what}: at step {step} token {token_id} lacks {lacking:.3f} nats to {int(row.argmax())}, expected at "
                f"most {allowed:.3f} (recorded gap {gap:.3f})"
            )
