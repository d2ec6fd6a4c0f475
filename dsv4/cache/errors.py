"""Named errors of the cache. No torch: the scheduler catches them too."""

from __future__ import annotations

from dsv4.errors import Dsv4Error


class CacheError(Dsv4Error, ValueError):
    """A request the cache cannot serve as asked. The cache is unchanged."""


class RequestTooLong(CacheError):
    """More tokens than `max_context_tokens`."""


class RequestNeverFits(CacheError):
    """More blocks than the whole cache has, however empty it is."""


class NoFreeSlot(CacheError):
    """Every slot is taken; release a request first."""


class UnknownSlot(CacheError):
    """A slot that does not exist or that no request holds."""


class DuplicateSlot(CacheError):
    """One slot named twice in the same forward call."""


class PositionMismatch(CacheError):
    """New tokens that do not continue a request exactly: a gap, a repeat, or no tokens at all."""


class BlockTableOverflow(CacheError):
    """New tokens beyond what the request was admitted for."""


class RewindTooFar(CacheError):
    """A position whose rows the rings no longer hold, or that was never reached."""


class OutOfBlocks(Dsv4Error, RuntimeError):
    """Not enough free blocks now; nothing was acquired. Releasing a request may help."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free of {total}")
        self.needed = needed
        self.free = free
        self.total = total

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[int, int, int]]:
        return type(self), (self.needed, self.free, self.total)


class BlockError(CacheError):
    """A block id used wrongly. The allocator is unchanged."""


class ForeignBlock(BlockError):
    """An id this allocator never handed out."""


class DoubleRelease(BlockError):
    """A block released more often than it was acquired and retained."""


class UnallocatedBlock(BlockError):
    """A free block cannot gain an owner by `retain`; it must be acquired."""


class IntegrityError(Dsv4Error, AssertionError):
    """`check_integrity` recomputed the truth and found something else: a defect of this package."""


def require_integrity(condition: bool, message: str) -> None:
    """An assertion that stays in optimised runs."""
    if not condition:
        raise IntegrityError(message)
