"""Times every op of dsv4/testing/cases on the current GPU, and compares records.

python -m benchmarks ops                         all cases, records appended to benchmarks/results/<gpu>.jsonl
python -m benchmarks ops --op rope --out FILE    some cases, another file
python -m benchmarks ops --precompile 90         compiles first, on all cores; a run then finds it in the cache
python -m benchmarks ops --digests               no times: digests of what every case computes, into
                                                 results/<gpu>-digests.jsonl; with --device cpu of the small cases in
                                                 the interpreter, with --oracle of the oracles
python -m benchmarks ops --compare OLD NEW       no GPU needed; exit status 1 if something became slower, or if bits
                                                 changed where both have digests
python -m benchmarks ops --markdown              no GPU needed; docs/kernels/measured.md anew from the H200's records

OLD and NEW are record files, or commits whose records are in the file of --out (by default the H200's).
"""

import argparse
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import records
from benchmarks.kernels.digests import digest_of_case
from benchmarks.records import H200, RESULTS, ROOT, Record
from benchmarks.runner import file_name
from dsv4.ops.lib.guard import IS_INTERPRETED
from dsv4.testing import interpreter
from dsv4.testing.bench import BenchCase, BenchError, Timer, Work, case_modules, load_cases, load_small_cases
from tools.compiled.compile_check import precompile

COLUMNS = ("case", "MB", "floor us", "us", "p10 to p90", "x floor", "ceiling", "TFLOP/s", "commit")
MEASURED = ROOT / "docs" / "kernels" / "measured.md"


@dataclass(frozen=True)
class Ceiling:
    """What one chip was measured to do: bytes a second, and operations a second by format."""

    read: float
    copy: float
    flops: dict[str, float]

    def floor_us(self, work: Work) -> float:
        """All bytes at read speed, or all operations, whichever takes longer."""
        return 1e6 * max((work.bytes_read + work.bytes_written) / self.read, self._compute_seconds(work))

    def limit_us(self, work: Work) -> float:
        """The same with writes at the speed that explains the measured copy: a byte read and written takes 2 / copy."""
        write_seconds_per_byte = 2 / self.copy - 1 / self.read
        memory = work.bytes_read / self.read + work.bytes_written * write_seconds_per_byte
        return 1e6 * max(memory, self._compute_seconds(work))

    def _compute_seconds(self, work: Work) -> float:
        return work.flops / self.flops[work.flops_format] if work.flops else 0.0


# torch 2.11, CUDA 13.0, driver 580, graph replay, L2 flushed: 8 GB pass, 8 GB copy, 8192^3 products
CEILINGS = {"H200": Ceiling(read=4.63e12, copy=4.26e12, flops={"bf16": 792e12, "fp8": 1392e12})}


def ceiling_of(device_name: str) -> Ceiling:
    for name, ceiling in CEILINGS.items():
        if name in device_name:
            return ceiling
    raise BenchError(f"no measured ceiling for {device_name!r}; known: {', '.join(CEILINGS)}")


def summarise(case: BenchCase, work: Work, times: list[float], launch_us: float, ceiling: Ceiling) -> Record:
    """Median and spread (10th and 90th percentile) of `times`, against the chip's limits."""
    deciles, median = statistics.quantiles(times, n=10), statistics.median(times)
    floor, limit = ceiling.floor_us(work), ceiling.limit_us(work)
    return {
        "op": case.op, "case": case.name, "shape": case.shape, "median_us": round(median, 3),
        "p10_us": round(deciles[0], 3), "p90_us": round(deciles[-1], 3), "samples": len(times),
        "launch_us": round(launch_us, 3), "bytes_read": work.bytes_read, "bytes_written": work.bytes_written,
        "flops": work.flops, "floor_us": round(floor, 3), "times_floor": round(median / floor, 3),
        "ceiling_percent": round(100 * limit / median, 1),
    }  # fmt: skip


# ---- what is printed, and the page ----


def table(found: Iterable[Record]) -> str:
    lines = [f"{'case':44} {'us':>9} {'p10':>9} {'p90':>9} {'floor':>9} {'x floor':>8} {'ceiling':>8}"]
    lines += [
        f"{r['op'] + '/' + r['case']:44} {r['median_us']:9.2f} {r['p10_us']:9.2f} {r['p90_us']:9.2f} "
        f"{r['floor_us']:9.2f} {r['times_floor']:8.2f} {r['ceiling_percent']:7.1f}%"
        for r in found
    ]
    return "\n".join(lines)


