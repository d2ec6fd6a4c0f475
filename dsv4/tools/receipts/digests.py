"""`checkpoint_parts`: digests of every byte of a checkpoint, layer by layer.

Those of a file are kept in the user's cache folder, under its place, size, inode and times: a server that starts again
need not read it again. The time of its last change of state (ctime) is among them, which no program sets.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsv4.config import ModelConfig
from dsv4.engine.fingerprint import config_parts, digest_of
from dsv4.engine.user_cache import cache_file, read_json, write_json
from dsv4.loader.checkpoint import Checkpoint, TensorInfo
from dsv4.loader.progress import Progress, byte_progress

_PIECE_BYTES = 2**22
_SETTLED_SECONDS = 2.0  # since its last change; a file that changes twice within a tick of the clock looks the same


def checkpoint_parts(checkpoint: Checkpoint, config: ModelConfig, progress: Progress = False) -> dict[str, str]:
    """A digest of every byte of each layer, each draft block and the rest, of the config and of the tokenizer. Where a
    tensor lies does not matter. Reads the files that it does not know, on several threads."""
    files = {info.file: _FileDigests(info.file) for info in checkpoint.tensors.values()}
    missing = [info for info in checkpoint.tensors.values() if info.name not in files[info.file].digests]
    num_bytes = sum(info.nbytes for info in missing)
    with (
        byte_progress(progress and bool(missing), num_bytes, "reading the weights once more, for their digests") as add,
        ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads,
    ):
        for info, digest in zip(missing, threads.map(_tensor_digest, missing), strict=True):
            files[info.file].digests[info.name] = digest
            add(info.nbytes)
    for file in {info.file for info in missing}:
        files[file].keep()
    units: dict[str, list[str]] = {}
    for info in sorted(checkpoint.tensors.values(), key=lambda info: info.name):
        digest = files[info.file].digests[info.name]
        units.setdefault(_unit(info.name), []).append(repr((info.name, info.dtype, info.shape, digest)))
    return {**config_parts(checkpoint, config), **{unit: digest_of(tensors) for unit, tensors in units.items()}}


class _FileDigests:
    """digests  of a file's tensors, those that are known"""

    def __init__(self, file: Path) -> None:
        self._file, self._state = file, _state(file)
        name = hashlib.blake2b(repr(self._state).encode(), digest_size=16).hexdigest()
        self._kept = cache_file("digests", name)
        self.digests: dict[str, str] = read_json(self._kept)

    def keep(self) -> None:
        """Unless it has changed meanwhile, or just before."""
        is_settled = time.time() - self._state[-1] / 1e9 > _SETTLED_SECONDS
        if is_settled and _state(self._file) == self._state:
            write_json(self._kept, self.digests)


def _state(file: Path) -> tuple[str, int, int, int, int, int]:
    """Another one for another content."""
    found = file.stat()
    return str(file.resolve()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _tensor_digest(info: TensorInfo) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        left = info.nbytes
        while left:
            piece = stream.read(min(left, _PIECE_BYTES))
            if not piece:
                raise OSError(f"{info.file} ends before tensor {info.name!r} does; it was changed while it was read")
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _unit(name: str) -> str:
    """`model.layers.3.mlp.gate.weight` -> `layers.3`."""
    found = re.search(r"\b(layers|mtp)\.\d+", name)
    return "embedding and head" if found is None else found[0]
