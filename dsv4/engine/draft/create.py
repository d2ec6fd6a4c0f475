"""The drafter a model came with."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.model.drafter import Drafter
from dsv4.model.dspark import DSparkDrafter
from dsv4.model.mtp_drafter import MtpDrafter
from dsv4.model.transformer import Transformer


class DraftCache(Protocol):
    """What a drafter needs of a cache."""

    @property
    def block_table(self) -> Tensor: ...

    def handle(self, layer_idx: int) -> LayerCacheHandle: ...


def make_drafter(model: Transformer, cache: DraftCache) -> Drafter | None:
    """Over a cache whose schedule has the draft blocks; None for a model without any."""
    if model.weights.dspark is not None:
        return DSparkDrafter(model, cache.handle, cache.block_table)
    if model.weights.mtp:
        return MtpDrafter(model, cache.handle, cache.block_table)
    return None
