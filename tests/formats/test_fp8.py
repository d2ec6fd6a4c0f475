"""E4M3: all 256 codes, every rounding boundary, groups, blocks, and the recorded vectors, all bitwise."""

import math

import pytest
import torch
from safetensors.torch import load_file

from dsv4.formats.e8m0 import E4M3_MAX, e8m0_to_float
from dsv4.formats.fp8 import fp8_block_dequantize, fp8_block_quantize, fp8_dequantize, fp8_fake_quantize, fp8_quantize
from dsv4.testing.numeric import assert_bitwise
from dsv4.testing.shipped_data import OP_VECTORS

VECTORS = load_file(OP_VECTORS)
MAX_CODE = 0x7E  # 448; 0x7F is NaN


def e4m3_value(code: int) -> float:
    """What a code means, from its fields: 1 sign, 4 exponent (bias 7), 3 mantissa; no infinity, one NaN a sign."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def randn(*shape, seed=0, spread=True):
    """Normal values; with `spread`, rows differ in magnitude by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    exponents = torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    return torch.ldexp(x, exponents) if spread else x


def test_every_code_decodes_to_its_fields():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    ones = torch.full((8,), 127, dtype=torch.uint8)
    decoded = fp8_dequantize(codes.view(torch.float8_e4m3fn), ones, 32)
    is_nan = expected.isnan()
    assert_bitwise(decoded[~is_nan], expected[~is_nan])
    assert decoded[is_nan].isnan().all()
    assert is_nan.nonzero().flatten().tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("scale_code", [105, 126, 127, 128, 150])
def test_every_finite_code_survives_a_second_pass(scale_code):
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() * 2.0 ** (scale_code - 127)
    again, scale = fp8_quantize(values, codes.numel())
    assert scale.tolist() == [scale_code]
    assert again.view(torch.uint8).tolist() == codes.tolist()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounds_to_nearest_even_at_every_midpoint(sign):
    values = torch.tensor([e4m3_value(code) for code in range(MAX_CODE + 1)])
    midpoints = (values[:-1] + values[1:]) / 2  # exact: one bit more than E4M3 has
    low = torch.arange(MAX_CODE)
    top = torch.tensor([E4M3_MAX])  # holds the group's scale at 1

    def codes_of(x):
        codes, scale = fp8_quantize(torch.cat((sign * x, top)), x.numel() + 1)
        assert scale.tolist() == [127]
        return (codes.view(torch.uint8)[:-1] & 0x7F).long()

    assert torch.equal(codes_of(midpoints), torch.where(low % 2 == 0, low, low + 1))
    assert torch.equal(codes_of(torch.nextafter(midpoints, torch.tensor(math.inf))), low + 1)
    assert torch.equal(codes_of(torch.nextafter(midpoints, torch.tensor(-math.inf))), low)


def test_the_largest_value_of_a_group_never_overflows():
    # significands that fill fp32, in every position relative to the scale's power of two
    amax = torch.nextafter(torch.linspace(1, 2, 4097), torch.tensor(math.inf)).unsqueeze(-1)
    x = torch.cat((amax, -amax), -1)
    codes, scale = fp8_quantize(x, 2)
    assert not codes.float().isnan().any()
    quotient = amax / e8m0_to_float(scale)
    assert (quotient <= E4M3_MAX).all()
    assert (quotient > E4M3_MAX / 2).all()
    assert codes.float().abs().max() == E4M3_MAX


def test_zeros_keep_their_sign_and_take_the_floor_scale():
    codes, scale = fp8_quantize(torch.tensor([0.0, -0.0]), 2)
    assert codes.view(torch.uint8).tolist() == [0x00, 0x80]
    assert scale.tolist() == [127 - 22]
    assert_bitwise(fp8_dequantize(codes, scale, 2), torch.tensor([0.0, -0.0]))


def test_amax_below_the_floor_uses_the_floor():
    _, scale = fp8_quantize(torch.tensor([1e-9, -1e-12]), 2)
    assert scale.tolist() == [127 - 22]


