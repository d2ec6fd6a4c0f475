"""A bench `Report` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4.tools.bench.drafting import acceptance
from dsv4.tools.bench.model import Record, Report

_Column = tuple[str, Callable[[Record], Any]]


def print_report(report: Report, console: Console) -> None:
    origin = report.origin
    console.print(f"{report.model} on {origin['device']}, torch {origin['torch']}", markup=False, highlight=False)
    for kind, (title, columns) in _TABLES.items():
        records = report.of(kind)
        if records:
            console.print(_table(title, columns, records))
    for record in report.of("error"):
        console.print(f"{record['what']}: {record['error']}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, columns: Sequence[_Column], records: Sequence[Record]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(*(_shown(value(record)) for _, value in columns))
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _get(name: str) -> Callable[[Record], Any]:
    return lambda record: record.get(name)


def _mode(record: Record) -> str:
    return str(record["mode"]).split(":", 1)[0]


def _moved(record: Record) -> float | None:
    return record["bytes_per_token"] / 1e6 if "bytes_per_token" in record else None


def _acceptance(record: Record) -> str | None:
    return " ".join(f"{100 * share:.0f} %" for share in acceptance(record)) or None


_TABLES: dict[str, tuple[str, tuple[_Column, ...]]] = {
    "decode": (
        "Decode: one step",
        (
            ("batch", _get("batch")), ("context", _get("context")), ("ms", _get("ms")), ("p10", _get("ms_p10")),
            ("p90", _get("ms_p90")), ("tokens/s", _get("tokens_per_second")), ("ms a layer", _get("ms_per_layer")),
            ("how", _mode),
        ),
    ),
    "layer": (
        "One layer in a decode step",
        (
            ("layer", _get("layer")), ("kind", _get("attention")), ("batch", _get("batch")),
            ("context", _get("context")), ("ms", _get("ms")), ("MB read", lambda record: record["bytes"] / 1e6),
            ("floor ms", _get("floor_ms")), ("x floor", _get("times_floor")), ("launches", _get("launches")),
            ("how", _mode),
        ),
    ),
    "stream": (
        "One request, a new token every step",
        (
            ("context", _get("context")), ("ms", _get("ms")), ("p90", _get("ms_p90")),
            ("tokens/s", _get("tokens_per_second")), ("experts a layer", _get("slots")),
            ("misses", _get("misses_per_token")), ("MB moved a token", _moved), ("how", _mode),
        ),
    ),
    "prefill": (
        "Prefill: one prompt in one call",
        (("tokens", _get("tokens")), ("ms", _get("ms")), ("tokens/s", _get("tokens_per_second"))),
    ),
    "serving": (
        "Requests through the engine",
        (
            ("at once", _get("concurrency")), ("prompt", _get("prompt_tokens")), ("output", _get("output_tokens")),
            ("first token ms", _get("first_token_ms")), ("between ms", _get("between_tokens_ms")),
            ("p99", _get("between_tokens_ms_p99")), ("tokens/s", _get("tokens_per_second")),
        ),
    ),
    "drafts": (
        "Drafts on text",
        (
            ("drafts", _get("drafts")), ("temperature", _get("temperature")), ("at once", _get("concurrency")),
            ("tokens/s", _get("tokens_per_second")), ("x off", _get("speedup")),
            ("tokens a step", _get("tokens_per_step")), ("came true, by place", _acceptance),
        ),
    ),
    "memory": (
        "Memory: bytes held and planned",
        (
            ("weights", _get("weights")), ("planned", _get("weights_planned")), ("cache", _get("cache")),
            ("planned", _get("cache_planned")), ("in use", _get("used")), ("planned", _get("planned")),
        ),
    ),
}  # fmt: skip
