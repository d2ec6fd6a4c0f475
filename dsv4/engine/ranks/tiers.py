"""Prefixes in host memory and files of other ranks, as rank 0's books see them. No torch.

What lies below a rank's device changes by itself: files arrive, or turn out to be damaged, and room is made for others.
So rank 0 keeps no books of it. It asks all ranks what they have of a request's prefix, and a rank keeps what it told of
until it has repeated the changes of the next step (`Tiers.promise`). The change that admits a request says how much of
it rank 0 counted on. What is stored, and what gives way to it, each rank decides alone.

    question  the rank that waits for its files or 0, then for each rank besides 0 the blocks its device has, keys
    answer    blocks that host memory has, blocks there will be when files have been read, whether one brought them
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dsv4.cache.prefix.tree import KEY_BYTES, Node


class Below(NamedTuple):
    """What a rank has of a prefix below its device."""

    num_blocks: int = 0
    num_loading: int = 0
    is_from_disk: bool = False


class _Books(Protocol):
    def num_here(self, keys: Sequence[bytes]) -> int: ...


class Lookups:
    """What the other ranks have of the prefixes that were asked for since `forget`. `ask` sends all of them a question
    and gives their answers; `books` are theirs, by rank."""

    def __init__(self, ask: Callable[[list[int]], list[list[int]]]) -> None:
        self.books: list[_Books] = []
        self._ask = ask
        self._found: dict[bytes, list[Below]] = {}

    def of(self, rank: int, keys: Sequence[bytes], *, must_wait: bool = False) -> Below:
        """`must_wait`: the rank's files have a moment to arrive."""
        if not keys:
            return Below()
        found = None if must_wait else self._found.get(keys[-1])
        if found is None:
            here = [books.num_here(keys) for books in self.books]
            words = array("q", b"".join(keys))
            answers = self._ask([rank if must_wait else 0, *here, *words])
            found = [Below(num_blocks, num_loading, bool(disk)) for num_blocks, num_loading, disk in answers]
            self._found[keys[-1]] = found
        return found[rank - 1]

    def forget(self) -> None:
        """Ask again: time has passed, or what was promised was used."""
        self._found.clear()


class RankTiers:
    """`LowerTiers` of one rank, for rank 0's books of it: nothing is moved here."""

    def __init__(self, lookups: Lookups, rank: int) -> None:
        self._lookups = lookups
        self._rank = rank
        self._keys: Sequence[bytes] = ()
        self.last = Below()  # what the books were told last

    def longest(self, keys: Sequence[bytes]) -> int:
        self.last = self._lookups.of(self._rank, keys)
        return self.last.num_blocks

    def prepare(self, keys: Sequence[bytes], num_blocks: int) -> int:
        self._keys = keys
        return self._lookups.of(self._rank, keys).num_loading

    def wait(self, seconds: float | None = None) -> None:
        """As long as the rank waits in one go."""
        self._lookups.of(self._rank, self._keys, must_wait=True)

    def fetch(self, key: bytes, num_held: int, blocks: Sequence[int], snapshot: int) -> bool:
        return self.last.is_from_disk

    def store(self, node: Node) -> None:
        pass

    def forget(self, key: bytes) -> None:
        raise AssertionError("hits of other ranks cannot be verified")


class SyncEndpoint(NamedTuple):
    """What a rank is asked: whether to wait for files, the blocks its device has, and the keys of the prefix."""

    must_wait: bool
    num_here: int
    keys: list[bytes]

    @classmethod
    def decode(cls, numbers: Sequence[int], rank: int, num_ranks: int) -> SyncEndpoint:
        data = array("q", numbers[num_ranks:]).tobytes()
        keys = [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]
        return cls(numbers[0] == rank, numbers[rank], keys)
