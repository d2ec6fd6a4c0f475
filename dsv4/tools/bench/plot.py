"""The decode records of a bench `Report` as a picture: speed against context, speed against batch. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.errors import Dsv4Error

if TYPE_CHECKING:
    from dsv4.tools.bench.model import Record, Report


class PlotError(Dsv4Error, ValueError):
    """Nothing to plot, or nothing to plot with."""


def plot_report(report: Report, path: Path) -> None:
    """Write the picture; the ending of `path` chooses the format (png, svg, pdf)."""
    records = report.of("decode")
    if not records:
        raise PlotError("there are no decode records to plot; run the section `decode`")
    figure = figure_of(f"{report.model} on {report.origin['device']}")
    by_context, by_batch = figure.subplots(1, 2)
    _lines(by_context, records, "context", "batch", "ms", "context (tokens)", "ms a step")
    _lines(by_batch, records, "batch", "context", "tokens_per_second", "batch (requests)", "tokens a second")
    figure.savefig(path, dpi=150)


def check_plots() -> None:
    """Before a measurement that is to be drawn: minutes should not end in a missing library."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plots need matplotlib, which is not installed: pip install matplotlib")


def figure_of(title: str) -> Any:
    """An empty figure, twice as wide as high."""
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def _lines(axes: Any, records: Sequence[Record], x: str, line: str, y: str, x_label: str, y_label: str) -> None:
    """One line for each value of `line`."""
    for value in sorted({record[line] for record in records}):
        points = sorted((record[x], record[y]) for record in records if record[line] == value)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{line} {value:,}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend()
