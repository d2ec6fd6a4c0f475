"""Times other ways to cut `hc_boundary` up, beside the ones in use. What wins belongs into FEW_ROWS and MANY_ROWS of
dsv4/ops/hyper.py; the bits are the same in all of them.

    python benchmarks/hyper_variants.py [--width 4096] [--samples 100] [--compile ARCH]

`--compile 90` needs no GPU: it prints registers, spills and shared memory instead of times.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from benchmarks.cases_hyper import SETTINGS, make_inputs
from dsv4.ops.hyper import FEW_ROWS, MANY_ROWS, HyperCall, HyperVariant, launch_hyper
from dsv4.testing import bench
from dsv4.testing.compile_check import compile_case

FEW = {
    "in-use": FEW_ROWS,
    "one-role": replace(FEW_ROWS, num_workers=16, num_roles=1),  # a token's Sinkhorn after its collapse
    "last-only": replace(FEW_ROWS, num_workers=1, num_roles=1),  # nobody waits; one program finishes the tile
    "not-eager": replace(FEW_ROWS, is_eager=False),
    "registers-168": replace(FEW_ROWS, max_registers=168),
}
MANY = {
    "in-use": MANY_ROWS,
    "few-rows": FEW_ROWS,
    "tile-16": replace(MANY_ROWS, tile_rows=16, worker_tokens=1),
    "tile-16-last-only": replace(MANY_ROWS, tile_rows=16, num_workers=1),
    "tile-32": replace(MANY_ROWS, tile_rows=32, worker_tokens=2),
    "registers-128": replace(MANY_ROWS, max_registers=128),
}


def make_case(name: str, variant: HyperVariant, rows: int, width: int) -> bench.BenchCase:
    def build(device: torch.device) -> bench.Work:
        x = make_inputs(rows, width, device)
        call = HyperCall(x.streams, *x.mixing, SETTINGS, x.norm, False, x.out, x.post, x.comb)
        return bench.Work(
            lambda: launch_hyper(call, variant),
            bench.nbytes(x.out, x.streams, x.post, x.comb, x.norm) + x.weights_bytes,
            bench.nbytes(x.streams, x.out, x.post, x.comb),
            x.flops,
        )

    shape = {"rows": rows, "width": width, "variant": name}
    return bench.BenchCase("hc_boundary", f"{name}-{rows}x{width}", shape, build)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--compile", type=int, metavar="ARCH", help="only compile for this architecture")
    options = parser.parse_args()
    few = [make_case(name, cut, rows, options.width) for rows in (1, 4, 16, 64) for name, cut in FEW.items()]
    many = [make_case(name, cut, rows, options.width) for rows in (64, 256, 4096) for name, cut in MANY.items()]
    if options.compile:
        for case in few[: len(FEW)] + many[-len(MANY) :]:
            for report in compile_case(case, options.compile):
                print(
                    f"{case.name:32} {report.registers} registers, {report.spill_bytes} spilled, {report.shared_bytes}"
                )
        return
    timer = bench.Timer(options.samples)
    ceiling = bench.ceiling_of(torch.cuda.get_device_name())
    print(bench.table(bench.measure(case, timer, ceiling) for case in few + many))
    print(f"an empty launch takes {timer.launch_us:.2f} us")


if __name__ == "__main__":
    main()
