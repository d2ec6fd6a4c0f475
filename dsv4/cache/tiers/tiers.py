"""`Tiers`: prefixes that outlive the device's memory: in host memory, and from there in files.

What the device keeps is copied to the host as soon as it has a name (`store`), and written to disk in a thread. A hit
goes the other way: files are read and checked in a thread while other requests go on (`prepare`), and copied to the
device when the request starts (`fetch`). Every file passes through host memory, whose budget therefore bounds the
longest prefix that can come back. All calls come from one thread.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.prefix.tree import Node
from dsv4.cache.tiers.disk import DiskTier
from dsv4.cache.tiers.host import UNIT_BYTES, HostTier
from dsv4.cache.tiers.payload import Payload
from dsv4.cache.tiers.segment_file import Tensors, make_header
from dsv4.cache.tiers.segments import Segment

_LOG = logging.getLogger("dsv4.cache")
_DTYPES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class _Write:
    """A host segment that is being written to a file."""

    segment: Segment
    num_bytes: int
    done: Future[int | None]


@dataclass(frozen=True)
class _Load:
    """Files that are being read into host memory, in the order of the prefix, after `parent`."""

    parent: Segment | None
    files: list[tuple[Segment, list[int], Future[str | None]]]

    @property
    def is_done(self) -> bool:
        return all(done.done() for _, _, done in self.files)


class Tiers:
    """The host's segments, and the disk's if there is one."""

    def __init__(self, payload: Payload, host: HostTier, disk: DiskTier | None) -> None:
        self._payload = payload
        self.host = host
        self.disk = disk
        self._writes: dict[bytes, _Write] = {}  # in the order they were asked for
        self._loads: dict[bytes, _Load] = {}  # by the key of the last file
        self._from_disk: set[bytes] = set()  # loaded, and not yet of use
        self.num_stored = 0

    # ---- looking ----

    def longest(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest prefix that host memory has."""
        segment = self.host.tree.longest(keys)
        return 0 if segment is None else segment.end

    def prepare(self, keys: Sequence[bytes], num_blocks: int) -> int:
        """Start reading a prefix longer than `num_blocks` if only the disk has one; its blocks while it is being read,
        otherwise 0."""
        self.settle()
        wanted = None if self.disk is None else self.disk.tree.longest(keys)
        if wanted is None or wanted.end <= max(num_blocks, self.longest(keys)):
            return 0
        return wanted.end if wanted.key in self._loads or self._load(wanted) else 0

    def _load(self, wanted: Segment) -> bool:
        assert self.disk is not None
        missing, parent = _missing(wanted, self.host)
        sizes = [self._payload.num_bytes(segment.num_blocks) for segment in missing]
        counts = [-(-size // UNIT_BYTES) for size in sizes]
        units = self.host.reserve(sum(counts) * UNIT_BYTES, parent)
        if units is None:
            return False
        if parent is not None:
            parent.num_pins += 1
        files = []
        for segment, size, count in zip(missing, sizes, counts, strict=True):
            own, units = units[:count], units[count:]
            targets = _buffers(self.host.views(own, size), self.host.fence())
            segment.num_pins += 1
            files.append((segment, own, self.disk.read(segment, self._tensors(segment.num_blocks), targets)))
        self._loads[wanted.key] = _Load(parent, files)
        return True

    def wait(self, seconds: float | None = None) -> None:
        """Wait until everything that is being read has arrived, at most `seconds`."""
        wait([done for load in self._loads.values() for _, _, done in load.files], seconds)
        self.settle()

    def flush(self) -> None:
        """Wait until everything is read and written."""
        self.wait()
        wait([write.done for write in self._writes.values()])
        self.settle()

    def close(self) -> None:
        self.flush()
        if self.disk is not None:
            self.disk.close()

    # ---- moving ----

    def store(self, node: Node) -> None:
        """Copy what leads to a node from the last segment there is, and the node's snapshot."""
        self.settle()
        known = self.host.tree.get(node.key)
        if known is not None:
            self.host.tree.touch(known)
            return
        path = node.path()
        parent = self.host.tree.longest([one.key for one in path[:-1]])
        blocks = [one.block for one in path[0 if parent is None else parent.end :]]
        assert node.snapshot is not None and None not in blocks, "only what the device has can be stored"
        num_bytes = self._payload.num_bytes(len(blocks))
        units = self.host.reserve(num_bytes, parent)
        if units is None:
            return
        flat = self._payload.gather(blocks, node.snapshot)  # type: ignore[arg-type]
        self.host.write(units, flat)
        segment = self.host.add(node.key, parent, node.depth, units)
        self.num_stored += 1
        self._write_path(segment)

    def _write_path(self, segment: Segment) -> None:
        """Files for a segment and those of its ancestors that have none."""
        if self.disk is None or not self.disk.can_write:
            return
        for one in segment.path():
            if self.disk.tree.get(one.key) is not None or one.key in self._writes:
                continue
            tensors = self._tensors(one.num_blocks)
            label = self.disk.label(one.key, one.parent, one.end)
            num_bytes = len(make_header(label, tensors, "0" * 64)) + tensors.num_bytes
            pending = sum(write.num_bytes for write in self._writes.values())
            parent = None if one.parent is None else self.disk.tree.get(one.parent.key)
            if not self.disk.make_room(num_bytes + pending, parent):
                return
            data = _buffers(self.host.bytes_of(one, tensors.num_bytes), self.host.fence())
            one.num_pins += 1
            done = self.disk.write(one.key, one.parent, one.end, tensors, data)
            self._writes[one.key] = _Write(one, num_bytes, done)

    def fetch(self, key: bytes, num_held: int, blocks: Sequence[int], snapshot: int) -> bool:
        """A prefix from host memory to the device: its blocks from `num_held` on into `blocks`, and its snapshot.

        Returns whether a file brought it.
        """
        segment = self.host.tree.get(key)
        assert segment is not None and len(blocks) == segment.end - num_held, "the host has no such prefix"
        for one in segment.path():
            self.host.tree.touch(one)
            if one.end <= num_held and one is not segment:
                continue
            first = max(one.start, num_held)
            rows = range(first - one.start, one.end - one.start)
            with self.host.read(one, self._payload.num_bytes(one.num_blocks)) as flat:
                self._payload.scatter(flat, one.num_blocks, rows, blocks[first - num_held : one.end - num_held])
                if one is segment:
                    self._payload.put_snapshot(flat, one.num_blocks, snapshot)
        is_from_disk = key in self._from_disk
        self._from_disk.discard(key)
        return is_from_disk

    def forget(self, key: bytes) -> None:
        """Remove a prefix that is not to be trusted, and what builds on it."""
        self.flush()
        segment = self.host.tree.get(key)
        for one in [] if segment is None else self.host.tree.descendants(segment):
            self.host.remove(one)
        wrong = None if self.disk is None else self.disk.tree.get(key)
        if self.disk is not None and wrong is not None:
            self.disk.reject(wrong, f"{self.disk.path_of(wrong)} differs from a cold run")

    # ---- what threads have done ----

    def settle(self) -> None:
        """Take note of files that were written or read meanwhile. Never waits."""
        for key, write in list(self._writes.items()):
            if not write.done.done():
                break  # files are written in order: later ones build on earlier ones
            del self._writes[key]
            self._written(write)
        for key, load in list(self._loads.items()):
            if load.is_done:
                del self._loads[key]
                self._loaded(key, load)

    def _written(self, write: _Write) -> None:
        assert self.disk is not None
        segment, num_bytes = write.segment, write.done.result()
        segment.num_pins -= 1
        if num_bytes is None or self.disk.tree.get(segment.key) is not None:
            return
        parent = None if segment.parent is None else self.disk.tree.get(segment.parent.key)
        if segment.parent is not None and parent is None:
            self.disk.drop(segment.key)  # its beginning was not written
        else:
            self.disk.add(segment.key, parent, segment.end, num_bytes)

    def _loaded(self, key: bytes, load: _Load) -> None:
        assert self.disk is not None
        parent = load.parent
        if parent is not None:
            parent.num_pins -= 1
        bad: tuple[Segment, str] | None = None
        for segment, units, done in load.files:
            segment.num_pins -= 1
            reason = done.result()
            known = self.host.tree.get(segment.key)
            if bad is None and reason is not None:
                bad = segment, reason
            if bad is not None or known is not None:
                self.host.give_back(units)
                parent = known
            else:
                parent = self.host.add(segment.key, parent, segment.end, units)
                self.disk.tree.touch(segment)
        if bad is None:
            self._from_disk.add(key)
        else:
            self.disk.reject(*bad)

    def _tensors(self, num_blocks: int) -> Tensors:
        parts = self._payload.parts
        return Tensors(
            tuple((one.name, _DTYPES[one.pool.all_layers.dtype], one.shape(num_blocks)) for one in parts),
            tuple(one.num_bytes(num_blocks) for one in parts),
        )

    def check_integrity(self) -> None:
        loading = [units for load in self._loads.values() for _, units, _ in load.files]
        self.host.check_integrity(sum(map(len, loading)))
        if self.disk is not None:
            self.disk.tree.check_integrity()


def _missing(wanted: Segment, host: HostTier) -> tuple[list[Segment], Segment | None]:
    """The segments of a path that the host does not have, and the last one that it has."""
    missing: list[Segment] = []
    for segment in reversed(wanted.path()):
        known = host.tree.get(segment.key)
        if known is not None:
            return missing[::-1], known
        missing.append(segment)
    return missing[::-1], None


def _buffers(views: Sequence[Tensor], fence: torch.cuda.Event | None) -> Callable[[], list[Any]]:
    """The bytes of host tensors, for a thread that may touch them once the device is done with them."""

    def buffers() -> list[Any]:
        if fence is not None:
            fence.synchronize()
        return [memoryview(view.numpy()) for view in views]  # type: ignore[arg-type]

    return buffers
