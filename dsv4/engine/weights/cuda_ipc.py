"""Memory of a GPU between processes of one machine, by the driver's own calls: 64 bytes name an allocation.

Not torch's way (`UntypedStorage._share_cuda_`): that also opens a file which the sender names, and the form of its
handles is torch's own and changes with it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import Dsv4Error

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class SharingFailed(Dsv4Error, RuntimeError):
    """The driver will not share, or open, memory of a GPU."""


@dataclass(frozen=True)
class Allocation:
    """Memory of this process, as torch took it from the driver. `device`: the GPU's UUID."""

    base: int
    num_bytes: int
    handle: bytes
    device: str


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class OpenMemory:
    """An allocation of another process. `data`: uint8, all of it."""

    def __init__(self, handle: bytes, device: str) -> None:
        index = _index_of(device)
        address, base, size = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_size_t()
        given = _Handle.from_buffer_copy(handle)
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # the device's context is there, and this thread's own
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
            self._address, self._index = address, index
            try:
                _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
                self.data: Tensor = torch.as_tensor(_Bytes(address.value, size.value), device=f"cuda:{index}")
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()  # nothing reads it any more
            _call("cuIpcCloseMemHandle", self._address)


class _Bytes:
    """What torch makes a tensor over."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def allocation_of(tensor: Tensor) -> Allocation:
    """Where a tensor lies. `SharingFailed` for memory that no other process can open."""
    if not tensor.is_cuda:
        raise SharingFailed(f"it is on {tensor.device}, and only memory of a GPU is shared")
    base, size, handle = ctypes.c_ulonglong(), ctypes.c_size_t(), _Handle()
    with torch.cuda.device(tensor.device):
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_ulonglong(tensor.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return Allocation(base.value, size.value, bytes(handle.data), device)


def wait_for(device: torch.device) -> None:
    torch.cuda.synchronize(device)


def _index_of(device: str) -> int:
    found = [str(torch.cuda.get_device_properties(one).uuid) for one in range(torch.cuda.device_count())]
    if device not in found:
        raise SharingFailed(f"it is on GPU {device}, and this process sees {', '.join(found) or 'none'}")
    return found.index(device)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise SharingFailed(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
