"""What a tree of parameters is made of: its tensors' memory, and weights that keep operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import WideWeight


def leaves(tree: Any) -> Iterator[Tensor | WideWeight]:
    """Tensors and `WideWeight`s, the sources of those too. Dataclasses, lists and tuples are structure; the rest, such
    as offloaded experts, is passed over."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, WideWeight):
        yield tree
        yield from leaves(tree.source)
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from leaves(part)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from leaves(getattr(tree, field.name))


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Each piece of memory once."""
    found: dict[int, torch.UntypedStorage] = {}
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor) and leaf.numel():
            storage = leaf.untyped_storage()
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def wide_weights_of(tree: Any) -> list[WideWeight]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, WideWeight)]
