"""What `dsv4 bench serve` shows: a progress bar, a table, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dsv4.tools.bench.load import Load, Observed
from dsv4.tools.bench.plot import figure_of
from dsv4.tools.bench.serve import ServeReport, gaps_of

_COLUMNS = ("p50", "p90", "p99", "max")
_BUSY = 0.8  # of a core: beyond it a client process may be what is measured


@contextmanager
def progress(load: Load) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; call what it gives with the number of requests that have ended."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=load.requests + (load.intruder is not None))
        yield lambda count: bar.advance(task, count)


def print_serve_report(report: ServeReport, console: Console) -> None:
    load = report.load
    how = f"{load.streams} streams" if load.rate is None else f"{load.rate:g} a second"
    table = Table(title=f"{report.target}: {load.requests} requests, {how}", title_justify="left", title_style="bold")
    for name in ("ms", *_COLUMNS):
        table.add_column(name, justify="left" if name == "ms" else "right")
    waits = {
        "first token": report.first_token_ms, "between tokens": report.between_tokens_ms,
        "whole request": report.request_ms,
    }  # fmt: skip
    if report.intruder is not None:
        waits["between tokens, beside the intruder"] = report.intruder.get("between_tokens_ms", {})
    for name, values in waits.items():
        table.add_row(name, *(f"{values[part]:,.1f}" if values else "-" for part in _COLUMNS))
    console.print(table)
    lines = [
        f"{report.tokens_per_second:,.1f} tokens/s out, {report.total_tokens_per_second:,.1f} with the prompts, "
        f"{report.requests_per_second:,.2f} requests/s; {report.prompt_tokens:,} + {report.output_tokens:,} tokens in "
        f"{report.seconds:.1f} s"
    ]
    if report.intruder is not None and "error" not in report.intruder:
        lines.append(f"the intruder's first token came after {report.intruder['first_token_ms']:,.0f} ms")
    elif report.intruder is not None:
        lines.append(f"the intruder failed: {report.intruder['error']}")
    if report.host_share is not None:
        lines.append(f"the host worked {100 * report.host_share:.0f} % of the time")
    if report.clients and report.clients["busiest"] > _BUSY:
        lines.append(
            f"the busiest client process used {100 * report.clients['busiest']:.0f} % of a core: it may be the limit; "
            "raise --processes"
        )
    if report.failed:
        lines.append(f"{report.failed} requests failed:")
        lines += [f"  {count} x {error}" for error, count in report.errors.items()]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def plot_waits(report: ServeReport, seen: Observed, path: Path) -> None:
    """Two histograms: until the first token, and between tokens."""
    figure = figure_of(f"{report.target}: {report.tokens_per_second:,.0f} tokens/s out")
    first, between = figure.subplots(1, 2)
    done = [one for one in seen.timelines if one.error is None and len(one.tokens)]
    firsts = [1e3 * (one.tokens[0] - one.started) for one in done]
    gaps = [1e3 * gap for gap in gaps_of(done)]
    for axes, values, label in ((first, firsts, "until the first token, ms"), (between, gaps, "between tokens, ms")):
        axes.hist(values, bins=40)
        axes.set_xlabel(label)
        axes.set_ylabel("times")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
