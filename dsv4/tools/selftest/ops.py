"""Every op's kernel against its oracle, and rows alone against rows in a batch, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from dsv4.errors import Dsv4Error
from dsv4.ops import Backend
from dsv4.ops.lib.compile_only import can_compile_in_parallel, compiled_in_parallel, launches_only_compile
from dsv4.testing.agreement import Comparison, compare_with_oracle, compare_with_pieces, pieces_of
from dsv4.testing.bench import BenchCase, case_modules, load_cases, load_small_cases
from dsv4.testing.op_call import OpCall
from dsv4.tools.selftest.report import Check, Status, of_measures, raised

META = torch.device("meta")
PARTS: dict[str, Comparison] = {"oracle": compare_with_oracle, "batch": compare_with_pieces}
_MAX_TOKENS = 8192
_PRO_TOKENS = 64  # of the larger model's cases those of a decode step
_CANNOT_COMPILE = {
    "CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "PTXASError", "OutOfResources",
}  # fmt: skip
SEED = 20261116


class DeviceLost(Dsv4Error, RuntimeError):
    """A kernel broke the CUDA context: nothing after it can run in this process."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.detail)
        self.check = check


@dataclass(frozen=True)
class OpCase:
    """A case and the size class it is of: "small" or "real"."""

    size: str
    case: BenchCase

    @property
    def name(self) -> str:
        return f"{self.case.key} ({self.size})"


def op_cases(device: torch.device, *, has_real_shapes: bool, ops: Iterable[str] = ()) -> list[OpCase]:
    """Small shapes everywhere, real ones on a GPU; of all ops unless some are named."""
    modules = case_modules()
    cases = [OpCase("small", case) for case in load_small_cases(modules)]
    if device.type == "cuda" and has_real_shapes:
        cases += [OpCase("real", case) for case in load_cases(modules) if _is_wanted(case)]
    wanted = set(ops)
    return [case for case in cases if not wanted or case.case.op in wanted or _op_of(case.case) in wanted]


def _is_wanted(case: BenchCase) -> bool:
    """Launches as the model makes them: no variants, nothing that takes an oracle minutes."""
    tokens = max(int(case.shape.get(name, 0)) for name in ("tokens", "rows", "requests"))
    most = _PRO_TOKENS if "pro" in case.name or 7168 in case.shape.values() else _MAX_TOKENS
    return not case.shape.get("variant") and tokens <= most and _op_of(case) is not None


def _op_of(case: BenchCase) -> str | None:
    call = case.build(META).op_call
    return None if call is None else call.op


def compile_ahead(cases: list[OpCase], progress: Callable[[int, int], None]) -> None:
    """Compile what the checks will launch, on all cores."""
    if not can_compile_in_parallel():
        return
    with launches_only_compile(), compiled_in_parallel(progress):
        for case in cases:
            with suppress(Exception):  # what does not compile says so when it is run
                call = case.case.build(META).op_call
                assert call is not None
                call()
                for rows in pieces_of(call.num_rows) if call.num_rows > 1 else ():
                    call.of_rows(rows)()


def check_ops(cases: list[OpCase], backend: Backend, device: torch.device) -> Iterator[Check]:
    """Both parts of every case. Raises `DeviceLost` where nothing more can be launched."""
    for case in cases:
        yield from _checks(case, backend, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _checks(case: OpCase, backend: Backend, device: torch.device) -> Iterator[Check]:
    torch.manual_seed(SEED)
    try:
        call = case.case.build(device).op_call
    except Exception as error:
        yield _of_error("oracle", case.name, case.case.op, error, 0.0)
        return
    assert call is not None, case.name
    yield from checks_of(call, case.name, backend, device)


def checks_of(call: OpCall, name: str, backend: Backend, device: torch.device) -> Iterator[Check]:
    """Both parts of one call. Raises `DeviceLost`."""
    for part, compare in PARTS.items():
        start = time.perf_counter()
        try:
            measures = compare(call, backend)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # whatever a kernel raises is this check's result, and the others go on
            check = _of_error(part, name, call.op, error, time.perf_counter() - start)
            if _is_lost(device, error):
                raise DeviceLost(check) from error
            yield check
            return
        if measures:
            yield of_measures(part, name, call.op, measures, time.perf_counter() - start)


def _is_lost(device: torch.device, error: Exception) -> bool:
    """Whether the CUDA context is broken: then waiting fails too."""
    if "CUDA error" in str(error):
        return True
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _of_error(part: str, name: str, op: str, error: Exception, seconds: float) -> Check:
    is_compiler = type(error).__name__ in _CANNOT_COMPILE or "PassManager" in str(error)
    return raised(part, name, op, error, seconds, Status.CANNOT_RUN if is_compiler else Status.FAILED)
