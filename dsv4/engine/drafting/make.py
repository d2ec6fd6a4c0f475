"""The drafter a model came with."""

from __future__ import annotations

from dsv4.cache.manager import KVCacheManager
from dsv4.model.drafter import Drafter
from dsv4.model.dspark import DSparkDrafter
from dsv4.model.mtp_drafter import MtpDrafter
from dsv4.model.transformer import Transformer


def make_drafter(model: Transformer, cache: KVCacheManager) -> Drafter | None:
    """Over a cache whose schedule has the draft blocks; None for a model without any."""
    if model.params.dspark is not None:
        return DSparkDrafter(model, cache.handle, cache.block_table)
    if model.params.mtp:
        return MtpDrafter(model, cache.handle, cache.block_table)
    return None
