"""The RMSNorm kernels against their oracles, with hostile inputs; fused against unfused and batched against single,
bit for bit.
"""

import pytest
import torch

from dsv4.formats.fp8 import fp8_quantize
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.norm import rms_norm, rms_norm_quant, rms_norm_ref
from dsv4.testing.inputs import around, kernel_device, normal, strided, wild
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

EPS = 1e-6
WIDTHS = [1, 63, 64, 65, 128, 512, 1000, 1024, 1536, 4096, 7168]


def assert_follows_oracle(out, x, weight):
    assert_close_to_oracle(out, lambda dtype: rms_norm_ref(x.to(dtype), weight, EPS))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_weight", [True, False])
def test_every_width(width, has_weight):
    x = wild((5, width), seed=width)
    weight = normal((width,), seed=1) if has_weight else None
    assert_follows_oracle(rms_norm(x, weight, EPS), x, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", around(8))
def test_every_dtype_and_rows_around_the_tile(dtype, rows):
    x = wild((rows, 512), dtype, seed=rows)
    weight = normal((512,), torch.float32, seed=2)
    assert_follows_oracle(rms_norm(x, weight, EPS), x, weight)


def test_leading_dimensions_are_rows():
    x = wild((2, 3, 4, 64), seed=3)
    assert_bitwise(rms_norm(x, None, EPS).flatten(0, 2), rms_norm(x.flatten(0, 2), None, EPS))
    assert rms_norm(x[:0], None, EPS).shape == (0, 3, 4, 64)


def test_a_strided_weight_and_heads():
    plain, weight = wild((4, 6, 128), seed=5), normal((128,), seed=6)
    assert_follows_oracle(rms_norm(strided(plain, 1), strided(weight, 0), EPS), plain, weight)


def test_a_nan_stays_in_its_row():
    x = wild((9, 1000), seed=7)
    clean = rms_norm(x, None, EPS)
    x[4, 999] = float("nan")
    out = rms_norm(x, None, EPS)
    assert out[4].isnan().all()
    keep = torch.arange(9, device=x.device) != 4
    assert_bitwise(out[keep], clean[keep])


def test_an_infinity_gives_nan_there_and_zero_elsewhere_as_the_oracle():
    x = normal((3, 512), seed=8)
    x[1, 5] = float("inf")
    assert_bitwise(rms_norm(x, None, EPS)[1], rms_norm_ref(x, None, EPS)[1])


@pytest.mark.parametrize("width", [256, 512, 1536, 4096, 7168])
@pytest.mark.parametrize("has_weight", [True, False])
def test_codes_are_those_of_the_rounded_norm(width, has_weight):
    x = wild((9, width), seed=11)
    weight = normal((width,), seed=12) if has_weight else None
    plain, quant = rms_norm_quant(x, weight, EPS, True)
    assert_bitwise(plain, rms_norm(x, weight, EPS), "fused against unfused")
    codes, scale = fp8_quantize(plain, 128)
    assert_bitwise(quant.codes, codes, "codes")
    assert_bitwise(quant.scale, scale, "scale")


def test_codes_alone_are_the_same_codes():
    x = wild((3, 2, 1024), seed=13)
    plain, both = rms_norm_quant(x, None, EPS, True)
    nothing, alone = rms_norm_quant(x, None, EPS, False)
    assert plain is not None
    assert nothing is None
    assert_bitwise(alone.codes, both.codes)
    assert_bitwise(alone.scale, both.scale)
    assert alone.scale.shape == (3, 2, 8)


def test_a_nan_reaches_the_codes_of_its_row():
    x = wild((3, 256), seed=15)
    x[1, 200] = float("nan")
    _, quant = rms_norm_quant(x, None, EPS, False)
    assert quant.dequantize()[1].isnan().all()
    assert not quant.dequantize()[[0, 2]].isnan().any()


def test_what_cannot_be_done_is_said():
    x = normal((2, 512))
    with pytest.raises(KernelInputError, match="expected one of .* found torch.float64"):
        rms_norm(x.double(), None, EPS)
    with pytest.raises(KernelInputError, match=r"expected a weight of shape \(512,\), found \(511,\)"):
        rms_norm(x, normal((511,)), EPS)
    with pytest.raises(KernelInputError, match="multiple of 128 columns, found 500"):
        rms_norm_quant(x[:, :500], None, EPS, True)
    with pytest.raises(KernelInputError, match="must be at most 16384, found 16385"):
        rms_norm(torch.zeros(1, 16385, device=kernel_device()), None, EPS)
