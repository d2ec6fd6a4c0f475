"""Small SVG plots as text: lines over layers, and a map of counts. No script, no font or file from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#1f5fa8", "#c2571a", "#2e7d4f", "#8a3ea0", "#8c6d1f", "#b02a4c", "#3b7f8c", "#555555")
_WIDTH, _HEIGHT = 760, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 150, 12, 34


def line_plot(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], *, y_label: str, is_log: bool = False
) -> str:
    """A line with dots for each series; None leaves a gap. Log: values that are not positive leave one too."""
    usable = {
        name: [_usable(value, is_log) for value in values]
        for name, values in series.items()
        if any(_usable(value, is_log) is not None for value in values)
    }
    values = [value for line in usable.values() for value in line if value is not None]
    if not values:
        return ""
    low, high = min(values), max(values)
    margin = (high - low) * 0.08 or max(abs(high) * 0.1, 0.1)
    low, high = low - margin, high + margin

    def x(place: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / max(1, len(labels))

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    parts = [*_grid(low, high, y, is_log), *_names(labels, x)]
    for number, (name, line) in enumerate(usable.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(place), y(value)) for place, value in enumerate(line) if value is not None]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += (f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points)
        height = _TOP + 14 * number + 8
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 12}" y="{height - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 27}" y="{height + 1}">{escape(name)}</text>')
    return _svg(_HEIGHT, y_label, parts)


def count_map(rows: Mapping[str, Mapping[int, int]], *, x_label: str) -> str:
    """One row of cells a name, one column a number; darker is more, on a logarithmic scale."""
    columns = sorted({column for counts in rows.values() for column in counts})
    if not columns:
        return ""
    span = range(columns[0], columns[-1] + 1)
    cell = min(26.0, (_WIDTH - _LEFT - 40) / len(span))
    most = max(max(counts.values(), default=1) for counts in rows.values())
    parts = []
    for place, (name, counts) in enumerate(rows.items()):
        top = _TOP + 15 * place
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 11}" text-anchor="end">{escape(name)}</text>')
        for column, count in counts.items():
            shade = 0.12 + 0.88 * math.log1p(count) / math.log1p(most)
            parts.append(
                f'<rect x="{_LEFT + cell * (column - span[0]):.1f}" y="{top}" width="{cell:.1f}" height="14" '
                f'fill="{COLOURS[0]}" fill-opacity="{shade:.2f}">'
                f"<title>{escape(name)}: 2^{column}, {count:,}</title></rect>"
            )
    bottom = _TOP + 15 * len(rows) + 14
    step = max(1, len(span) // 16)
    parts += (
        f'<text x="{_LEFT + cell * (place + 0.5):.1f}" y="{bottom}" text-anchor="middle">{column}</text>'
        for place, column in enumerate(span)
        if place % step == 0
    )
    return _svg(bottom + 10, x_label, parts)


def _usable(value: float | None, is_log: bool) -> float | None:
    if value is None or not math.isfinite(value) or (is_log and value <= 0):
        return None
    return math.log10(value) if is_log else value


def _grid(low: float, high: float, y: Callable[[float], float], is_log: bool) -> list[str]:
    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        shown = f"{10**value if is_log else value:.2g}"
        height = y(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{shown}</text>')
    return parts


def _names(labels: Sequence[str], x: Callable[[int], float]) -> list[str]:
    step = max(1, math.ceil(len(labels) / 14))
    return [
        f'<text x="{x(place):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{escape(label)}</text>'
        for place, label in enumerate(labels)
        if place % step == 0
    ]


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n{inner}\n</svg>"
    )
