"""What the GPUs of an architecture have, in one place: launchers ask `architecture()`, kernels the functions below it.

| | 80 | 89 | 90 | 100, 103 | 120 |
|---|---|---|---|---|---|
| launches that overlap, the copy engine (TMA) | | | x | x | x |
| E4M3 as a type: conversions, tensor cores | | x | x | x | x |
| warp groups' products (wgmma), from shared memory | | | x | | |
| kernels in Gluon, for many rows | | | x | | |
| tensor memory, where products of a loop live | | | | x | |
| shared memory of a program, KB | 163 | 99 | 227 | 227 | 99 |

Where something is missing, a kernel does without in another form: the same arithmetic, run in the interpreter too. The
interpreter has everything but Gluon and tensor memory; a test that wants the other forms sets `INTERPRETED`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.lib.guard import HAS_TRITON, IS_INTERPRETED

ARCHITECTURES = (80, 89, 90, 100, 103, 120)
INTERPRETED = 0  # the architecture that the interpreter stands for; 0: none
_DRIVERS: Any = importlib.import_module("triton.runtime").driver if HAS_TRITON else None
H200_MULTIPROCESSORS = 132  # what launch tables were timed on, and what a machine without a GPU stands for


@dataclass(frozen=True)
class Architecture:
    """Of one GPU: 80 is Ampere, 89 Ada, 90 Hopper, 100 and 103 Blackwell, 120 its workstation form; 0 in the
    interpreter."""

    number: int

    @property
    def has_overlap(self) -> bool:
        return self.number == 0 or self.number >= 90

    @property
    def has_copy_engine(self) -> bool:
        return self.number == 0 or self.number >= 90

    @property
    def has_e4m3(self) -> bool:
        return self.number == 0 or self.number >= 89

    @property
    def has_warp_groups(self) -> bool:
        return self.number in (0, 90)

    @property
    def has_wide_kernels(self) -> bool:
        """Kernels in Gluon, for many rows: written for Hopper, and not for the interpreter."""
        return self.number == 90

    @property
    def shared_bytes(self) -> int:
        """That one program may have."""
        return 1024 * {80: 163, 89: 99, 120: 99}.get(self.number, 227)


def architecture() -> Architecture:
    """Of the GPU that kernels are compiled for."""
    if IS_INTERPRETED:
        return Architecture(INTERPRETED)
    return _of_driver(_DRIVERS.active, _DRIVERS.active.get_current_device())


@cache  # launchers ask several times, and a driver takes microseconds to answer
def _of_driver(driver: Any, device: int) -> Architecture:
    return Architecture(int(driver.get_current_target().arch))


# Triton then follows no further what a kernel depends on; the target is part of its cache's key
setattr(architecture, "__triton_builtin__", True)  # noqa: B010


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the GPU at hand; of an H200 where there is none."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return H200_MULTIPROCESSORS
    gpu = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(gpu).multi_processor_count


def blackwell_registers(limit: int) -> dict[str, int]:
    """A launch option where ptxas for Blackwell would otherwise take fewer registers than the kernel needs, and spill a
    few bytes."""
    return {"maxnreg": limit} if architecture().number >= 100 else {}


def overlapping(is_wanted: bool = True) -> dict[str, bool]:
    """A launch option: it may begin while the launch before it still runs, and its kernel calls `pdl_wait`."""
    return {"launch_pdl": True} if is_wanted and architecture().has_overlap else {}


def code_tensor(codes: Tensor) -> Tensor:
    """E4M3 codes as kernels take them: where the GPU does not have the type, as bytes. Other tensors as they are."""
    is_bytes = codes.dtype == torch.float8_e4m3fn and not architecture().has_e4m3
    return codes.view(torch.uint8) if is_bytes else codes


# ---- inside kernels, known when they are compiled ----


def known_at_compile_time(function: Callable[..., Any]) -> Any:
    """A function of constants that kernels may call."""
    return importlib.import_module("triton.runtime.jit").constexpr_function(function) if HAS_TRITON else function


@known_at_compile_time
def launches_overlap() -> bool:
    return not IS_INTERPRETED and architecture().has_overlap


@known_at_compile_time
def has_e4m3() -> bool:
    return architecture().has_e4m3
