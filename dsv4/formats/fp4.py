"""E2M1 nibbles with a scale per group: MXFP4 (E8M0 per 32) and NVFP4 (E4M3 per 16 and one FP32 for the tensor).

A packed byte j of a row holds element 2j in its low nibble and 2j + 1 in its high nibble; a nibble is a sign (bit 3)
and an index into {0, 0.5, 1, 1.5, 2, 3, 4, 6}.
"""

from functools import cache

import torch
from torch import Tensor

from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX, FP4_AMAX_FLOOR, ceil_e8m0, e8m0_to_float
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# where the next index begins: at the midpoint for odd ones, since a tie goes to the even index, else one fp32 above
_BOUNDS = tuple(
    midpoint if index % 2 else midpoint * (1 + 2.0**-23)
    for index, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # whoever asks first: others may need gradients
        return torch.tensor(values, device=device)


def e2m1_encode(x: Tensor) -> Tensor:
    """Values -> uint8 nibbles (one per element), round to nearest, ties to even, saturating at 6."""
    magnitude = x.abs().float().nan_to_num(0.0, posinf=E2M1_MAX)
    code = torch.bucketize(magnitude, _constant(_BOUNDS, x.device), out_int32=True, right=True)
    return torch.where(x.signbit(), code + 8, code).to(torch.uint8)


def e2m1_decode(nibbles: Tensor) -> Tensor:
    """uint8 nibbles -> fp32 values."""
    table = _constant((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), nibbles.device)
    return table[nibbles.int()]


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """[..., K] nibbles -> [..., K / 2] bytes, even element low."""
    pairs = nibbles.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., K / 2] bytes (uint8 or int8) -> [..., K] nibbles."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def mxfp4_quantize(x: Tensor, group: int = MXFP4_GROUP) -> tuple[Tensor, Tensor]:
    """x [..., K] -> packed bytes [..., K / 2] and E8M0 codes uint8 [..., K / group]."""
    if x.shape[-1] % group:
        raise ValueError(f"the last dimension {x.shape[-1]} is not a multiple of the group {group}")
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1).clamp_min(FP4_AMAX_FLOOR)
    scale = ceil_e8m0(amax, E2M1_MAX)
    nibbles = e2m1_encode((groups / e8m0_to_float(scale).unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX))
    return pack_nibbles(nibbles.flatten(-2)), scale


def mxfp4_dequantize(packed: Tensor, scale: Tensor, group: int = MXFP4_GROUP) -> Tensor:
    """Packed bytes and E8M0 codes -> fp32 [..., K], exact."""
    values = e2m1_decode(unpack_nibbles(packed)).unflatten(-1, (-1, group))
    return (values * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)


def nvfp4_quantize(weight: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [..., K] -> packed bytes, E4M3 scales [..., K / 16] and the FP32 scale of the whole tensor.

    `global_scale` is given where matrices share one (w1 and w3 of an expert); values it cannot reach saturate.
    """
    groups = weight.float().unflatten(-1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(-1)
    if global_scale is None:
        global_scale = (amax.amax() / (E2M1_MAX * E4M3_MAX)).clamp_min(torch.finfo(torch.float32).tiny)
    scale = (amax / (E2M1_MAX * global_scale)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * global_scale).unsqueeze(-1)
    quotient = torch.where(step > 0, groups / step, torch.zeros_like(groups))
    return pack_nibbles(e2m1_encode(quotient).flatten(-2)), scale, global_scale


def nvfp4_dequantize(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """e2m1 * weight_scale * weight_scale_2 in fp32; the first product is exact. `global_scale` broadcasts."""
    values = e2m1_decode(unpack_nibbles(packed)).unflatten(-1, (-1, NVFP4_GROUP))
    return (values * scale.float().unsqueeze(-1)).flatten(-2) * global_scale
