"""`SegmentTree`: which prefixes a tier below the device holds, within a budget of bytes. No torch.

A segment is a snapshot and the blocks that lead to it from the segment before, its parent. What a hit needs is a
segment and its ancestors, so an ancestor is never given up before what follows it: the least recently used one without
children goes first. A pinned one (being read or written) stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.cache.errors import require_integrity


@dataclass(eq=False)
class Segment:
    """Blocks `start` to `end - 1` of the prefix that `key` names, and the snapshot at its end."""

    key: bytes
    parent: Segment | None
    end: int
    num_bytes: int
    num_children: int = 0
    num_pins: int = 0

    @property
    def start(self) -> int:
        return 0 if self.parent is None else self.parent.end

    @property
    def num_blocks(self) -> int:
        return self.end - self.start

    def path(self) -> list[Segment]:
        """From the first segment to this one."""
        segments, here = [], self
        while True:
            segments.append(here)
            if here.parent is None:
                return segments[::-1]
            here = here.parent


class SegmentTree:
    """Segments by key, in the order of their last use."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evictions = 0
        self.touched: set[bytes] | None = None  # keys that came or went, where they are watched
        self._segments: OrderedDict[bytes, Segment] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._segments)

    def all_keys(self) -> list[bytes]:
        return list(self._segments)

    def get(self, key: bytes) -> Segment | None:
        return self._segments.get(key)

    def longest(self, keys: Sequence[bytes]) -> Segment | None:
        """The segment of the longest prefix among `keys`, which are those of ever longer prefixes."""
        return next((self._segments[key] for key in reversed(keys) if key in self._segments), None)

    def add(self, segment: Segment) -> None:
        assert segment.key not in self._segments, "a prefix has one segment"
        parent = segment.parent
        assert parent is None or self._segments.get(parent.key) is parent, "the segment's parent is gone"
        self._segments[segment.key] = segment
        self.num_bytes += segment.num_bytes
        if self.touched is not None:
            self.touched.add(segment.key)
        if parent is not None:
            parent.num_children += 1

    def touch(self, segment: Segment) -> None:
        self._segments.move_to_end(segment.key)

    def remove(self, segment: Segment) -> None:
        """A leaf that is not pinned."""
        assert segment.num_children == 0 and segment.num_pins == 0, "the segment is in use"
        del self._segments[segment.key]
        self.num_bytes -= segment.num_bytes
        if self.touched is not None:
            self.touched.add(segment.key)
        if segment.parent is not None:
            segment.parent.num_children -= 1

    def descendants(self, segment: Segment) -> list[Segment]:
        """The segment and all that build on it, the last ones first."""
        found = [one for one in self._segments.values() if segment in one.path()]
        return sorted(found, key=lambda one: -one.end)

    def evict_for(self, num_bytes: int, keep: Segment | None) -> list[Segment] | None:
        """Remove what must go so that `num_bytes` more fit, the path to `keep` excepted. None if that is impossible:
        then nothing is removed."""
        kept = set() if keep is None else set(keep.path())
        children = {segment: segment.num_children for segment in self._segments.values()}
        gone: list[Segment] = []
        excess = self.num_bytes + num_bytes - self.max_bytes
        while excess > 0:
            leaf = next(
                (one for one, count in children.items() if not count and not one.num_pins and one not in kept), None
            )
            if leaf is None:
                return None
            del children[leaf]
            if leaf.parent is not None:
                children[leaf.parent] -= 1
            gone.append(leaf)
            excess -= leaf.num_bytes
        for segment in gone:
            self.remove(segment)
        self.num_evictions += len(gone)
        return gone

    def check_integrity(self) -> None:
        """Recompute the truth: bytes, parents, children."""
        segments = self._segments.values()
        total = sum(segment.num_bytes for segment in segments)
        require_integrity(total == self.num_bytes, f"segments hold {total} bytes, counted {self.num_bytes}")
        require_integrity(total <= self.max_bytes, f"segments hold {total} bytes of {self.max_bytes}")
        for segment in segments:
            parent = segment.parent
            is_rooted = parent is None or self._segments.get(parent.key) is parent
            require_integrity(is_rooted, "a segment's parent is gone")
            require_integrity(segment.num_blocks > 0, "a segment without blocks")
            children = sum(one.parent is segment for one in segments)
            require_integrity(children == segment.num_children, "a segment's children are miscounted")
