"""What `dsv4 bench serve` shows: a progress bar, a table, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dsv4.tools.bench.plot import figure_of
from dsv4.tools.bench.serve import ServeReport, Timeline


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; call what it gives for each request that has ended."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


def print_serve_report(report: ServeReport, console: Console) -> None:
    load = report.load
    how = f"{load.concurrency} at once" if load.rate is None else f"{load.rate:g} a second"
    table = Table(
        title=f"{report.target}: {load.requests} requests of {load.prompt_tokens} + {load.output_tokens} tokens, {how}",
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for name in ("ms", "p50", "p99", "max"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    waits = {
        "first token": report.first_token_ms, "between tokens": report.between_tokens_ms,
        "whole request": report.request_ms,
    }  # fmt: skip
    for name, spread in waits.items():
        table.add_row(name, *(f"{spread[part]:,.1f}" if spread else "-" for part in ("p50", "p99", "max")))
    console.print(table)
    host = "" if report.host_share is None else f"; the host worked {100 * report.host_share:.0f} % of the time"
    console.print(
        f"{report.tokens_per_second:,.1f} tokens/s out, {report.total_tokens_per_second:,.1f} with the prompts, "
        f"{report.seconds:.1f} s{host}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if report.failed:
        console.print(f"{report.failed} requests failed: {report.first_error}", markup=False, soft_wrap=True)


def plot_waits(report: ServeReport, timelines: Sequence[Timeline], path: Path) -> None:
    """Two histograms: until the first token, and between tokens."""
    figure = figure_of(f"{report.target}: {report.tokens_per_second:,.0f} tokens/s out")
    first, between = figure.subplots(1, 2)
    done = [one for one in timelines if one.error is None and one.tokens]
    firsts = [1e3 * (one.tokens[0] - one.started) for one in done]
    gaps = [1e3 * (after - before) for one in done for before, after in pairwise(one.tokens)]
    for axes, values, label in ((first, firsts, "until the first token, ms"), (between, gaps, "between tokens, ms")):
        axes.hist(values, bins=40)
        axes.set_xlabel(label)
        axes.set_ylabel("times")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
