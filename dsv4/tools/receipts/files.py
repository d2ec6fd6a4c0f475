"""`RecordFile`: an append-only file of whole lines, rotated at a size limit; and reading one.

One process writes to a file (it holds a lock). A line is written in one go, and taken back if it did not fit; what a
killed process may leave is half a line at the end, which the next writer ends and readers skip. A file that would grow
beyond its size becomes FILE.1, FILE.1 becomes FILE.2, and the oldest is deleted. No torch.
"""

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from dsv4.config import ConfigError
from dsv4.tools.receipts.lines import Gap, Header, Receipt, RecordError, parse_line

_FIRST_BYTES = b'{"kind":"'  # of every line


class RecordFile:
    """Opening it checks that it can be written to: `ConfigError` says why not. `append` raises `OSError` later.

    max_bytes  a file is not continued beyond this
    num_files  how many there are at most: the one that is written and those before it
    """

    def __init__(self, path: str | Path, *, max_bytes: int = 2**28, num_files: int = 4) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._header = b""
        self._handle: int | None = None
        self._needs_header = True
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written to: {error.strerror or error}") from None

    def begin(self, header: bytes) -> None:
        """The line that this process starts with here, and every further file with."""
        self._header = header
        self._needs_header = True

    def append(self, line: bytes) -> None:
        """Write one line. On any failure the file is as it was."""
        assert line.endswith(b"\n") and self._header, "begin comes first"
        try:
            self._make_ready(len(line))
            self._write(self._header + line if self._needs_header else line)
        except BaseException:
            self._drop()  # opened anew for the next line: this one may be on a disk that is gone
            raise
        self._needs_header = False

    def sync(self) -> None:
        if self._handle is not None:
            os.fdatasync(self._handle)

    def close(self) -> None:
        self._drop()

    def _make_ready(self, num_bytes: int) -> None:
        if self._handle is not None and not self._is_in_place(self._handle):
            self._drop()  # the file was moved or deleted
        if self._handle is None:
            self._open()
        assert self._handle is not None
        size = os.fstat(self._handle).st_size
        if size and size + num_bytes > self._max_bytes and not (self._needs_header and size <= len(self._header)):
            self._rotate()

    def _open(self) -> None:
        """Ours alone, readable by its owner only."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{self.path} is not a regular file; a record is one")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path} is being written by another process; give each its own") from None
            if found.st_size and not os.pread(handle, len(_FIRST_BYTES), 0).startswith(_FIRST_BYTES):
                raise ConfigError(f"{self.path} exists and is not a record; choose another name")
            if stat.S_IMODE(found.st_mode) & 0o077:
                os.fchmod(handle, 0o600)
            if found.st_size and os.pread(handle, 1, found.st_size - 1) != b"\n":
                os.write(handle, b"\n")  # ends what a killed process left
        except BaseException:
            os.close(handle)
            raise
        self._handle, self._needs_header = handle, True

    def _is_in_place(self, handle: int) -> bool:
        try:
            here, ours = os.stat(self.path), os.fstat(handle)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino)

    def _rotate(self) -> None:
        last = self._num_files - 1
        for number in reversed(range(last)):
            older = rotated(self.path, number)
            if older.exists():
                os.replace(older, rotated(self.path, number + 1))
        if last == 0:
            self.path.unlink()
        self._drop()
        self._open()

    def _write(self, line: bytes) -> None:
        assert self._handle is not None
        before, written = os.fstat(self._handle).st_size, 0
        try:
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except BaseException:
            if written:
                os.ftruncate(self._handle, before)
            raise

    def _drop(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)


def rotated(path: Path, number: int) -> Path:
    """The file written before it (1), and before that; the file itself for 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


def read_record(
    paths: Iterable[Path], on_damage: Callable[[Path, int, str], None] = lambda path, number, why: None
) -> Iterator[tuple[Path, Header, Receipt | Gap]]:
    """Every request (and gap) of some files with the header it ran under. `on_damage` is called with lines that are
    skipped, with their number; `RecordError` for a file that has no line of a record at all."""
    for path in paths:
        header, num_good = None, 0
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    entry = parse_line(line)
                    if not isinstance(entry, Header) and header is None:
                        raise RecordError("it precedes the first header")
                except RecordError as error:
                    on_damage(path, number, str(error))
                    continue
                num_good += 1
                if isinstance(entry, Header):
                    header = entry
                    continue
                assert header is not None
                yield path, header, replace(entry, line=number) if isinstance(entry, Receipt) else entry
        if num_good == 0:
            raise RecordError(f"{path} is not a record of `dsv4 serve --record`")
