"""Weights as trees of tensors: walked, changed, copied into one another, shown.

Dataclasses, lists and tuples are structure; `WideWeight`s stand for their sources; anything else is a leaf.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsv4.formats.layouts import LayoutError, ShuffledTensor
from dsv4.formats.tensors import QuantTensor, WideWeight


def map_tensors(weights: Any, change: Callable[[Tensor], Tensor], leading: tuple[int, ...] | None = None) -> Any:
    """The same structure with every tensor changed; other leaves are kept. A `WideWeight` becomes its source.

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


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its place in the tree, `WideWeight`s themselves too, each before its source."""
    if isinstance(tree, WideWeight):
        yield name, tree
        yield from named_leaves(tree.source, name)
    elif isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        for place, part in enumerate(tree):
            yield from named_leaves(part, f"{name}[{place}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from named_leaves(getattr(tree, field.name), f"{name}.{field.name}" if name else field.name)
    else:
        yield name, tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor, in the tree's order."""
    return [leaf for _, leaf in named_leaves(tree) if isinstance(leaf, Tensor)]


def wide_weights_of(tree: Any) -> list[WideWeight]:
    return [leaf for _, leaf in named_leaves(tree) if isinstance(leaf, WideWeight)]


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Each piece of memory once."""
    storages = (tensor.untyped_storage() for tensor in tensors_of(tree) if tensor.numel())
    return list({storage.data_ptr(): storage for storage in storages}.values())


def assign(live: Any, fresh: Any, name: str = "weights") -> None:
    """Copy every tensor of `fresh` into that of `live`, in place: who holds an address, a CUDA graph above all, reads
    the new values from the next launch on. Both are prepared alike (model/prepare.py): `LayoutError`, and no change, if
    anything but values differs, since it may be part of a graph.
    """
    old, new = (
        {place: leaf for place, leaf in named_leaves(tree, name) if not isinstance(leaf, WideWeight)}
        for tree in (live, fresh)
    )
    if old.keys() != new.keys():
        place = next(iter(old.keys() ^ new.keys()))
        raise LayoutError(f"{place} is in one layout of {name}, and not in the other")
    for place, leaf in old.items():
        if _kind(leaf) != _kind(new[place]):
            raise LayoutError(f"{place} is {_kind(leaf)}, its new value {_kind(new[place])}")
    for place, leaf in old.items():
        if isinstance(leaf, Tensor) and leaf is not new[place]:
            leaf.copy_(new[place])
    for wide in wide_weights_of(live):
        wide.forget_operands()


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class ReadOnly:
    """A tree to look at: what it gives are copies, and nothing can be set."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Any) -> None:
        object.__setattr__(self, "_tree", tree)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} shows no {name}")
        return _shown(getattr(self._tree, name))

    def __getitem__(self, place: Any) -> Any:
        return _shown(self._tree[place])

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return "<copies of weights>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: weights change by update_weights() alone")


def _shown(value: Any) -> Any:
    if isinstance(value, (Tensor, QuantTensor, ShuffledTensor, WideWeight)):
        return map_tensors(value, torch.clone)
    return value if isinstance(value, (str, int, float, torch.dtype, torch.device, type(None))) else ReadOnly(value)
