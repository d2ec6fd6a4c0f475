"""Hoppers with fewer multiprocessors than an H200: what launchers choose there fits, and compiles.

Nothing else of a chip decides a choice: all Hoppers have the shared memory and registers of an H200.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.ops.lib.arch import Architecture
from dsv4.ops.lib.guard import HAS_TRITON
from dsv4.ops.select import TOPK_CONFIG
from dsv4.testing.bench import case_modules, load_cases

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, to compile")

H200, H100_PCIE, H20 = 132, 114, 78
STAYING = {"wide_linear_kernel", "expert_tiles_kernel", "dense_tiles_kernel"}  # a program for each multiprocessor
SPILLING = {"attend_pairs_kernel"}  # as on an H200: KNOWN_SPILLS of test_kernels_compile.py


@pytest.fixture(scope="module")
def chips():
    """By multiprocessors: grids of every case's kernels, and reports of what was compiled."""
    script = Path(__file__).with_name("hopper_forms_process.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script)]
    run = subprocess.run(
        command, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return {int(count): chip for count, chip in json.loads(run.stdout.splitlines()[-1]).items()}


def test_every_choice_compiles(chips):
    """Forms that an H200 has are compiled by test_kernels_compile.py."""
    assert set(chips) == {H200, H100_PCIE, H20}
    reports = [report for chip in chips.values() for report in chip["compiled"]]
    assert {report["kernel"] for report in reports} == {
        "attend_pairs_kernel", "topk_long_kernel", "grouped_shuffled_kernel"
    }  # fmt: skip
    for report in reports:
        assert 0 < report["registers"] <= 255, report
        assert report["shared_bytes"] <= Architecture(90).shared_bytes, report
        assert report["spill_bytes"] == 0 or report["kernel"] in SPILLING, report


def test_programs_that_stay_are_one_for_each_multiprocessor(chips):
    for count, chip in chips.items():
        found = [(name, grid) for kernels in chip["grids"].values() for name, grid in kernels]
        assert {name for name, _ in found} >= STAYING | {"attend_pairs_kernel"}
        assert all(grid == [count] for name, grid in found if name in STAYING), count
        pairs = [grid for name, grid in found if name == "attend_pairs_kernel"]
        assert max(pairs) == [count]


def test_programs_that_wait_run_at_once(chips):
    """Those of a long selection wait for each other, unless each has a row of its own."""
    shapes = {case.key: case.shape for case in load_cases(case_modules())}
    for count, chip in chips.items():
        waiting = {
            case: grid
            for case, kernels in chip["grids"].items()
            for name, grid in kernels
            if name == "topk_long_kernel" and grid[0] > 1
        }
        assert len(waiting) >= 5
        for case, (programs, rows) in waiting.items():
            shape = shapes[case]
            spread = TOPK_CONFIG.spread_over(rows, shape.get("columns") or shape["context"] // 4, count)
            assert (spread.programs, programs * rows <= spread.resident * count) == (programs, True), (case, count)


def test_few_multiprocessors_choose_otherwise(chips):
    """Attention's cut, the shares of scores and selections, and the tile of wo_a."""
    own = chips[H200]["grids"]
    for count in (H100_PCIE, H20):
        changed = {case for case, kernels in chips[count]["grids"].items() if kernels != own[case]}
        assert changed >= {
            "sparse_attention/flash-csa-64k-64", "index_topk/64x1-at-65536-fp4", "index_topk/1x2048-at-65536-fp4",
            "topk_select/512-of-262144x1", "linear/flash-wo_b-4096", "moe/flash-nvfp4-4096", "moe/flash-mxfp4-4096",
        }  # fmt: skip
        assert not changed & {"linear/flash-wq_a-1", "moe/flash-nvfp4-1", "sparse_attention/flash-csa-64k-1"}
    assert chips[H100_PCIE]["grids"]["grouped_linear/flash-wo_a-256"] != own["grouped_linear/flash-wo_a-256"]
