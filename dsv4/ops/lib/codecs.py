"""Number formats inside kernels: E8M0 scales, E4M3 and E2M1 groups, from the bits of fp32."""

from __future__ import annotations

import struct

from dsv4.formats.e8m0 import FP4_AMAX_FLOOR, FP8_AMAX_FLOOR
from dsv4.ops.lib.arch import has_e4m3
from dsv4.ops.lib.guard import jit, tl

# ---- E8M0 scales, from the bits of fp32 ----


def _fp32_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


_FP8_FLOOR_BITS = tl.constexpr(_fp32_bits(FP8_AMAX_FLOOR))
_FP4_FLOOR_BITS = tl.constexpr(_fp32_bits(FP4_AMAX_FLOOR))


@jit
def abs_bits(x):
    """fp32 -> int32 bits of |x|. Their order is the values' order, with NaN above infinity: an integer max keeps
    NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _ceil_e8m0(amax_bits, MAX_EXPONENT: tl.constexpr, MAX_MANTISSA: tl.constexpr):
    """int32 code of the smallest power of two s with amax / max <= s, max = 2^MAX_EXPONENT (1 + MAX_MANTISSA / 2^23).

    The same as `ceil_e8m0` of formats/e8m0.py for amax at or above its floor, without a division.
    """
    exponent = amax_bits >> 23
    code = exponent - MAX_EXPONENT + ((amax_bits & 0x7FFFFF) > MAX_MANTISSA).to(tl.int32)
    return tl.where(exponent == 255, 255, code)


@jit
def e4m3_scale(amax_bits):
    """int32 bits of amax -> E8M0 code (int32) of its E4M3 scale, amax floored at 1e-4. 448 = 1.75 * 2^8."""
    return _ceil_e8m0(tl.maximum(amax_bits, _FP8_FLOOR_BITS), 8, 0x600000)


@jit
def e2m1_scale(amax_bits):
    """int32 bits of amax -> E8M0 code (int32) of its E2M1 scale, amax floored at 6 * 2^-126. 6 = 1.5 * 2^2."""
    return _ceil_e8m0(tl.maximum(amax_bits, _FP4_FLOOR_BITS), 2, 0x400000)


@jit
def e8m0_to_float(code):
    """int32 or uint8 code -> 2^(code - 127) in fp32; 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x400000, code << 23)  # 2^-127 is a subnormal
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def e8m0_reciprocal(code):
    """int32 code from 1 to 253 -> 2^(127 - code) in fp32; 255 is NaN. Multiplying by it is dividing by the scale."""
    return tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.float32, bitcast=True)


# ---- E4M3 and E2M1 groups ----


@jit
def e4m3_bytes(x):
    """fp32 -> E4M3 codes in bytes, for GPUs without the type: round to nearest, ties to even, saturating at 448; NaN
    gives NaN.

    Below 2^-6 the spacing is 2^-9: adding 2^14, whose last bit is worth 2^-9, rounds. Above, three mantissa bits stay.
    """
    bits = abs_bits(x)
    low = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    high = tl.minimum(((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960, 0x7E)
    code = tl.where(bits < 0x3C800000, low, high)  # |x| < 2^-6
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@jit
def e4m3_values(codes):
    """E4M3 codes in bytes -> fp32, exact. Sign, exponent and mantissa put at fp32's places are the value * 2^-120."""
    code = codes.to(tl.int32)
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    bits = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@jit
def e4m3_codes(x):
    """fp32 of at most 448 -> E4M3 codes: of that type where the GPU has it, else bytes (arch.py: `code_tensor`)."""
    if has_e4m3():
        return x.to(tl.float8e4nv)
    else:
        return e4m3_bytes(x)


@jit
def round_e4m3(x):
    """fp32 of at most 448, rounded to the values of E4M3."""
    if has_e4m3():
        return x.to(tl.float8e4nv).to(tl.float32)
    else:
        return e4m3_values(e4m3_bytes(x))


@jit
def quantize_e4m3(x):
    """fp32 [R, group] -> E4M3 codes [R, group] and E8M0 scale codes uint8 [R], as `fp8_quantize`.

    Nothing needs clamping: the scale is chosen so that amax / s <= 448 exactly.
    """
    scale = e4m3_scale(tl.max(abs_bits(x), axis=1))
    return e4m3_codes(x * e8m0_reciprocal(scale)[:, None]), scale.to(tl.uint8)


@jit
def fake_quantize_e4m3(x):
    """[R, 128] -> the same rounded to E4M3 with one E8M0 scale a row, in bf16: exact there."""
    wide = x.to(tl.float32)
    return _rounded(wide, e4m3_scale(tl.max(abs_bits(wide), axis=1)))


@jit
def fake_quantize_halves(left, right):
    """The same of two [R, 64] that are one group of 128 columns."""
    left, right = left.to(tl.float32), right.to(tl.float32)
    scale = scale_of_halves(left, right)
    return _rounded(left, scale), _rounded(right, scale)


@jit
def scale_of_halves(left, right):
    """E8M0 codes (int32) [R] of the E4M3 scales of rows of which each has a half, fp32 [R, 64]."""
    return e4m3_scale(tl.maximum(tl.max(abs_bits(left), axis=1), tl.max(abs_bits(right), axis=1)))


@jit
def _rounded(x, scale):
    """fp32 [R, C] rounded to E4M3 with E8M0 scales [R]."""
    return (round_e4m3(x * e8m0_reciprocal(scale)[:, None]) * e8m0_to_float(scale)[:, None]).to(tl.bfloat16)


@jit
def e2m1_encode(x):
    """fp32 -> nibbles in int32: round to nearest, ties to even, saturating at 6; NaN gives 0.

    Below 2 the spacing is 0.5: adding 2^22, whose last bit is worth 0.5, rounds. From 2 on one mantissa bit is kept.
    """
    bits = abs_bits(x)
    low = (bits.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) & 7
    high = tl.minimum(((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252, 7)
    code = tl.where(bits < 0x40000000, low, high)  # |x| < 2
    code = tl.where(bits > 0x7F800000, 0, code)  # NaN
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@jit
def e2m1_decode(nibble):
    """Nibbles in any integer type -> fp32. Sign, exponent and mantissa put at fp32's places are the value * 2^-126."""
    code = nibble.to(tl.int32)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@jit
def quantize_e2m1(x):
    """fp32 [R, group] -> packed bytes uint8 [R, group / 2] (even element low) and E8M0 codes uint8 [R], as
    `mxfp4_quantize`.
    """
    scale = e2m1_scale(tl.max(abs_bits(x), axis=1))
    nibbles = e2m1_encode(x * e8m0_reciprocal(scale)[:, None])
    even, odd = tl.split(tl.reshape(nibbles, [x.shape[0], x.shape[1] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8), scale.to(tl.uint8)
