"""Tensors that stay where another process of this machine has them: on a GPU that both see (CUDA IPC).

`share` is the trainer's side: it describes tensors in plain JSON, each with the driver's handle of its memory. The
engine opens them as `SharedTensors`, and reads them as it reads tensors of its own. Until the engine has answered, the
trainer must neither free nor change them; afterwards it may.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from torch import Tensor

from dsv4.engine.weights import cuda_ipc
from dsv4.engine.weights.cuda_ipc import HANDLE_BYTES, Allocation, OpenMemory, SharingFailed
from dsv4.engine.weights.group import dtype_named
from dsv4.loader.header import CheckpointError
from dsv4.loader.memory_source import TensorSource

_MAX_DIMS = 8


@dataclass(frozen=True)
class SharedTensor:
    """shape, stride   in elements
    offset         of its first byte in the allocation
    handle         of the allocation, 64 bytes in base64
    storage_bytes  of the allocation
    device         the GPU's UUID
    """

    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int
    handle: str
    storage_bytes: int
    device: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """`CheckpointError` for what is no tensor, or does not lie in its allocation."""
        names = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or given.keys() != names:
            found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise CheckpointError(f"a shared tensor has the fields {', '.join(sorted(names))}; found {found}")
        made = cls(**given)
        made._check()
        return made

    def _check(self) -> None:
        for field in ("name", "dtype", "handle", "device"):
            if not isinstance(getattr(self, field), str):
                raise CheckpointError(f"{self.name!r}: {field} must be a string, found {getattr(self, field)!r}")
        itemsize = dtype_named(self.dtype, self.name).itemsize
        if not (_are_sizes(self.shape) and _are_sizes(self.stride) and len(self.shape) == len(self.stride)):
            raise CheckpointError(f"{self.name} cannot have the shape {self.shape!r} and the stride {self.stride!r}")
        if not _are_sizes([self.offset, self.storage_bytes]) or self.offset % itemsize:
            raise CheckpointError(f"{self.name}: offset {self.offset!r} in {self.storage_bytes!r} bytes is no place")
        if len(self.handle_bytes) != HANDLE_BYTES:
            raise CheckpointError(f"{self.name}: handle must be {HANDLE_BYTES} bytes in base64")
        if self.end > self.storage_bytes:
            raise CheckpointError(f"{self.name} ends at byte {self.end} of an allocation of {self.storage_bytes}")

    @property
    def handle_bytes(self) -> bytes:
        try:
            return base64.b64decode(self.handle, validate=True)
        except (binascii.Error, ValueError):
            return b""

    @property
    def end(self) -> int:
        """Of its last byte in the allocation."""
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * dtype_named(self.dtype, self.name).itemsize

    def over(self, memory: Tensor) -> Tensor:
        """It, in its allocation (uint8, all of it)."""
        if self.end > len(memory):
            raise CheckpointError(f"{self.name} ends at byte {self.end}, its allocation at {len(memory)}")
        data = memory[self.offset : self.end].view(dtype_named(self.dtype, self.name))
        return data.as_strided(self.shape, self.stride) if data.numel() else data.view(self.shape)


class SharedTensors(TensorSource):
    """Tensors of another process, open until `close`. `CheckpointError` if one cannot be, and all are closed again."""

    def __init__(self, tensors: Sequence[Mapping[str, Any]]) -> None:
        described = [SharedTensor.of(one) for one in tensors]
        self._open: dict[tuple[str, str], OpenMemory] = {}
        try:
            super().__init__([(one.name, one.over(self._memory(one))) for one in described])
        except BaseException:
            self.close()
            raise

    def _memory(self, one: SharedTensor) -> Tensor:
        place = one.device, one.handle
        if place not in self._open:
            try:
                self._open[place] = cuda_ipc.OpenMemory(one.handle_bytes, one.device)
            except SharingFailed as error:
                raise CheckpointError(
                    f"{one.name}: its memory cannot be opened: {error}. It must be that of another process of this "
                    "machine, which still runs"
                ) from None
        return self._open[place].data

    def close(self) -> None:
        self.values = {}
        while self._open:
            self._open.popitem()[1].close()


def share(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """Describe tensors on GPUs, in JSON, for an engine on the same machine. They are complete when this returns: what
    was launched on their devices has run. `SharingFailed` for memory that cannot be shared."""
    given = [(name, one.detach()) for name, one in (tensors.items() if isinstance(tensors, Mapping) else tensors)]
    found: dict[int, Allocation] = {}  # torch puts many tensors into an allocation, and several into a storage
    described = []
    for name, tensor in given:
        storage = tensor.untyped_storage().data_ptr()
        place = found[storage] = found[storage] if storage in found else _allocation(name, tensor)
        one = SharedTensor(
            name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()),
            tensor.data_ptr() - place.base, base64.b64encode(place.handle).decode(), place.num_bytes, place.device,
        )  # fmt: skip
        described.append(asdict(one))
    for device in {tensor.device for _, tensor in given}:
        cuda_ipc.wait_for(device)
    return described


def _allocation(name: str, tensor: Tensor) -> Allocation:
    try:
        return cuda_ipc.allocation_of(tensor)
    except SharingFailed as error:
        raise SharingFailed(
            f"{name}: {error}. Memory of torch's allocator can be shared unless PYTORCH_CUDA_ALLOC_CONF asks for "
            "expandable_segments or backend:cudaMallocAsync"
        ) from None


def _are_sizes(numbers: object) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MAX_DIMS
        and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in numbers)
    )
