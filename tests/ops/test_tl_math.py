"""fp64 exp, log and softplus of the kernels: rounded to fp32 they are torch's, and the order of orderable bits is the
values'.
"""

from __future__ import annotations

import torch

from dsv4.ops.tl_math import exp_negative, log_positive, ordered_bits, ordered_bits64, softplus
from dsv4.ops.tl_utils import jit, tl
from dsv4.testing.inputs import generator, kernel_device
from dsv4.testing.numeric import assert_bitwise

SIZE = 1 << 16
HUGE = 1.7976931348623157e308


@jit
def _function_kernel(x_ptr, out_ptr, WHICH: tl.constexpr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    x = tl.load(x_ptr + lanes)
    if WHICH == 0:
        tl.store(out_ptr + lanes, exp_negative(x))
    elif WHICH == 1:
        tl.store(out_ptr + lanes, log_positive(x))
    elif WHICH == 2:
        tl.store(out_ptr + lanes, softplus(x))
    elif WHICH == 3:
        tl.store(out_ptr + lanes, ordered_bits(x))
    else:
        tl.store(out_ptr + lanes, ordered_bits64(x))


def run(which, x, dtype):
    padded = torch.ones(max(1 << (len(x) - 1).bit_length(), 16), dtype=x.dtype)
    padded[: len(x)] = x
    device = kernel_device()
    out = torch.empty(len(padded), dtype=dtype, device=device)
    _function_kernel[(1,)](padded.to(device), out, WHICH=which, SIZE=len(padded), num_warps=16, enable_fp_fusion=False)
    return out[: len(x)].cpu()


def uniform(low, high, seed):
    return torch.rand(SIZE, generator=generator(seed), dtype=torch.float64) * (high - low) + low


def test_exp():
    for seed, low in enumerate((-1.0, -100.0, -700.0)):
        x = uniform(low, 0.0, seed)
        assert_bitwise(run(0, x, torch.float64).float(), x.exp().float())
    special = run(0, torch.tensor([0.0, -0.0, -800.0, -HUGE, -float("inf"), float("nan")]).double(), torch.float64)
    assert special[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert special[5].isnan()


def test_log():
    near_one = 1 - uniform(0.0, 1e-6, 3)
    for x in (uniform(1e-9, 1.0, 0), uniform(1.0, 1e9, 1), uniform(-700.0, 700.0, 2).exp(), near_one):
        assert_bitwise(run(1, x, torch.float64).float(), x.log().float())
    assert run(1, torch.ones(1).double(), torch.float64).item() == 0.0


def test_softplus():
    for seed, (low, high) in enumerate(((-30.0, 30.0), (-600.0, 0.0), (-1e-3, 1e-3))):
        x = uniform(low, high, seed)
        assert_bitwise(run(2, x, torch.float64).float(), torch.nn.functional.softplus(x).float())
    x = torch.tensor([20.0, 20.000001, 1e30, -1e30, 0.0, float("inf"), float("-inf"), float("nan")]).double()
    assert_bitwise(run(2, x, torch.float64).float(), torch.nn.functional.softplus(x).float())


def test_orderable_bits():
    infinity = float("inf")
    ascending = [-infinity, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1e-38, 1.0, 3e38, infinity]
    for which, floats, integers in ((3, torch.float32, torch.int32), (4, torch.float64, torch.int64)):
        bits = run(which, torch.tensor(ascending, dtype=floats), integers)
        assert (bits.diff() > 0).all()
        zeros = run(which, torch.tensor([0.0, -0.0], dtype=floats), integers)
        assert zeros[0] == zeros[1]
    no_number = run(3, torch.tensor([float("nan"), -infinity]), torch.int32)
    assert no_number[0] == no_number[1]
