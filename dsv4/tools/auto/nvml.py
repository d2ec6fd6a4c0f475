"""The GPUs that CUDA programs of this process will see, asked of the driver's own library. No torch, no CUDA context:
memory is read without taking any."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4.errors import Dsv4Error
from dsv4.tools.auto.machine import Accelerator

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_SM_CLOCK, _MEMORY_CLOCK = 1, 2


class NoDriver(Dsv4Error, RuntimeError):
    """The driver cannot be asked; the text says why."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_gpus(environment: Mapping[str, str]) -> tuple[Accelerator, ...]:
    """In CUDA's order. `NoDriver` if the driver is missing or broken."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        raise NoDriver(f"{LIBRARY} of NVIDIA's driver is not installed") from None
    _check(library, library.nvmlInit_v2(), "start")
    try:
        count = ctypes.c_uint()
        _check(library, library.nvmlDeviceGetCount_v2(ctypes.byref(count)), "count GPUs")
        handles = [_handle(library, idx) for idx in range(count.value)]
        names = [_text(library, library.nvmlDeviceGetUUID, handle) for handle in handles]
        return tuple(
            _gpu(library, handles[idx], names[idx]) for idx in visible(environment.get("CUDA_VISIBLE_DEVICES"), names)
        )
    finally:
        library.nvmlShutdown()


class LoadMeter:
    """What one GPU does at the moment: clocks in MHz of its multiprocessors and of its memory, and watts."""

    def __init__(self, uuid: str) -> None:
        """`NoDriver` where the driver cannot say."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NoDriver(f"{LIBRARY} of NVIDIA's driver is not installed") from None
        _check(self._library, self._library.nvmlInit_v2(), "start")
        self._handle = ctypes.c_void_p()
        asked = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle))
        _check(self._library, asked, f"open {uuid}")

    def read(self) -> dict[str, float]:
        library, found = self._library, ctypes.c_uint()
        load: dict[str, float] = {}
        for name, clock in (("sm_mhz", _SM_CLOCK), ("memory_mhz", _MEMORY_CLOCK)):
            _check(library, library.nvmlDeviceGetClockInfo(self._handle, clock, ctypes.byref(found)), "read a clock")
            load[name] = found.value
        _check(library, library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(found)), "read the power")
        return load | {"watts": found.value / 1000}

    def close(self) -> None:
        self._library.nvmlShutdown()


def visible(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Which GPUs CUDA shows: a list ends at its first word that names none; one GPU twice shows none."""
    if text is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for word in (part.strip() for part in text.split(",")):
        idx = int(word) if word.isdigit() else _by_uuid(word, uuids)
        if idx is None or idx >= len(uuids):
            break
        if idx in found:
            return []
        found.append(idx)
    return found


def _by_uuid(word: str, uuids: Sequence[str]) -> int | None:
    """The one GPU whose name begins so."""
    matching = [idx for idx, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _handle(library: Any, idx: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(library, library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(idx), ctypes.byref(handle)), f"open GPU {idx}")
    return handle


def _gpu(library: Any, handle: ctypes.c_void_p, uuid: str) -> Accelerator:
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "read memory")
    asked = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    _check(library, asked, "read the architecture")
    name = _text(library, library.nvmlDeviceGetName, handle)
    return Accelerator(name, memory.total, memory.free, 10 * major.value + minor.value, uuid)


def _text(library: Any, ask: Any, handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(library, ask(handle, text, ctypes.c_uint(_TEXT_BYTES)), "read a name")
    return text.value.decode("utf-8", "replace")


def _check(library: Any, status: int, what: str) -> None:
    if status == 0:
        return
    try:
        library.nvmlErrorString.restype = ctypes.c_char_p
        reason = library.nvmlErrorString(status).decode("utf-8", "replace")
    except AttributeError:
        reason = f"status {status}"
    raise NoDriver(f"NVIDIA's driver could not {what}: {reason}")
