"""The tolerance policy itself: what must pass passes, and what is a little worse does not."""

import pytest
import torch

from dsv4.formats.fp4 import mxfp4_dequantize, mxfp4_quantize, nvfp4_dequantize, nvfp4_quantize
from dsv4.formats.fp8 import fp8_block_dequantize, fp8_block_quantize, fp8_fake_quantize
from dsv4.testing.inputs import generator
from dsv4.testing.numeric import (
    NEAR_TIE_NATS,
    assert_bitwise,
    assert_close_to_oracle,
    assert_greedy,
    assert_within_format,
    product_difference,
)


def test_bitwise_sees_zeros_and_ulps_and_accepts_any_nan():
    x = torch.tensor([0.0, 1.0, float("nan")])
    other_nan = x.view(torch.int32).clone()
    other_nan[2] ^= 1
    assert_bitwise(x, other_nan.view(torch.float32))
    for index, value in ((0, -0.0), (1, 1 + 2**-23), (2, 0.0)):
        changed = x.clone()
        changed[index] = value
        with pytest.raises(AssertionError, match=rf"1 of 3 elements differ, the first at \({index},\)"):
            assert_bitwise(changed, x)
    with pytest.raises(AssertionError, match="expected torch.float32, found torch.float64"):
        assert_bitwise(x.double(), x)
    with pytest.raises(AssertionError, match="expected shape"):
        assert_bitwise(x[:2], x)


def test_bitwise_works_for_codes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    assert_bitwise(codes, codes.clone())
    with pytest.raises(AssertionError, match="1 of 256"):
        assert_bitwise(torch.cat((codes[1:2], codes[1:])), codes)


def square_sum(x):
    return lambda dtype: x.to(dtype).square().sum(-1, keepdim=True)


def test_close_to_oracle_allows_the_oracle_s_own_error_and_not_much_more():
    x = torch.randn(16, 300, generator=generator(0))
    oracle = square_sum(x)
    assert_close_to_oracle(oracle(torch.float32), oracle)
    assert_close_to_oracle(oracle(torch.float64).float(), oracle)
    with pytest.raises(AssertionError, match="the oracle's own"):
        assert_close_to_oracle(oracle(torch.float64).float() * (1 + 2**-19), oracle)
    with pytest.raises(AssertionError, match="the oracle's own"):
        assert_close_to_oracle(torch.full((16, 1), float("nan")), oracle)


def test_close_to_oracle_looks_at_small_rows_too():
    x = torch.ones(2, 8)
    x[1] *= 1e-6
    wrong = x.clone()
    wrong[1] *= 1.01  # 1e-8 in absolute terms
    with pytest.raises(AssertionError, match="the oracle's own"):
        assert_close_to_oracle(wrong, x.to)


def test_close_to_oracle_wants_the_oracle_s_shape_and_dtype():
    x = torch.ones(2, 8)
    with pytest.raises(AssertionError, match=r"expected torch.float32 \(2, 8\), found torch.float32 \(2, 4\)"):
        assert_close_to_oracle(x[:, :4], x.to)
    with pytest.raises(AssertionError, match="must give fp64 for fp64"):
        assert_close_to_oracle(x, lambda dtype: x)


def quantised(weight, number_format, spoil):
    """The weight after a trip through the format; `spoil` makes the mistake a kernel could make."""
    if number_format == "bf16":
        return weight.bfloat16().float() * (1 + 2**-7 if spoil else 1)
    if number_format == "fp8":
        codes, scale = fp8_block_quantize(weight, (128, 128))
        scale[0, 0] += spoil
        return fp8_block_dequantize(codes, scale, (128, 128))
    if number_format == "mxfp4":
        packed, scale = mxfp4_quantize(weight)
        return mxfp4_dequantize((packed >> 4) | (packed << 4) if spoil else packed, scale)
    packed, scale, global_scale = nvfp4_quantize(weight)
    return nvfp4_dequantize((packed >> 4) | (packed << 4) if spoil else packed, scale, global_scale)


@pytest.mark.parametrize("number_format", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_format_bounds_hold_and_catch_mistakes(number_format):
    x = torch.randn(64, 512, generator=generator(1))
    weight = torch.randn(128, 512, generator=generator(2))
    exact = x.double() @ weight.double().T
    seen = x.bfloat16().float() if number_format in ("bf16", "nvfp4") else fp8_fake_quantize(x, 128)
    assert_within_format(seen @ quantised(weight, number_format, False).T, exact, number_format)
    with pytest.raises(AssertionError, match=f"for {number_format}"):
        assert_within_format(seen @ quantised(weight, number_format, True).T, exact, number_format)


def test_product_difference_is_half_the_squared_relative_error():
    x = torch.randn(1000, generator=generator(3))
    noise = torch.randn(1000, generator=generator(4)) * 0.01
    expected = 0.5 * (noise.square().sum() / x.square().sum()).item()
    assert product_difference(x + noise, x) == pytest.approx(expected, rel=0.1)
    assert product_difference(torch.zeros(3), torch.zeros(3)) == 0.0
    assert product_difference(torch.zeros(3), torch.ones(3)) == 1.0


def test_greedy_tokens_may_differ_at_near_ties_only():
    logits = torch.tensor([[0.0, 5.0, 1.0], [2.0, 2.25, 0.0]])
    assert_greedy(logits, [1, 0], [NEAR_TIE_NATS, NEAR_TIE_NATS / 2])
    assert_greedy(logits, [1, 1], [4.0, 2 * NEAR_TIE_NATS])
    for token_ids, gaps in (
        ([2, 1], [0.0, 0.25]),
        ([1, 0], [4.0, NEAR_TIE_NATS]),
        ([1, 0], [4.0, NEAR_TIE_NATS - 0.2]),
    ):
        with pytest.raises(AssertionError, match=r"lacks .* nats"):
            assert_greedy(logits, token_ids, gaps)
    with pytest.raises(AssertionError, match="lacks nan"):
        assert_greedy(logits * float("nan"), [1, 1], [0.0, 0.0])
