"""E2M1: all 16 codes, every rounding boundary, packing, MXFP4 and NVFP4, and the recorded vectors."""

import math

import pytest
import torch
from safetensors.torch import load_file

from dsv4.formats import fp4
from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX, e8m0_to_float
from dsv4.testing.numeric import assert_bitwise
from dsv4.testing.shipped_data import OP_VECTORS

VECTORS = load_file(OP_VECTORS)
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_NIBBLES = torch.arange(16, dtype=torch.uint8)


def mxfp4_fake_quantize(x):
    """Quantise and come back, in the dtype of `x`."""
    return fp4.mxfp4_dequantize(*fp4.mxfp4_quantize(x)).to(x.dtype)


def randn(*shape, seed=0):
    """Normal values whose rows differ in magnitude by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return torch.ldexp(x, torch.randint(-12, 12, (*shape[:-1], 1), generator=generator))


# ---- codes ----


def test_every_code_decodes_to_its_value():
    expected = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    assert_bitwise(fp4.e2m1_decode(ALL_NIBBLES), expected)  # 8 is -0.0


def test_every_code_encodes_back():
    assert torch.equal(fp4.e2m1_encode(fp4.e2m1_decode(ALL_NIBBLES)), ALL_NIBBLES)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounds_to_nearest_even_at_every_midpoint(sign):
    values = torch.tensor(MAGNITUDES)
    midpoints = (values[:-1] + values[1:]) / 2
    sign_bit = 8 if sign < 0 else 0

    def codes_of(x):
        return [code - sign_bit for code in fp4.e2m1_encode(sign * x).tolist()]

    assert codes_of(midpoints) == [0, 2, 2, 4, 4, 6, 6]
    assert codes_of(torch.nextafter(midpoints, torch.tensor(math.inf))) == [1, 2, 3, 4, 5, 6, 7]
    assert codes_of(torch.nextafter(midpoints, torch.tensor(-math.inf))) == [0, 1, 2, 3, 4, 5, 6]
    assert codes_of(midpoints.bfloat16()) == [0, 2, 2, 4, 4, 6, 6]


def test_saturates_at_six():
    large = torch.tensor([6.0, 6.1, 7.0, 1e30, math.inf, -6.1, -math.inf])
    assert fp4.e2m1_encode(large).tolist() == [7, 7, 7, 7, 7, 15, 15]


def test_packing_puts_the_even_element_low():
    assert fp4.pack_nibbles(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert fp4.unpack_nibbles(torch.tensor([0x21, 0x0F], dtype=torch.uint8)).tolist() == [1, 2, 15, 0]


def test_packing_round_trip_of_every_byte():
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(fp4.pack_nibbles(fp4.unpack_nibbles(packed)), packed)
    assert torch.equal(fp4.unpack_nibbles(packed.view(torch.int8)), fp4.unpack_nibbles(packed))
    assert fp4.unpack_nibbles(packed.reshape(4, 8, 8)).shape == (4, 8, 16)


# ---- MXFP4 ----


@pytest.mark.parametrize("scale_code", [1, 100, 127, 200, 252])
def test_mxfp4_every_code_at_every_kind_of_scale(scale_code):
    nibbles = torch.cat((ALL_NIBBLES, ALL_NIBBLES))
    values = fp4.e2m1_decode(nibbles) * e8m0_to_float(torch.tensor([scale_code], dtype=torch.uint8))
    packed, scale = fp4.mxfp4_quantize(values)
    assert scale.tolist() == [scale_code]
    assert torch.equal(fp4.unpack_nibbles(packed), nibbles)
    assert_bitwise(fp4.mxfp4_dequantize(packed, scale), values)


@pytest.mark.parametrize("exponent", [-30, -1, 0, 1, 30])
def test_mxfp4_scale_at_an_exact_power_of_two_and_one_ulp_around(exponent):
    exact = torch.full((1, 32), math.ldexp(E2M1_MAX, exponent))
    above = torch.nextafter(exact, torch.tensor(math.inf))
    below = torch.nextafter(exact, torch.tensor(0.0))
    assert fp4.mxfp4_quantize(exact)[1].item() == 127 + exponent
    assert fp4.mxfp4_quantize(above)[1].item() == 128 + exponent
    assert fp4.mxfp4_quantize(below)[1].item() == 127 + exponent
    assert mxfp4_fake_quantize(below).unique().tolist() == [math.ldexp(E2M1_MAX, exponent)]
    # just above, half of the range is used: 3 is the code nearest to 6 / 2
    assert mxfp4_fake_quantize(above).unique().tolist() == [math.ldexp(E2M1_MAX, exponent)]


def test_mxfp4_zeros_keep_their_sign_and_take_the_floor_scale():
    x = torch.zeros(32)
    x[1::2] = -0.0
    packed, scale = fp4.mxfp4_quantize(x)
    assert scale.tolist() == [1]
    assert packed.unique().tolist() == [0x80]
    assert_bitwise(fp4.mxfp4_dequantize(packed, scale), x)


def test_mxfp4_nan_comes_back_as_nan():
    x = torch.ones(3, 64)
    x[1, 40] = math.nan
    y = mxfp4_fake_quantize(x)
    assert y[1, 32:].isnan().all()
    y[1, 32:] = 1
    assert torch.equal(y, torch.ones(3, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_second_pass_changes_nothing(dtype):
    once = mxfp4_fake_quantize(randn(64, 128).to(dtype))
    assert once.dtype == dtype
    assert_bitwise(mxfp4_fake_quantize(once), once)


def test_mxfp4_picks_the_nearest_value_of_the_smallest_fitting_scale():
    x = randn(40, 64)
    packed, scale = fp4.mxfp4_quantize(x)
    steps = e8m0_to_float(scale).double().repeat_interleave(32, -1)  # [40, 64]
    groups = x.abs().unflatten(-1, (2, 32)).amax(-1)
    assert (groups <= E2M1_MAX * e8m0_to_float(scale)).all()
    assert (groups > E2M1_MAX / 2 * e8m0_to_float(scale)).all()
    errors = (x.double() - fp4.mxfp4_dequantize(packed, scale)).abs()
    candidates = steps.unsqueeze(-1) * fp4.e2m1_decode(ALL_NIBBLES).double()  # [40, 64, 16]
    assert torch.equal(errors, (x.double().unsqueeze(-1) - candidates).abs().amin(-1))


def test_mxfp4_groups_do_not_see_each_other():
    x = randn(5, 96)
    packed, scale = fp4.mxfp4_quantize(x)
    assert packed.shape == (5, 48)
    assert scale.shape == (5, 3)
    for row in range(5):
        for group in range(3):
            alone, alone_scale = fp4.mxfp4_quantize(x[row, 32 * group : 32 * (group + 1)])
            assert torch.equal(packed[row, 16 * group : 16 * (group + 1)], alone)
            assert scale[row, group] == alone_scale


@pytest.mark.parametrize("shape", [(0, 32), (1, 64), (2, 0, 32)])
def test_mxfp4_no_rows_and_one_row(shape):
    packed, scale = fp4.mxfp4_quantize(torch.ones(shape))
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    assert torch.equal(fp4.mxfp4_dequantize(packed, scale), torch.ones(shape))


def test_mxfp4_width_that_is_not_a_multiple_of_the_group_is_named():
    with pytest.raises(ValueError, match="the last dimension 48 is not a multiple of the group 32"):
        fp4.mxfp4_quantize(torch.ones(2, 48))


# ---- NVFP4 ----


def test_nvfp4_scales_follow_the_rule():
    weight = randn(24, 64)
    packed, scale, global_scale = fp4.nvfp4_quantize(weight)
    assert packed.shape == (24, 32)
    assert scale.shape == (24, 4)
    assert scale.dtype == torch.float8_e4m3fn
    assert global_scale.dtype == torch.float32
    assert global_scale == weight.abs().max() / (E2M1_MAX * E4M3_MAX)
    amax = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
    assert_bitwise(scale, (amax / (E2M1_MAX * global_scale)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn))
    assert scale.float().max() == E4M3_MAX


def test_nvfp4_picks_the_nearest_value():
    weight = randn(24, 64).sign() * torch.rand(24, 64, generator=torch.Generator().manual_seed(1))
    packed, scale, global_scale = fp4.nvfp4_quantize(weight)
    step = (scale.float() * global_scale).double().repeat_interleave(16, -1)
    chosen = fp4.e2m1_decode(fp4.unpack_nibbles(packed)).double() * step
    candidates = step.unsqueeze(-1) * fp4.e2m1_decode(ALL_NIBBLES).double()
    assert torch.equal((weight - chosen).abs(), (weight.double().unsqueeze(-1) - candidates).abs().amin(-1))


def test_nvfp4_decoding_of_every_code_and_scale():
    """256 E4M3 scales x 16 codes: the first product is exact, the second rounds once."""
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(-1)  # [256, 1]
    packed = fp4.pack_nibbles(ALL_NIBBLES).expand(256, 8)
    global_scale = torch.tensor(0.0123)
    decoded = fp4.nvfp4_dequantize(packed, scales, global_scale)
    exact = scales.double() * fp4.e2m1_decode(ALL_NIBBLES).double()
    is_nan = exact.isnan()
    assert torch.equal(exact.float().double()[~is_nan], exact[~is_nan])
    assert torch.equal(decoded[~is_nan], (exact.float() * global_scale)[~is_nan])
    assert decoded[is_nan].isnan().all()


def test_nvfp4_with_a_shared_global_scale():
    weight = randn(8, 32)
    own = fp4.nvfp4_quantize(weight)
    shared = own[2] * 4
    _, scale, global_scale = fp4.nvfp4_quantize(weight, shared)
    assert global_scale is shared
    assert scale.float().max() == E4M3_MAX / 4
    # a scale that is too small cannot reach the largest values: they saturate, with their sign
    small = fp4.nvfp4_dequantize(*fp4.nvfp4_quantize(weight, own[2] / 1024))
    largest = weight.abs().argmax()
    assert small.flatten()[largest] == weight.flatten()[largest].sign() * E2M1_MAX * E4M3_MAX * (own[2] / 1024)


def test_nvfp4_zero_tensor_and_zero_group():
    packed, scale, global_scale = fp4.nvfp4_quantize(torch.zeros(4, 32))
    assert global_scale > 0
    assert torch.equal(fp4.nvfp4_dequantize(packed, scale, global_scale), torch.zeros(4, 32))
    weight = randn(4, 32)
    weight[2, 16:] = 0
    decoded = fp4.nvfp4_dequantize(*fp4.nvfp4_quantize(weight))
    assert torch.equal(decoded[2, 16:], torch.zeros(16))
    assert not decoded.isnan().any()


def test_nvfp4_holds_a_power_of_two_mxfp4_cast_exactly():
    """The exact cast: weight_scale_2 = 2^m, weight_scale = 2^(k - m), nibbles unchanged."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    packed, codes = fp4.mxfp4_quantize(x)
    exponents = codes.int() - 127
    shift = int(exponents.max()) - 8
    scale = torch.exp2((exponents - shift).float()).repeat_interleave(2, -1).to(torch.float8_e4m3fn)
    decoded = fp4.nvfp4_dequantize(packed, scale, torch.tensor(2.0**shift))
    assert_bitwise(decoded, fp4.mxfp4_dequantize(packed, codes))


# ---- recorded vectors ----


def test_vector_fake_quantisation():
    assert_bitwise(mxfp4_fake_quantize(VECTORS["fp4_fake_32.x"]), VECTORS["fp4_fake_32.y"])


def test_vector_mxfp4_dequantised_weight_rows():
    weight = fp4.mxfp4_dequantize(VECTORS["linear_mxfp4.weight"][:8], VECTORS["linear_mxfp4.scale"][:8])
    assert_bitwise(weight.bfloat16(), VECTORS["linear_mxfp4.dequantised_rows_0_8"])


def test_vector_nvfp4_dequantised_weight_rows():
    weight = fp4.nvfp4_dequantize(
        VECTORS["linear_nvfp4.weight"][:8],
        VECTORS["linear_nvfp4.weight_scale"][:8],
        VECTORS["linear_nvfp4.weight_scale_2"],
    )
    assert_bitwise(weight, VECTORS["linear_nvfp4.dequantised_rows_0_8"])
