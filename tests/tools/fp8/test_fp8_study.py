"""The study of MXFP4 experts on FP8 tensor cores: what its oracle cuts off, and when a weight is exact in E4M3."""

import torch

from dsv4.formats.exact_sums import in_runs
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.moe import moe_ref
from dsv4.testing.cases.linear import random_fp8
from dsv4.testing.vectors import relative_l2
from tools.fp8.study import SPAN, fp8_sums, moe_fp8, spans


def mxfp4(codes, scales):
    return QuantTensor(codes, scales, QuantFormat.MXFP4)


def random_mxfp4(*shape):
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    return mxfp4(codes, torch.randint(116, 120, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8))


def sums_of(values, weights=1.0):
    """Of a row of numbers with one of weights, both at least 2^-6 or zero."""
    row = in_runs(torch.tensor([values]).float())
    return fp8_sums(row, torch.ones(*row.shape[:2], 1), torch.ones_like(row) * torch.tensor(weights)).item()


def test_what_an_instruction_cuts_off():
    rest = [0.0] * 126
    assert sums_of([1.0] * 300) == 300.0
    assert sums_of([2.0**13, 1.0, *rest]) == 2.0**13 + 1
    assert sums_of([2.0**13, 0.75, *rest]) == 2.0**13
    assert sums_of([2.0**13] + [0.0] * 31 + [0.75] * 96) == 2.0**13, "what is there already counts as the largest"
    assert sums_of([-(2.0**13), -0.75, *rest]) == -(2.0**13), "cut off, not rounded"
    assert sums_of([2.0**13] + [0.0] * 127 + [0.75] * 2) == 2.0**13 + 1.5, "128 columns on, fp32 adds"


def test_what_counts_as_the_largest_and_what_a_result_keeps():
    """As an H200 does: tools/fp8/products.py."""
    large, small = 1.5 * 2.0**6, 0.5
    assert sums_of([large, small, small] + [0.0] * 125, [large] + [1.0] * 127) == large**2 + 1, "2.25 x 2^12 as 2^12"
    assert sums_of([0.0] * 125 + [2.0**12, 2.0**12, 0.5]) == 2.0**13, "14 bits of a result, of the last one too"
    # a subnormal code counts as the smallest normal one: 2^-9 x 2^6 as 1
    assert sums_of([2.0**-9, 2.0**-14] + [0.0] * 126, [2.0**6] + [1.0] * 127) == 2.0**-3
    assert sums_of([2.0**-6, 2.0**-13] + [0.0] * 126, [1.0] * 128) == 2.0**-6 + 2.0**-13


def test_scales_that_leave_a_weight_exact_in_e4m3():
    every = torch.arange(16, dtype=torch.uint8).repeat(4)  # both nibbles of a byte: every value of E2M1
    for span, is_exact in ((0, True), (SPAN, True), (SPAN + 1, False)):
        scales = torch.tensor([[100, 100 + span, 100, 100 + span]], dtype=torch.uint8)
        weight = mxfp4((every * 17).unsqueeze(0), scales)
        assert spans(weight).tolist() == [[span]]
        codes = weight.dequantize() * 2.0 ** (127 - (100 + span) + 6)  # the largest becomes 6 x 2^6
        assert torch.equal(codes.to(torch.float8_e4m3fn).float(), codes) == is_exact
    empty = mxfp4(torch.zeros(1, 64, dtype=torch.uint8), torch.tensor([[1, 250, 7, 90]], dtype=torch.uint8))
    assert spans(empty).tolist() == [[0]]


def test_experts_of_fourteen_bits_are_near_exact_ones_and_rows_stand_alone():
    torch.manual_seed(0)
    routed = tuple(random_mxfp4(4, *shape) for shape in ((128, 256), (256, 128), (128, 256)))
    shared = tuple(random_fp8(*shape, torch.device("cpu")) for shape in ((128, 256), (256, 128), (128, 256)))
    x, experts = torch.randn(9, 256, dtype=torch.bfloat16), torch.tensor([[0, 2], [1, 3], [-1, 2]] * 3)
    given = x, experts, torch.rand(9, 2), routed, shared
    found, expected = moe_fp8(*given, limit=10.0), moe_ref(*given, limit=10.0)
    assert 0 < relative_l2(found, expected) < 2e-3  # bf16 rounds to 2^-9
    alone = torch.cat(
        [moe_fp8(*(part[row : row + 1] for part in given[:3]), routed, shared, limit=10.0) for row in range(9)]
    )
    assert torch.equal(alone, found)
