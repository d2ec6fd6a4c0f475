"""The goals of a server, and what records of `python -m benchmarks server` say of them. For that benchmark."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.records import Record


class Goal(NamedTuple):
    """`value` is of a record through HTTP and the engine's own of the same load; None where it was not measured."""

    what: str
    section: str
    streams: int
    value: Callable[[Record, Record], float | None]
    limit: str
    is_least: bool = False


def _over_step(name: str) -> Callable[[Record, Record], float | None]:
    def ratio(served: Record, engine: Record) -> float | None:
        waits, own = served["between_tokens_ms"], engine["between_tokens_ms"]
        return waits[name] / own["p50"] if waits and own and own["p50"] else None

    return ratio


def _host_ms(served: Record, engine: Record) -> float | None:
    """Of a step: the median, which with 128 tokens an answer is a step without prompts."""
    # the free model waits where it is called
    return engine.get("host_ms", {}).get("p50") if engine.get("layers") else None


def _after(served_ms: float, engine: Record) -> float:
    return served_ms - float(engine["first_token_ms"]["p50"])


GOALS = (
    Goal("tokens/s over the engine's own", "steady", 256, lambda served, _: served["share_of_engine"], "0.95", True),
    Goal("between tokens, p50 over a step", "streams", 256, _over_step("p50"), "1.05"),
    Goal("between tokens, p99 over a step", "streams", 256, _over_step("p99"), "2.0"),
    Goal("between tokens, p99 over the engine's p99", "streams", 256,
         lambda served, engine: served["between_tokens_ms"]["p99"] / engine["between_tokens_ms"]["p99"], "1.1"),
    Goal("tokens/s over 60,000, or 0.95 of the engine's", "steady", 1024,
         lambda served, engine: served["tokens_per_second"] / min(60_000.0, 0.95 * engine["tokens_per_second"]),
         "1", True),
    Goal("CPU of all processes, us a token", "steady", 256, lambda served, _: served["cpu_us_per_token"], "25"),
    Goal("first token, ms after the engine's own", "first", 1,
         lambda served, engine: _after(served["first_token_ms"]["p50"], engine), "1.5"),
    Goal("the very first request's first token, ms after", "first", 1,
         lambda served, engine: _after(served.get("very_first_ms", 0.0), engine), "1.5"),
    Goal("512 requests of 16 + 1, requests/s", "short", 512, lambda served, _: served["requests_per_second"], "1500",
         True),
    Goal("host work of a step, ms", "streams", 256, _host_ms, "0.5"),
    Goal("host work of a step, ms", "streams", 1024, _host_ms, "2"),
)  # fmt: skip


def pairs(records: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    """Each record through HTTP, with the engine's own of the same model and load."""

    def key(record: Record) -> tuple[Any, ...]:
        return record.get("layers"), record["section"], record["load"]["streams"]

    alone = {key(record): record for record in records if record["kind"] == "serve_engine"}
    yield from ((one, alone[key(one)]) for one in records if one["kind"] == "serve" and key(one) in alone)


def table(records: Sequence[Record]) -> list[str]:
    """A row for each goal, kind of request and model that was measured."""
    rows = [("layers", "kind", "streams", "what", "measured", "goal", "")]
    found = list(pairs(records))
    for goal in GOALS:
        for served, engine in found:
            load = served["load"]
            if (served["section"], load["streams"]) != (goal.section, goal.streams):
                continue
            if (value := goal.value(served, engine)) is not None:
                is_met = (operator.ge if goal.is_least else operator.le)(value, float(goal.limit))
                shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                layers, verdict = str(served.get("layers") or "-"), "met" if is_met else "missed"
                rows.append((layers, load["kind"], str(goal.streams), goal.what, shown, goal.limit, verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
