"""exp, log, cosine and sine, and what is made of them, for kernels: the same bits in the interpreter and on every GPU.

In fp32, for kernels that should wait for memory: `exp_fp32`, `log_fp32`, `log_of_odd`, each right to a bound in units
of the result's last place that its docstring states and tests/ops/lib/test_maths.py holds it to. In fp64, where the
oracle's bits are wanted: the oracles take transcendental functions in fp64 and round to fp32; these series are good to
a few fp64 steps, so the rounded results agree except where the exact value lies within 2^-50 of the middle between two
fp32 numbers.

No library is called: a library's last bit differs between machines. Kernels that use these are launched with fp fusion
off; where one rounding is wanted, `tl.fma` is written.

Also here: rounding to bf16 two at a time, and the orderable integer of a float, which turns every comparison of this
project's selections into one of integers; and the order of columns in which two tensor-core instructions sum alike.
"""

from __future__ import annotations

import math

from dsv4.ops.lib.guard import INTERPRET, jit, tl

_LOG2_E = tl.constexpr(1.4426950408889634074)
# ln 2 in two parts; the first has 32 bits, so that its product with an exponent is exact
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)

_LOG2_E_FP32 = tl.constexpr(1.4426950216293335)
# ln 2 in two fp32 parts; the first has 15 bits, so that its product with an exponent is exact
_LN2_HIGH_FP32 = tl.constexpr(0.693145751953125)
_LN2_LOW_FP32 = tl.constexpr(1.428606765330187e-06)
_ROUND_FP32 = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits


# ---- fp32 ----


@jit
def exp_fp32(x):
    """e^x of fp32 x <= 0, wrong by less than 1.1 in the last place; 0 below -86 (e^-86 = 4.5e-38). NaN stays NaN."""
    is_zero = x < -86.0
    x = tl.where(is_zero, -86.0, x)
    shifted = tl.fma(x, _LOG2_E_FP32, _ROUND_FP32)
    whole = shifted - _ROUND_FP32
    r = tl.fma(whole, -_LN2_LOW_FP32, tl.fma(whole, -_LN2_HIGH_FP32, x))  # |r| <= ln 2 / 2
    tail = tl.fma(r, 0.001394760562106967, 0.008369873277842999)
    tail = tl.fma(tail, r, 0.04166624695062637)
    tail = tl.fma(tail, r, 0.16666509211063385)
    tail = tl.fma(tail, r, 0.5)
    value = tl.fma(tail * r, r, r) + 1.0
    scaled = value.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(is_zero, 0.0, tl.where(x == x, scaled.to(tl.float32, bitcast=True), x))


@jit
def _log_ratio_fp32(numerator, denominator):
    """log((1 + s) / (1 - s)) of s = numerator / denominator, |s| <= 0.1716."""
    s = tl.div_rn(numerator, denominator)
    s2 = s * s
    tail = tl.fma(s2, 0.2987652122974396, 0.39977332949638367)
    tail = tl.fma(tail, s2, 0.6666677594184875)
    return tl.fma(tail * s2, s, s + s)


@jit
def log_fp32(x):
    """log x of a normal, finite fp32 x > 0, wrong by less than 3 in the last place."""
    bits = x.to(tl.int32, bitcast=True)
    # the exponent that leaves a mantissa between sqrt(1/2) and sqrt(2)
    whole = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (whole << 23)).to(tl.float32, bitcast=True)
    fraction = _log_ratio_fp32(mantissa - 1.0, mantissa + 1.0)
    wide = whole.to(tl.float32)
    return tl.fma(wide, _LN2_HIGH_FP32, tl.fma(wide, _LN2_LOW_FP32, fraction))


@jit
def log_of_odd(odd):
    """log(odd / 2^25) of an odd int32 below 2^25, in fp32, wrong by less than 3 in the last place. Near 1 the distance
    to 1 is used, which fp32 holds where it does not hold the number itself."""
    is_near = odd > 23726566  # sqrt(1/2) * 2^25
    x = odd.to(tl.float32)
    distance = (odd - 33554432).to(tl.float32) * (1.0 / 33554432.0)  # exact where it is used
    bits = x.to(tl.int32, bitcast=True)
    whole = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (whole << 23)).to(tl.float32, bitcast=True)
    numerator = tl.where(is_near, distance, mantissa - 1.0)
    fraction = _log_ratio_fp32(numerator, numerator + 2.0)
    wide = tl.where(is_near, 0, whole - 25).to(tl.float32)
    return tl.fma(wide, _LN2_HIGH_FP32, tl.fma(wide, _LN2_LOW_FP32, fraction))


# ---- fp64 ----


