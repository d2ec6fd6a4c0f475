"""Compiles every kernel of a Flash step for six architectures and writes architectures.md from what ptxas says.

python -m benchmarks architectures                  all, on all cores; records in benchmarks/results/architectures.json
python -m benchmarks architectures --arch 89        one of them; what the others' cases gave stays
python -m benchmarks architectures --markdown       only the page, from the records; other Hoppers are calculated

No GPU is needed. Of each op and format a step of one token and one of many are compiled. On 16 cores that should take a
few minutes; what ptxas said is kept by the content of its input (.pytest_cache/compile).
"""

import argparse
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.kernels.ops import CEILINGS, Ceiling
from benchmarks.records import RESULTS, ROOT, markdown_table
from dsv4.ops import OpSet
from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, IN_PAIRS, RUN, WHOLE
from dsv4.ops.attention.plan import pick_plan
from dsv4.ops.indexer.plan import SCORE_CONFIG
from dsv4.ops.lib.arch import ARCHITECTURES, Architecture
from dsv4.ops.linear.plan import WHOLE_WAVES, pick_shuffled_tile
from dsv4.ops.select import TOPK_CONFIG
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
CHIP_COLUMNS = ("GPUs", "cases compiled", "kernels", "that fit", "largest", "limit", "spills")
KINDS = ("csa", "hca", "nvfp4", "mxfp4", "fp8", "fp4", "hash")


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


def tables(records: dict[str, Any]) -> dict[str, list[str]]:
    """Of the page, by the mark that stands before each."""
    found = {arch: records["architectures"].get(str(arch), {}) for arch in ARCHITECTURES}
    kernels = {arch: kernels_of(cases) for arch, cases in found.items()}
    head = [f"Triton {records['triton']}", *CHIP_COLUMNS]
    names = sorted({name for part in kernels.values() for name in part})
    sizes = (
        [name, *(f"{kernels[arch][name][1] / 1024:.1f}" if name in kernels[arch] else "" for arch in ARCHITECTURES)]
        for name in names
    )
    return {
        "chips": markdown_table(head, [_chip_row(arch, found[arch], kernels[arch]) for arch in ARCHITECTURES]),
        "kernels": markdown_table(["kernel", *(f"sm_{arch}" for arch in ARCHITECTURES)], sizes),
        **hopper_tables(),
    }


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


# ---- other Hoppers: what the kernels choose there, and how fast they can be ----


@dataclass(frozen=True)
class Chip:
    """Of a data sheet: multiprocessors, L2 in MB, bytes a second of memory, dense products a second in bf16 and FP8."""

    multiprocessors: int
    cache_megabytes: int
    read: float
    bf16: float
    fp8: float

    @property
    def ceiling(self) -> Ceiling:
        own, measured = CHIPS["H200"], CEILINGS["H200"]
        memory = self.read / own.read
        products = {"bf16": self.bf16 / own.bf16, "fp8": self.fp8 / own.fp8}
        return Ceiling(
            measured.read * memory, measured.copy * memory,
            {name: measured.flops[name] * share for name, share in products.items()},
        )  # fmt: skip


CHIPS = {
    "H200": Chip(132, 60, 4.8e12, 989e12, 1979e12),
    "H100": Chip(132, 50, 3.35e12, 989e12, 1979e12),
    "H800": Chip(132, 50, 3.35e12, 989e12, 1979e12),
    "H100 PCIe": Chip(114, 50, 2.0e12, 756e12, 1513e12),
    "H20": Chip(78, 60, 4.0e12, 148e12, 296e12),
}
CUTS = {BY_TILE: "a tile each", BY_RUN: "runs", WHOLE: "whole", IN_PAIRS: "pairs", BY_COLUMNS: "columns"}
FLOORS = (
    "linear/flash-wq_a-1", "linear/flash-lm_head-1", "moe/flash-nvfp4-1", "moe/flash-nvfp4-64", "moe/flash-nvfp4-4096",
    "grouped_linear/flash-wo_a-256", "grouped_linear/flash-wo_a-4096", "sparse_attention/flash-csa-64k-1",
    "sparse_attention/flash-csa-64k-64", "index_topk/1x1-at-65536-fp4",
)  # fmt: skip
FLASH_TILES, HCA_TILES = 10, 18  # keys in tiles of 64: a window and 512 picks; a window and 1,024 entries (128K)


def choices(chip: Chip) -> dict[str, str]:
    """Of Flash, by kernel and size."""
    count = chip.multiprocessors
    attention = pick_plan(Architecture(90), count)
    scores = replace(SCORE_CONFIG, multiprocessors=count)
    found = {}
    for name, tiles in (("CSA", FLASH_TILES), ("HCA at 128K", HCA_TILES)):
        for queries in (1, 16, 64, 256, 4096):
            found[f"attention, {name}, {queries} queries"] = CUTS[attention.cut(queries, tiles, RUN)]
    for tokens in (1, 64, 2048):
        programs, groups = scores.grid(tokens, 16384)
        found[f"index scores of 64K, {tokens} tokens"] = f"{programs} x {groups} programs"
    for rows, columns in ((1, 65536), (16, 65536), (1, 262144)):
        spread = TOPK_CONFIG.spread_over(rows, columns, count)
        found[f"top-k, {rows} rows of {columns:,}"] = "one program" if spread is None else f"{spread.programs} programs"
    for tokens in (128, 256, 384, 512):
        is_whole = pick_shuffled_tile(tokens, count) is WHOLE_WAVES
        found[f"wo_a, {tokens} tokens"] = "larger tiles" if is_whole else "smaller tiles"
    found["experts, wide linear layers: programs that stay"] = str(count)
    return found


def floors() -> dict[str, dict[str, float]]:
    """Microseconds by case and chip."""
    works = {case.key: case.build(torch.device("meta")) for case in load_cases(case_modules()) if case.key in FLOORS}
    return {key: {name: chip.ceiling.floor_us(works[key]) for name, chip in CHIPS.items()} for key in FLOORS}


def hopper_tables() -> dict[str, list[str]]:
    chosen = {name: choices(chip) for name, chip in CHIPS.items()}
    sheets = {
        "multiprocessors": lambda chip: chip.multiprocessors, "L2, MB": lambda chip: chip.cache_megabytes,
        "memory, TB/s": lambda chip: f"{chip.read / 1e12:g}", "bf16, TFLOP/s": lambda chip: f"{chip.bf16 / 1e12:g}",
        "FP8, TFLOP/s": lambda chip: f"{chip.fp8 / 1e12:g}",
    }  # fmt: skip
    least = (
        [key, *(f"{us:,.0f}" if us >= 100 else f"{us:.3g}" for us in row.values())] for key, row in floors().items()
    )
    return {
        "sheets": markdown_table(["", *CHIPS], ([what, *map(of, CHIPS.values())] for what, of in sheets.items())),
        "choices": markdown_table(
            ["", *CHIPS], ([what, *(chosen[name][what] for name in CHIPS)] for what in chosen["H200"])
        ),
        "floors": markdown_table(["floor, us", *CHIPS], least),
    }


# ---- running ----


def markdown(records: dict[str, Any], page: str) -> str:
    """The page with fresh tables: each follows a line `<!-- NAME -->`."""
    for name, lines in tables(records).items():
        table = "".join(f"{line}\n" for line in lines)
        page, count = re.subn(rf"(<!-- {name} -->\n\n)(\|.*\n)*", lambda found, new=table: found[1] + new, page)
        assert count == 1, f"no mark of {name} in the page"
    return page


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
    PAGE.write_text(markdown(read_records(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
