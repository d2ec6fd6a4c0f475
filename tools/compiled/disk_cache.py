"""`DiskCache`: text kept by a key that is the hash of all it depends on, so that nothing in it can be out of date."""

import hashlib
import os
import tempfile
from pathlib import Path


def content_key(*parts: str) -> str:
    """A name for these parts, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class DiskCache:
    """A folder of texts. Several processes may read and write it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> str | None:
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except OSError:
            return None

    def write(self, key: str, text: str) -> None:
        """Whole or not at all. A folder that cannot be written keeps nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, encoding="utf-8", delete=False) as file:
                file.write(text)
            os.replace(file.name, self.folder / key)
        except OSError:
            return
