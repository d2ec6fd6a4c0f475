"""`RankBooks`: what rank 0 knows of another rank's cache, without having it. No torch.

What becomes of a cache follows from what is asked of it: slots, blocks, which prefixes are kept. So rank 0 asks books
without tensors, writes down what it asked, and the rank asks its cache the same in the same order
(engine/rank_worker.py). What a cache keeps also depends on how many tokens of a request were known then: the changes
say it, since a rank may know more by the time it hears of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsv4.cache.ledger import CacheLedger
from dsv4.cache.prefix.cache import Match
from dsv4.cache.prefix.tree import ChainKeys
from dsv4.cache.schema import CacheSchema
from dsv4.config import EngineConfig
from dsv4.engine.ranks.tiers import RankTiers


class Admitted(NamedTuple):
    """A slot given to a request of at most `max_tokens`, which starts at `position`: with `token_ids`, those known, it
    looks for a prefix, of which `num_below` blocks are in host memory; without, it does not."""

    slot: int
    max_tokens: int
    position: int
    num_below: int = 0
    token_ids: tuple[int, ...] = ()
    salt: str | None = None


class Released(NamedTuple):
    """A slot taken back; `keep` leaves what it held to the prefix cache."""

    slot: int
    keep: bool
    num_known: int


class StopAt(NamedTuple):
    """Somebody waits for the request's first `position` tokens."""

    slot: int
    position: int


class Launched(NamedTuple):
    """The request's last step is on its way: whatever is to be kept of it is copied now."""

    slot: int
    num_known: int


class Rewound(NamedTuple):
    """Drafts that did not come true: the request stands at `position` again."""

    slot: int
    position: int


CacheChange = Admitted | Released | StopAt | Launched | Rewound


class _NoCopies:
    """The rank has the state that is copied."""

    def save(self, slot: int, position: int, snapshot: int) -> None:
        pass

    def restore(self, slot: int, position: int, snapshot: int) -> None:
        pass


class RankBooks(CacheLedger):
    """Of one rank's cache, for its scheduler. `take_changes` is what the rank has yet to hear of."""

    def __init__(self, schema: CacheSchema, limits: EngineConfig, tiers: RankTiers | None = None) -> None:
        super().__init__(schema, limits, _NoCopies(), tiers)
        self._tiers = tiers
        self._chains: dict[int, ChainKeys | None] = {}  # by slot
        self._changes: list[CacheChange] = []

    def admit(self, max_tokens: int, chain: ChainKeys | None = None, match: Match | None = None) -> int:
        slot = super().admit(max_tokens, chain, match)
        self._chains[slot] = chain
        below = 0 if chain is None or self._tiers is None else self._tiers.last.num_blocks
        known = ((), None) if chain is None else (tuple(chain.token_ids), chain.salt)
        self._changes.append(Admitted(slot, max_tokens, self.position(slot), below, *known))
        return slot

    def num_here(self, keys: Sequence[bytes]) -> int:
        """Blocks of a prefix that the rank's device has."""
        return 0 if self.prefix is None else self.prefix.num_here(keys)

    def release(self, slot: int, *, keep: bool = True) -> None:
        super().release(slot, keep=keep)
        self._changes.append(Released(slot, keep, self._num_known(slot)))
        del self._chains[slot]

    def stop_at(self, slot: int, position: int) -> None:
        super().stop_at(slot, position)
        self._changes.append(StopAt(slot, position))

    def rewind(self, slot: int, position: int) -> None:
        if position != self.position(slot):
            super().rewind(slot, position)
            self._changes.append(Rewound(slot, position))

    def launched(self, slot: int) -> None:
        super().launched(slot)
        self._changes.append(Launched(slot, self._num_known(slot)))

    def take_changes(self) -> tuple[CacheChange, ...]:
        """What was done since this was last asked, for the rank to repeat before its next step."""
        changes, self._changes = self._changes, []
        return tuple(changes)

    def _num_known(self, slot: int) -> int:
        chain = self._chains[slot]
        return 0 if chain is None else len(chain.token_ids)
