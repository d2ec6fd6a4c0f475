"""`Checkpoint`: the tensors of a folder of safetensors files, checked by their headers, read one at a time.

Opening reads headers only. Data is memory-mapped shard by shard, at most two at a time and anew after half a gigabyte,
so the peak is near the size of what the caller keeps.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4.loader.files import INDEX_FILE, find_tensors
from dsv4.loader.header import CheckpointError, TensorInfo

__all__ = ["INDEX_FILE", "Checkpoint", "CheckpointError", "TensorInfo"]

# how a tensor of a file is held: E8M0 as the uint8 codes
STORED_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64, "I64": torch.int64,
    "F64": torch.float64,
}  # fmt: skip
_MAX_OPEN_SHARDS = 2  # a weight and its scale may lie in neighbouring shards
_MAX_TOUCHED_BYTES = 2**29  # then shards are mapped anew: what was read and let go stops counting as this process's


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
        return cls(root, find_tensors(root))

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

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}")
        return info

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, a view of the mapped file: copy what you keep.

        E8M0 comes back as the uint8 codes (the bits, never a numeric conversion), E4M3 as torch.float8_e4m3fn.
        """
        info = self.info(name)
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
