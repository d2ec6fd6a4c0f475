"""`StateCache`: the fixed part of every request, one slot each: window rings and compressor tails. Allocated once."""

from collections.abc import Sequence

import torch

from dsv4.cache.errors import UnknownSlot
from dsv4.cache.pool import PoolSet
from dsv4.cache.schema import CacheSchema
from dsv4.cache.transfer import to_device

NO_POSITION = -1
ABSENT_SCORE = float("-inf")  # softmax weight exactly 0


class StateCache(PoolSet):
    """Rows are addressed by position (p % ring_len), so that taking back draft tokens moves no data."""

    def __init__(self, schema: CacheSchema, *, device: torch.device, plain_dtype: torch.dtype | None) -> None:
        super().__init__(schema.state_pools, device, plain_dtype)
        self.num_slots = schema.num_slots
        self.reset()

    def reset(self) -> None:
        """Every slot is that of a new request."""
        for pool in self.pools.values():
            pool.all_layers.fill_(_fresh_value(pool.schema.name))

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Exactly the state of new requests: no positions, rows zero, tails kv 0 and score -inf. No other slots."""
        if not 0 <= min(slots) <= max(slots) < self.num_slots:  # a negative index is another request's from the end
            raise UnknownSlot(f"slots {[*slots]} are not all among 0 .. {self.num_slots - 1}")
        places = to_device(torch.tensor(slots), self.pools["window.data"].storage.device)
        for pool in self.pools.values():
            value = _fresh_value(pool.schema.name)
            (pool.all_layers if value else pool.words).index_fill_(1, places, value)


def _fresh_value(pool_name: str) -> float:
    if pool_name == "window.positions":
        return NO_POSITION
    return ABSENT_SCORE if pool_name.endswith(".score") else 0
