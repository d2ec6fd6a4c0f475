"""`HostTier`: segments in host memory, pinned where the device is a GPU. One allocation, made at the start.

The memory is divided into units; a segment takes as many as it needs, wherever they are. Copies to and from a GPU run
in a stream of their own, in order, beside the steps: only what is computed from them waits for them. `fence` waits
where the host itself is to touch the bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from dsv4.cache.errors import require_integrity
from dsv4.cache.tiers.segments import Segment, SegmentTree

UNIT_BYTES = 2**16


class HostTier:
    """Segments, and the units that hold each of them. At most `max_bytes`, rounded down to whole units."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        num_units = max_bytes // UNIT_BYTES
        self.tree = SegmentTree(num_units * UNIT_BYTES)
        self._device = device
        self._arena = torch.empty((num_units, UNIT_BYTES), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._free = list(range(num_units - 1, -1, -1))
        self._units: dict[bytes, list[int]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes really held."""
        return self._arena.numel()

    def reserve(self, num_bytes: int, parent: Segment | None) -> list[int] | None:
        """Units for a segment after `parent`; evicts others to make room. None if there cannot be enough."""
        num_units = -(-num_bytes // UNIT_BYTES)
        taken = self.tree.max_bytes - self.tree.num_bytes - len(self._free) * UNIT_BYTES  # reserved, not yet added
        gone = self.tree.evict_for(num_units * UNIT_BYTES + taken, parent)
        if gone is None:
            return None
        for segment in gone:
            self.give_back(self._units.pop(segment.key))
        return [self._free.pop() for _ in range(num_units)]

    def give_back(self, units: list[int]) -> None:
        """Units that hold no segment any more."""
        self._free += units
        self._free.sort(reverse=True)  # low ones first: neighbours are copied at once

    def add(self, key: bytes, parent: Segment | None, end: int, units: list[int]) -> Segment:
        """The reserved units hold this segment from now on."""
        segment = Segment(key, parent, end, len(units) * UNIT_BYTES)
        self.tree.add(segment)
        self._units[key] = units
        return segment

    def remove(self, segment: Segment) -> None:
        """A segment without children is gone."""
        self.tree.remove(segment)
        self.give_back(self._units.pop(segment.key))

    def views(self, units: list[int], num_bytes: int) -> list[Tensor]:
        """The bytes in these units: uint8 views, as few as their places allow."""
        starts = [0, *(at for at, (a, b) in enumerate(pairwise(units), 1) if b != a + 1), len(units)]
        runs = [self._arena[units[a] : units[b - 1] + 1].view(-1) for a, b in pairwise(starts)]
        runs[-1] = runs[-1][: num_bytes - (len(units) * UNIT_BYTES - runs[-1].numel())]
        return runs

    def bytes_of(self, segment: Segment, num_bytes: int) -> list[Tensor]:
        return self.views(self._units[segment.key], num_bytes)

    def write(self, units: list[int], flat: Tensor) -> None:
        """From the device, where `flat` is made by what was launched until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            flat.record_stream(self._stream)
        with self._copying():
            start = 0
            for view in self.views(units, flat.numel()):
                view.copy_(flat[start : start + view.numel()], non_blocking=True)
                start += view.numel()

    @contextmanager
    def read(self, segment: Segment, num_bytes: int) -> Iterator[Tensor]:
        """To the device: uint8 [n], for what is launched inside the block. Its memory then goes to later segments, so
        that a long prefix needs no more of it than two of its segments."""
        with self._copying():
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            start = 0
            for view in self.bytes_of(segment, num_bytes):
                flat[start : start + view.numel()].copy_(view, non_blocking=True)
                start += view.numel()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        yield flat
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def fence(self) -> torch.cuda.Event | None:
        """What to wait for before the host reads or writes bytes that were copied until now."""
        return self._copied

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def check_integrity(self, num_reserved: int) -> None:
        """`num_reserved` units belong to segments that are still being read."""
        self.tree.check_integrity()
        held = [unit for units in self._units.values() for unit in units]
        require_integrity(len(set(held) | set(self._free)) == len(held) + len(self._free), "a unit is held twice")
        total = len(held) + len(self._free) + num_reserved
        require_integrity(total == len(self._arena), f"{total} units of {len(self._arena)}")
        require_integrity(len(self._units) == len(self.tree), "units of a segment that is gone")
        require_integrity(len(held) * UNIT_BYTES == self.tree.num_bytes, "segments and units differ in bytes")