def test_nan_comes_back_as_nan():
    x = torch.ones(2, 64)
    x[0, 3] = math.nan
    y = fp8_fake_quantize(x, 64)
    assert y[0].isnan().all()
    assert torch.equal(y[1], torch.ones(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [64, 128])
def test_a_second_pass_changes_nothing(dtype, group):
    once = fp8_fake_quantize(randn(64, 256).to(dtype), group)
    assert once.dtype == dtype
    assert_bitwise(fp8_fake_quantize(once, group), once)


def test_rows_and_groups_do_not_see_each_other():
    x = randn(6, 256)
    codes, scale = fp8_quantize(x, 64)
    assert codes.shape == (6, 256)
    assert scale.shape == (6, 4)
    for row in range(6):
        for group in range(4):
            columns = slice(64 * group, 64 * (group + 1))
            alone, alone_scale = fp8_quantize(x[row, columns], 64)
            assert_bitwise(codes[row, columns], alone)
            assert scale[row, group] == alone_scale


def test_input_layout_does_not_matter():
    x = randn(128, 32)
    codes, scale = fp8_quantize(x.T, 64)
    expected_codes, expected_scale = fp8_quantize(x.T.contiguous(), 64)
    assert_bitwise(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (2, 0, 128)])
def test_no_rows_and_one_row(shape):
    codes, scale = fp8_quantize(torch.ones(shape), 128)
    assert codes.shape == shape
    assert scale.shape == (*shape[:-1], 1)


def test_a_width_that_is_not_a_multiple_of_the_group_is_named():
    with pytest.raises(ValueError, match="the last dimension 100 is not a multiple of the group 64"):
        fp8_quantize(torch.ones(2, 100), 64)


# ---- weights in blocks ----


@pytest.mark.parametrize("shape", [(256, 384), (130, 100), (1, 129), (127, 1)])
@pytest.mark.parametrize("fp32_scale", [False, True], ids=["e8m0", "fp32"])
def test_block_scale_applies_to_its_block_only(shape, fp32_scale):
    weight = randn(*shape)
    codes, scale = fp8_block_quantize(weight, (128, 128), fp32_scale)
    rows, cols = shape
    assert codes.shape == shape
    assert scale.shape == (math.ceil(rows / 128), math.ceil(cols / 128))
    assert scale.dtype == (torch.float32 if fp32_scale else torch.uint8)
    decoded = fp8_block_dequantize(codes, scale, (128, 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            factor = scale[i, j] if fp32_scale else e8m0_to_float(scale[i, j])
            assert_bitwise(decoded[block], codes[block].float() * factor)
            assert codes[block].float().abs().max() >= E4M3_MAX / 2  # no coarser a scale than needed


def test_block_e8m0_rule_is_the_activation_rule():
    weight = randn(128, 128)
    codes, scale = fp8_block_quantize(weight, (128, 128))
    flat_codes, flat_scale = fp8_quantize(weight.flatten(), 128 * 128)
    assert_bitwise(codes.flatten(), flat_codes)
    assert scale.flatten().tolist() == flat_scale.tolist()


def test_block_second_pass_changes_nothing():
    block = (32, 64)
    once = fp8_block_dequantize(*fp8_block_quantize(randn(100, 200), block), block)
    assert_bitwise(fp8_block_dequantize(*fp8_block_quantize(once, block), block), once)


def test_block_decoding_of_a_stack_and_of_native_e8m0():
    parts = [fp8_block_quantize(randn(130, 100, seed=seed), (128, 64)) for seed in range(3)]
    codes = torch.stack([part[0].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    scale = torch.stack([part[1] for part in parts])
    stacked = fp8_block_dequantize(codes, scale, (128, 64))
    assert_bitwise(stacked, fp8_block_dequantize(codes, scale.view(torch.float8_e8m0fnu), (128, 64)))
    for idx, part in enumerate(parts):
        assert_bitwise(stacked[idx], fp8_block_dequantize(*part, (128, 64)))


# ---- recorded vectors ----


def test_vector_activation_codes_and_scales():
    codes, scale = fp8_quantize(VECTORS["fp8_act_128.x"], 128)
    assert_bitwise(codes, VECTORS["fp8_act_128.codes"])
    assert torch.equal(scale, VECTORS["fp8_act_128.scale"].view(torch.uint8))


def test_vector_fake_quantisation():
    assert_bitwise(fp8_fake_quantize(VECTORS["fp8_fake_64.x"], 64), VECTORS["fp8_fake_64.y"])


def test_vector_dequantised_weight_rows():
    weight = fp8_block_dequantize(VECTORS["linear_fp8.weight"], VECTORS["linear_fp8.scale"], (128, 128))
    assert_bitwise(weight[120:136].bfloat16(), VECTORS["linear_fp8.dequantised_rows_120_136"])
