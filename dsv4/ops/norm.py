"""RMSNorm: x * rsqrt(mean(x^2) + eps), optionally times a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.invariant import accumulator


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., K], weight [K] or None -> [..., K] in x's dtype. Maths in at least fp32, one rounding at the end."""
    wide = x.to(accumulator(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(normed.dtype)
    return normed.to(x.dtype)
