"""What `dsv4 bench` shows of its measurements: tables, a progress bar, and pictures, which need matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dsv4.errors import Dsv4Error

if TYPE_CHECKING:  # the commands import this before they know that they need torch
    from dsv4.tools.bench.model import Record, Report
    from dsv4.tools.bench.serve import ServeReport
    from dsv4.tools.bench.workload import Load, Observed

# kind of record -> title, and columns: a field, or NAME=FIELD
_TABLES = {
    "decode": (
        "Decode: one step",
        "batch | context | ms | p10=ms_p10 | p90=ms_p90 | tokens/s=tokens_per_second | ms a layer=ms_per_layer | "
        "how=mode",
    ),
    "layer": (
        "One layer in a decode step",
        "layer | kind=attention | batch | context | ms | MB read=bytes | floor ms=floor_ms | x floor=times_floor | "
        "launches | how=mode",
    ),
    "stream": (
        "One request, a new token every step",
        "context | ms | p90=ms_p90 | tokens/s=tokens_per_second | experts a layer=slots | misses=misses_per_token | "
        "MB moved a token=bytes_per_token | how=mode",
    ),
    "prefill": ("Prefill: one prompt in one call", "tokens | ms | tokens/s=tokens_per_second"),
    "serving": (
        "Requests through the engine",
        "at once=concurrency | prompt=prompt_tokens | output=output_tokens | first token ms=first_token_ms | "
        "between ms=between_tokens_ms | p99=between_tokens_ms_p99 | tokens/s=tokens_per_second",
    ),
    "drafts": (
        "Drafts on text",
        "drafts | temperature | at once=concurrency | tokens/s=tokens_per_second | x off=speedup | "
        "tokens a step=tokens_per_step | came true, by place=accepted_by_place",
    ),
    "memory": (
        "Memory: bytes held and planned",
        "weights | planned=weights_planned | cache | planned=cache_planned | in use=used | planned",
    ),
}
_WAITS = ("p50", "p90", "p99", "max")
_BUSY = 0.8  # of a core: beyond it a client process may be what is measured


class PlotError(Dsv4Error, ValueError):
    """Nothing to plot, or nothing to plot with."""


# ---- tables ----


def print_report(report: Report, console: Console) -> None:
    origin = report.origin
    _say(console, f"{report.model} on {origin['device']}, torch {origin['torch']}")
    for kind, (title, columns) in _TABLES.items():
        if records := report.of(kind):
            named = [column.partition("=") for column in columns.split(" | ")]
            rows = ([_shown(record, field or name) for name, _, field in named] for record in records)
            console.print(_table(title, [name for name, _, _ in named], rows))
    for record in report.of("error"):
        _say(console, f"{record['what']}: {record['error']}")


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in head:
        table.add_column(name, justify="left" if name == "waits, ms" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _shown(record: Record, field: str) -> str:
    value = record.get(field)
    if field == "accepted_by_place":
        return " ".join(f"{100 * share:.0f} %" for share in acceptance(record)) or "-"
    if value is None:
        return "-"
    if field in ("bytes", "bytes_per_token"):
        value /= 1e6
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).split(":", 1)[0]


def acceptance(record: Record) -> list[float]:
    """Of the drafts verified at each place, the share that came true with all before them."""
    pairs = zip(record.get("accepted_by_place", ()), record.get("verified_by_place", ()), strict=True)
    return [accepted / verified for accepted, verified in pairs if verified]


def print_serve_report(report: ServeReport, console: Console) -> None:
    load, intruder = report.load, report.intruder
    how = f"{load.streams} streams" if load.rate is None else f"{load.rate:g} a second"
    waits = {
        "first token": report.first_token_ms, "between tokens": report.between_tokens_ms,
        "whole request": report.request_ms,
    }  # fmt: skip
    if intruder is not None:
        waits["between tokens, beside the intruder"] = intruder.get("between_tokens_ms", {})
    rows = [[name, *(f"{of[part]:,.1f}" if of else "-" for part in _WAITS)] for name, of in waits.items()]
    console.print(_table(f"{report.target}: {load.requests} requests, {how}", ["waits, ms", *_WAITS], rows))
    lines = [
        f"{report.tokens_per_second:,.1f} tokens/s out, {report.total_tokens_per_second:,.1f} with the prompts, "
        f"{report.requests_per_second:,.2f} requests/s; {report.prompt_tokens:,} + {report.output_tokens:,} tokens in "
        f"{report.seconds:.1f} s"
    ]
    if intruder is not None and "error" not in intruder:
        lines.append(f"the intruder's first token came after {intruder['first_token_ms']:,.0f} ms")
    elif intruder is not None:
        lines.append(f"the intruder failed: {intruder['error']}")
    if report.host_share is not None:
        lines.append(f"the host worked {100 * report.host_share:.0f} % of the time")
    if report.clients and report.clients["busiest"] > _BUSY:
        busy = 100 * report.clients["busiest"]
        lines.append(f"the busiest client process used {busy:.0f} % of a core and may be the limit: raise --processes")
    if report.failed:
        lines += [f"{report.failed} requests failed:", *(f"  {n} x {error}" for error, n in report.errors.items())]
    for line in lines:
        _say(console, line)


@contextmanager
def progress(load: Load) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; call what it gives with the number of requests that have ended."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=load.requests + (load.intruder is not None))
        yield lambda count: bar.advance(task, count)


# ---- pictures ----


def check_plots() -> None:
    """Before a measurement that is to be drawn: minutes should not end in a missing library."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib, which is not installed: pip install matplotlib")


def plot_report(report: Report, path: Path) -> None:
    """Decode speed by context, and by batch; the ending of `path` chooses the format (png, svg, pdf)."""
    records = report.of("decode")
    if not records:
        raise PlotError("there are no decode records to plot; run the section `decode`")
    with _figure(f"{report.model} on {report.origin['device']}", path) as (by_context, by_batch):
        _lines(by_context, records, "context", "batch", "ms", "context (tokens)", "ms a step")
        _lines(by_batch, records, "batch", "context", "tokens_per_second", "batch (requests)", "tokens a second")


def plot_waits(report: ServeReport, seen: Observed, path: Path) -> None:
    """Two histograms: until the first token, and between tokens."""
    from dsv4.tools.bench.serve import gaps_of

    done = [one for one in seen.timelines if one.error is None and len(one.tokens)]
    firsts = [1e3 * (one.tokens[0] - one.started) for one in done]
    gaps = [1e3 * gap for gap in gaps_of(done)]
    with _figure(f"{report.target}: {report.tokens_per_second:,.0f} tokens/s out", path) as (first, between):
        for axes, values, what in ((first, firsts, "until the first token"), (between, gaps, "between tokens")):
            axes.hist(values, bins=40)
            axes.set(xlabel=f"{what}, ms", ylabel="times")


@contextmanager
def _figure(title: str, path: Path) -> Iterator[Any]:
    """Two axes beside each other, written to `path` at the end."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    yield (both := figure.subplots(1, 2))
    for axes in both:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _lines(axes: Any, records: Sequence[Record], x: str, line: str, y: str, x_label: str, y_label: str) -> None:
    """One line for each value of `line`."""
    for value in sorted({record[line] for record in records}):
        points = sorted((record[x], record[y]) for record in records if record[line] == value)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{line} {value:,}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend()
