"""What a self-test found: one `Check` for everything tried, and the report they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch

from dsv4.testing.agreement import Measure

FORMAT = 1  # of the JSON


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"
    CANNOT_RUN = "cannot run"  # this architecture does not have the kernel
    LEFT_OUT = "left out"  # for want of memory


@dataclass(frozen=True)
class Check:
    """One thing tried.

    part: "oracle" (kernel against oracle), "batch" (rows alone against rows in a batch), "text", "requests", "vectors"
    op: the op that is to blame where this fails; "" where no single one is. measure: the number nearest to its limit
    """

    part: str
    name: str
    status: Status
    op: str = ""
    detail: str = ""
    measure: Measure | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Speed:
    """One kernel's time, cold cache, beside what this GPU's own read bandwidth allows."""

    case: str
    median_us: float
    gigabytes_a_second: float
    bandwidth_percent: float
    teraflops: float


@dataclass
class SelftestReport:
    """All of it. `is_interpreted`: no GPU, so kernels ran in the interpreter; `bandwidth`: measured GB/s of reads."""

    machine: dict[str, str]
    is_interpreted: bool
    checks: list[Check] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    bandwidth: float = 0.0
    seconds: float = 0.0

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status is Status.FAILED]

    @property
    def is_passed(self) -> bool:
        return not self.failures

    def ops_with(self, status: Status) -> list[str]:
        """Ops of which some check has this status."""
        return sorted({check.op for check in self.checks if check.status is status and check.op})

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "passed": self.is_passed, "failed_ops": self.ops_with(Status.FAILED)} | asdict(self)


def tried(part: str, name: str, measure: Callable[[], Iterable[Measure]], op: str = "") -> Check:
    """What `measure` finds; whatever it raises is the result too."""
    start = time.perf_counter()
    try:
        return of_measures(part, name, op, measure(), time.perf_counter() - start)
    except Exception as error:
        return raised(part, name, op, error, time.perf_counter() - start)


def raised(part: str, name: str, op: str, error: Exception, seconds: float, status: Status = Status.FAILED) -> Check:
    """In place of a measure, the error on one line. Want of memory is nothing that kernels are to blame for."""
    if isinstance(error, torch.OutOfMemoryError):
        return Check(part, name, Status.LEFT_OUT, op, "the GPU's memory is too small", None, round(seconds, 3))
    detail = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return Check(part, name, status, op, detail, None, round(seconds, 3))


def of_measures(part: str, name: str, op: str, measures: Iterable[Measure], seconds: float) -> Check:
    """Failed where one number is above its limit; it tells of the one that is furthest beyond, or nearest."""
    ordered = sorted(measures, key=_excess, reverse=True)
    failed = [measure for measure in ordered if not measure.is_ok]
    detail = "; ".join(f"{measure.what} {measure.value:.3g} > {measure.limit:.3g}" for measure in failed[:3])
    worst = ordered[0] if ordered else None
    return Check(part, name, Status.FAILED if failed else Status.OK, op, detail, worst, round(seconds, 3))


def _excess(measure: Measure) -> float:
    if measure.value != measure.value:
        return float("inf")
    return measure.value / measure.limit if measure.limit else measure.value * 1e30
