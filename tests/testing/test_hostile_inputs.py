"""The builders of hostile inputs really are hostile, and keep the values they are given."""

import pytest
import torch

from dsv4.testing.inputs import around, elementwise_block, padded_rows, poison, strided, transposed, whole_blocks, wild


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_strided_views_keep_values_and_hide_nan(dim):
    x = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    view = strided(x, dim)
    assert torch.equal(view, x)
    assert not view.is_contiguous()
    storage = torch.empty(0).set_(view.untyped_storage())
    assert storage.isnan().sum() == storage.numel() - x.numel() > 0


def test_transposed_keeps_values():
    x = torch.arange(6).view(2, 3)
    assert torch.equal(transposed(x), x)
    assert transposed(x).stride() == (1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_poison_is_nan(dtype):
    assert poison(torch.empty(4, dtype=dtype)).float().isnan().all()


def test_poison_of_integers_is_minus_one():
    assert poison(torch.empty(4, dtype=torch.int32)).eq(-1).all()
    assert poison(torch.empty(4, dtype=torch.uint8)).eq(255).all()


def test_padding_is_nan():
    padded = padded_rows(torch.ones(2, 3), 4)
    assert padded[:2].eq(1).all()
    assert padded[2:].isnan().all()
    assert padded.shape == (6, 3)


def test_wild_is_wild_and_finite():
    x = wild((64, 512)).float()
    assert x.isfinite().all()
    assert x.square().sum(-1).isfinite().all()
    rows = x[x.abs().amax(-1) > 0].abs().amax(-1)
    assert rows.max() / rows.min() > 2**15
    assert (x[1] == 0).all()
    assert torch.signbit(x[x == 0]).any()
    assert torch.equal(x, wild((64, 512)).float())


def test_sizes_around_a_tile():
    assert around(8) == (1, 7, 8, 9)
    assert around(1) == (1, 2)


def test_whole_blocks():
    x = torch.ones(5, dtype=torch.bfloat16)
    padded = whole_blocks(x)
    assert padded.numel() == elementwise_block()
    assert padded.sum() == 5
