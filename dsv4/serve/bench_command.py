"""`dsv4 bench ops`: time single ops on this GPU. Registered by `dsv4.serve.cli`.

The cases and the timer belong to a checkout, not to the installed package (nothing in the package imports
`dsv4.testing`), so this runs `benchmarks/bench_ops.py` in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsv4.config import ConfigError

bench_app = typer.Typer(no_args_is_help=True)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_ops.py"


@bench_app.callback()
def bench() -> None:
    """Measure this machine."""


@bench_app.command("ops")
def bench_ops_command(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    samples: Annotated[int, typer.Option(help="Timed replays per case.", min=10)] = 100,
    out: Annotated[Path | None, typer.Option(help="Record file. Default: benchmarks/results/<gpu>.jsonl.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Compare two record files; no GPU needed.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names of the cases and stop.")] = False,
) -> None:
    """Time every op at the real shapes of Flash and Pro, against what the chip was measured to do.

    Examples:

    dsv4 bench ops --op rms_norm

    dsv4 bench ops --compare old.jsonl new.jsonl
    """
    if not SCRIPT.is_file():
        raise ConfigError(f"dsv4 bench needs a source checkout: expected {SCRIPT}, found nothing there")
    arguments = ["--samples", str(samples)]
    for name in op or ():
        arguments += ["--op", name]
    if case is not None:
        arguments += ["--case", case]
    if out is not None:
        arguments += ["--out", str(out)]
    if compare is not None:
        arguments += ["--compare", *map(str, compare)]
    if list_cases:
        arguments.append("--list")
    raise typer.Exit(subprocess.run([sys.executable, str(SCRIPT), *arguments]).returncode)
