"""Manifold-constrained hyper-connections (mHC): n residual streams mixed around every sublayer.

X [T, n, D] streams; u = X flattened; m = (fn u) * rsqrt(mean(u^2) + eps).
  pre  = sigmoid(m[0:n] * scale[0] + base[0:n]) + hc_eps      sublayer input y = sum_j pre[j] X[j]
  post = 2 sigmoid(m[n:2n] * scale[1] + base[n:2n])
  comb = sinkhorn(m[2n:] * scale[2] + base[2n:])              after it X'[k] = post[k] o + sum_j comb[j, k] X[j]
comb moves stream j into stream k: the first index is the source, so the mixing matrix is comb transposed.

Ops: `hc_post` and `hc_pre` (and `hc_head`, a pre without post and comb) are the steps; `hc_boundary` is everything
between one sublayer and the next in one launch, `hc_enter` the same at the first sublayer, `hc_head_norm` at the end. A
fused op gives the bits of the chain of unfused ones. Rows are independent: a padded row costs time, changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.formats.fp8 import fp8_fake_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP, AnyWeight, QuantActivation
from dsv4.ops.lib.invariant import accumulator, ordered_sum, rows_matmul, sigmoid, wide_dtype
from dsv4.ops.norm import rms_norm_ref


@dataclass(frozen=True)
class HyperSettings:
    """Constants of a model's hyper-connections; norm_eps is also that of the RMSNorm behind them."""

    num_iters: int
    hc_eps: float
    norm_eps: float


@dataclass(frozen=True)
class HyperInput:
    """What a sublayer starts from: the streams [T, n, D] it will be mixed into, its normed input [T, D] (and that
    input's FP8 codes, or what they stand for in its own dtype, if asked for), and the weights post [T, n] and comb
    [T, n, n] for mixing, in at least fp32."""

    streams: Tensor
    hidden: Tensor
    quant: QuantActivation | None
    post: Tensor
    comb: Tensor
    rounded: Tensor | None = None


def hc_expand_ref(hidden: Tensor, num_streams: int) -> Tensor:
    """hidden [T, D] -> streams [T, n, D]: every stream starts as the embedding."""
    return hidden.unsqueeze(1).repeat(1, num_streams, 1)


