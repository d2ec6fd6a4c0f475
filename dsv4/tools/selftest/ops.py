"""Every op's kernel against its oracle, and rows alone against rows in a batch, bit for bit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from dsv4.ops import Backend
from dsv4.ops.compile_only import can_compile_in_parallel, compiled_in_parallel, launches_only_compile
from dsv4.testing.agreement import Comparison, Measure, compare_with_oracle, compare_with_pieces, pieces_of
from dsv4.testing.bench import BenchCase, case_modules, load_cases, load_small_cases
from dsv4.testing.op_call import OpCall
from dsv4.tools.selftest.report import Check, Status, tried

Done = Callable[[str, int, int], None]  # what, how many are done, of how many
META = torch.device("meta")
PARTS: dict[str, Comparison] = {"oracle": compare_with_oracle, "batch": compare_with_pieces}
_MAX_TOKENS = 8192
_PRO_TOKENS = 64  # of the larger model's cases those of a decode step
SEED = 20261116


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


def check_ops(cases: list[OpCase], backend: Backend, device: torch.device, progress: Done) -> Iterator[Check]:
    """Both parts of every case."""
    for number, case in enumerate(cases):
        progress(case.name, number, len(cases))
        torch.manual_seed(SEED)
        built: list[OpCall] = []
        check = tried("oracle", case.name, partial(_build, case, device, built), case.case.op)
        if built:
            yield from checks_of(built[0], case.name, backend)
        else:
            yield check
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _build(case: OpCase, device: torch.device, built: list[OpCall]) -> list[Measure]:
    call = case.case.build(device).op_call
    assert call is not None, case.name
    built.append(call)
    return []


def checks_of(call: OpCall, name: str, backend: Backend) -> Iterator[Check]:
    """Both parts of one call; the second where the first ran and there are several rows."""
    for part, compare in PARTS.items():
        check = tried(part, name, partial(compare, call, backend), call.op)
        if check.measure is not None or check.status is not Status.OK:
            yield check
        if check.measure is None:
            return
