"""What a scheduler works with: the cache's books on one side, `StepPlan` and its `Piece`s on the other. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from dsv4.cache.prefix.cache import Match
from dsv4.cache.prefix.tree import ChainKeys
from dsv4.engine.request import Request


class CacheBooks(Protocol):
    """What the scheduler needs of `KVCacheManager`."""

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    def chain(self, token_ids: Sequence[int], salt: str | None) -> ChainKeys | None: ...

    def match(self, chain: ChainKeys | None) -> Match: ...

    def admit(self, max_tokens: int, chain: ChainKeys | None = None) -> int: ...

    def launched(self, slot: int) -> None: ...

    def next_stop(self, slot: int) -> int: ...

    def stop_at(self, slot: int, position: int) -> None: ...

    def rewind(self, slot: int, position: int) -> None: ...

    def release(self, slot: int, *, keep: bool = True) -> None: ...

    def blocks_freed_by(self, slots: Sequence[int]) -> int: ...

    def position(self, slot: int) -> int: ...


class Piece(NamedTuple):
    """The tokens `start` to `start + length - 1` of a request. `draws`: they are the last it knows, a token follows.
    The last `num_drafts` of them are drafts, which it may turn out not to have."""

    request: Request
    slot: int
    start: int
    length: int
    draws: bool
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """Behind its tokens that are certain."""
        return self.start + self.length - self.num_drafts


@dataclass(frozen=True)
class StepPlan:
    """One forward call: requests that decode, then those that read prompts. `preempted` lost their slots for it."""

    pieces: tuple[Piece, ...]
    preempted: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @cached_property
    def has_rules(self) -> bool:
        """Whether the host must say what may be drawn, which it knows only once the step before is collected. As it was
        when first asked: rules may end with what that step drew."""
        return any(piece.request.has_rules for piece in self.pieces if piece.draws)
