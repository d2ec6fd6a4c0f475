"""Orders of sums from layouts: trees that must be told apart, and kernels that must have the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.ops.lib.guard import HAS_TRITON
from dsv4.testing.random_shapes import FAMILY
from tools.compiled.sum_orders import LayoutError, orders_of, tree_of


def blocked(size, threads, warps):
    return (
        f"#ttg.blocked<{{sizePerThread = {size}, threadsPerWarp = {threads}, warpsPerCTA = {warps}, order = [1, 0]}}>"
    )


# partials [16, 32] of 384 columns, summed over their rows: few tokens before, and many
FEW, MANY = blocked([1, 4], [4, 8], [4, 1]), blocked([1, 1], [1, 32], [4, 1])


def test_a_layout_is_an_order():
    assert tree_of(FEW, (16, 32), 0) != tree_of(MANY, (16, 32), 0)
    assert tree_of(FEW, (16, 32), 0) == tree_of(FEW, (16, 64), 0)  # the other columns do not matter
    assert tree_of(MANY, (16, 32), 0) != tree_of(blocked([1, 1], [1, 32], [8, 1]), (16, 32), 0)


def test_two_numbers_have_no_order():
    in_a_thread, in_two_lanes = blocked([1, 2], [32, 1], [4, 1]), blocked([1, 1], [16, 2], [4, 1])
    assert tree_of(in_a_thread, (8, 2), 1) == tree_of(in_two_lanes, (8, 2), 1)


def test_a_slice_and_a_linear_layout_are_what_they_are_made_of():
    parent = (
        "#ttg.blocked<{sizePerThread = [1, 1, 4], threadsPerWarp = [8, 4, 1], warpsPerCTA = [4, 1, 1], "
        "order = [2, 1, 0]}>"
    )
    linear = (
        "#ttg.linear<{register = [[0, 1], [0, 2]], lane = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], warp = [], "
        "block = []}>"
    )
    plain = blocked([1, 4], [8, 4], [1, 1])
    assert tree_of(linear, (8, 16), 1) == tree_of(plain, (8, 16), 1)
    assert tree_of(f"#ttg.slice<{{dim = 2, parent = {parent}}}>", (8, 4), 1) == tree_of(
        blocked([1, 1], [8, 4], [4, 1]), (8, 4), 1
    )


def test_an_unknown_layout_is_named():
    with pytest.raises(LayoutError, match=r"found #ttg\.padded"):
        tree_of("#ttg.padded<{}>", (8,), 0)


def test_sums_are_found_in_the_text():
    path = Path(__file__).parents[3] / "dsv4" / "ops" / "norm" / "kernel_norm.py"
    line = path.read_text().splitlines().index("    mean_square = tl.div_rn(tl.sum(x * x, axis=1), K * 1.0)") + 1
    text = f"""#blocked = {blocked([1, 4], [1, 32], [1, 4])}
#loc = loc(unknown)
#loc1 = loc("/elsewhere/standard.py":293:36)
#loc2 = loc("{path}":{line}:30)
#loc3 = loc(callsite(#loc1 at #loc2))
    %5 = "tt.reduce"(%4) <{{axis = 1 : i32}}> ({{
    ^bb0(%a: f32 loc(callsite(#loc1 at #loc2)), %b: f32 loc(callsite(#loc1 at #loc2))):
      %6 = arith.addf %a, %b : f32 loc(#loc3)
      tt.reduce.return %6 : f32 loc(#loc3)
    }}) : (tensor<1x512xf32, #blocked>) -> tensor<1xf32, #ttg.slice<{{dim = 1, parent = #blocked}}>> loc(#loc3)
"""
    (found,) = orders_of(text)
    assert found.where == "kernel_norm.inverse_rms"
    assert found.order.startswith("512:")
    assert orders_of(text.replace("arith.addf", "arith.maximumf")) == []


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, to compile")
def test_hyper_connections_sum_in_one_order_at_384_columns():
    """Before their tile was padded they did not: on an H200 rows of up to 16 tokens differed from others."""
    script = Path(__file__).with_name("hyper_orders_process.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for width in ("256", "384"):
        few, many = found[width]
        assert few == many, width
        assert "kernel_weights.token_weights" in few
    few, many = found["384 unpadded"]
    assert few["kernel_weights.token_weights"] != many["kernel_weights.token_weights"]
    assert few["kernel_norm.inverse_rms"] == many["kernel_norm.inverse_rms"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, to compile")
def test_forms_sum_in_one_order_in_twenty_random_models():
    """Of families that share no widths. Some minutes of compiling; on a GPU `benchmarks bits` runs them."""
    numbers = [str(FAMILY * family) for family in range(20)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.compiled.form_orders", *numbers]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [line for number in numbers for line in (number, "  equal")]
