"""`dsv4 audit`: is a checkpoint sound? Exit status 0: sound, 1: faults found, 2: could not run."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.request import RequestError
from dsv4.tools.model_loading import ModelArgument, ModelOption, RevisionOption, find_model

if TYPE_CHECKING:
    from dsv4.tools.audit.report import AuditReport, Finding

_MAX_PRINTED = 40


def audit_command(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    revision: RevisionOption = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkpoint to compare with, or the JSON of an earlier audit.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Also run this UTF-8 text through the model, layer by layer.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 512,
    device: Annotated[str, typer.Option(help="Device for the text: cpu or cuda.")] = "cpu",
    resume: Annotated[
        Path | None, typer.Option(help="Save progress in this file; a later run continues from it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write the whole report as one page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Read every byte of a checkpoint, layer by layer, and name its faults.

    Exit status 0: sound. 1: faults were found. 2: it could not run.

    \b
    Examples:
      dsv4 audit ./checkpoint
      dsv4 audit ./checkpoint --html report.html --resume audit.progress
      dsv4 audit ./quantised --against ./source
    """
    from dsv4.tools.audit.run import AuditOptions, audit_checkpoint

    folder = find_model(model, Console(stderr=True), option=model_option, revision=revision)
    token_ids = None if text is None else _read_tokens(folder, text, max_tokens)
    report = audit_checkpoint(
        folder, AuditOptions(against=against, token_ids=token_ids, resume=resume, device=device, progress=True)
    )
    if html is not None:
        html.write_text(audit_page(report), encoding="utf-8")
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print_audit(report, Console())
    if not report.is_sound:
        raise typer.Exit(1)


def _read_tokens(folder: Path, file: Path, max_tokens: int) -> list[int]:
    from dsv4.text.tokenizer import Tokenizer

    if max_tokens < 2:
        raise RequestError(f"--max-tokens must be at least 2, found {max_tokens}")
    try:
        words = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text: {error}") from error
    ids = Tokenizer.from_pretrained(folder).encode(words)[:max_tokens]
    if len(ids) < 2:
        raise RequestError(f"{file} has {len(ids)} tokens; at least 2 are needed")
    return ids


def audit_page(report: AuditReport) -> str:
    """The whole report as HTML that needs nothing else: no script, font or picture from outside."""
    console = Console(record=True, width=160, file=io.StringIO())
    print_audit(report, console, most_findings=len(report.findings))
    return console.export_html()


def print_audit(report: AuditReport, console: Console, most_findings: int = _MAX_PRINTED) -> None:
    """A table of findings, one of layers, and the verdict."""
    _print_findings(report.findings, console, most_findings)
    _print_layers(report, console)
    if report.text is not None:
        _print_text(report, console)
    against = f" against {escape(report.against)}" if report.against else ""
    colour = "green" if report.is_sound else "red"
    console.print(
        f"{escape(report.path)}{against}, {escape(report.naming or 'unknown')} names: "
        f"[{colour}]{report.verdict}[/{colour}]. {report.total_bytes:,} bytes in {report.seconds:.1f} s, "
        f"peak memory {report.peak_bytes / 2**20:,.0f} MiB",
        soft_wrap=True,
    )


def _print_findings(findings: list[Finding], console: Console, most: int) -> None:
    ordered = sorted(findings, key=lambda finding: finding.severity)  # faults come before notes
    for finding in ordered[:most]:
        colour = "red" if finding.severity == "fault" else "yellow"
        console.print(
            f"[{colour}]{finding.severity}[/{colour}] {finding.kind}: {escape(finding.tensor)}: {escape(finding.text)}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
    if len(ordered) > most:
        rest = Counter(f"{finding.severity} {finding.kind}" for finding in ordered[most:])
        console.print("and " + ", ".join(f"{count} x {kind}" for kind, count in rest.items()), soft_wrap=True)


def _print_layers(report: AuditReport, console: Console) -> None:
    is_compared = any(unit.comparisons for unit in report.units)
    table = Table("part", "MB", "weights", "rms", "log2 scale", "router", *(["error"] * is_compared), box=None)
    for unit in report.units:
        quantised = {record.format for record in unit.tensors if record.scales is not None}
        sizes = [record.rms for record in unit.tensors if record.scales is not None or len(record.shape) > 1]
        rms = f"{min(sizes):.2g} to {max(sizes):.2g}" if sizes else ""
        scales = f"{min(unit.scale_counts)} to {max(unit.scale_counts)}" if unit.scale_counts else ""
        router = unit.routing
        routing = "" if router is None else f"{router.kind} {router.low:.3g} to {router.high:.3g}"
        size = f"{sum(record.nbytes for record in unit.tensors) / 1e6:,.1f}"
        error = [f"{max((one.error for one in unit.comparisons), default=0.0):.4f}"] if is_compared else []
        table.add_row(unit.name, size, " ".join(sorted(quantised)) or "plain", rms, scales, routing, *error)
    console.print(table)


def _print_text(report: AuditReport, console: Console) -> None:
    run = report.text
    assert run is not None
    console.print(
        f"{run.tokens} tokens: perplexity {run.exact_perplexity:.4f} exact, {run.official_perplexity:.4f} official"
    )
    has_kernels = any(layer.kernel_error is not None for layer in run.layers)
    headings = ("layer", "kind", "attn", "ffn", "streams", "noise", "kv", "experts", "recall", "max")
    table = Table(*headings, *(["kernels"] * has_kernels), title="official against exact", box=None)
    for layer in run.layers:
        recall = "" if layer.index_recall is None else f"{layer.index_recall:.3f}"
        kernel = [] if layer.kernel_error is None else [f"{layer.kernel_error:.4f}"]
        errors = (layer.attn_error, layer.ffn_error, layer.stream_error, layer.noise, layer.kv_error)
        table.add_row(
            str(layer.layer_idx), layer.attention, *(f"{error:.3f}" for error in errors), f"{layer.router:.3f}", recall,
            f"{layer.largest:.1f}", *kernel,
        )  # fmt: skip
    console.print(table)
    console.print(
        "attn, ffn: error of this layer alone; streams: of all layers so far; noise: what bf16 activations alone do; "
        "kv: of the cached rows; experts, recall: agreement"
    )
