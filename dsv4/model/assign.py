"""New values into the tensors of a model that runs: `assign` copies in place, so captured graphs stay valid.

Both sides are prepared alike (model/prepare.py). A tensor never moves: whoever holds its address, a CUDA graph above
all, reads the new values from the next launch on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import WideWeight, as_loaded


def assign(live: Any, fresh: Any, name: str = "weights") -> None:
    """Copy every tensor of `fresh` into that of `live`. Both have one structure; only tensors may differ, in value."""
    for _, target, source in list(_pairs(live, fresh, name)):
        target.copy_(source)
    for wide in _wide_weights(live):
        wide.forget_operands()


def _pairs(live: Any, fresh: Any, name: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors of both sides with the place they stand at. Anything else must be equal: it may be part of a graph."""
    if live is fresh:  # offloaded experts: written when they were read
        return
    if isinstance(live, WideWeight) or isinstance(fresh, WideWeight):
        live, fresh = as_loaded(live), as_loaded(fresh)
    assert type(live) is type(fresh), f"{name} is {type(live).__name__}, its new value {type(fresh).__name__}"
    if isinstance(live, Tensor):
        expected, found = (live.shape, live.dtype), (fresh.shape, fresh.dtype)
        assert expected == found, f"{name} is {expected}, its new value {found}"
        yield name, live, fresh
    elif isinstance(live, (list, tuple)) and not isinstance(live, torch.Size):
        assert len(live) == len(fresh), f"{name} has {len(live)} parts, its new value {len(fresh)}"
        for index, pair in enumerate(zip(live, fresh, strict=True)):
            yield from _pairs(*pair, f"{name}[{index}]")
    elif is_dataclass(live):
        for field in fields(live):
            yield from _pairs(getattr(live, field.name), getattr(fresh, field.name), f"{name}.{field.name}")
    else:
        assert live == fresh, f"{name} is {live!r}, its new value {fresh!r}"


def _wide_weights(tree: Any) -> Iterator[WideWeight]:
    if isinstance(tree, WideWeight):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _wide_weights(part)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _wide_weights(getattr(tree, field.name))
