"""`Checkpoint`: the tensors of a folder of safetensors files, checked by their headers, read one at a time.

Opening reads headers only. Data is memory-mapped shard by shard, at most two at a time and anew after half a gigabyte,
so the peak is near the size of what the caller keeps.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.loader.header import CheckpointError, TensorInfo, parse_json_object, read_header

__all__ = ["INDEX_FILE", "Checkpoint", "CheckpointError", "TensorInfo"]

INDEX_FILE = "model.safetensors.index.json"
_MAX_OPEN_SHARDS = 2  # a weight and its scale may lie in neighbouring shards
_MAX_TOUCHED_BYTES = 2**29  # then shards are mapped anew: what was read and let go stops counting as this process's
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


class Checkpoint:
    """Read-only view of a checkpoint. `tensors` maps every stored name to its `TensorInfo`, in file order."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self._shards: OrderedDict[Path, Any] = OrderedDict()
        self._order = {name: place for place, name in enumerate(self.tensors)}
        self._num_touched = 0  # bytes read since the shards were mapped

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """A folder (with an index, or just safetensors files) or one file. Checks every header and the index."""
        root = Path(path)
        if root.is_file():
            return cls(root, _collect([root]))
        if not root.is_dir():
            raise CheckpointError(f"{root} does not exist; expected a checkpoint folder or a .safetensors file")
        if (root / INDEX_FILE).is_file():
            return cls(root, _open_indexed(root))
        files = sorted(root.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{root} holds neither {INDEX_FILE} nor any .safetensors file")
        _check_numbering(root, files)
        return cls(root, _collect(files))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def file_state(self) -> str:
        """SHA-256 over names, lengths and times of change of the files: other files, another text."""
        state = hashlib.sha256()
        folder = self.path.parent if self.path.is_file() else self.path
        for file in sorted({info.file for info in self.tensors.values()} | {folder / "config.json"}):
            stat = file.stat()
            state.update(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
        return state.hexdigest()

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """`names` sorted so that reading them walks through each shard once."""
        return sorted(names, key=self._order.__getitem__)

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, a view of the mapped file: copy what you keep.

        E8M0 comes back as the uint8 codes (the bits, never a numeric conversion), E4M3 as torch.float8_e4m3fn.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}")
        if self._num_touched > _MAX_TOUCHED_BYTES:
            self.close()
        self._num_touched += info.nbytes
        try:
            tensor: Tensor = self._shard(info.file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: reading tensor {name!r} failed: {error}") from None
        if tuple(tensor.shape) != info.shape:
            raise CheckpointError(f"{info.file} changed while it was open: {name!r} is now {tuple(tensor.shape)}")
        return tensor.view(torch.uint8) if info.dtype == "F8_E8M0" else tensor

    def close(self) -> None:
        """Unmap every shard. Tensors already read stay valid; reading again opens the shard again."""
        self._num_touched = 0
        while self._shards:
            self._shards.popitem()[1].__exit__(None, None, None)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _shard(self, file: Path) -> Any:
        if file in self._shards:
            self._shards.move_to_end(file)
            return self._shards[file]
        while len(self._shards) >= _MAX_OPEN_SHARDS:
            self._shards.popitem(last=False)[1].__exit__(None, None, None)
        self._shards[file] = safe_open(file, framework="pt", device="cpu")
        return self._shards[file]


def _collect(files: Iterable[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if info.name in tensors:
                raise CheckpointError(f"tensor {info.name!r} is in both {tensors[info.name].file} and {file}")
            tensors[info.name] = info
    return tensors


def _open_indexed(root: Path) -> dict[str, TensorInfo]:
    index = root / INDEX_FILE
    try:
        text = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from None
    weight_map = parse_json_object(index, text, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if not shard.isprintable() or len(shard) > 200 or Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{index}: {outside[0][:80]!a} is not the name of a file in this folder")
    missing = [shard for shard in shards if not (root / shard).is_file()]
    if missing:
        raise CheckpointError(f"{root}: {_first(missing)} named by the index {_are(missing)} missing")
    tensors = _collect(root / shard for shard in shards)
    absent = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].file.name != shard]
    if absent:
        raise CheckpointError(f"{index} places {_first(absent)} in a shard that does not hold {_it(absent)}")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"{index} does not name {_first(unlisted)}, which its shards hold")
    return tensors


def _check_numbering(root: Path, files: list[Path]) -> None:
    """Without an index, the names model-00001-of-00003 still say how many files there must be."""
    groups: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = _SHARD_NAME.fullmatch(file.name)
        if match:
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), numbers in groups.items():
        missing = [f"{stem}-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1) if n not in numbers]
        if missing:
            raise CheckpointError(f"{root}: {_first(missing)} {_are(missing)} missing")


def _first(names: list[str]) -> str:
    shown = ", ".join(ascii(name)[1:-1] for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
