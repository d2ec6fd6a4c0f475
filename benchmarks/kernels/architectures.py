"""Compiles every kernel of a Flash step for six architectures and writes architectures.md from what ptxas says.

python -m benchmarks architectures                  all, on all cores; records in benchmarks/results/architectures.json
python -m benchmarks architectures --arch 89        one of them; what the others' cases gave stays
python -m benchmarks architectures --markdown       only the page, from the records; other Hoppers are calculated

No GPU is needed. Of each op and format a step of one token and one of many are compiled. On 16 cores that should take a
few minutes; what ptxas said is kept by the content of its input (.pytest_cache/compile).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import cache
from multiprocessing import get_context
from typing import Any

from benchmarks.kernels import hoppers
from benchmarks.records import RESULTS, ROOT, markdown_table
from dsv4.ops import OpSet
from dsv4.ops.lib.arch import ARCHITECTURES, Architecture
from dsv4.testing.bench import BenchCase, case_modules, load_cases
from tools.compiled.compile_check import compile_case

RECORDS = RESULTS / "architectures.json"
PAGE = ROOT / "docs" / "kernels" / "architectures.md"
GPUS = {
    80: "A100", 89: "L40S, RTX 4090", 90: "H100, H200", 100: "B200", 103: "B300", 120: "RTX PRO 6000, RTX 5090",
}  # fmt: skip
MIDDLE_TOKENS, MAX_TOKENS = 64, 4096
THREE_SIZES = {"sparse_attention", "linear", "linears", "grouped_linear", "moe"}  # another form between few and many
# launches of others' kernels
SAME_KERNELS = {"grouped_codes", "hc_enter", "hc_head", "moe_parts", "moe_shared", "moe_fold", "rms_norm"}
KINDS = ("csa", "hca", "nvfp4", "mxfp4", "fp8", "fp4", "hash")
INTRODUCTION = """# Architectures

Written by `python -m benchmarks architectures` from `benchmarks/results/architectures.json`. Every kernel of
a Flash step, compiled as it is launched (`tools/compiled/compile_check.py`), by ptxas of Triton
{triton}. Only Hopper has been run; `dsv4 selftest` says whether the others compute what they should.

What an architecture has, and which form a kernel takes where it lacks something, is decided in
`dsv4/ops/lib/arch.py`:

| | 80 | 89 | 90 | 100, 103 | 120 |
|---|---|---|---|---|---|
| launches overlap | one after the other | one after the other | yes | yes | yes |
| tiles of linear layers come by | pointers | pointers | copy engine | copy engine | copy engine |
| FP8 products | codes as bytes, bf16 products | FP8 | FP8 | FP8 | FP8 |
| quantising to E4M3 | integer arithmetic | conversions | conversions | conversions | conversions |
| experts of 512 and more tokens | as for fewer | as for fewer | warp groups | as for fewer | as for fewer |
| heads of a program of attention | 32 | 16, a tile each | 64 | 32 | 16, a tile each |

Bits are the same for every batch on one architecture, not across architectures: the order of sums in a
product is the hardware's.
"""
SIZES = """Sizes are of a program's shared memory, spills in bytes. A kernel that does not compile or fit is served
by its oracle once `dsv4 selftest` has run there.

## Kernels

