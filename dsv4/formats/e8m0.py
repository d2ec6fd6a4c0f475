"""E8M0 scales: one byte b that means 2^(b - 127). Always read and written through bits, never through float log2."""

import math

import torch
from torch import Tensor

E8M0 = torch.float8_e8m0fnu

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6.0 * 2.0**-126


def e8m0_to_float(codes: Tensor) -> Tensor:
    """uint8 codes (or torch.float8_e8m0fnu) -> fp32 powers of two. Code 0 is 2^-127, code 255 is NaN."""
    return codes.view(E8M0).float()


def ceil_e8m0(amax: Tensor, max_code: float) -> Tensor:
    """uint8 code of the smallest power of two s with amax / max_code <= s, from the fp32 bits of amax.

    Infinity and NaN give 255, the NaN scale: a NaN must come back as one even where the codes cannot hold it (E2M1).
    """
    return ceil_scale(amax, max_code).view(torch.uint8)


def ceil_scale(amax: Tensor, max_code: float) -> Tensor:
    """`ceil_e8m0` as torch.float8_e8m0fnu. amax is at least one of the floors above.

    torch rounds to E8M0 by the significand, 1.5 and more up. Less what max_code's own (1.75 or 1.5) is above 1.5, and
    one last place, exactly those above max_code's are.
    """
    significand, exponent = math.frexp(max_code)
    step = int((2 * significand - 1.5) * 2**23) + 1
    return ((amax.float() * 2.0 ** (1 - exponent)).view(torch.int32) - step).view(torch.float32).to(E8M0)
