"""Segments as files: safetensors, with a checksum over header and data. Nothing here trusts what it reads. No torch.

The header's metadata say what the file is: the fingerprint of everything that decides bits, the key of the prefix, its
parent's, and how many blocks lie before and after. A header must be, byte for byte, the one its own content makes;
the checksum covers that and the data. A file is written under another name and renamed when it is complete.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.errors import Dsv4Error

FORMAT = "dsv4 prefix 2"
SUFFIX = ".safetensors"
_MAX_HEADER = 2**20
_KEY_DIGITS = 64
_FIELDS = ("checksum", "end", "fingerprint", "format", "key", "parent", "start")


class SegmentFileError(Dsv4Error, ValueError):
    """A file that is no segment, is damaged, or belongs to something else; the message says which and why."""


@dataclass(frozen=True)
class Tensors:
    """Names, safetensors dtypes and shapes of a segment's parts, in the order of their bytes."""

    parts: tuple[tuple[str, str, tuple[int, ...]], ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Label:
    """Which segment a file holds. Keys are lower-case hexadecimal; a first segment has no parent."""

    fingerprint: str
    key: str
    parent: str
    start: int
    end: int


def file_name(key: str) -> str:
    return f"{key}{SUFFIX}"


def make_header(label: Label, tensors: Tensors, checksum: str) -> bytes:
    """Length and JSON, padded with spaces to a multiple of eight."""
    content: dict[str, Any] = {
        "__metadata__": {
            "checksum": checksum, "end": str(label.end), "fingerprint": label.fingerprint, "format": FORMAT,
            "key": label.key, "parent": label.parent, "start": str(label.start),
        }
    }  # fmt: skip
    offset = 0
    for (name, dtype, shape), size in zip(tensors.parts, tensors.sizes, strict=True):
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(content, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def checksum_of(label: Label, tensors: Tensors, data: Iterable[Any]) -> str:
    digest = hashlib.sha256(make_header(label, tensors, ""))  # the fastest there is where the processor knows it
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def write_segment(path: Path, label: Label, tensors: Tensors, data: Sequence[Any]) -> int:
    """Bytes written. `OSError` if the disk does not take them; then nothing is left behind."""
    header = make_header(label, tensors, checksum_of(label, tensors, data))
    aside = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(header)
            for piece in data:
                file.write(piece)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return len(header) + tensors.num_bytes


def read_label(path: Path) -> tuple[Label, int]:
    """What a file says it is, by its header and its size alone, and its bytes. `SegmentFileError` if that is not a
    whole segment under its own name."""
    try:
        with path.open("rb") as file:
            label, header, content = _read_header(path, file)
        num_bytes = path.stat().st_size
    except OSError as error:
        raise SegmentFileError(f"{path} cannot be read: {error.strerror}") from None
    ends = [one["data_offsets"][1] for name, one in content.items() if name != "__metadata__"]
    if not ends or num_bytes != len(header) + max(ends):
        raise SegmentFileError(f"{path} is truncated or too long: {num_bytes} bytes")
    return label, num_bytes


def read_segment(path: Path, label: Label, tensors: Tensors, targets: Sequence[Any]) -> None:
    """The data of exactly this segment into writable buffers; `SegmentFileError` if anything differs from it."""
    try:
        with path.open("rb") as file:
            found, header, content = _read_header(path, file)
            if found != label:
                raise SegmentFileError(f"{path} holds another segment than its name states")
            checksum = content["__metadata__"]["checksum"]
            if header != make_header(label, tensors, checksum):
                raise SegmentFileError(f"{path} has a header that this engine would not write")
            for target in targets:
                if file.readinto(target) != len(target):
                    raise SegmentFileError(f"{path} is truncated")
            if file.read(1):
                raise SegmentFileError(f"{path} is too long")
    except OSError as error:
        raise SegmentFileError(f"{path} cannot be read: {error.strerror}") from None
    if checksum_of(label, tensors, targets) != checksum:
        raise SegmentFileError(f"{path} is damaged: its checksum does not match")


def verify_file(path: Path) -> Label:
    """Check a whole file without knowing the model; `SegmentFileError` says what is wrong."""
    label, _ = read_label(path)
    try:
        with path.open("rb") as file:
            _, header, content = _read_header(path, file)
            checksum = content["__metadata__"]["checksum"]
            parts = {name: one for name, one in content.items() if name != "__metadata__"}
            tensors = Tensors(
                tuple((name, one["dtype"], tuple(one["shape"])) for name, one in parts.items()),
                tuple(one["data_offsets"][1] - one["data_offsets"][0] for one in parts.values()),
            )
            if header != make_header(label, tensors, checksum):
                raise SegmentFileError(f"{path} has a header that this engine would not write")
            found = checksum_of(label, tensors, iter(lambda: file.read(2**20), b""))
    except OSError as error:
        raise SegmentFileError(f"{path} cannot be read: {error.strerror}") from None
    if found != checksum:
        raise SegmentFileError(f"{path} is damaged: its checksum does not match")
    return label


def _read_header(path: Path, file: Any) -> tuple[Label, bytes, dict[str, Any]]:
    length_bytes = file.read(8)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or not 2 <= length <= _MAX_HEADER:
        raise SegmentFileError(f"{path} is not a segment: it has no safetensors header")
    text = file.read(length)
    try:
        content = json.loads(text.decode("utf-8"))
        metadata = content["__metadata__"]
        is_whole = set(metadata) == set(_FIELDS) and all(isinstance(value, str) for value in metadata.values())
        if not is_whole or metadata["format"] != FORMAT:
            raise ValueError("its metadata is not that of a segment")
        label = Label(
            metadata["fingerprint"], metadata["key"], metadata["parent"], int(metadata["start"]), int(metadata["end"])
        )
        if not 0 <= label.start < label.end < 2**32 or bool(label.parent) != bool(label.start):
            raise ValueError("its block numbers are invalid")
        if not all(_is_key(key) for key in (label.key, label.parent or label.key)):
            raise ValueError("its keys are not hashes")
        for name, one in content.items():
            if name != "__metadata__":
                begin, end = one["data_offsets"]
                if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
                    raise ValueError("its tensor offsets are invalid")
                if not isinstance(one["dtype"], str) or not all(isinstance(size, int) for size in one["shape"]):
                    raise ValueError("its tensor shapes or dtypes are invalid")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SegmentFileError(f"{path} is not a segment: {error}") from None
    if path.name != file_name(label.key):
        raise SegmentFileError(f"{path} holds another segment than its name states")
    return label, length_bytes + text, content


def _is_key(text: str) -> bool:
    return len(text) == _KEY_DIGITS and all(digit in "0123456789abcdef" for digit in text)
