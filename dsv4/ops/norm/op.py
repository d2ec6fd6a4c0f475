"""RMSNorm: x * rsqrt(mean(x^2) + eps), optionally times a weight; with FP8 codes of the result in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.tensors import QuantActivation
from dsv4.ops.lib.invariant import ordered_sum, wide_dtype


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., K], weight [K] or None -> [..., K] in x's dtype. Maths in at least fp32, one rounding at the end."""
    wide = x.to(wide_dtype(x))
    mean_square = ordered_sum(wide.square(), -1, keepdim=True) / x.shape[-1]
    normed = wide * torch.rsqrt(mean_square + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rms_norm_quant_ref(
    x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool
) -> tuple[Tensor | None, QuantActivation]:
    """`rms_norm` of x [..., K] and its FP8 codes: what an FP8 linear layer would make of the rounded result.

    K is a multiple of 128. The plain result is returned where other layers need it (`keep_plain`), else None.
    """
    normed = rms_norm_ref(x, weight, eps)
    return (normed if keep_plain else None), QuantActivation.of(normed)