def markdown(cases: Iterable[BenchCase], found: dict[str, Record]) -> str:
    """The page docs/kernels/measured.md: the last record of every case there is, by op; cases without one are named."""
    # records older than the field say nothing of the assembler
    origins = sorted(
        {(*(r[n] for n in ("gpu", "driver", "torch", "triton")), r.get("assembler", "")) for r in found.values()}
    )
    about = "; ".join(f"{g}, driver {d}, torch {t}, Triton {n}{a and ', ' + a}" for g, d, t, n, a in origins)
    lines = ["# Measured", ""]
    lines += ["Written by `python -m benchmarks ops --markdown`; the method and the columns are explained in"]
    lines += [f"[README.md](README.md). {about}."]
    unmeasured: list[str] = []
    by_op: dict[str, list[Record]] = {}
    for case in cases:
        if case.key in found:
            by_op.setdefault(case.op, []).append(found[case.key])
        else:
            unmeasured.append(case.key)
    for op, rows in sorted(by_op.items()):
        lines += ["", f"## {op}", "", *records.markdown_table(COLUMNS, map(_cells, rows))]
    if unmeasured:
        lines += ["", *textwrap.wrap("Not measured: " + ", ".join(unmeasured) + ".", 109, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _cells(r: Record) -> tuple[str, ...]:
    moved = (r["bytes_read"] + r["bytes_written"]) / 1e6
    return (
        r["case"], f"{moved:.3g}", f"{r['floor_us']:.3g}", f"{r['median_us']:.1f}",
        f"{r['p10_us']:.1f} to {r['p90_us']:.1f}", f"{r['times_floor']:.3g}", f"{r['ceiling_percent']:.0f} %",
        f"{r['flops'] / r['median_us'] / 1e6:.0f}" if r["flops"] else "", r["commit"][:7],
    )  # fmt: skip


# ---- running ----


def select(cases: list[BenchCase], ops: list[str] | None, part: str | None) -> list[BenchCase]:
    """The cases asked for; asking for none at all is a mistake."""
    unknown = sorted(set(ops or ()) - {case.op for case in cases})
    if unknown:
        known = ", ".join(sorted({case.op for case in cases}))
        raise BenchError(f"no case of {', '.join(unknown)}; there are {known}")
    chosen = [case for case in cases if (not ops or case.op in ops) and (not part or part in case.name)]
    if not chosen:
        raise BenchError(f"no case contains {part!r}")
    return sorted(chosen, key=lambda case: ops.index(case.op)) if ops else chosen


def compare(old: str, new: str, file: Path) -> int:
    """Record files, or commits in `file`."""
    sides = [
        records.read_records(Path(name)) if Path(name).is_file() else records.read_records(file, commit=name)
        for name in (old, new)
    ]
    comparisons = records.compare(*sides)
    print(*comparisons, records.summary(comparisons), sep="\n")
    return int(any(item.is_regression or item.has_other_bits for item in comparisons))


def write_digests(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    origin = records.origin_of(device, options.commit)
    if device.type == "cuda":
        cases = load_cases(case_modules())
    else:
        interpreter.without_gpu()
        cases = load_small_cases(case_modules())
        origin["gpu"] = f"CPU {'oracles' if options.oracle else 'interpreter'}"
    cases = [case for case in cases if not options.oracle or case.build(torch.device("meta")).op_call is not None]
    path = options.out or RESULTS / f"{file_name(origin['gpu'])}-digests.jsonl"
    for case in select(cases, options.op, options.case):
        found = digest_of_case(case, device, is_oracle=options.oracle)
        records.write_records(path, [{"op": case.op, "case": case.name, "digest": found}], origin)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"digests appended to {path}")


def measure(cases: list[BenchCase], options: argparse.Namespace) -> None:
    timer, device = Timer(options.samples), torch.device("cuda")
    origin = records.origin_of(device, options.commit)
    ceiling = ceiling_of(origin["gpu"])
    path, found = options.out or RESULTS / f"{file_name(origin['gpu'])}.jsonl", []
    for case in cases:
        work = case.build(device)
        record = summarise(case, work, timer.times_us(work.call), timer.launch_us, ceiling)
        del work
        found.append(record | {"digest": digest_of_case(case, device)})
        records.write_records(path, found[-1:], origin)  # one by one: a crash keeps what was measured
        torch.cuda.empty_cache()
    print(table(found))
    print(f"{len(found)} records appended to {path}; an empty launch takes {timer.launch_us:.2f} us")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", help="only this op; may be repeated, and then that is the order")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--samples", type=int, default=100, help="timed replays per case")
    parser.add_argument("--out", type=Path, help="file to append records to; default: results/<gpu>.jsonl")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    parser.add_argument("--digests", action="store_true", help="only digests of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of --digests")
    parser.add_argument("--oracle", action="store_true", help="--digests of the oracles")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--precompile", type=int, metavar="ARCH", help="only compile, on all cores, for 90 or 100")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="files or commits")
    parser.add_argument("--markdown", action="store_true", help="write docs/kernels/measured.md")


def main(options: argparse.Namespace) -> int:
    try:
        if options.compare:
            return compare(*options.compare, options.out or H200)
        if options.markdown:
            text = markdown(load_cases(case_modules()), records.read_records(H200))
            MEASURED.write_text(text, encoding="utf-8")
        elif options.digests and options.device == "cpu" and not IS_INTERPRETED:
            # read when Triton is imported
            environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
            return subprocess.run(options.command, env=environment).returncode
        elif options.digests:
            write_digests(options)
        else:
            cases = select(load_cases(case_modules()), options.op, options.case)
            if options.list:
                print("\n".join(case.key for case in cases))
            elif options.precompile:
                precompile([case.key for case in cases], options.precompile)
            else:
                measure(cases, options)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
