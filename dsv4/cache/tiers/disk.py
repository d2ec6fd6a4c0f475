"""`DiskTier`: segments as files of one folder, found again after a restart. No torch.

Files of one fingerprint lie in a folder of their own. One process at a time writes and deletes there (it holds the
lock, which the kernel drops with the process); others only read. Nothing that fails here fails a request: the file is
named in the log and is not used again.

The calling thread owns the tree. Threads of this object's own read and write files and touch nothing else: one writes,
in order; several read, since a checksum takes longer than a disk.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsv4.cache.tiers.segment_file import (
    SUFFIX,
    Label,
    SegmentFileError,
    Tensors,
    file_name,
    read_label,
    read_segment,
    write_segment,
)
from dsv4.cache.tiers.segments import Segment, SegmentTree

_LOG = logging.getLogger("dsv4.cache")
LOCK_NAME = "lock"
_NUM_READERS = 4


class DiskTier:
    """The folder `directory / fingerprint`, at most `max_bytes` of it. `OSError` if it cannot even be made or read."""

    def __init__(self, directory: Path, max_bytes: int, fingerprint: str) -> None:
        self.tree = SegmentTree(max_bytes)
        self.fingerprint = fingerprint
        self.folder = directory / fingerprint
        self.num_bad = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not self.folder.is_dir():
                raise OSError(error.errno, f"cache_dir {directory} cannot be created: {error.strerror}") from None
        self._lock = self._take_lock()
        self._writer = ThreadPoolExecutor(1, "dsv4-cache-write")
        self._reader = ThreadPoolExecutor(_NUM_READERS, "dsv4-cache-read")
        self._scan()

    @property
    def can_write(self) -> bool:
        return self._lock is not None

    def path_of(self, segment: Segment) -> Path:
        return self.folder / file_name(segment.key.hex())

    # ---- files, in threads ----

    def write(self, key: bytes, parent: Segment | None, end: int, tensors: Tensors, data: Callable[[], Sequence[Any]],
    ) -> Future[int | None]:  # fmt: skip
        """Write a file; the result is its size, None if the disk did not take it. `data` is called in the thread."""
        label = self.label(key, parent, end)
        return self._writer.submit(self._write, self.folder / file_name(key.hex()), label, tensors, data)

    def _write(self, path: Path, label: Label, tensors: Tensors, data: Callable[[], Sequence[Any]]) -> int | None:
        try:
            return write_segment(path, label, tensors, data())
        except OSError as error:
            helps = "; free some space or lower cache_disk_bytes" if error.errno == errno.ENOSPC else ""
            _LOG.warning("the prefix cache cannot write %s: %s%s", path, error.strerror, helps)
            return None

    def read(
        self, segment: Segment, tensors: Tensors, targets: Callable[[], Sequence[Any]]
    ) -> Future[str | None]:  # fmt: skip
        """Read a file into buffers; the result is None, or what is wrong with it."""
        label = self.label(segment.key, segment.parent, segment.end)
        return self._reader.submit(_read, self.path_of(segment), label, tensors, targets)

    def label(self, key: bytes, parent: Segment | None, end: int) -> Label:
        if parent is None:
            return Label(self.fingerprint, key.hex(), "", 0, end)
        return Label(self.fingerprint, key.hex(), parent.key.hex(), parent.end, end)

    # ---- the tree ----

    def make_room(self, num_bytes: int, parent: Segment | None) -> bool:
        """Delete what must go so that a file after `parent` fits; False if it cannot."""
        gone = self.tree.evict_for(num_bytes, parent)
        for segment in gone or ():
            self._delete(self.path_of(segment))
        return gone is not None

    def add(self, key: bytes, parent: Segment | None, end: int, num_bytes: int) -> Segment:
        segment = Segment(key, parent, end, num_bytes)
        self.tree.add(segment)
        return segment

    def reject(self, segment: Segment, reason: str) -> None:
        """A file that is not what it should be: it and what builds on it are not used again."""
        lost = self.tree.descendants(segment)
        also = f"; nor are {len(lost) - 1} that build on it" if len(lost) > 1 else ""
        _LOG.warning("the prefix cache does not use a file: %s%s", reason, also)
        self.num_bad += 1
        for one in lost:
            self.tree.remove(one)
            self._delete(self.path_of(one))

    def drop(self, key: bytes) -> None:
        """Delete a file that is in no tree."""
        self._delete(self.folder / file_name(key.hex()))

    def _delete(self, path: Path) -> None:
        if self.can_write:
            self._writer.submit(_unlink, path)  # after the writes that were asked for before

    def close(self) -> None:
        """Finish what was asked for and let others write."""
        self._writer.shutdown()
        self._reader.shutdown()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- the start ----

    def _take_lock(self) -> int | None:
        try:
            handle = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            _LOG.warning("the prefix cache only reads %s: %s", self.folder, error.strerror)
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            _LOG.warning("the prefix cache only reads %s: another process writes there", self.folder)
            return None
        return handle

    def _scan(self) -> None:
        """Find the segments that are whole by their headers, with all their ancestors; the others are named."""
        labels: dict[str, tuple[Label, int]] = {}
        try:
            files = sorted((path for path in self.folder.iterdir() if path.name != LOCK_NAME), key=_age)
        except OSError as error:
            raise OSError(error.errno, f"cache_dir {self.folder} cannot be read: {error.strerror}") from None
        for path in files:
            if path.name.startswith("."):
                self._delete(path)  # of a process that was killed while it wrote
                continue
            try:
                label, num_bytes = read_label(path)
                if label.fingerprint != self.fingerprint or path.suffix != SUFFIX:
                    raise SegmentFileError(f"{path} was written for another model or configuration")
            except SegmentFileError as error:
                _LOG.warning("the prefix cache does not use a file: %s", error)
                self.num_bad += 1
                continue
            labels[label.key] = label, num_bytes
        for key in list(labels):
            self._adopt(key, labels)
        self._fit_budget()

    def _adopt(self, key: str, labels: dict[str, tuple[Label, int]]) -> None:
        """Add a file and its ancestors to the tree, the first one first."""
        path: list[tuple[Label, int]] = []
        while key and self.tree.get(bytes.fromhex(key)) is None:
            found = labels.get(key)
            is_next = found is not None and (not path or found[0].end == path[-1][0].start)
            if found is None or not is_next:  # an ancestor is missing, damaged, or another one
                for label, _ in path:
                    _LOG.warning("the prefix cache does not use a file: %s lacks its beginning", label.key)
                    self.num_bad += 1
                    labels.pop(label.key, None)
                    self.drop(bytes.fromhex(label.key))
                return
            path.append(found)
            key = found[0].parent
        parent = self.tree.get(bytes.fromhex(key)) if key else None
        if path and parent is not None and parent.end != path[-1][0].start:
            return
        for label, num_bytes in reversed(path):
            parent = Segment(bytes.fromhex(label.key), parent, label.end, num_bytes)
            self.tree.add(parent)

    def _fit_budget(self) -> None:
        """A budget that is smaller than last time."""
        gone = self.tree.evict_for(0, None)
        for segment in gone or ():
            self._delete(self.path_of(segment))


def _read(path: Path, label: Label, tensors: Tensors, targets: Callable[[], Sequence[Any]]) -> str | None:
    try:
        read_segment(path, label, tensors, targets())
    except SegmentFileError as error:
        return str(error)
    try:
        os.utime(path)  # so that a restart knows what was of use last
    except OSError:
        return None  # another program's file
    return None


def _age(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("the prefix cache cannot delete %s: %s", path, error.strerror)
