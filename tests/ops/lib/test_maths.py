"""exp, log and softplus of the kernels: in fp64, rounded to fp32, they are torch's; in fp32 they keep the bounds they
state. And the order of orderable bits is the values'.
"""

import torch

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import exp_fp32, exp_negative, log_fp32, log_of_odd, log_positive, ordered_bits, softplus
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
    elif WHICH == 5:
        tl.store(out_ptr + lanes, exp_fp32(x))
    elif WHICH == 6:
        tl.store(out_ptr + lanes, log_fp32(x))
    else:
        tl.store(out_ptr + lanes, log_of_odd(x))


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
    bits = run(3, torch.tensor(ascending), torch.int32)
    assert (bits.diff() > 0).all()
    zeros = run(3, torch.tensor([0.0, -0.0]), torch.int32)
    assert zeros[0] == zeros[1]
    no_number = run(3, torch.tensor([float("nan"), -infinity]), torch.int32)
    assert no_number[0] == no_number[1]


# ---- fp32 ----

# what the docstrings of dsv4/ops/lib/maths.py state, in units of the last place
EXP_BOUND, LOG_BOUND = 1.1, 3.0


def units_wrong(found, exact):
    rounded = exact.float().abs()
    unit = torch.nextafter(rounded, torch.full_like(rounded, float("inf"))) - rounded
    return ((found.double() - exact).abs() / unit.double()).max().item()


def test_exp_fp32():
    for seed, low in enumerate((-1e-3, -1.0, -20.0, -86.0)):
        x = uniform(low, 0.0, seed).float()
        assert units_wrong(run(5, x, torch.float32), x.double().exp()) < EXP_BOUND
    special = run(5, torch.tensor([0.0, -0.0, -86.1, -3e38, -float("inf"), float("nan")]), torch.float32)
    assert special[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert special[5].isnan()


def test_log_fp32():
    near_one = 1 + uniform(-1e-3, 1e-3, 3)
    for x in (uniform(1e-9, 1.0, 0), uniform(1.0, 1e9, 1), uniform(-87.0, 88.0, 2).exp(), near_one):
        x = x.float()
        assert units_wrong(run(6, x, torch.float32), x.double().log()) < LOG_BOUND
    assert run(6, torch.ones(1), torch.float32).item() == 0.0


def test_log_of_odd():
    for low, high in ((0, 1 << 16), ((1 << 24) - (1 << 16), 1 << 24), (0, 1 << 24), (11_800_000, 11_900_000)):
        odd = 2 * uniform(low, high, low).long() + 1
        odd[:2] = torch.tensor([2 * low + 1, 2 * high - 1])
        assert units_wrong(run(8, odd.int(), torch.float32), (odd.double() / 2**25).log()) < LOG_BOUND
