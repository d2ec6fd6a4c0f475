"""`dsv4 bench serve`: a load sent to a target, and what its callers waited for. Milliseconds, as callers see them.

Time to the first token runs from the moment a request is sent (open loop: is due) to its first text. Time between
tokens is that between two events with text; a server may put several tokens into one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from dsv4.tools.bench.workload import Load, Observed, Timeline


class Target(Protocol):
    """Where a load goes. `on_done` hears how many more requests have ended."""

    name: str

    def run(self, load: Load, on_done: Callable[[int], None]) -> Observed: ...


@dataclass(frozen=True)
class ServeReport:
    """A load and its result. Spreads are empty where nothing was measured."""

    load: Load
    target: str
    seconds: float
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    total_tokens_per_second: float
    tokens_per_event: float | None
    first_token_ms: dict[str, float]
    between_tokens_ms: dict[str, float]
    request_ms: dict[str, float]
    intruder: dict[str, Any] | None
    host_share: float | None
    host_ms: dict[str, float]
    clients: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "serve", **asdict(self)}


def measure_load(
    target: Target, load: Load, on_done: Callable[[int], None] = lambda count: None
) -> tuple[ServeReport, Observed]:
    seen = target.run(load, on_done)
    good = [one for one in seen.timelines if one.error is None and len(one.tokens)]
    errors = Counter(one.error or "no text" for one in seen.timelines if one.error is not None or not len(one.tokens))
    ends = [one.tokens[-1] for one in good]
    seconds = max(ends) - min(one.started for one in seen.timelines) if ends else 0.0
    num_events = sum(len(one.tokens) for one in good)
    num_output = sum(len(one.tokens) if one.num_output is None else one.num_output for one in good)
    sizes = {id(one): prompt for one, (prompt, _) in zip(seen.timelines, load.sizes(), strict=True)}
    num_prompt = sum(sizes[id(one)] if one.num_prompt is None else one.num_prompt for one in good)

    def a_second(count: int) -> float:
        return round(count / seconds, 2) if seconds else 0.0

    report = ServeReport(
        load=load, target=target.name, seconds=round(seconds, 3), failed=len(seen.timelines) - len(good),
        errors=dict(errors.most_common(5)), prompt_tokens=num_prompt, output_tokens=num_output,
        requests_per_second=a_second(len(good)), tokens_per_second=a_second(num_output),
        total_tokens_per_second=a_second(num_output + num_prompt),
        tokens_per_event=round(num_output / num_events, 3) if num_events else None,
        first_token_ms=spread(one.tokens[0] - one.started for one in good),
        between_tokens_ms=spread(gaps_of(good)), request_ms=spread(one.tokens[-1] - one.started for one in good),
        intruder=None if seen.intruder is None else beside(seen.intruder, good),
        host_share=None if seen.host_share is None else round(seen.host_share, 4),
        host_ms=spread(seen.host), clients=seen.clients,
    )  # fmt: skip
    return report, seen


def gaps_of(timelines: Iterable[Timeline]) -> list[float]:
    return [after - before for one in timelines for before, after in pairwise(one.tokens)]


def beside(intruder: Timeline, streams: Sequence[Timeline]) -> dict[str, Any]:
    """How long the intruder waited for its first token, and the streams between theirs, meanwhile and otherwise."""
    if intruder.error is not None or not len(intruder.tokens):
        return {"error": intruder.error or "no text"}
    begin, end = intruder.started, intruder.tokens[0]
    during: list[float] = []
    otherwise: list[float] = []
    for one in streams:
        for before, after in pairwise(one.tokens):
            (during if after > begin and before < end else otherwise).append(after - before)
    return {
        "prompt_tokens": intruder.num_prompt, "first_token_ms": round(1e3 * (end - begin), 3),
        "between_tokens_ms": spread(during), "between_tokens_otherwise_ms": spread(otherwise),
    }  # fmt: skip


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """Milliseconds: median, 90th and 99th percentile, the largest, the mean. A percentile is the smallest value that
    at least so large a share does not exceed."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    found = {f"p{share}": ordered[max(0, -(-len(ordered) * share // 100) - 1)] for share in (90, 99)}
    values = {"p50": statistics.median(ordered), **found, "max": ordered[-1], "mean": statistics.fmean(ordered)}
    return {name: round(1e3 * value, 3) for name, value in values.items()}
