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

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import RESULTS, file_name
from dsv4.ops.lib.guard import IS_INTERPRETED
from dsv4.testing import bench, interpreter
from dsv4.testing.compiled.compile_check import precompile
from dsv4.testing.digests import digest_of_case
from dsv4.tools.bench.model import describe_machine

META = torch.device("meta")

H200 = RESULTS / "nvidia-h200.jsonl"
MEASURED = Path(__file__).parents[1] / "docs" / "kernels" / "measured.md"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument(
        "--markdown", action="store_true", help="write docs/kernels/measured.md from the H200's records"
    )
    return parser.parse_args(arguments)


def select(cases: list[bench.BenchCase], ops: list[str] | None, part: str | None) -> list[bench.BenchCase]:
    """The cases asked for; asking for none at all is a mistake."""
    unknown = sorted(set(ops or ()) - {case.op for case in cases})
    if unknown:
        known = ", ".join(sorted({case.op for case in cases}))
        raise bench.BenchError(f"no case of {', '.join(unknown)}; there are {known}")
    chosen = [case for case in cases if (not ops or case.op in ops) and (not part or part in case.name)]
    if not chosen:
        raise bench.BenchError(f"no case contains {part!r}")
    return sorted(chosen, key=lambda case: ops.index(case.op)) if ops else chosen


def records_named(name: str, file: Path) -> dict[str, dict[str, Any]]:
    """Of a record file, or of a commit in `file`: the last record of each case."""
    return bench.read_records(Path(name)) if Path(name).is_file() else bench.read_records(file, commit=name)


def compare(old: str, new: str, file: Path) -> int:
    comparisons = bench.compare(records_named(old, file), records_named(new, file))
    print(*comparisons, bench.summary(comparisons), sep="\n")
    return int(any(item.is_regression or item.has_other_bits for item in comparisons))


def write_digests(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    if device.type == "cuda":
        cases, origin = bench.load_cases(bench.case_modules()), bench.provenance(options.commit)
    else:
        interpreter.without_gpu()
        cases = bench.load_small_cases(bench.case_modules())
        what = "oracles" if options.oracle else "interpreter"
        origin = describe_machine(device) | {"gpu": f"CPU {what}", "commit": options.commit or bench.current_commit()}
    cases = [case for case in cases if not options.oracle or case.build(META).op_call is not None]
    path = options.out or RESULTS / f"{file_name(origin['gpu'])}-digests.jsonl"
    for case in select(cases, options.op, options.case):
        found = digest_of_case(case, device, is_oracle=options.oracle)
        bench.write_records(path, [{"op": case.op, "case": case.name, "digest": found}], origin)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"digests appended to {path}")


def run(cases: list[bench.BenchCase], samples: int, out: Path | None, commit: str | None) -> None:
    timer = bench.Timer(samples)
    origin = bench.provenance(commit)
    ceiling = bench.ceiling_of(origin["gpu"])
    path = out or RESULTS / f"{file_name(origin['gpu'])}.jsonl"
    records = []
    for case in cases:
        record = bench.measure(case, timer, ceiling) | {"digest": digest_of_case(case, torch.device("cuda"))}
        bench.write_records(path, [record], origin)  # one by one: a crash keeps what was measured
        records.append(record)
        torch.cuda.empty_cache()
    print(bench.table(records))
    print(f"{len(records)} records appended to {path}; an empty launch takes {timer.launch_us:.2f} us")


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        if options.compare:
            return compare(*options.compare, options.out or H200)
        if options.markdown:
            records = bench.read_records(H200)
            MEASURED.write_text(bench.markdown(bench.load_cases(bench.case_modules()), records), encoding="utf-8")
            return 0
        if options.digests and options.device == "cpu" and not IS_INTERPRETED:
            # read when Triton is imported
            environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, "-m", "benchmarks", "ops", *arguments]
            return subprocess.run(command, cwd=bench.ROOT, env=environment).returncode
        if options.digests:
            write_digests(options)
            return 0
        cases = select(bench.load_cases(bench.case_modules()), options.op, options.case)
        if options.list:
            print("\n".join(case.key for case in cases))
        elif options.precompile:
            precompile([case.key for case in cases], options.precompile)
        else:
            run(cases, options.samples, options.out, options.commit)
    except bench.BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
