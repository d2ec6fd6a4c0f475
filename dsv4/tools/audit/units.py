"""A checkpoint in units that are read together: each layer, each draft block, and the rest."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4.loader.resolve import Source

REST = "embedding and head"


def unit_of(name: str) -> str:
    """`layers.3.attn.wkv.weight` -> `layers.3`."""
    first, second, *_ = [*name.split("."), ""]
    return f"{first}.{second}" if first in ("layers", "mtp") else REST


def group_sources(sources: Iterable[Source]) -> dict[str, list[Source]]:
    """Unit -> its weights in file order; units in the model's order."""
    units: dict[str, list[Source]] = {}
    for source in sources:
        units.setdefault(unit_of(source.tensor.name), []).append(source)
    return dict(sorted(units.items(), key=lambda item: _place(item[0])))


def _place(unit: str) -> tuple[int, int]:
    if unit == REST:
        return (0, 0)
    first, number = unit.split(".")
    return (1 if first == "layers" else 2, int(number))
