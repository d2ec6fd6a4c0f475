"""What a self-test found: one `Check` for everything tried, and the report they make."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch

from dsv4.errors import Dsv4Error
from dsv4.testing.agreement import Measure

FORMAT = 1  # of the JSON
_CANNOT_COMPILE = {
    "CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "PTXASError", "OutOfResources",
}  # fmt: skip


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


class DeviceLost(Dsv4Error, RuntimeError):
    """A kernel broke the CUDA context: nothing after it can run in this process."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.detail)
        self.check = check


def tried(part: str, name: str, measure: Callable[[], Iterable[Measure]], op: str = "") -> Check:
    """What `measure` finds, failed where one number is above its limit. Whatever it raises is the result too, and the
    other checks go on, unless the device is lost (`DeviceLost`)."""
    start = time.perf_counter()
    try:
        measures = list(measure())
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        check = _of_error(part, name, op, error, time.perf_counter() - start)
        if _is_lost(error):
            raise DeviceLost(check) from error
        return check
    ordered = sorted(measures, key=_excess, reverse=True)
    failed = [one for one in ordered if not one.is_ok]
    detail = "; ".join(f"{one.what} {one.value:.3g} > {one.limit:.3g}" for one in failed[:3])
    worst = ordered[0] if ordered else None  # the number furthest beyond its limit, or nearest to it
    seconds = round(time.perf_counter() - start, 3)
    return Check(part, name, Status.FAILED if failed else Status.OK, op, detail, worst, seconds)


def _of_error(part: str, name: str, op: str, error: Exception, seconds: float) -> Check:
    """The error on one line. Want of memory is nothing that kernels are to blame for; one op's may be unable to run."""
    status, detail = Status.FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, torch.OutOfMemoryError):
        status, detail = Status.LEFT_OUT, "the GPU's memory is too small"
    elif op and (type(error).__name__ in _CANNOT_COMPILE or "PassManager" in str(error)):
        status = Status.CANNOT_RUN
    return Check(part, name, status, op, detail, None, round(seconds, 3))


def _is_lost(error: Exception) -> bool:
    """Whether the CUDA context is broken: then waiting fails too."""
    if "CUDA error" in str(error):
        return True
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _excess(measure: Measure) -> float:
    if measure.value != measure.value:
        return float("inf")
    return measure.value / measure.limit if measure.limit else measure.value * 1e30
