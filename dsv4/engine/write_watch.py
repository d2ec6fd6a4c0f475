"""`WriteWatch`: notices writes into the weights of a running model that bypass `update_weights`.

Such a write would be half a change: operands made before, and rows in the prefix cache, are of the old values. So the
engine refuses requests until a whole update follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from dsv4.engine.request import WeightsIncomplete
from dsv4.formats.tensors import WideWeight

_version = attrgetter("_version")  # torch counts the writes into a tensor and its views


class WriteWatch:
    """Of the tensors of `params` as they are now. A look took 0.16 us a tensor on a busy CPU."""

    def __init__(self, params: Any) -> None:
        found = [(name, tensor) for name, tensor in _named(params, "") if not tensor.is_inference()]
        self._names = [name for name, _ in found]
        self._tensors = [tensor for _, tensor in found]
        self.renew()

    def renew(self) -> None:
        """What was written so far is known."""
        self._versions = list(map(_version, self._tensors))

    def problem(self) -> WeightsIncomplete | None:
        """An error that names a tensor written into; None if there is none."""
        versions = list(map(_version, self._tensors))
        if versions == self._versions:
            return None
        name = next(name for name, now, then in zip(self._names, versions, self._versions, strict=True) if now != then)
        return WeightsIncomplete(
            f"model.params.{name} was written into directly: prepared copies and cached prefixes are of its old "
            "values. Call update_weights() with the whole model"
        )


def _named(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, WideWeight):
        yield from _named(tree.source, name)
    elif isinstance(tree, (list, tuple)):
        for place, part in enumerate(tree):
            yield from _named(part, f"{name}[{place}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _named(getattr(tree, field.name), f"{name}.{field.name}" if name else field.name)
