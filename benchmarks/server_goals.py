"""The goals of a server, and what records of `python -m benchmarks server` say of them. For that benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.runner import Record


class Goal(NamedTuple):
    """`value` of a record through HTTP and the engine's own of the same load; None where it was not measured."""

    what: str
    section: str
    streams: int
    value: Callable[[Record, Record], float | None]
    goal: str
    is_met: Callable[[float, Record], bool]


def _above(least: float) -> Callable[[float, Record], bool]:
    return lambda value, engine: value >= least


def _below(most: float) -> Callable[[float, Record], bool]:
    return lambda value, engine: value <= most


def _share(served: Record, engine: Record) -> float | None:
    found: float | None = served["share_of_engine"]
    return found


def _over_step(name: str) -> Callable[[Record, Record], float | None]:
    def ratio(served: Record, engine: Record) -> float | None:
        waits, own = served["between_tokens_ms"], engine["between_tokens_ms"]
        return waits[name] / own["p50"] if waits and own and own["p50"] else None

    return ratio


def _host_ms(served: Record, engine: Record) -> float | None:
    """Of a step: the engine's time besides waiting, its prompts' steps included."""
    waits, share = engine["between_tokens_ms"], engine["host_share"]
    if not waits or share is None or not engine.get("layers"):  # the free model waits where it is called
        return None
    return float(waits["p50"] * share)


def _late_ms(served: Record, engine: Record) -> float | None:
    return float(served["first_token_ms"]["p50"] - engine["first_token_ms"]["p50"])


GOALS = (
    Goal("tokens/s over the engine's own", "steady", 256, _share, "0.95", _above(0.95)),
    Goal("between tokens, p50 over a step", "streams", 256, _over_step("p50"), "1.05", _below(1.05)),
    Goal("between tokens, p99 over a step", "streams", 256, _over_step("p99"), "2.0", _below(2.0)),
    Goal("tokens/s", "steady", 1024, lambda served, engine: float(served["tokens_per_second"]),
         "60,000, or 0.95 of the engine's",
         lambda value, engine: value >= min(60_000.0, 0.95 * engine["tokens_per_second"])),
    Goal("CPU of all processes, us a token", "steady", 256,
         lambda served, engine: float(served["cpu_us_per_token"]), "25", _below(25.0)),
    Goal("first token, ms after the engine's own", "first", 1, _late_ms, "1.5", _below(1.5)),
    Goal("the very first request's first token, ms after", "first", 1,
         lambda served, engine: served.get("very_first_ms", 0.0) - engine["first_token_ms"]["p50"], "1.5", _below(1.5)),
    Goal("512 requests of 16 + 1, requests/s", "short", 512,
         lambda served, engine: float(served["requests_per_second"]), "1,500", _above(1500.0)),
    Goal("host work of a step, ms", "streams", 256, _host_ms, "0.5", _below(0.5)),
    Goal("host work of a step, ms", "streams", 1024, _host_ms, "2", _below(2.0)),
)  # fmt: skip


def pairs(records: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Each record through HTTP, with the engine's own of the same model and load."""
    alone: dict[tuple[Any, ...], Record] = {}
    for record in records:
        if record["kind"] == "serve_engine":
            alone[_key(record)] = record
    for record in records:
        if record["kind"] == "serve" and _key(record) in alone:
            yield record, alone[_key(record)]


def _key(record: Record) -> tuple[Any, ...]:
    return record.get("layers"), record["section"], record["load"]["streams"]


def table(records: Sequence[Record]) -> list[str]:
    """A row for each goal, kind of request and model that was measured."""
    rows = [("layers", "kind", "streams", "what", "measured", "goal", "")]
    found = list(pairs(records))
    for goal in GOALS:
        for served, engine in found:
            if (served["section"], served["load"]["streams"]) != (goal.section, goal.streams):
                continue
            value = goal.value(served, engine)
            if value is not None:
                verdict = "met" if goal.is_met(value, engine) else "missed"
                shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                layers = str(served.get("layers") or "-")
                rows.append((layers, served["load"]["kind"], str(goal.streams), goal.what, shown, goal.goal, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
