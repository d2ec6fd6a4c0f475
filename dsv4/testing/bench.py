"""Timing of single ops on a GPU, with the bytes and operations each case must move, and records that say where they
are from.

A case is captured in a CUDA graph; before every replay the L2 cache is overwritten; the time is that between two events
around the replay. Nothing waits for the host in between, since the flush gives it time to run ahead. What remains of
the launch itself is measured on an empty graph (`launch_us`) and recorded, not subtracted.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import platform
import statistics
import subprocess
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dsv4.errors import Dsv4Error
from dsv4.ops.lib.assembler import assembler_of
from dsv4.testing import cases
from dsv4.testing.op_call import OpCall

ROOT = Path(__file__).parents[2]
REGRESSION_LIMIT = 1.05  # slower than this times the old median, and beyond both spreads, is a regression


class BenchError(Dsv4Error, ValueError):
    """A benchmark that cannot run, or records that cannot be compared."""


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


@dataclass(frozen=True)
class Work:
    """One call of an op, and what it cannot avoid: bytes in, bytes out, multiply-adds counted as two operations.

    Inputs that fit the cache and are used by every row (a weight vector) count once. The call returns every tensor it
    wrote, those written in place too, and gives the same bits when it is repeated: the graph test compares them.
    `op`: the same as data, where it is an op as the model calls it; `call` itself, if that is one. `defined`: of what
    the call returns, without what it leaves unwritten.
    """

    call: Callable[[], Any]
    bytes_read: int
    bytes_written: int
    flops: int = 0
    flops_format: str = "bf16"
    op: OpCall | None = None
    defined: Callable[[Any], Any] = lambda result: result

    @property
    def op_call(self) -> OpCall | None:
        return self.call if isinstance(self.call, OpCall) else self.op


@dataclass(frozen=True)
class BenchCase:
    """`build(device)` makes inputs and the call. It must also work on the device "meta", where the compile check
    runs it: random and constant tensors only, nothing that reads a value."""

    op: str
    name: str
    shape: dict[str, int | str]
    build: Callable[[torch.device], Work] = field(repr=False)

    @property
    def key(self) -> str:
        return f"{self.op}/{self.name}"


def load_cases(modules: Iterable[str]) -> list[BenchCase]:
    """The `CASES` of every module, checked for duplicate names."""
    return _load(modules, "CASES")


def load_small_cases(modules: Iterable[str]) -> list[BenchCase]:
    """The `SMALL` cases of every module."""
    return _load(modules, "SMALL")


def _load(modules: Iterable[str], name: str) -> list[BenchCase]:
    found = [case for module in modules for case in getattr(importlib.import_module(module), name)]
    keys = [case.key for case in found]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise BenchError(f"expected every case once, found twice: {', '.join(duplicates)}")
    return found


def case_modules() -> list[str]:
    """The modules of `dsv4/testing/cases`, in order."""
    return [f"{cases.__name__}.{info.name}" for info in pkgutil.iter_modules(cases.__path__)]


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- timing ----


class Timer:
    """Replays graphs on the current CUDA device with a cold cache: full of something else that was only read. After a
    flush that writes, the timed call would also pay for writing those lines back, a byte for every byte it reads.
    """

    def __init__(self, samples: int = 100) -> None:
        if not torch.cuda.is_available():
            raise BenchError("benchmarks need a CUDA GPU, found none")
        self.samples = samples
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.zeros(cache_bytes, dtype=torch.float32, device="cuda")
        self._word = torch.zeros(1, device="cuda")
        self.launch_us = statistics.median(self.times_us(lambda: self._word.zero_()))

    def times_us(self, call: Callable[[], Any]) -> list[float]:
        graph = self._capture(call)
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.samples)
        ]
        for start, end in pairs:
            self._flush.sum()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def _capture(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets the allocator settle
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return graph


def measure(case: BenchCase, timer: Timer, ceiling: Ceiling) -> dict[str, Any]:
    """One record, without provenance."""
    work = case.build(torch.device("cuda"))
    times = timer.times_us(work.call)
    return summarise(case, work, times, timer.launch_us, ceiling)


def summarise(case: BenchCase, work: Work, times: list[float], launch_us: float, ceiling: Ceiling) -> dict[str, Any]:
    """Median and spread (10th and 90th percentile) of `times`, against the chip's limits."""
    deciles = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    floor, limit = ceiling.floor_us(work), ceiling.limit_us(work)
    return {
        "op": case.op,
        "case": case.name,
        "shape": case.shape,
        "median_us": round(median, 3),
        "p10_us": round(deciles[0], 3),
        "p90_us": round(deciles[-1], 3),
        "samples": len(times),
        "launch_us": round(launch_us, 3),
        "bytes_read": work.bytes_read,
        "bytes_written": work.bytes_written,
        "flops": work.flops,
        "floor_us": round(floor, 3),
        "times_floor": round(median / floor, 3),
        "ceiling_percent": round(100 * limit / median, 1),
    }


