"""The interpreter against torch, over every code and every rounding case. On a GPU the same kernels test the GPU."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.ops.lib.guard import jit, tl
from dsv4.testing import interpreter
from dsv4.testing.inputs import elementwise_block, generator, kernel_device, whole_blocks
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

E4M3_MAX = 448.0


@jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@jit
def binary_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr, OP: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)
    if OP == "add":
        out = a + b
    elif OP == "sub":
        out = a - b
    elif OP == "mul":
        out = a * b
    elif OP == "maximum":
        out = tl.maximum(a, b).to(a.dtype)
    elif OP == "minimum":
        out = tl.minimum(a, b).to(a.dtype)
    elif OP == "fma":
        out = tl.fma(a, b, b)
    elif OP == "where_less":
        out = tl.where(a < b, a, b)
    tl.store(out_ptr + offsets, out)


@jit
def chain_kernel(a_ptr, out_ptr, BLOCK: tl.constexpr):
    a = tl.load(a_ptr + tl.arange(0, BLOCK))
    out = a * 1.5 + tl.full([BLOCK], 0.375, a.dtype)
    tl.store(out_ptr + tl.arange(0, BLOCK), -tl.abs(out) * a)


@jit
def clamp_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.clamp(x, -1.5, 2.5))


@jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a, b = tl.load(a_ptr + rows * K + inner[None, :]), tl.load(b_ptr + inner[:, None] * N + cols)
    tl.store(out_ptr + rows * N + cols, tl.dot(a, b, input_precision="ieee"))


@jit
def reduce_kernel(x_ptr, sum_ptr, max_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * COLS + tl.arange(0, COLS)[None, :])
    tl.store(sum_ptr + rows, tl.sum(x.to(tl.float32), axis=1))
    tl.store(max_ptr + rows, tl.max(x, axis=1).to(tl.float32))


@jit
def count_kernel(n_ptr, out_ptr):
    total = 0
    for step in range(tl.load(n_ptr)):
        total += step
    tl.store(out_ptr, total)


def launch_cast(x, dtype):
    source = whole_blocks(x)
    result = torch.empty(source.shape, dtype=dtype, device=x.device)
    cast_kernel[(len(source) // elementwise_block(),)](source, result, BLOCK=elementwise_block())
    return result[: len(x)]


def fp32_corners():
    """All bf16 values, the fp32 values at and around each midpoint between two of them, and random bits."""
    high = torch.arange(0, 1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] + low).flatten()
    bits = torch.cat((bits, torch.randint(0, 1 << 32, (200_000,), generator=generator(1))))
    return bits.to(torch.int32).view(torch.float32).to(kernel_device())


def e4m3_corners():
    """Every midpoint between neighbouring E4M3 values and one fp32 step to each side, specials, and the saturation
    range.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    steps = torch.cat((codes, middles, torch.tensor([464.0, 480.0, 1e6, 3e38, float("inf"), 2.0**-10, 2.0**-149])))
    near = torch.cat((steps, torch.nextafter(steps, steps + 1), torch.nextafter(steps, steps - 1)))
    return torch.cat((near, -near, torch.tensor([float("nan")]))).to(kernel_device())