KB of shared memory, the most of any case."""


@cache
def table_cases() -> list[BenchCase]:
    """Of every op of the model and each of its formats: one token, the most up to `MAX_TOKENS`, and between."""
    groups: dict[tuple[str, str], dict[int, BenchCase]] = {}
    ops = {field.name for field in fields(OpSet)} - SAME_KERNELS
    for case in load_cases(case_modules()):
        is_flash = "pro" not in case.name and 7168 not in case.shape.values()
        tokens = max(int(case.shape.get(name, 0)) for name in ("tokens", "rows", "requests"))
        if case.op in ops and is_flash and tokens <= MAX_TOKENS and not case.shape.get("variant"):
            kind = "".join(part for part in KINDS if part in case.name)
            groups.setdefault((case.op, kind), {}).setdefault(tokens, case)
    return [
        cases[tokens]
        for (op, _), cases in groups.items()
        for tokens in sorted({min(cases), max(cases), *(MIDDLE_TOKENS for _ in range(op in THREE_SIZES))} & set(cases))
    ]


def compiled(job: tuple[int, str]) -> tuple[int, str, list[list[Any]] | str]:
    """Of one case on one architecture: each kernel with bytes of spills and of shared memory, or why there is none."""
    arch, key = job
    case = next(case for case in table_cases() if case.key == key)
    try:
        reports = compile_case(case, arch)
    except Exception as error:  # whatever a compiler raises belongs to this case
        return arch, key, " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return arch, key, [[report.kernel, report.spill_bytes, report.shared_bytes] for report in reports]


def record(architectures: list[int], records: dict[str, Any]) -> None:
    """Compile on all cores and put what came of it into `records`; written as it comes."""
    jobs = [(arch, case.key) for case in table_cases() for arch in architectures]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for done, (arch, key, result) in enumerate(pool.map(compiled, jobs), 1):
            records["architectures"].setdefault(str(arch), {})[key] = result
            print(f"{done} of {len(jobs)}: sm_{arch} {key}", file=sys.stderr, flush=True)
            RECORDS.write_text(json.dumps(records, sort_keys=True, indent=1) + "\n", encoding="utf-8")


def kernels_of(cases: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The most bytes of spills and of shared memory that any case gives a kernel."""
    found: dict[str, tuple[int, int]] = {}
    for result in cases.values():
        for kernel, spilled, shared in result if isinstance(result, list) else ():
            before = found.get(kernel, (0, 0))
            found[kernel] = max(before[0], spilled), max(before[1], shared)
    return found


def markdown(records: dict[str, Any]) -> str:
    """The page."""
    found = {arch: records["architectures"].get(str(arch), {}) for arch in ARCHITECTURES}
    kernels = {arch: kernels_of(cases) for arch, cases in found.items()}
    head = ["", "GPUs", "cases compiled", "kernels", "that fit", "largest", "limit", "spills"]
    lines = [INTRODUCTION.format(triton=records["triton"]), "## Chips"]
    lines += ["", *markdown_table(head, (_chip_row(arch, found[arch], kernels[arch]) for arch in ARCHITECTURES))]
    lines += ["", SIZES, ""]
    names = sorted({name for part in kernels.values() for name in part})
    lines += markdown_table(
        ["kernel", *(f"sm_{arch}" for arch in ARCHITECTURES)],
        ([name, *(f"{kernels[arch][name][1] / 1024:.1f}" if name in kernels[arch] else "" for arch in ARCHITECTURES)]
         for name in names),
    )  # fmt: skip
    lines += hoppers.page_lines()
    failures = [
        f"* sm_{arch}: {case}: {result[:80]}"
        for arch in ARCHITECTURES
        for case, result in found[arch].items()
        if isinstance(result, str)
    ]
    if failures:
        lines += ["", "## What does not compile", "", *failures]
    return "\n".join(lines) + "\n"


def _chip_row(arch: int, cases: dict[str, Any], kernels: dict[str, tuple[int, int]]) -> tuple[Any, ...]:
    limit = Architecture(arch).shared_bytes
    sizes = [shared for _, shared in kernels.values()]
    num_compiled = sum(isinstance(result, list) for result in cases.values())
    spilling = [f"{name} {spilled}" for name, (spilled, _) in sorted(kernels.items()) if spilled]
    return (
        f"sm_{arch}", GPUS[arch], f"{num_compiled} of {len(table_cases())}", len(sizes),
        sum(size <= limit for size in sizes), f"{max(sizes, default=0) / 1024:.0f} KB", f"{limit // 1024} KB",
        ", ".join(spilling) or ("none" if sizes else ""),
    )  # fmt: skip


def read_records() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="only this; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="only the page")


def main(options: argparse.Namespace) -> None:
    import triton

    if not options.markdown:
        records = read_records() if RECORDS.exists() else {"architectures": {}}
        records["triton"] = triton.__version__
        record(options.arch or list(ARCHITECTURES), records)
    PAGE.write_text(markdown(read_records()), encoding="utf-8")