@jit
def exp_negative(x):
    """e^x of fp64 x <= 0: 0 below -708. NaN stays NaN."""
    x = tl.where(x < -708.0, -708.0, x)
    whole = tl.floor(x * _LOG2_E + 0.5)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW  # |r| <= ln 2 / 2; the next term of the series is below 2^-53
    tail = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0
    tail = tail * r + 1.0 / 39916800.0
    tail = tail * r + 1.0 / 3628800.0
    tail = tail * r + 1.0 / 362880.0
    tail = tail * r + 1.0 / 40320.0
    tail = tail * r + 1.0 / 5040.0
    tail = tail * r + 1.0 / 720.0
    tail = tail * r + 1.0 / 120.0
    tail = tail * r + 1.0 / 24.0
    tail = tail * r + 1.0 / 6.0
    tail = tail * r + 0.5
    value = 1.0 + (r + r * (r * tail))
    power = ((whole.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x <= -708.0, 0.0, value * power)


@jit
def _log_ratio(s):
    """log((1 + s) / (1 - s)) for |s| <= 0.1716, in fp64."""
    s2 = s * s
    tail = s2 * (1.0 / 21.0) + 1.0 / 19.0
    tail = tail * s2 + 1.0 / 17.0
    tail = tail * s2 + 1.0 / 15.0
    tail = tail * s2 + 1.0 / 13.0
    tail = tail * s2 + 1.0 / 11.0
    tail = tail * s2 + 1.0 / 9.0
    tail = tail * s2 + 1.0 / 7.0
    tail = tail * s2 + 1.0 / 5.0
    tail = tail * s2 + 1.0 / 3.0
    return 2.0 * (s + s * (s2 * tail))


@jit
def log_positive(x):
    """log x of a normal, finite fp64 x > 0."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)  # [1, 2)
    is_high = mantissa > 1.4142135623730951
    mantissa = tl.where(is_high, mantissa * 0.5, mantissa)
    whole = tl.where(is_high, exponent + 1, exponent).to(tl.float64)
    fraction = _log_ratio((mantissa - 1.0) / (mantissa + 1.0))
    return whole * _LN2_HIGH + (whole * _LN2_LOW + fraction)


@jit
def softplus(x):
    """log(1 + e^x) of fp64 x, relative precision for every x; the identity above 20, as torch has it."""
    y = exp_negative(tl.where(x > 0.0, -x, x))  # e^-|x|, in (0, 1]
    is_high = y > 0.41421356237309503
    # 1 + y = (1 + s) / (1 - s), or twice that
    s = tl.where(is_high, y - 1.0, y) / tl.where(is_high, y + 3.0, y + 2.0)
    logarithm = _log_ratio(s)
    logarithm = tl.where(
        is_high, logarithm + _LN2_LOW + _LN2_HIGH, logarithm
    )  # a `where` of two constants would be fp32
    value = tl.where(x > 0.0, x + logarithm, logarithm)
    return tl.where(x > 20.0, x, value)


# ---- rounding ----


@jit
def to_bf16(x):
    """fp32 -> bf16, to nearest even, as `x.to(tl.bfloat16)`. Written out because the compiler converts one value at a
    time, at a sixteenth of the rate of an addition, where the instruction for two has half of it."""
    if INTERPRET:
        return x.to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


# ---- order ----


@jit
def ordered_bits(x):
    """fp32 -> int32 whose order is the values' order: NaN as -inf, both zeros equal."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# ---- cosine and sine ----

_TWO_OVER_PI = tl.constexpr(2 / math.pi)
# pi / 2 in two parts; the first has 33 bits, so that its product with a quadrant number below 2^20 is exact
_HALF_PI_HIGH = tl.constexpr(1.57079632673412561417)
_HALF_PI_LOW = tl.constexpr(6.07710050650619224932e-11)


@jit
def cos_sin(angle):
    """fp32 angle -> cos and sin, exact to fp32 for |angle| up to 1.6 million (graceful beyond).

    Cody-Waite reduction and Taylor series in fp64: no slow path, no library, and the same bits in the interpreter
    and on a GPU. The series ends where the next term, at pi / 4, is below 2^-52.
    """
    wide = angle.to(tl.float64)
    quadrant = tl.floor(wide * _TWO_OVER_PI + 0.5)
    r = (wide - quadrant * _HALF_PI_HIGH) - quadrant * _HALF_PI_LOW
    r2 = r * r
    tail = r2 * (-1.0 / 1307674368000.0) + 1.0 / 6227020800.0
    tail = tail * r2 - 1.0 / 39916800.0
    tail = tail * r2 + 1.0 / 362880.0
    tail = tail * r2 - 1.0 / 5040.0
    tail = tail * r2 + 1.0 / 120.0
    tail = tail * r2 - 1.0 / 6.0
    sine = r + r * (r2 * tail)
    tail = r2 * (1.0 / 20922789888000.0) - 1.0 / 87178291200.0
    tail = tail * r2 + 1.0 / 479001600.0
    tail = tail * r2 - 1.0 / 3628800.0
    tail = tail * r2 + 1.0 / 40320.0
    tail = tail * r2 - 1.0 / 720.0
    tail = tail * r2 + 1.0 / 24.0
    cosine = 1.0 + r2 * (tail * r2 - 0.5)
    turns = quadrant.to(tl.int64) & 3
    is_swapped = (turns & 1) == 1
    cos_value = tl.where(is_swapped, sine, cosine)
    sin_value = tl.where(is_swapped, cosine, sine)
    cos_value = tl.where((turns == 1) | (turns == 2), -cos_value, cos_value)
    sin_value = tl.where(turns >= 2, -sin_value, sin_value)
    return cos_value.to(tl.float32), sin_value.to(tl.float32)


@jit
def in_product_order(x):
    """[R, C] -> the same columns, of which 16 neighbours are what mma.sync takes at once from an operand after a join:
    of a column's number inside 32, bit 1 moves to the top.

    The compiler gives a thread four neighbours of such an operand where it gives two of others, and an MMA then takes
    of 32 columns first those with bit 1 clear, then those with it set. The order inside the 16 does not matter to a
    sum: products without a join, or of wgmma, over columns in this order give the same bits.
    """
    split = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 4, 2, 2])
    return tl.reshape(tl.permute(split, [0, 1, 4, 2, 3, 5]), [x.shape[0], x.shape[1]])
