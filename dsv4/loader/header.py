"""Safetensors headers, read and checked before anything touches the data. Pure bytes and JSON: no tensor is made here.

A file is: header length (u64, little endian), header (JSON object: name -> dtype, shape, data_offsets), data. Every
rule of the format is checked: a shard that was cut short or overwritten must be named before a model is half loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dsv4.config import shown, unique_keys
from dsv4.errors import Dsv4Error

MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 500
MAX_ELEMENTS = 2**48

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class CheckpointError(Dsv4Error, ValueError):
    """A checkpoint that is damaged, incomplete, or does not fit its config."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: bytes [start, end) of `file`, `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)


def read_header(file: Path) -> list[TensorInfo]:
    """Every tensor of a safetensors file in the order of its bytes; `CheckpointError` on any flaw."""
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{file}: {file_bytes} bytes are too few for a safetensors file")
            if is_lfs_pointer(prefix):
                raise CheckpointError(pointer_text(file))
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(f"{file}: header length {header_bytes} exceeds the file's {file_bytes} bytes")
            text = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    entries = _parse_json(file, text)
    data_start = 8 + header_bytes
    tensors = [_parse_entry(file, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.start, info.end))
    _check_ranges(file, tensors, data_start, file_bytes)
    return tensors


_POINTER = b"version https://git-lfs"


def is_lfs_pointer(beginning: bytes) -> bool:
    """Whether a file begins (8 bytes or more) as Git LFS writes in the place of one it has not fetched."""
    return len(beginning) >= 8 and beginning.startswith(_POINTER[: len(beginning)])


def pointer_text(file: Path) -> str:
    return (
        f"{file} is a Git LFS pointer of a few lines, not the file itself: run `git lfs pull` in {file.parent}, or "
        "give the model's name on the hub (ORG/NAME)"
    )


def parse_json_object(file: Path, text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated keys."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON and over-long numbers
        raise CheckpointError(f"{file}: {what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {what} must be a JSON object, found {type(value).__name__}")
    return value


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CheckpointError(f"{file}: the header does not start with '{{': not a safetensors file, or damaged")
    entries = parse_json_object(file, text, "the header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map strings to strings")
    return entries


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(file: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not name.isprintable() or len(name) > MAX_NAME_LENGTH:  # also lone surrogates, which no message can hold
        raise CheckpointError(f"{file}: tensor name {shown(name)} is not printable text of a sensible length")
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets, found {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has an unknown dtype {shown(dtype)}; expected one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_count(size) for size in shape):
        raise CheckpointError(f"{where} has an impossible shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{where} has impossible data_offsets {shown(offsets)}")
    begin, end = offsets
    expected = prod(shape) * ITEM_BYTES[dtype]
    if prod(shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{where} has an impossible shape {shape}")
    if begin > end or end - begin != expected:
        raise CheckpointError(f"{where} is {dtype} {shape}, {expected} bytes; its data_offsets {offsets} do not match")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, data_start + end)


def _check_ranges(file: Path, tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors lie end to end and fill the file exactly."""
    position = data_start
    for info in tensors:
        if info.start < position:
            raise CheckpointError(f"{file}: tensor {info.name!r} overlaps the one before it")
        if info.end > file_bytes:
            raise CheckpointError(
                f"{file} is truncated: tensor {info.name!r} ends at byte {info.end}, the file has {file_bytes}"
            )
        if info.start > position:
            raise CheckpointError(
                f"{file}: {info.start - position} bytes before tensor {info.name!r} belong to no tensor"
            )
        position = info.end
    if position != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes - position} bytes after the last tensor belong to no tensor")
