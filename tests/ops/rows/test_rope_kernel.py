"""The rope kernels against their oracles, bit for bit where no sum is involved."""

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.rows import rope, rope_frequencies, rope_ref
from dsv4.testing.inputs import generator, kernel_device, normal, strided, wild
from dsv4.testing.numeric import assert_bitwise

FLASH = ModelConfig.flash()


def frequencies(rope_dim=64, is_compressed=True):
    theta, scaling = (FLASH.compress_rope_theta, FLASH.rope_scaling) if is_compressed else (FLASH.rope_theta, None)
    return rope_frequencies(rope_dim, theta, scaling).to(kernel_device())


def positions(num_tokens, seed=0):
    """Anywhere up to a million, the ends included."""
    values = torch.randint(0, 1 << 20, (num_tokens,), generator=generator(seed))
    values[0], values[-1] = 0, (1 << 20) - 1
    return values.to(kernel_device())


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 512), (3, 9, 512), (2, 128, 512), (3, 64, 128), (5, 512), (2, 3, 5, 64)])
def test_rope_is_the_oracle(shape, inverse):
    x, at, freqs = wild(shape, seed=sum(shape)), positions(shape[0]), frequencies()
    assert_bitwise(rope(x, at, freqs, inverse), rope_ref(x, at, freqs, inverse))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_compressed", [True, False])
def test_rope_of_other_dtypes_and_frequencies(dtype, is_compressed):
    x, at, freqs = wild((4, 3, 96), dtype, seed=1), positions(4), frequencies(is_compressed=is_compressed)
    assert_bitwise(rope(x, at, freqs), rope_ref(x, at, freqs))


@pytest.mark.parametrize("rope_dim", [2, 16, 128])
def test_rope_dims(rope_dim):
    x, at, freqs = wild((3, 2, 128), seed=2), positions(3), frequencies(rope_dim, is_compressed=False)
    assert_bitwise(rope(x, at, strided(freqs, 0), True), rope_ref(x, at, freqs, True))


def test_infinities_and_nan_outside_the_rotated_dims_stay_there():
    x, at, freqs = normal((2, 3, 512), seed=3), positions(2), frequencies()
    x[0, 1, 447], x[1, 2, 0] = float("nan"), float("inf")
    out = rope(x, at, freqs)
    assert_bitwise(out, rope_ref(x, at, freqs))
    assert out[0, 1, 448:].isfinite().all()


def test_what_cannot_be_done_is_said():
    x, at, freqs = normal((2, 3, 512)), positions(2), frequencies()
    with pytest.raises(KernelInputError, match="found torch.float64 and torch.float32"):
        rope(x.double(), at, freqs)
    with pytest.raises(KernelInputError, match="fp32 frequencies, found torch.bfloat16 and torch.float64"):
        rope(x, at, freqs.double())
    with pytest.raises(KernelInputError, match=r"positions \[T\], found \(2, 3, 512\) and \(3,\)"):
        rope(x, positions(3), freqs)
    with pytest.raises(KernelInputError, match="power of two up to 512, found 6"):
        rope(x, at, freqs[:3])
    with pytest.raises(KernelInputError, match="power of two up to 32, found 64"):
        rope(x[..., :32], at, freqs)