def sinkhorn_ref(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """logits [T, n, n] -> nearly doubly stochastic comb. One softmax over rows, then columns and rows in turn.

    Ends on columns: num_iters column steps, num_iters - 1 row steps. eps stands in every denominator and once after the
    softmax.
    """
    comb = torch.softmax(logits.double(), -1) + eps
    is_small = comb.is_cpu and comb.shape in ((1, 4, 4), (2, 4, 4))
    if is_small and eps > 0:  # which keeps Python from dividing by 0
        balanced = [_balanced(columns, 2 * num_iters - 1, eps) for columns in comb.mT.tolist()]
        return torch.tensor(balanced, dtype=logits.dtype)
    small = comb.new_full((1, 1, 1), eps)
    rows = comb.new_ones(1, 1, 1).expand(comb.shape[0], comb.shape[2], 1)
    columns = rows.transpose(1, 2)
    comb /= torch.baddbmm(small, columns, comb)
    for _ in range(num_iters - 1):
        comb /= torch.baddbmm(small, comb, rows)
        comb /= torch.baddbmm(small, columns, comb)
    return comb.to(logits.dtype)


def _balanced(lines: Sequence[Sequence[float]], num_steps: int, eps: float) -> Sequence[Sequence[float]]:
    """The steps of `sinkhorn_ref` on the columns of one 4 x 4 matrix, the same sums and quotients in Python's numbers:
    with one token 80 torch calls take four times as long, with two twice as long. Every step turns the matrix, so that
    rows follow columns.
    """
    for _ in range(num_steps):
        scaled = [
            (a / total, b / total, c / total, d / total) for a, b, c, d in lines for total in (a + b + c + d + eps,)
        ]
        lines = list(zip(*scaled, strict=True))
    return lines


def hc_split_ref(
    mixes: Tensor, base: Tensor, scale: Tensor, num_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes [T, 2n + n*n] -> pre [T, n], post [T, n], comb [T, n, n]."""
    n = round((mixes.shape[-1] + 1) ** 0.5) - 1  # 2n + n^2 = (n + 1)^2 - 1
    scale_ids = (torch.arange(mixes.shape[-1], device=scale.device) // n).clamp_max(2)  # n rows, n rows, all others
    logits = mixes * scale.index_select(0, scale_ids) + base
    gates, comb = logits.split_with_sizes((2 * n, n * n), -1)
    pre, post = sigmoid(gates).split_with_sizes((n, n), -1)
    return pre + eps, 2 * post, sinkhorn_ref(comb.unflatten(-1, (n, n)), num_iters, eps)


def _mixes(streams: Tensor, fn: AnyWeight, norm_eps: float) -> Tensor:
    """(fn u) * rsqrt(mean(u^2) + eps): the norm is over all streams together and comes after the product."""
    flat = streams.flatten(1)
    mean_square = ordered_sum(flat.to(wide_dtype(flat)).square(), -1, keepdim=True) / flat.shape[1]
    return (rows_matmul(flat, fn) * torch.rsqrt(mean_square + norm_eps)).to(accumulator(streams))


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre[j] X[j], first stream first, rounded once."""
    return _mix(pre.unsqueeze(-1), streams.to(pre.dtype)).to(streams.dtype)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """sum_j weights[:, j] values[:, j], the first first; both broadcast."""
    return functools.reduce(torch.add, (weights * values).unbind(1))


def hc_pre_ref(
    streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, *, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, n, D] -> sublayer input y [T, D], post [T, n], comb [T, n, n] (the last two in at least fp32)."""
    mixes = _mixes(streams, fn, norm_eps)
    pre, post, comb = hc_split_ref(mixes, base.to(mixes.dtype), scale.to(mixes.dtype), num_iters, hc_eps)
    return _collapse(streams, pre), post, comb


def hc_post_ref(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Sublayer output [T, D] and the streams it was read from -> the new streams [T, n, D], rounded once."""
    wide = streams.to(post.dtype)
    mixed = _mix(comb.unsqueeze(-1), wide.unsqueeze(2))  # [T, source, destination, D] summed over the source
    return (post.unsqueeze(-1) * out.to(post.dtype).unsqueeze(1) + mixed).to(streams.dtype)


def hc_head_ref(
    streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """The final collapse [T, n, D] -> [T, D]: only the pre weights, fn [n, n*D], one scale."""
    mixes = _mixes(streams, fn, norm_eps)
    return _collapse(streams, sigmoid(mixes * scale.to(mixes.dtype) + base.to(mixes.dtype)) + hc_eps)


def hc_enter_ref(
    source: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, norm_weight: Tensor, settings: HyperSettings,
    has_codes: bool,
) -> HyperInput:  # fmt: skip
    """Into the first sublayer: `hc_pre`, then RMSNorm, then FP8 codes of the rounded result if `has_codes`.

    source: streams [T, n, D], handed on as they are, or an embedding [T, D], which `hc_expand` makes into streams.
    """
    streams = hc_expand_ref(source, fn.shape[1] // source.shape[-1]) if source.dim() == 2 else source
    hidden, post, comb = hc_pre_ref(
        streams, fn, base, scale, num_iters=settings.num_iters, hc_eps=settings.hc_eps, norm_eps=settings.norm_eps
    )
    normed = rms_norm_ref(hidden, norm_weight, settings.norm_eps)
    quant = QuantActivation.of(normed) if has_codes else None
    return HyperInput(streams, normed, quant, post, comb)


def hc_boundary_ref(
    out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor,
    norm_weight: Tensor, settings: HyperSettings, has_codes: bool, has_rounded: bool = False,
) -> HyperInput:  # fmt: skip
    """From one sublayer into the next: `hc_post` with the old weights, then `hc_enter` with the next fn, base, scale.

    The streams between the two are rounded to their dtype. New tensors throughout. `has_rounded`: instead of codes what
    they stand for, in the input's dtype.
    """
    made = hc_enter_ref(hc_post_ref(out, streams, post, comb), fn, base, scale, norm_weight, settings, has_codes)
    if not has_rounded:
        return made
    return replace(made, rounded=fp8_fake_quantize(made.hidden, ACTIVATION_GROUP))


def hc_head_norm_ref(
    streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, norm_weight: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """`hc_head`, then the final RMSNorm: [T, n, D] -> [T, D]."""
    return rms_norm_ref(hc_head_ref(streams, fn, base, scale, hc_eps=hc_eps, norm_eps=norm_eps), norm_weight, norm_eps)
