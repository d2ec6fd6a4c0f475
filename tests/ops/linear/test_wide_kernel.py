"""The linear kernel for many rows on Hopper, in Gluon: what it takes, and the bits of the kernel that runs in the
interpreter too.
"""

import pytest
import torch
from quantised_weights import fp8_weight

from dsv4.formats.fp8 import fp8_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation
from dsv4.ops.lib.arch import architecture
from dsv4.ops.linear import LinearBundle, launch_linears, launch_wide, linear, linears
from dsv4.ops.linear.plan import MANY_ROWS, WIDE, WideConfig
from dsv4.testing.inputs import normal, wild
from dsv4.testing.numeric import assert_bitwise

BF16, FP32 = torch.bfloat16, torch.float32
# N of the FP8 weights, N of the bf16 weights, K: one split and several, tiles and bundles that end inside a tile
BUNDLES = {
    "csa-in": ((1024, 512), (1024, 1024, 256, 256, 64), 4096),
    "queries": ((32768, 8192), (), 1024),
    "wo_b": ((4096,), (), 8192),
    "odd": ((72, 200), (24, 130), 2432),
    "bf16": ((), (8200, 8), 1024),
    "one step": ((8,), (8,), 128),
}


def bundle_of(name, fp32_scale=False):
    """A bundle, and results of both dtypes in each format."""
    fp8_rows, plain_rows, width = BUNDLES[name]
    weights = [fp8_weight(n, width, fp32_scale, seed=n) for n in fp8_rows]
    weights += [normal((n, width), seed=n) for n in plain_rows]
    dtypes = [(BF16, FP32)[i % 2] for i in range(len(weights))]
    return LinearBundle.build(weights), dtypes, width


def hostile(num_tokens, width):
    """Wild rows, one of NaN, one of infinities, and their codes."""
    x = wild((num_tokens, width), seed=7)
    x[num_tokens // 3], x[num_tokens // 2, ::5] = float("nan"), float("inf")
    return x, QuantActivation(*fp8_quantize(x, ACTIVATION_GROUP))


def test_hopper_takes_it_and_the_interpreter_never():
    weight, x = fp8_weight(8, 128), normal((WIDE.min_rows, 128))
    assert launch_wide.takes_wide(weight, None, x, x) == (architecture().number == 90)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (torch.zeros(4, 128, dtype=BF16), True),
        (torch.zeros(4, 256, dtype=BF16)[:, :128], True),
        (torch.zeros(4, 129, dtype=BF16)[:, :128], False),  # rows begin at odd places
        (torch.zeros(4, 264, dtype=BF16)[:, 1:129], False),  # and the matrix
        (torch.zeros(128, dtype=BF16).expand(4, 128), False),
    ],
    ids=["dense", "part of rows", "odd rows", "odd beginning", "one row"],
)
def test_what_the_copy_engine_takes(matrix, expected):
    assert launch_wide.can_be_copied(matrix) is expected


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 129, WIDE.min_rows, 1061, 4096])
@pytest.mark.parametrize("name", BUNDLES)
def test_bits_of_the_kernel_for_any_gpu(name, num_tokens, monkeypatch):
    bundle, dtypes, width = bundle_of(name)
    x, codes = hostile(num_tokens, width)
    expected = launch_linears(x, bundle, dtypes, codes, MANY_ROWS)
    monkeypatch.setattr("dsv4.ops.linear.launch.linear_kernel", None)  # it would fail
    monkeypatch.setattr("dsv4.ops.linear.launch.WIDE", WideConfig(min_rows=1))
    for found, one in zip(launch_linears(x, bundle, dtypes, codes), expected, strict=True):
        assert_bitwise(found, one)


@pytest.mark.gpu
def test_scales_and_strides():
    """fp32 scales of weights; every E8M0 code; rows that are parts of longer ones."""
    bundle, dtypes, width = bundle_of("odd", fp32_scale=True)
    x, codes = hostile(1061, 2 * width)
    codes.scale.copy_(torch.arange(codes.scale.numel(), device=x.device).view(codes.scale.shape) % 256)
    x, codes = x[:, :width], QuantActivation(codes.codes[:, :width], codes.scale[:, : width // 128])
    expected = launch_linears(x, bundle, dtypes, codes, MANY_ROWS)
    for found, one in zip(launch_linears(x, bundle, dtypes, codes), expected, strict=True):
        assert_bitwise(found, one)


@pytest.mark.gpu
def test_it_replays_and_runs_behind_itself():
    """Programs that stay leave nothing behind: in a graph, again and again, on results of each other."""
    first, second = fp8_weight(1024, 4096, seed=1), normal((4096, 1024), seed=2)
    x = normal((1500, 4096), seed=3)

    def chain():
        y = x
        for _ in range(4):
            y = linear(linear(y, first), second)
            y = linear(linears(y, LinearBundle.build([first]), [BF16])[0], second)
        return y

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert_bitwise(found, expected)
