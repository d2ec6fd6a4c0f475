"""Times every op of cases/*.py on the current GPU, and compares two record files.

python benchmarks/bench_ops.py                         all cases, records appended to benchmarks/results/<gpu>.jsonl
python benchmarks/bench_ops.py --op rope --out FILE    some cases, another file
python benchmarks/bench_ops.py --precompile 90         compiles first, on all cores; a run then finds it in the cache
python benchmarks/bench_ops.py --compare OLD NEW       no GPU needed; exit status 1 if something became slower
python benchmarks/bench_ops.py --markdown              no GPU needed; measured.md anew from the H200's records
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout without an installation

from dsv4.testing import bench
from dsv4.testing.compile_check import precompile

RESULTS = Path(__file__).parent / "results"
MEASURED = Path(__file__).parents[1] / "docs" / "kernels" / "measured.md"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="only this op; may be repeated, and then that is the order")
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--samples", type=int, default=100, help="timed replays per case")
    parser.add_argument("--out", type=Path, help="file to append records to; default: results/<gpu>.jsonl")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--precompile", type=int, metavar="ARCH", help="only compile, on all cores, for 90 or 100")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two record files")
    parser.add_argument("--markdown", action="store_true", help="write measured.md from results/nvidia-h200.jsonl")
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


def compare(old: Path, new: Path) -> int:
    comparisons = bench.compare(bench.read_records(old), bench.read_records(new))
    for item in comparisons:
        mark = "  SLOWER" if item.is_regression else ""
        print(f"{item.key:44} {item.old_us:9.2f} -> {item.new_us:9.2f} us  x {item.ratio:.3f}{mark}")
    return int(any(item.is_regression for item in comparisons))


def run(cases: list[bench.BenchCase], samples: int, out: Path | None, commit: str | None) -> None:
    timer = bench.Timer(samples)
    origin = bench.provenance(commit)
    ceiling = bench.ceiling_of(origin["gpu"])
    path = out or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', origin['gpu'].lower()).strip('-')}.jsonl"
    records = []
    for case in cases:
        record = bench.measure(case, timer, ceiling)
        bench.write_records(path, [record], origin)  # one by one: a crash keeps what was measured
        records.append(record)
        torch.cuda.empty_cache()
    print(bench.table(records))
    print(f"{len(records)} records appended to {path}; an empty launch takes {timer.launch_us:.2f} us")


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        if options.compare:
            return compare(*options.compare)
        if options.markdown:
            records = bench.read_records(RESULTS / "nvidia-h200.jsonl")
            MEASURED.write_text(bench.markdown(bench.load_cases(bench.case_modules()), records), encoding="utf-8")
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