def saturated_e4m3(x):
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def test_fp32_to_bf16_rounds_like_torch():
    x = fp32_corners()
    assert_bitwise(launch_cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_bf16_to_fp32_and_fp16_is_exact():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(kernel_device())
    assert_bitwise(launch_cast(x, torch.float32), x.float())
    assert_bitwise(launch_cast(launch_cast(x, torch.float32), torch.float16), x.float().to(torch.float16))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_casts_to_e4m3_round_to_even_and_saturate(source):
    x = torch.cat((e4m3_corners(), fp32_corners()[::3])).to(source)
    assert_bitwise(launch_cast(x, torch.float8_e4m3fn), saturated_e4m3(x))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_all_e4m3_codes_come_back(target):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(kernel_device()).view(torch.float8_e4m3fn)
    assert_bitwise(launch_cast(codes, target), codes.to(target))


def test_integers_and_bf16():
    integers = torch.randint(-70000, 70000, (4096,), generator=generator(2), dtype=torch.int32).to(kernel_device())
    assert_bitwise(launch_cast(integers, torch.bfloat16), integers.float().to(torch.bfloat16))
    values = integers.float().to(torch.bfloat16)
    assert_bitwise(launch_cast(values, torch.int32), values.to(torch.int32))


def bf16_pairs():
    """100,000 pairs of arbitrary bit patterns, and pairs of similar size, where sums cancel and round."""
    bits = torch.randint(0, 1 << 16, (2, 1 << 16), generator=generator(3)).to(torch.int16).view(torch.bfloat16)
    close = torch.randn(2, 1 << 16, generator=generator(4)).to(torch.bfloat16)
    return [torch.cat(pair).to(kernel_device()) for pair in zip(bits, close, strict=True)]


def launch_binary(a, b, op):
    left, right = whole_blocks(a), whole_blocks(b)
    out = torch.empty_like(left)
    grid = (len(out) // elementwise_block(),)
    binary_kernel[grid](left, right, out, BLOCK=elementwise_block(), OP=op, enable_fp_fusion=False)
    return out[: len(a)]


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_bf16_arithmetic_rounds_once(op):
    a, b = bf16_pairs()
    assert_bitwise(launch_binary(a, b, op), getattr(torch, op)(a, b))


def test_bf16_comparison_and_select():
    a, b = bf16_pairs()
    assert_bitwise(launch_binary(a, b, "where_less"), torch.where(a < b, a, b))


def test_bf16_constants_negation_and_magnitude():
    a = torch.randn(1024, generator=generator(5)).to(torch.bfloat16).to(kernel_device())
    out = torch.empty_like(a)
    chain_kernel[(1,)](a, out, BLOCK=1024, enable_fp_fusion=False)
    magnitude = (a * 1.5 + 0.375).abs()
    # up to Triton 3.7 -x is 0 - x, for zeros too
    has_negation = hasattr(importlib.import_module("triton._C.libtriton").ir.builder, "create_fneg")
    negated = -magnitude if has_negation else 0 - magnitude
    assert_bitwise(out, negated * a)


@pytest.mark.parametrize(("op", "expected"), [("maximum", torch.fmax), ("minimum", torch.fmin)])
def test_maximum_and_minimum_drop_a_nan(op, expected):
    a, b = torch.randn(2, 1024, generator=generator(6)).to(kernel_device())
    a[::7], b[::11] = float("nan"), float("nan")
    assert_bitwise(launch_binary(a, b, op), expected(a, b))


def test_clamp():
    x = 3 * torch.randn(1024, generator=generator(7)).to(kernel_device())
    out = torch.empty_like(x)
    clamp_kernel[(1,)](x, out, BLOCK=1024)
    assert_bitwise(out, x.clamp(-1.5, 2.5))


def test_fma_rounds_once():
    # x * y + y with y = 2^-24 - like tails: two roundings and one differ in many of these
    a, b = torch.randn(2, 1 << 16, generator=generator(8)).to(kernel_device())
    exact = (a.double() * b.double() + b.double()).float()  # the fp64 sum is exact enough for all but double ties
    fused = launch_binary(a, b, "fma")
    assert (fused != a * b + b).any()
    assert_bitwise(fused, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32])
def test_dot_accumulates_in_fp32(dtype):
    """Whole numbers, so that every machine's order of summation gives the same bits; sums need more bits than bf16
    has.
    """
    source = generator(9)
    a, b = (
        torch.randint(-8, 9, shape, generator=source).to(kernel_device()).float() for shape in ((64, 128), (128, 32))
    )
    out = torch.empty(64, 32, device=a.device)
    dot_kernel[(1,)](a.to(dtype), b.to(dtype), out, M=64, N=32, K=128)
    exact = (a.cpu().double() @ b.cpu().double()).float()
    assert (exact != exact.to(torch.bfloat16).float()).any()
    assert_bitwise(out.cpu(), exact)


def test_reductions():
    x = torch.randn(8, 512, generator=generator(10)).to(torch.bfloat16).to(kernel_device())
    total, largest = torch.empty(2, 8, device=x.device)
    reduce_kernel[(1,)](x, total, largest, ROWS=8, COLS=512)
    assert_close_to_oracle(total[:, None], lambda wide: x.to(wide).sum(-1, keepdim=True))
    assert_bitwise(largest, x.float().amax(-1))


def test_a_sum_of_bf16_is_refused():
    module = importlib.import_module("triton.runtime.interpreter")
    interpreter.repair(module)  # on a GPU nothing uses it
    with pytest.raises(interpreter.InterpreterError, match="convert before tl.sum"):
        module.ReduceOps(0, None, False).sum(SimpleNamespace(dtype=tl.bfloat16))


def test_range_takes_a_loaded_number():
    n = torch.tensor([10], dtype=torch.int32, device=kernel_device())
    out = torch.zeros_like(n)
    count_kernel[(1,)](n, out)
    assert out.item() == 45


def test_too_late_is_an_error():
    program = (
        "import triton, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "from dsv4.testing import interpreter\n"
        "try:\n    interpreter.without_gpu()\n"
        "except interpreter.InterpreterError as error:\n    print(error)\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={"PATH": "/usr/bin"}, capture_output=True, text=True
    )
    assert "expected triton not to be imported" in run.stdout, run.stderr
