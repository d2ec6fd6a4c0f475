"""E8M0: all 256 codes bitwise, and the scale rule against exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX, FP4_AMAX_FLOOR, FP8_AMAX_FLOOR, ceil_e8m0, e8m0_to_float

ALL_CODES = torch.arange(256, dtype=torch.uint8)
MAXIMA = pytest.mark.parametrize("max_code", [E4M3_MAX, E2M1_MAX], ids=["e4m3", "e2m1"])


def smallest_scale_exponent(amax: float, max_code: float) -> int:
    """The smallest e with amax <= max_code * 2^e, by exact arithmetic."""
    quotient = Fraction(amax) / Fraction(max_code)
    exponent = math.floor(math.log2(quotient)) - 2  # two below: log2 itself may be off by a little
    while Fraction(2) ** exponent < quotient:
        exponent += 1
    return exponent


def test_every_code_is_its_power_of_two():
    values = e8m0_to_float(ALL_CODES)
    assert values.dtype == torch.float32
    assert values[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert values[255].isnan()


def test_torch_agrees_on_every_code():
    native = ALL_CODES.view(torch.float8_e8m0fnu)
    assert torch.equal(e8m0_to_float(native)[:255], native.float()[:255])
    assert torch.equal(e8m0_to_float(native)[:255], e8m0_to_float(ALL_CODES)[:255])


def test_views_with_strides_decode_the_same():
    table = ALL_CODES.reshape(16, 16)
    assert torch.equal(e8m0_to_float(table.T)[:15], e8m0_to_float(table).T[:15])


@MAXIMA
def test_scale_at_powers_of_two_and_one_ulp_around(max_code):
    exponents = torch.arange(-118, 118)
    exact = torch.ldexp(torch.full(exponents.shape, max_code), exponents)
    above = torch.nextafter(exact, torch.tensor(math.inf))
    below = torch.nextafter(exact, torch.tensor(0.0))
    assert ceil_e8m0(exact, max_code).tolist() == (exponents + 127).tolist()
    assert ceil_e8m0(above, max_code).tolist() == (exponents + 128).tolist()
    assert ceil_e8m0(below, max_code).tolist() == (exponents + 127).tolist()


@MAXIMA
def test_scale_is_the_smallest_that_fits_every_bf16_mantissa(max_code):
    mantissas = torch.arange(128, 256, dtype=torch.float32)  # the 128 significands of bf16
    for exponent in (-20, -7, 0, 1, 30):
        amax = torch.ldexp(mantissas, torch.tensor(exponent))
        expected = [smallest_scale_exponent(value, max_code) + 127 for value in amax.tolist()]
        assert ceil_e8m0(amax, max_code).tolist() == expected
        assert ceil_e8m0(amax.bfloat16(), max_code).tolist() == expected


@MAXIMA
def test_scale_is_the_smallest_that_fits_random_fp32(max_code):
    bits = torch.randint(0x20000000, 0x5F000000, (4000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    amax = bits.view(torch.float32)
    expected = [smallest_scale_exponent(value, max_code) + 127 for value in amax.tolist()]
    assert ceil_e8m0(amax, max_code).tolist() == expected


def test_scales_at_the_floors():
    # 1e-4 / 448 lies between 2^-23 and 2^-22; 6 * 2^-126 / 6 is the smallest normal power of two
    assert ceil_e8m0(torch.tensor([FP8_AMAX_FLOOR]), E4M3_MAX).tolist() == [127 - 22]
    assert ceil_e8m0(torch.tensor([FP4_AMAX_FLOOR]), E2M1_MAX).tolist() == [1]


@MAXIMA
def test_scale_of_what_is_not_finite_is_nan(max_code):
    """A NaN must not come back as a number: E2M1 has no code for it, so the scale has to carry it."""
    codes = ceil_e8m0(torch.tensor([math.nan, -math.nan, math.inf]), max_code)
    assert codes.tolist() == [255, 255, 255]
    payloads = torch.tensor([0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0x7FFF0000], dtype=torch.int32)
    assert (ceil_e8m0(payloads.view(torch.float32), max_code) == 255).all()
