"""RMSNorm: x * rsqrt(mean(x^2) + eps), optionally times a weight; with FP8 codes of the result in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.fp8 import fp8_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation
from dsv4.ops.lib.invariant import accumulator


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., K], weight [K] or None -> [..., K] in x's dtype. Maths in at least fp32, one rounding at the end."""
    wide = x.to(accumulator(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(normed.dtype)
    return normed.to(x.dtype)


def rms_norm_quant_ref(
    x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool
) -> tuple[Tensor | None, QuantActivation]:
    """`rms_norm` of x [..., K] and its FP8 codes: what an FP8 linear layer would make of the rounded result.

    K is a multiple of 128. The plain result is returned where other layers need it (`keep_plain`), else None.
    """
    normed = rms_norm_ref(x, weight, eps)
    codes, scale = fp8_quantize(normed, ACTIVATION_GROUP)
    return (normed if keep_plain else None), QuantActivation(codes, scale)
