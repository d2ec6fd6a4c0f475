"""Writing safetensors: what a file will hold is decided first, its data comes one weight at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.loader.header import ITEM_BYTES
from dsv4.loader.layout import StoredTensor

DEFAULT_SHARD_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class StoredWeight:
    """Tensors that are made together (a weight and its scales); `make` gives their data in the same order."""

    parts: tuple[StoredTensor, ...]
    make: Callable[[], list[Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def split_shards(weights: Iterable[StoredWeight], shard_bytes: int) -> Iterator[list[StoredWeight]]:
    """In order, at most `shard_bytes` a shard; a larger single weight gets its own."""
    shard: list[StoredWeight] = []
    filled = 0
    for weight in weights:
        if shard and filled + weight.nbytes > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(weight)
        filled += weight.nbytes
    yield shard


def shard_name(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def index_text(shards: Sequence[Sequence[StoredWeight]]) -> str:
    """The index file of these shards."""
    weight_map = {
        part.name: shard_name(number, len(shards))
        for number, shard in enumerate(shards, start=1)
        for part in _in_file_order(shard)
    }
    total_size = sum(weight.nbytes for shard in shards for weight in shard)
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=1)


def shard_header(weights: Sequence[StoredWeight]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, and where each tensor's data begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for part in _in_file_order(weights):
        starts[part.name] = position
        end = position + part.nbytes
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}


def write_shard(file: Path, weights: Sequence[StoredWeight], advance: Callable[[int], None]) -> None:
    """Write one file, each weight at the place its header announces; it is on the disk when this returns."""
    prefix, starts = shard_header(weights)
    with _naming(file), file.open("wb") as stream:
        stream.write(prefix)
        for weight in weights:
            for part, data in zip(weight.parts, weight.make(), strict=True):
                raw = data.contiguous().flatten().view(torch.uint8).numpy()
                assert raw.nbytes == part.nbytes, (part, data.shape, data.dtype)
                stream.seek(starts[part.name])
                stream.write(raw.data)
                advance(part.nbytes)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """An error of a full disk names the file that had no room there."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            error.filename = str(file)
        raise


def _in_file_order(weights: Sequence[StoredWeight]) -> list[StoredTensor]:
    """Widest items first keeps every tensor aligned to its item size."""
    parts = [part for weight in weights for part in weight.parts]
    return sorted(parts, key=lambda part: -ITEM_BYTES[part.dtype])
