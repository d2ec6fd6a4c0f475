"""Records of benchmarks: where they are from, files of them, and what changed between two."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dsv4.ops.lib.assembler import assembler_of
from dsv4.testing.bench import BenchError
from dsv4.tools.bench.model import describe_machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
H200 = RESULTS / "nvidia-h200.jsonl"  # of single ops
REGRESSION_LIMIT = 1.05  # slower than this times the old median, and beyond both spreads, is a regression
Record = dict[str, Any]


def origin_of(device: torch.device, commit: str | None = None) -> Record:
    """Where a record comes from: chip, driver, versions, commit ('+' if files differ from it), date."""
    found: Record = {"gpu": "none", "cpus": os.cpu_count(), "commit": commit or current_commit()}
    if device.type != "cuda":
        return found | describe_machine(device)
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0],
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "assembler": assembler_of(torch.cuda.get_device_capability()),
        "python": platform.python_version(),
        "commit": found["commit"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def current_commit() -> str:
    """The checkout's, with a + where files differ from it."""
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    is_dirty = commit != "unknown" and _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) != ""
    return commit + ("+" if is_dirty else "")


def _output(command: list[str]) -> str:
    """What a program prints, or 'unknown' where it is missing or fails: a record then says so itself."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_records(path: Path, records: Iterable[Record], origin: Record) -> None:
    """Append records as JSON lines, each with its origin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record | origin) + "\n" for record in records)


def read_records(path: Path, commit: str | None = None) -> dict[str, Record]:
    """The last record of every case in a file, by "op/case"; of a commit (or its beginning), if one is given."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    records = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if commit is None or record.get("commit", "").startswith(commit):
                records[f"{record['op']}/{record['case']}"] = record
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path}:{number}: not a benchmark record: {error}") from error
    if commit is not None and not records:
        raise BenchError(f"expected a record file or a commit with records in {path}, found {commit!r}")
    return records


@dataclass(frozen=True)
class Comparison:
    """One case in two files. `ratio` is new / old; a regression is slower by more than 5 % and beyond both spreads.
    Without two times there is no ratio. `has_other_bits`: both records have a `digest` of the output, and these differ;
    None where one has none.
    """

    key: str
    old_us: float | None
    new_us: float | None
    ratio: float | None
    is_regression: bool
    has_other_bits: bool | None = None

    def __str__(self) -> str:
        marks = ("  SLOWER" if self.is_regression else "") + ("  BITS CHANGED" if self.has_other_bits else "")
        if self.ratio is None:
            return f"{self.key:44}{marks}"
        return f"{self.key:44} {self.old_us:9.2f} -> {self.new_us:9.2f} us  x {self.ratio:.3f}{marks}"


def compare(old: dict[str, Record], new: dict[str, Record]) -> list[Comparison]:
    """Every case of both files, worst first. Records of different chips are not comparable: `BenchError`."""
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise BenchError("the two files have no case in common")
    comparisons = []
    for key in shared:
        before, after = old[key], new[key]
        if before["gpu"] != after["gpu"]:
            raise BenchError(f"{key}: expected records of one chip, found {before['gpu']!r} and {after['gpu']!r}")
        ratio, is_regression = None, False
        times = before.get("median_us"), after.get("median_us")
        if None not in times:
            ratio = after["median_us"] / before["median_us"]
            is_regression = ratio > REGRESSION_LIMIT and after["p10_us"] > before["p90_us"]
        digests = {record.get("digest") for record in (before, after)}
        comparisons.append(Comparison(key, *times, ratio, is_regression, None if None in digests else len(digests) > 1))
    return sorted(comparisons, key=lambda item: -(item.ratio or 0.0))


def summary(comparisons: Iterable[Comparison]) -> str:
    found = list(comparisons)
    timed = [item for item in found if item.ratio is not None]
    digested = [item for item in found if item.has_other_bits is not None]
    return (
        f"{len(timed)} cases timed, {sum(item.is_regression for item in timed)} slower; "
        f"{len(digested)} with digests, {sum(item.has_other_bits is True for item in digested)} with other bits"
    )


def markdown_table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Its lines."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows))
    return [first, "|---" * len(head) + "|", *others]
