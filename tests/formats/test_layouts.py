"""Shuffled weights: the way back is exact, sizes are those of the packed weights, what cannot be kept is refused."""

import pytest
import torch

from dsv4.formats import layouts
from dsv4.formats.fp4 import pack_nibbles
from dsv4.formats.layouts import LayoutError, check_values, shuffle, unshuffle
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.testing.inputs import generator
from dsv4.testing.numeric import assert_bitwise

STACK, ROWS, COLS = 3, 128, 256


def random_nibbles(shape, seed=0):
    return torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator(seed))


def nvfp4(shape=(STACK, ROWS, COLS), seed=0):
    *stack, rows, cols = shape
    scale = torch.randint(1, 0x7F, (*stack, rows, cols // 16), dtype=torch.uint8, generator=generator(seed + 1))
    given = torch.rand(tuple(stack), generator=generator(seed + 2))
    data = pack_nibbles(random_nibbles(shape, seed))
    return QuantTensor(data, scale.view(torch.float8_e4m3fn), QuantFormat.NVFP4, given)


def mxfp4(shape=(STACK, ROWS, COLS), seed=0, codes=(60, 180)):
    *stack, rows, cols = shape
    scale = torch.randint(*codes, (*stack, rows, cols // 32), dtype=torch.uint8, generator=generator(seed + 1))
    return QuantTensor(pack_nibbles(random_nibbles(shape, seed)), scale, QuantFormat.MXFP4)


def fp8(shape=(STACK, ROWS, COLS), seed=0, fp32=False):
    *stack, rows, cols = shape
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(seed))
    data = torch.where((data & 0x7F) == 0x7F, 0, data).view(torch.float8_e4m3fn)
    blocks = (*stack, -(-rows // 128), -(-cols // 128))
    scale = torch.randint(100, 140, blocks, dtype=torch.uint8, generator=generator(seed + 1))
    scale = torch.exp2(scale.float() - 127) if fp32 else scale
    return QuantTensor(data, scale, QuantFormat.FP8_BLOCK)


def assert_same(found, weight):
    assert_bitwise(found.data.view(torch.uint8), weight.data.view(torch.uint8), "data")
    assert found.scale.dtype == weight.scale.dtype
    assert_bitwise(found.scale, weight.scale, "scale")
    assert (found.format, found.block, found.shape) == (weight.format, weight.block, weight.shape)
    if weight.global_scale is not None:
        assert_bitwise(found.global_scale, weight.global_scale, "global scale")


@pytest.mark.parametrize("make", [nvfp4, mxfp4, fp8])
@pytest.mark.parametrize("shape", [(STACK, ROWS, COLS), (64, 128), (1, 72, 160), (130, 32)])
def test_there_and_back(make, shape):
    weight = make(shape, seed=sum(shape))
    assert_same(unshuffle(shuffle(weight)), weight)


@pytest.mark.parametrize("make", [nvfp4, mxfp4, fp8])
@pytest.mark.parametrize("shape", [(STACK, ROWS, COLS), (64, 128), (1, 72, 160), (130, 32)])
def test_shapes_alone(make, shape):
    """On "meta", for kernels that are compiled before there are weights."""
    real, found = shuffle(make(shape)), shuffle(make(shape).to("meta"))
    for name in ("data", "scale", "out_scale", "shift"):
        one, other = getattr(real, name), getattr(found, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        strides = zip(one.shape, one.stride(), other.stride(), strict=True)
        assert all(first == second for length, first, second in strides if length > 1)
        assert other.device.type == "meta"
    assert (real.shape, real.format, real.block) == (found.shape, found.format, found.block)


@pytest.mark.parametrize("make", [nvfp4, mxfp4, fp8])
def test_a_stack_is_its_matrices(make, monkeypatch):
    """Laid out a few at a time; each as if alone."""
    stack = make((5, 72, 160))
    monkeypatch.setattr(layouts, "_PIECE_WEIGHTS", 2 * 72 * 160)
    whole, alone = shuffle(stack), [shuffle(stack[place]) for place in range(5)]
    for name in ("data", "scale", "out_scale", "shift"):
        assert_bitwise(getattr(whole, name), torch.stack([getattr(one, name) for one in alone]), name)


def test_scales_in_fp32():
    weight = fp8(fp32=True)
    assert_same(unshuffle(shuffle(weight)), weight)


@pytest.mark.parametrize("make", [nvfp4, mxfp4, fp8])
def test_no_larger_than_the_packed_weights(make):
    weight = make()
    shuffled = shuffle(weight)
    per_matrix = 8 * STACK  # out_scale and shift
    per_tile = 4 * shuffled.scale.numel() - weight.scale.numel() if make is fp8 else 0  # one word for each 64 x 128
    assert shuffled.nbytes == weight.nbytes + per_matrix + per_tile
    assert per_tile * 1000 < weight.nbytes


def test_every_nibble_under_every_scale():
    """256 x 16 combinations in one matrix; those a scale of zero hides come back as zeros of the same value."""
    codes = torch.arange(0x7F, dtype=torch.uint8)  # 0 and all positive numbers of E4M3
    scale = codes.repeat(2).unsqueeze(1)[:128].contiguous().view(torch.float8_e4m3fn)  # [128, 1]
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(128, 1)
    weight = QuantTensor(pack_nibbles(nibbles), scale, QuantFormat.NVFP4, torch.tensor(0.5))
    back = unshuffle(shuffle(weight))
    assert_bitwise(back.dequantize().abs(), weight.dequantize().abs())
    is_hidden = scale.float().flatten() == 0
    assert_bitwise(back.data[~is_hidden], weight.data[~is_hidden])
    assert (back.data[is_hidden] == 0).all()
    assert is_hidden.any()


def test_mxfp4_scales_of_empty_groups_are_kept():
    weight = mxfp4(codes=(118, 124))
    data = weight.data.unflatten(-1, (-1, 16)).clone()
    data[:, ::3, 1] = 0
    scale = weight.scale.clone()
    scale[:, ::3, 1] = torch.arange(scale[:, ::3, 1].numel()).view_as(scale[:, ::3, 1]).to(torch.uint8) % 255
    weight = QuantTensor(data.flatten(-2), scale, QuantFormat.MXFP4)
    assert_same(unshuffle(shuffle(weight)), weight)


def test_a_matrix_of_zeros():
    for weight in (nvfp4((64, 128)), mxfp4((64, 128)), fp8((64, 128))):
        zeros = QuantTensor(torch.zeros_like(weight.data), weight.scale, weight.format, weight.global_scale)
        assert_same(unshuffle(shuffle(zeros)), zeros)


def with_scale(weight, value):
    scale = weight.scale.clone()
    scale.view(torch.uint8).flatten()[5] = value
    return QuantTensor(weight.data, scale, weight.format, weight.global_scale)


@pytest.mark.parametrize("refused", [shuffle, check_values])
def test_what_cannot_be_kept_is_refused(refused):
    for value in (0x7F, 0x80, 0x93):  # NaN, -0, a negative number
        with pytest.raises(LayoutError, match="zero or positive"):
            refused(with_scale(nvfp4(), value))
    with pytest.raises(LayoutError, match="found NaN"):
        refused(with_scale(mxfp4(), 255))
    with pytest.raises(LayoutError, match="within a factor of 2\\^125, found codes from 3 to"):
        refused(with_scale(mxfp4(codes=(140, 180)), 3))
    broken = fp8()
    broken.data.view(torch.uint8)[0, 0, 0] = 0xFF
    with pytest.raises(LayoutError, match="weights that are numbers"):
        refused(broken)
    plain = fp8(fp32=True)
    with pytest.raises(LayoutError, match="powers of two"):
        refused(QuantTensor(plain.data, plain.scale * 1.5, plain.format))
    with pytest.raises(LayoutError, match="multiples of"):
        refused(QuantTensor(plain.data, plain.scale, plain.format, None, (32, 32)))
