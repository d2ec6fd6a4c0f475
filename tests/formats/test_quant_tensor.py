"""`QuantTensor`: shape, bytes, indexing and exact values of every weight format."""

import pytest
import torch

from dsv4.formats.fp4 import mxfp4_dequantize, mxfp4_quantize, nvfp4_dequantize, nvfp4_quantize
from dsv4.formats.fp8 import fp8_block_dequantize, fp8_block_quantize
from dsv4.formats.tensors import QuantFormat, QuantTensor, dequantize

E, N, K = 3, 130, 96
BLOCK = (64, 32)


def matrices():
    return [torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) for seed in range(E)]


def stack_bytes(parts):
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def fp8_stack(fp32_scale):
    parts = [fp8_block_quantize(weight, BLOCK, fp32_scale) for weight in matrices()]
    stacked = QuantTensor(
        stack_bytes([part[0] for part in parts]),
        torch.stack([part[1] for part in parts]),
        QuantFormat.FP8_BLOCK,
        block=BLOCK,
    )
    return stacked, [fp8_block_dequantize(*part, BLOCK) for part in parts], N * K + 3 * 3 * (4 if fp32_scale else 1)


def mxfp4_stack():
    parts = [mxfp4_quantize(weight) for weight in matrices()]
    stacked = QuantTensor(
        torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]), QuantFormat.MXFP4
    )
    return stacked, [mxfp4_dequantize(*part) for part in parts], N * K // 2 + N * K // 32


def nvfp4_stack():
    parts = [nvfp4_quantize(weight) for weight in matrices()]
    stacked = QuantTensor(
        torch.stack([part[0] for part in parts]),
        stack_bytes([part[1] for part in parts]),
        QuantFormat.NVFP4,
        torch.stack([part[2] for part in parts]),
    )
    return stacked, [nvfp4_dequantize(*part) for part in parts], N * K // 2 + N * K // 16 + 4


FORMATS = pytest.mark.parametrize(
    ("stacked", "expected", "matrix_bytes"),
    [fp8_stack(False), fp8_stack(True), mxfp4_stack(), nvfp4_stack()],
    ids=["fp8", "fp8-fp32-scale", "mxfp4", "nvfp4"],
)


@FORMATS
def test_shapes_are_in_weights_bytes_count_all_scales_and_an_index_copies_nothing(stacked, expected, matrix_bytes):
    one = stacked[2]
    assert (stacked.shape, one.shape, stacked.dequantize().shape) == ((E, N, K), (N, K), (E, N, K))
    assert (one.nbytes, stacked.nbytes) == (matrix_bytes, E * matrix_bytes)
    assert one.data.data_ptr() == stacked.data[2].data_ptr()
    assert one.scale.data_ptr() == stacked.scale[2].data_ptr()
    assert (one.format, one.block) == (stacked.format, stacked.block)


@FORMATS
def test_a_stack_holds_each_matrix_exactly(stacked, expected, matrix_bytes):
    whole = stacked.dequantize()
    assert whole.dtype == torch.float32
    for expert_idx in range(E):
        assert torch.equal(whole[expert_idx], expected[expert_idx])
        assert torch.equal(stacked[expert_idx].dequantize(), expected[expert_idx])


@FORMATS
def test_other_dtypes_round_the_exact_value_once(stacked, expected, matrix_bytes):
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(stacked[0].dequantize(dtype), expected[0].to(dtype))
        assert torch.equal(dequantize(stacked[0], dtype), expected[0].to(dtype))


@FORMATS
def test_moving_keeps_everything(stacked, expected, matrix_bytes):
    moved = stacked.to("cpu")
    assert moved.device == torch.device("cpu")
    assert (moved.format, moved.block, moved.nbytes) == (stacked.format, stacked.block, stacked.nbytes)
    assert torch.equal(moved.dequantize(), stacked.dequantize())
    meta = stacked.to("meta")
    assert meta.device == torch.device("meta")
    assert meta.shape == stacked.shape


def test_plain_tensors_pass_through_dequantize():
    weight = matrices()[0]
    assert torch.equal(dequantize(weight, torch.float64), weight.double())
