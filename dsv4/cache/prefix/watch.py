"""`PrefixWatch`: which prefixes a cache could start a request from, as they come and go. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from dsv4.cache.prefix.tree import PrefixTree
from dsv4.cache.tiers.segments import SegmentTree


class PrefixNews(NamedTuple):
    """Keys that are known now and were not, and the other way round."""

    added: list[bytes]
    removed: list[bytes]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class PrefixWatch:
    """Of the device and the tiers below it. One for a cache."""

    def __init__(self, trees: Sequence[PrefixTree | SegmentTree]) -> None:
        self._trees = trees
        self._touched = {key for tree in trees for key in tree.all_keys()}
        self._known: set[bytes] = set()
        for tree in trees:
            tree.touched = self._touched

    def news(self) -> PrefixNews:
        """Since this was last asked."""
        here = {key for key in self._touched if any(tree.get(key) is not None for tree in self._trees)}
        added, removed = here - self._known, (self._touched - here) & self._known
        self._known = (self._known | added) - removed
        self._touched.clear()
        return PrefixNews(sorted(added), sorted(removed))
