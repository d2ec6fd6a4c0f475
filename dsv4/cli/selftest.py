"""`dsv4 selftest`: does this machine compute what it should? Exit status 0: yes, 1: no, 2: could not run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsv4.tools.model_loading import MODEL_HELP, ModelOption, RevisionOption, complete_model, find_model, one_model

if TYPE_CHECKING:
    from dsv4.tools.selftest.report import Check, SelftestReport

_MODEL_HELP = MODEL_HELP.replace(MODEL_HELP[MODEL_HELP.index("Default:") :], "Default: all published shapes.")
_MAX_PRINTED = 20
_PARTS = {
    "oracle": "kernel against oracle", "batch": "alone against batch", "text": "recorded texts",
    "requests": "requests of the miniature", "vectors": "recorded vectors",
}  # fmt: skip


def selftest_command(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help=_MODEL_HELP, autocompletion=complete_model)
    ] = None,
    model_option: ModelOption = None,
    revision: RevisionOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes only, no table of speed.")] = False,
    op: Annotated[
        list[str] | None, typer.Option(help="Only this op; may be repeated. No verdict is written then.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON, for a bug report.")] = False,
    keep: Annotated[bool, typer.Option(help="Write the verdict that the engine reads.")] = True,
) -> None:
    """Test this machine: every kernel against its oracle, bit for bit in other batches, and whole models.

    On a GPU it takes a few minutes. Without one the kernels run in Triton's interpreter, at small shapes. The engine
    refuses kernels that failed here (--ignore-selftest).

    With MODEL: at this checkpoint's shapes alone, with random weights. Each op against its oracle; a prompt in one go,
    token by token, in chunks, and beside another request.

    Exit status 0: everything is right. 1: something is wrong. 2: it could not run.

    \b
    Examples:
      dsv4 selftest
      dsv4 selftest --json > selftest.json
      dsv4 selftest --op moe --op linear
      dsv4 selftest CHECKPOINT
    """
    from dsv4.tools.selftest import choose_device

    console = Console(stderr=True)
    chosen = one_model(model, model_option)
    folder = None if chosen is None else find_model(chosen, console, revision=revision)
    device = choose_device()
    from dsv4.tools.selftest.run import SelftestOptions, run_selftest

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        report = run_selftest(
            device, SelftestOptions(is_quick=quick, ops=tuple(op or ()), is_kept=keep, model=folder),
            lambda what, done, total: bar.update(task, description=escape(what), completed=done, total=total),
        )  # fmt: skip
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_selftest(report, Console())
    if not report.is_passed:
        raise typer.Exit(1)


def print_selftest(report: SelftestReport, console: Console) -> None:
    """The machine, a table of ops, the parts that are about no single op, the speed, and the verdict."""
    machine = report.machine
    architecture = f", {machine['architecture']}" if "architecture" in machine else ""
    console.print(f"{machine['device']}{architecture}, torch {machine['torch']}, Triton {machine['triton']}")
    if report.is_interpreted:
        console.print("No GPU: kernels run in the interpreter at small shapes, the miniature on the oracles.")
    _print_ops(report, console)
    for check in report.checks:
        if check.part not in ("oracle", "batch"):
            console.print(f"{_PARTS[check.part]}: {check.name}: {_colour(check)}", highlight=False, soft_wrap=True)
    _print_speeds(report, console)
    _print_bad(report, console)
    verdict = "[green]everything is right[/green]" if report.is_passed else f"[red]{len(report.failures)} failed[/red]"
    console.print(f"{len(report.checks)} checks in {report.seconds:.0f} s: {verdict}", highlight=False)


def _print_ops(report: SelftestReport, console: Console) -> None:
    by_op: dict[str, list[Check]] = defaultdict(list)
    for check in report.checks:
        if check.part in ("oracle", "batch"):
            by_op[check.op].append(check)
    table = Table("op", _PARTS["oracle"], "nearest to its limit", _PARTS["batch"], box=None)
    for op, checks in sorted(by_op.items()):
        parts = {part: [check for check in checks if check.part == part] for part in ("oracle", "batch")}
        shares = [
            check.measure.value / check.measure.limit
            for check in parts["oracle"]
            if check.measure is not None and check.measure.limit
        ]
        nearest = f"{100 * max(shares):.0f} %" if shares else "exact"
        table.add_row(op, _summary(parts["oracle"]), nearest, _summary(parts["batch"]))
    console.print(table)


def _summary(checks: list[Check]) -> str:
    if not checks:
        return ""
    counts: dict[str, int] = defaultdict(int)
    for check in checks:
        counts[check.status.value] += 1
    colour = "red" if "failed" in counts else "green" if set(counts) == {"ok"} else "yellow"
    return f"[{colour}]{', '.join(f'{count} {status}' for status, count in counts.items())}[/{colour}]"


def _colour(check: Check) -> str:
    colour = "green" if check.status.value == "ok" else "red"
    return f"[{colour}]{check.status.value}[/{colour}]"


def _print_speeds(report: SelftestReport, console: Console) -> None:
    if not report.speeds:
        return
    console.print(f"read bandwidth measured here: {report.bandwidth:,.0f} GB/s")
    table = Table("kernels", "us", "GB/s", "of this bandwidth", "TFLOP/s", box=None)
    for speed in report.speeds:
        rate = f"{speed.teraflops:.1f}" if speed.teraflops else ""
        table.add_row(
            speed.case, f"{speed.median_us:.1f}", f"{speed.gigabytes_a_second:,.0f}",
            f"{speed.bandwidth_percent:.0f} %", rate,
        )  # fmt: skip
    console.print(table)


def _print_bad(report: SelftestReport, console: Console) -> None:
    missing: dict[str, str] = {}
    for check in report.checks:
        if check.status.value == "cannot run":
            missing.setdefault(check.op, check.detail)
    for op, detail in missing.items():
        console.print(
            f"[yellow]cannot run here[/yellow] {op}: its oracle serves instead: {escape(detail[:200])}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for check in report.failures[:_MAX_PRINTED]:
        console.print(
            f"[red]failed[/red] {_PARTS[check.part]}: {escape(check.name)}: {escape(check.detail)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if len(report.failures) > _MAX_PRINTED:
        console.print(f"and {len(report.failures) - _MAX_PRINTED} more")
