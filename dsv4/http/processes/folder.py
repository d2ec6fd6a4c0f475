"""The private folder of a running server: made, locked, deleted; those that killed supervisors left are deleted too."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "dsv4-serve-"
_LOCK = "lock"
_MAX_LEN = 80  # a Unix socket's path has 107 bytes at most
_YOUNG_SECONDS = 60.0  # a folder may not be locked yet


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700, deleted at the end."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _MAX_LEN:
        parent = "/tmp"
    delete_abandoned(Path(parent))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = _lock(folder / _LOCK)
    assert lock is not None, "nobody else knows the folder"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def delete_abandoned(parent: Path) -> None:
    """Delete our user's folders whose supervisor is gone: its lock went with it."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            found = folder.stat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_SECONDS:
                continue
            lock = _lock(folder / _LOCK)
        except OSError:  # another process is deleting it, or it is not one of these folders
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """The descriptor of the locked file; None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
