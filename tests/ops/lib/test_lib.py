"""Number formats and launch checks inside kernels, against dsv4.formats and torch, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX, FP4_AMAX_FLOOR, FP8_AMAX_FLOOR, ceil_e8m0
from dsv4.formats.e8m0 import e8m0_to_float as e8m0_to_float_ref
from dsv4.formats.fp4 import e2m1_decode as e2m1_decode_ref
from dsv4.formats.fp4 import e2m1_encode as e2m1_encode_ref
from dsv4.formats.fp4 import mxfp4_quantize
from dsv4.formats.fp8 import fp8_quantize
from dsv4.ops.lib import guard
from dsv4.ops.lib.codecs import (
    abs_bits,
    e2m1_decode,
    e2m1_encode,
    e2m1_scale,
    e4m3_scale,
    e8m0_to_float,
    quantize_e2m1,
    quantize_e4m3,
)
from dsv4.ops.lib.guard import KernelInputError, check_launch, jit, tl
from dsv4.ops.lib.launch import LaunchConfig, next_power_of_2, pick_config
from dsv4.ops.lib.maths import cos_sin
from dsv4.testing.inputs import elementwise_block, generator, kernel_device, whole_blocks, wild
from dsv4.testing.numeric import assert_bitwise


@jit
def scale_kernel(amax_ptr, fp8_ptr, fp4_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    bits = abs_bits(tl.load(amax_ptr + offsets))
    tl.store(fp8_ptr + offsets, e4m3_scale(bits).to(tl.uint8))
    tl.store(fp4_ptr + offsets, e2m1_scale(bits).to(tl.uint8))


@jit
def e8m0_kernel(code_ptr, out_ptr):
    tl.store(out_ptr + tl.arange(0, 256), e8m0_to_float(tl.load(code_ptr + tl.arange(0, 256))))


@jit
def e2m1_kernel(x_ptr, code_ptr, value_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    code = e2m1_encode(tl.load(x_ptr + offsets))
    tl.store(code_ptr + offsets, code.to(tl.uint8))
    tl.store(value_ptr + offsets, e2m1_decode(code.to(tl.uint8)))


@jit
def quantize_kernel(x_ptr, codes_ptr, scale_ptr, ROWS: tl.constexpr, GROUP: tl.constexpr, IS_FP4: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, GROUP)
    x = tl.load(x_ptr + rows[:, None] * GROUP + cols[None, :])
    if IS_FP4:
        codes, scale = quantize_e2m1(x)
        tl.store(codes_ptr + rows[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :], codes)
    else:
        codes, scale = quantize_e4m3(x)
        tl.store(codes_ptr + rows[:, None] * GROUP + cols[None, :], codes)
    tl.store(scale_ptr + rows, scale)


@jit
def cos_sin_kernel(angle_ptr, cos_ptr, sin_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cos, sin = cos_sin(tl.load(angle_ptr + offsets))
    tl.store(cos_ptr + offsets, cos)
    tl.store(sin_ptr + offsets, sin)


def scale_corners():
    """For every exponent: the two maxima times a power of two and one fp32 step to each side, plus random values."""
    powers = torch.exp2(torch.arange(-126, 120).double())
    exact = torch.cat([(limit * powers).float() for limit in (E4M3_MAX, E2M1_MAX, 1.0)])
    near = torch.cat((exact, torch.nextafter(exact, exact * 2), torch.nextafter(exact, exact * 0)))
    random = torch.rand(1500, generator=generator(0)) * torch.exp2(
        torch.randint(-126, 127, (1500,), generator=generator(1))
    )
    special = torch.tensor([0.0, float("inf"), float("nan"), torch.finfo(torch.float32).max, 1e-4, 1e-5])
    return torch.nn.functional.pad(torch.cat((near, random, special)), (0, 4096))[:4096].to(kernel_device())


def test_scales_follow_the_rule_of_formats():
    amax = scale_corners()
    assert amax[-10:].eq(0).all()  # nothing was cut off
    fp8, fp4 = torch.empty(2, 4096, dtype=torch.uint8, device=amax.device)
    scale_kernel[(1,)](amax, fp8, fp4, BLOCK=4096)
    assert_bitwise(fp8, ceil_e8m0(amax.clamp_min(FP8_AMAX_FLOOR), E4M3_MAX))
    assert_bitwise(fp4, ceil_e8m0(amax.clamp_min(FP4_AMAX_FLOOR), E2M1_MAX))


def test_every_e8m0_code():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(kernel_device())
    out = torch.empty(256, device=codes.device)
    e8m0_kernel[(1,)](codes, out)
    assert_bitwise(out, e8m0_to_float_ref(codes))


def test_e2m1_codes_and_values():
    grid = torch.arange(0, 65, dtype=torch.float32) / 8  # every value and every midpoint, and beyond 6
    near = torch.cat((grid, torch.nextafter(grid, grid + 1), torch.nextafter(grid, grid - 1).abs()))
    x = torch.cat((near, -near, torch.randn(500, generator=generator(2)) * 3, torch.tensor([1e30, -1e30, 2.0**-140])))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x))).to(kernel_device())
    codes, values = torch.empty(1024, dtype=torch.uint8, device=x.device), torch.empty(1024, device=x.device)
    e2m1_kernel[(1,)](x, codes, values, BLOCK=1024)
    assert_bitwise(codes, e2m1_encode_ref(x))
    assert_bitwise(values, e2m1_decode_ref(codes))
    assert codes.unique().numel() == 16


def test_e4m3_groups():
    x = wild((64, 128), torch.float32, seed=3)
    x[5, 7], x[6, 0] = float("nan"), float("inf")
    codes = torch.empty(64, 128, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(64, dtype=torch.uint8, device=x.device)
    quantize_kernel[(1,)](x, codes, scale, ROWS=64, GROUP=128, IS_FP4=False)
    expected, expected_scale = fp8_quantize(x, 128)
    assert_bitwise(scale, expected_scale.squeeze(-1))
    assert_bitwise(codes, expected)
    assert codes[5:7].float().isnan().all()


def test_e2m1_groups():
    x = wild((64, 32), torch.float32, seed=4)
    packed = torch.empty(64, 16, dtype=torch.uint8, device=x.device)
    scale = torch.empty(64, dtype=torch.uint8, device=x.device)
    quantize_kernel[(1,)](x, packed, scale, ROWS=64, GROUP=32, IS_FP4=True)
    expected, expected_scale = mxfp4_quantize(x)
    assert_bitwise(scale, expected_scale.squeeze(-1))
    assert_bitwise(packed, expected)


def test_a_nan_reaches_the_scale_of_its_e2m1_group():
    x = wild((8, 32), torch.float32, seed=5)
    x[3, 3] = float("nan")
    packed = torch.empty(8, 16, dtype=torch.uint8, device=x.device)
    scale = torch.empty(8, dtype=torch.uint8, device=x.device)
    quantize_kernel[(1,)](x, packed, scale, ROWS=8, GROUP=32, IS_FP4=True)
    assert (scale == 255).tolist() == [row == 3 for row in range(8)]


def test_cos_and_sin_are_exact_to_fp32():
    positions = torch.randint(0, 1 << 20, (1 << 16,), generator=generator(6)).float()
    freqs = torch.exp(-torch.rand(1 << 16, generator=generator(7)) * 14)
    quarters = (
        torch.arange(1 << 12).double() * (torch.pi / 2)
    ).float()  # next to the zeros, where reduction is hardest
    angles = torch.cat((positions * freqs, positions, quarters, -quarters[1:], torch.tensor([0.0, 1048575.0])))
    angles = whole_blocks(angles.to(kernel_device()))
    cos, sin = torch.empty(2, len(angles), device=angles.device)
    grid = (len(angles) // elementwise_block(),)
    cos_sin_kernel[grid](angles, cos, sin, BLOCK=elementwise_block(), enable_fp_fusion=False)
    wide = angles.cpu().double()
    assert_bitwise(cos.cpu(), wide.cos().float())
    assert_bitwise(sin.cpu(), wide.sin().float())


def test_pick_config_takes_the_smallest_that_holds():
    table = {64: LaunchConfig(8, 1), 128: LaunchConfig(4, 2)}
    assert pick_config(table, 1, "width") == (64, table[64])
    assert pick_config(table, 64, "width") == (64, table[64])
    assert pick_config(table, 65, "width") == (128, table[128])
    with pytest.raises(KernelInputError, match="width must be at most 128, found 129"):
        pick_config(table, 129, "width")


def test_next_power_of_2():
    assert [next_power_of_2(size) for size in (1, 2, 3, 4, 5, 7168)] == [1, 2, 4, 4, 8, 8192]


def test_tensors_must_be_where_kernels_run(monkeypatch):
    here, elsewhere = torch.empty(1, device=kernel_device()), torch.empty(1, device="meta")
    check_launch(here, None)
    with pytest.raises(KernelInputError, match="found meta"):
        check_launch(elsewhere)
    with pytest.raises(KernelInputError, match="expected tensors on one device"):
        check_launch(here, elsewhere)
    monkeypatch.setattr(guard, "LAUNCH_DEVICES", frozenset({"cuda"}))
    with pytest.raises(KernelInputError, match="found cpu; the TORCH backend runs anywhere"):
        check_launch(torch.empty(1))


def run_python(program, **environment):
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=root, env={"PATH": "/usr/bin", **environment}, capture_output=True, text=True)


def test_without_triton_the_oracles_work_and_a_launch_says_why_not():
    run = run_python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from dsv4.ops import TORCH\n"
        "from dsv4.ops import TRITON\n"
        "from dsv4.ops.lib.guard import TritonMissingError\n"
        "x = torch.ones(2, 128)\n"
        "assert torch.equal(TORCH.ops.rms_norm(x, None, 0.0), x)\n"
        "try:\n    TRITON.ops.rms_norm(x, None, 0.0)\n"
        "except TritonMissingError as error:\n    print(error)\n"
    )
    assert run.stdout == "_rms_norm_kernel needs Triton, which is not installed here; use the TORCH backend\n", (
        run.stderr
    )


def test_what_a_compiled_kernel_is_called_does_not_depend_on_which_came_first():
    """Else a process that launches in another order finds none of them in the cache on disk."""
    run = run_python(
        "import importlib, pkgutil\n"
        "import dsv4.ops\n"
        "from triton.runtime.jit import JITCallable\n"
        "names = [module.name for module in pkgutil.walk_packages(dsv4.ops.__path__, 'dsv4.ops.')]\n"
        "values = [value for name in names for value in vars(importlib.import_module(name)).values()]\n"
        "functions = list({id(value): value for value in values if isinstance(value, JITCallable)}.values())\n"
        "def keys(functions):\n"
        "    for function in functions:\n"
        "        function.hash, function.used_global_vals = None, {}\n"
        "    return {id(function): function.cache_key for function in functions}\n"
        "print(len(functions), keys(functions) == keys(functions[::-1]))\n"
    )
    number, is_same = run.stdout.split()
    assert int(number) > 300, run.stderr
    assert is_same == "True"


def test_the_unrepaired_interpreter_is_refused():
    run = run_python(
        "import torch\n"
        "from dsv4.ops.norm import rms_norm\n"
        "from dsv4.ops.lib.guard import KernelInputError\n"
        "try:\n    rms_norm(torch.ones(2, 128), None, 0.0)\n"
        "except KernelInputError as error:\n    print(error)\n",
        TRITON_INTERPRET="1",
    )
    assert "TRITON_INTERPRET=1 computes wrong bits" in run.stdout, run.stderr
