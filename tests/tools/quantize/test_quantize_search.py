"""Searched scales: never worse than the usual rule, in any group; exact where the values already fit."""

import pytest
import torch

from dsv4.formats.fp4 import mxfp4_quantize, nvfp4_quantize
from dsv4.formats.fp4_search import cast_to_nvfp4, nvfp4_global_scale, quantize_mxfp4, quantize_nvfp4
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.tools.quantize import search


def hostile(seed=0):
    """Gaussian rows, and rows of zeros, tiny and huge values, single spikes, values on the grid and on midpoints."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    x[2] *= 1e-20
    x[3] *= 1e20
    x[4, ::16] = 100
    x[5] = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(16)
    x[6] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(16)
    x[7, 1:] = 0
    x[8] = 1
    x[9] = -0.0
    return x


def errors(weight, x, group):
    return (weight.dequantize().double() - x.double()).square().unflatten(1, (-1, group)).sum(-1)


def test_one_step_is_the_usual_rule():
    x = hostile()
    packed, scale = mxfp4_quantize(x)
    found = quantize_mxfp4(x, (0,))
    assert torch.equal(found.data, packed)
    assert torch.equal(found.scale, scale)
    whole = nvfp4_global_scale(x.abs().max())
    packed, scale, same = nvfp4_quantize(x, whole)
    found = quantize_nvfp4(x, whole, (0,))
    assert torch.equal(found.data, packed)
    assert torch.equal(found.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(nvfp4_quantize(x)[2], same)


def test_no_group_is_worse_and_most_are_better():
    x = hostile()
    assert bool((errors(quantize_mxfp4(x), x, 32) <= errors(quantize_mxfp4(x, (0,)), x, 32)).all())
    x = hostile()[torch.arange(64) != 3]
    whole = nvfp4_global_scale(x.abs().max())
    plain, best = errors(quantize_nvfp4(x, whole, (0,)), x, 16), errors(quantize_nvfp4(x, whole), x, 16)
    assert bool((best <= plain).all())
    assert float((best < plain).float().mean()) > 0.4
    gauss = x[20:]
    whole = nvfp4_global_scale(gauss.abs().max())
    plain, best = errors(quantize_nvfp4(gauss, whole, (0,)), gauss, 16), errors(quantize_nvfp4(gauss, whole), gauss, 16)
    assert 0.6 < float(best.sum() / plain.sum()) < 0.8


def test_pieces_do_not_matter(monkeypatch):
    x = hostile()
    whole = nvfp4_global_scale(x[10:].abs().max())
    before = quantize_mxfp4(x), quantize_nvfp4(x[10:], whole)
    monkeypatch.setattr(search, "_PIECE_VALUES", 300)
    after = quantize_mxfp4(x), quantize_nvfp4(x[10:], whole)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.data, other.data)
        assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))


@pytest.mark.parametrize("spread", [0, 6, 17])
def test_mxfp4_becomes_nvfp4_without_a_changed_bit(spread):
    generator = torch.Generator().manual_seed(spread)
    data = torch.randint(0, 256, (32, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(110 - spread, 111, (32, 4), generator=generator, dtype=torch.uint8)
    scale[0, 0], scale[1, 1] = 110, 110 - spread
    weight = QuantTensor(data, scale, QuantFormat.MXFP4)
    found = cast_to_nvfp4(weight, 110)
    assert found is not None
    assert found.format is QuantFormat.NVFP4
    assert torch.equal(found.dequantize(), weight.dequantize())
    higher = cast_to_nvfp4(weight, 113)  # a twin's scales are larger
    assert (higher is None) == (spread > 14)


def test_scales_that_span_too_much_cannot_be_cast():
    data = torch.full((1, 32), 0x11, dtype=torch.uint8)
    scale = torch.tensor([[120, 102]], dtype=torch.uint8)
    assert cast_to_nvfp4(QuantTensor(data, scale, QuantFormat.MXFP4), 120) is None
    data[0, 16:] = 0x80  # all zero: its scale means nothing
    found = cast_to_nvfp4(QuantTensor(data, scale, QuantFormat.MXFP4), 120)
    assert found is not None
    assert torch.equal(found.dequantize()[:, :32], QuantTensor(data, scale, QuantFormat.MXFP4).dequantize()[:, :32])
