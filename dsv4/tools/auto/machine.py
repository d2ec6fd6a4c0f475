"""`Machine`: what a server can have here. One description, read in one place; tests give their own. No torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4.tools.memory_check import free_host_bytes

DRIVER_FILE = Path("/dev/nvidiactl")  # there where the driver is loaded, in containers too


@dataclass(frozen=True)
class Accelerator:
    """A GPU as CUDA shows it; `architecture` is 90 for Hopper (`dsv4/ops/lib/arch.py`)."""

    name: str
    total_bytes: int
    free_bytes: int
    architecture: int = 90
    uuid: str = ""


@dataclass(frozen=True)
class Machine:
    """gpus        those that CUDA shows, in its order
    why_no_gpu  where there are none: why
    host_bytes  host memory that this process can still take; None where the system does not say
    """

    gpus: tuple[Accelerator, ...] = ()
    why_no_gpu: str = "this machine has no NVIDIA GPU"
    host_bytes: int | None = None

    def as_if_idle(self) -> Machine:
        """As every machine of its kind is: processes that are started apart must choose alike. Whether host memory does
        is seen when the model is loaded."""
        gpus = tuple(replace(gpu, free_bytes=gpu.total_bytes) for gpu in self.gpus)
        return replace(self, gpus=gpus, host_bytes=None)


def read_machine() -> Machine:
    """This one."""
    gpus, why = _gpus()
    return Machine(gpus, why, free_host_bytes())


def _gpus() -> tuple[tuple[Accelerator, ...], str]:
    from dsv4.tools.auto.nvml import NoDriver, read_gpus

    if not DRIVER_FILE.exists():
        return (), Machine.why_no_gpu
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "+cpu"
    if version.endswith("+cpu"):
        return (), f"torch {version} is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return (), "Triton is not installed, and the kernels need it"
    # CUDA would put the fastest first; the driver's library, nvidia-smi and --device cuda:N count by the bus
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        found = read_gpus(os.environ)
    except NoDriver as error:
        return (), str(error)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found, f"CUDA_VISIBLE_DEVICES={shown} hides every GPU" if shown is not None else Machine.why_no_gpu
