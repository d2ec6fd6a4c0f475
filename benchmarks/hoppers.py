"""Part of architectures.md: what the kernels choose on other Hoppers than the H200, and how fast they can be there.

Choices are those that launchers make from the number of multiprocessors; floors are bytes and operations of benchmark
cases over what a chip should reach: its data sheet's numbers, times what an H200 was measured to reach of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, IN_PAIRS, RUN, WHOLE
from dsv4.ops.attention.plan import pick_plan
from dsv4.ops.indexer.plan import SCORE_CONFIG
from dsv4.ops.lib.arch import Architecture
from dsv4.ops.linear.plan import WHOLE_WAVES, pick_shuffled_tile
from dsv4.ops.select import TOPK_CONFIG
from dsv4.testing.bench import CEILINGS, Ceiling, case_modules, load_cases


@dataclass(frozen=True)
class Chip:
    """Of a data sheet: multiprocessors, L2 in MB, bytes a second of memory, dense products a second in bf16 and FP8.
    The H200's L2 is what the device reports (torch's `L2_cache_size`); its data sheet names none."""

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


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def page_lines() -> list[str]:
    head, rule = "| | " + " | ".join(CHIPS) + " |", "|---" * (len(CHIPS) + 1) + "|"
    lines = ["", "## Other Hoppers", ""]
    lines += [
        "Only the H200 has been run. What a launcher chooses by the chip follows its number of multiprocessors, and",
        "changes no bit. What decides an order of sums (splits, ranges) follows the weight's shape alone, on every",
        "chip. Nothing is chosen by bandwidth or by the size of L2. Attention weighs its forms by times measured on an",
        "H200, so on an H20, whose tensor cores have a seventh of the speed, they should be measured first. The first",
        "table is the data sheets' (the H200's L2 is what the device reports), the second what is chosen for Flash.",
        "The third is the least time by bytes and operations, at the share of its data sheet that an H200 was",
        "measured to reach.",
        "", head, rule,
    ]  # fmt: skip
    rows = {
        "multiprocessors": [str(chip.multiprocessors) for chip in CHIPS.values()],
        "L2, MB": [str(chip.cache_megabytes) for chip in CHIPS.values()],
        "memory, TB/s": [f"{chip.read / 1e12:g}" for chip in CHIPS.values()],
        "bf16, TFLOP/s": [f"{chip.bf16 / 1e12:g}" for chip in CHIPS.values()],
        "FP8, TFLOP/s": [f"{chip.fp8 / 1e12:g}" for chip in CHIPS.values()],
    }
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    chosen = {name: choices(chip) for name, chip in CHIPS.items()}
    lines += ["", head, rule]
    lines += [f"| {what} | " + " | ".join(chosen[name][what] for name in CHIPS) + " |" for what in chosen["H200"]]
    lines += ["", "| floor, us | " + " | ".join(CHIPS) + " |", rule]
    lines += [
        f"| {key} | " + " | ".join(_microseconds(us[name]) for name in CHIPS) + " |" for key, us in floors().items()
    ]
    return lines
