"""exp, log and what is made of them in fp64, for kernels: the same bits in the interpreter and on every GPU.

The oracles take transcendental functions in fp64 and round to fp32. These series are good to a few fp64 steps, so the
rounded results agree with them except where the exact value lies within 2^-50 of the middle between two fp32 numbers.
No library is called: a library's last bit differs between machines. Kernels that use them are launched with fp fusion
off.

Also here: the orderable integer of a float, which turns every comparison of this project's selections into one of
integers.
"""

from __future__ import annotations

from dsv4.ops.tl_utils import jit, tl

_LOG2_E = tl.constexpr(1.4426950408889634074)
# ln 2 in two parts; the first has 32 bits, so that its product with an exponent is exact
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)


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


# ---- order ----


@jit
def ordered_bits(x):
    """fp32 -> int32 whose order is the values' order: NaN as -inf, both zeros equal."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def ordered_bits64(x):
    """The same for fp64 without NaN -> int64."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
