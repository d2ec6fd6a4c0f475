"""Everything a GPU is wanted for, in one command: tests, then benchmarks.

    python benchmarks/gpu_session.py FOLDER [--op OP ...] [--commit COMMIT]

FOLDER receives tests-ops.txt, tests-gpu.txt and bench.txt (whole outputs), bench.jsonl (records) and summary.txt (what
is printed last). The tests of tests/ops and tests/testing run compiled here, on the GPU; those marked `gpu` run only
here. Benchmarks run even if tests fail: a number beside a red test is still worth a look. Exit status 1 if a test
failed or a case could not be timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_logged(command: list[str], log: Path) -> tuple[int, str]:
    """Run in the checkout; exit status and output. The output goes to `log` as it comes: a killed session keeps it."""
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    return status, log.read_text(encoding="utf-8")


def run_tests(folder: Path) -> tuple[bool, list[str]]:
    """The op tests, compiled, then every test marked `gpu`; True if all passed, and the lines worth reading."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short"]
    parts = {"ops": ["tests/ops", "tests/testing"], "gpu": ["-m", "gpu"]}
    lines, is_green = [], True
    for name, selection in parts.items():
        status, output = run_logged([*pytest, *selection], folder / f"tests-{name}.txt")
        is_green = is_green and status == 0
        lines += [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        lines.append(f"tests ({name}): {output.strip().splitlines()[-1]}")
    return is_green, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--op", action="append", default=[], help="benchmark only this op; may be repeated")
    parser.add_argument("--commit", help="commit to record where there is no git repository")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    is_green, lines = run_tests(folder)
    command = [sys.executable, "benchmarks/bench_ops.py", "--out", str(folder / "bench.jsonl")]
    command += [word for op in options.op for word in ("--op", op)]
    command += ["--commit", options.commit] if options.commit else []
    status, output = run_logged(command, folder / "bench.txt")
    summary = "\n".join([*lines, output.strip() if status == 0 else output.strip()[-3000:]])
    (folder / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    print(summary)
    return int(not is_green or status != 0)


if __name__ == "__main__":
    sys.exit(main())
