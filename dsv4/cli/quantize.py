"""`dsv4 quantize`: write a checkpoint in coarser formats, and audit the result against its source."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from dsv4.tools.model_loading import check_choice, find_model


def quantize_command(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder, or the name of a shipped one.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; new, or an unfinished run of the same.")],
    experts: Annotated[str, typer.Option(help="Routed experts: nvfp4 (ModelOpt's layout) or mxfp4 (official).")],
    linears: Annotated[str | None, typer.Option(help="Other projections: fp8 or bf16. Default: as they are.")] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
) -> None:
    """Round a BF16, FP8 or MXFP4 checkpoint to 4-bit experts, weight by weight, with the best scale for every group.

    A killed run continues when started again, and gives the same bytes. At the end the result is audited
    against its source; exit status 1 if that finds faults.

    \b
    Examples:
      dsv4 quantize ./base ./base-nvfp4 --experts nvfp4
      dsv4 quantize ./bf16 ./official --experts mxfp4 --linears fp8
    """
    from dsv4.cli.audit import print_audit
    from dsv4.tools.audit.run import AuditOptions, audit_checkpoint
    from dsv4.tools.quantize.plan import Experts, Linears, Target
    from dsv4.tools.quantize.run import QuantizeOptions, quantize_checkpoint

    check_choice("--experts", experts, get_args(Experts))
    if linears is not None:
        check_choice("--linears", linears, get_args(Linears))
    console = Console()
    folder = find_model(source, console)
    formats = Target(experts, linears)  # type: ignore[arg-type]
    quantize_checkpoint(folder, target, formats, QuantizeOptions(device=device, progress=True))
    report = audit_checkpoint(target, AuditOptions(against=folder, progress=True))
    print_audit(report, console)
    if not report.is_sound:
        raise typer.Exit(1)
