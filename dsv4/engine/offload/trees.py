"""Weights as trees of tensors: any format, with or without scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import WideWeight


def map_tensors(weights: Any, change: Callable[[Tensor], Tensor], leading: tuple[int, ...] | None = None) -> Any:
    """The same structure with every tensor changed. Tuples, lists and dataclasses are structure; the rest is kept.
    A `WideWeight` becomes its source.

    A weight that states its logical shape [..., N, K] gets `leading` in front of the last two, if that is given.
    """
    if isinstance(weights, Tensor):
        return change(weights)
    if isinstance(weights, WideWeight):
        return map_tensors(weights.source, change, leading)
    if isinstance(weights, torch.Size):
        return weights if leading is None else torch.Size((*leading, *weights[-2:]))
    if isinstance(weights, (tuple, list)):
        make = getattr(weights, "_make", type(weights))  # a NamedTuple takes its fields one by one
        return make(map_tensors(part, change, leading) for part in weights)
    if is_dataclass(weights) and not isinstance(weights, type):
        changed = {field.name: map_tensors(getattr(weights, field.name), change, leading) for field in fields(weights)}
        return replace(weights, **changed)
    return weights


def tensors_of(weights: Any) -> list[Tensor]:
    """Every tensor of the structure, in its order."""
    found: list[Tensor] = []

    def note(part: Tensor) -> Tensor:
        found.append(part)
        return part

    map_tensors(weights, note)
    return found
