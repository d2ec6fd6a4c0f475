"""E8M0 scales: one byte b that means 2^(b - 127). Always read and written through bits, never through float log2."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6.0 * 2.0**-126


def e8m0_to_float(codes: Tensor) -> Tensor:
    """uint8 codes (or torch.float8_e8m0fnu) -> fp32 powers of two. Code 0 is 2^-127, code 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()


def ceil_e8m0(amax: Tensor, max_code: float) -> Tensor:
    """uint8 code of the smallest power of two s with amax / max_code <= s, from the fp32 bits of the quotient.

    Infinity and NaN give 255, the NaN scale: a NaN must come back as one even where the codes cannot hold it (E2M1).
    """
    bits = (amax.float() / max_code).view(torch.int32) & 0x7FFFFFFF
    # any fraction carries into the exponent; NaN must not, so it counts as infinity
    return ((bits.clamp_max(0x7F800000) + 0x7FFFFF) >> 23).to(torch.uint8)