def ceiling_of(device_name: str) -> Ceiling:
    for name, ceiling in CEILINGS.items():
        if name in device_name:
            return ceiling
    raise BenchError(f"no measured ceiling for {device_name!r}; known: {', '.join(CEILINGS)}")


# ---- records ----


def provenance(commit: str | None = None) -> dict[str, str]:
    """Where a record comes from: chip, driver, versions, commit ('+' if files differ from it), date."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0],
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "assembler": assembler_of(torch.cuda.get_device_capability()),
        "python": platform.python_version(),
        "commit": commit or current_commit(),
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


def write_records(path: Path, records: Iterable[dict[str, Any]], origin: dict[str, str]) -> None:
    """Append records as JSON lines, each with its origin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record | origin) + "\n")


def read_records(path: Path, commit: str | None = None) -> dict[str, dict[str, Any]]:
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


def compare(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[Comparison]:
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
        if "median_us" in before and "median_us" in after:
            ratio = after["median_us"] / before["median_us"]
            is_regression = ratio > REGRESSION_LIMIT and after["p10_us"] > before["p90_us"]
        digests = [record["digest"] for record in (before, after) if "digest" in record]
        has_other_bits = digests[0] != digests[1] if len(digests) == 2 else None
        times = before.get("median_us"), after.get("median_us")
        comparisons.append(Comparison(key, *times, ratio, is_regression, has_other_bits))
    return sorted(comparisons, key=lambda item: -(item.ratio or 0.0))


def summary(comparisons: Iterable[Comparison]) -> str:
    found = list(comparisons)
    timed = [item for item in found if item.ratio is not None]
    digested = [item for item in found if item.has_other_bits is not None]
    return (
        f"{len(timed)} cases timed, {sum(item.is_regression for item in timed)} slower; "
        f"{len(digested)} with digests, {sum(item.has_other_bits is True for item in digested)} with other bits"
    )


def table(records: Iterable[dict[str, Any]]) -> str:
    """A short text table of records."""
    lines = [f"{'case':44} {'us':>9} {'p10':>9} {'p90':>9} {'floor':>9} {'x floor':>8} {'ceiling':>8}"]
    lines += [
        f"{r['op'] + '/' + r['case']:44} {r['median_us']:9.2f} {r['p10_us']:9.2f} {r['p90_us']:9.2f} "
        f"{r['floor_us']:9.2f} {r['times_floor']:8.2f} {r['ceiling_percent']:7.1f}%"
        for r in records
    ]
    return "\n".join(lines)


def markdown(cases: Iterable[BenchCase], records: dict[str, dict[str, Any]]) -> str:
    """The page docs/kernels/measured.md: the last record of every case there is, by op; cases without one are named."""
    names = "gpu", "driver", "torch", "triton"
    # records older than the field say nothing of the assembler
    origins = sorted({(*(r[name] for name in names), r.get("assembler", "")) for r in records.values()})
    lines = [
        "# Measured",
        "",
        "Written by `python -m benchmarks ops --markdown`; the method and the columns are explained in",
    ]
    lines += [
        "[README.md](README.md). "
        + "; ".join(f"{g}, driver {d}, torch {t}, Triton {n}{a and ', ' + a}" for g, d, t, n, a in origins)
        + "."
    ]
    unmeasured = []
    by_op: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if case.key in records:
            by_op.setdefault(case.op, []).append(records[case.key])
        else:
            unmeasured.append(case.key)
    for op, rows in sorted(by_op.items()):
        lines += [
            "",
            f"## {op}",
            "",
            "| case | MB | floor us | us | p10 to p90 | x floor | ceiling | TFLOP/s | commit |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        for r in rows:
            moved = (r["bytes_read"] + r["bytes_written"]) / 1e6
            rate = f"{r['flops'] / r['median_us'] / 1e6:.0f}" if r["flops"] else ""
            lines.append(
                f"| {r['case']} | {moved:.3g} | {r['floor_us']:.3g} | {r['median_us']:.1f} | {r['p10_us']:.1f} to "
                f"{r['p90_us']:.1f} | {r['times_floor']:.3g} | {r['ceiling_percent']:.0f} % | {rate} | "
                f"{r['commit'][:7]} |"
            )
    if unmeasured:
        lines += ["", *textwrap.wrap("Not measured: " + ", ".join(unmeasured) + ".", 109, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"
