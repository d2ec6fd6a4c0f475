"""Memory of the GPUs people run this model on. No torch: plans are made on machines without one."""

import math
from dataclasses import dataclass

from dsv4.config import ConfigError

GIB = 2**30

# GiB a process sees as the device's total, rounded down; the CUDA context comes off it (see tools/plan.py). Boards
# differ by a few hundred MiB: pass the number itself where that matters.
GPU_GIB = {
    "b300": 267, "gb200": 184, "b200": 178, "h200": 139, "h20": 95, "rtx6000": 94, "h100": 79, "a100": 79,
    "rtx6000ada": 47, "l40s": 44, "a100-40": 39, "rtx5090": 31, "rtx4090": 23,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU by name, or just an amount of memory."""

    name: str
    usable_bytes: int


def known_gpus() -> tuple[Gpu, ...]:
    """Every named GPU, largest first."""
    return tuple(Gpu(name, gib * GIB) for name, gib in GPU_GIB.items())


def parse_gpu(text: str) -> Gpu:
    """A name of the table (any case) or a number of GiB, e.g. `h200`, `141`, `79.5`, `96GiB`."""
    name = text.strip().lower()
    if name in GPU_GIB:
        return Gpu(name, GPU_GIB[name] * GIB)
    try:
        gib = float(name.removesuffix("gib").strip())
    except ValueError:
        raise ConfigError(f"gpu must be one of {', '.join(GPU_GIB)} or a number of GiB, found {text!r}") from None
    if not (math.isfinite(gib) and 0 < gib <= 2**20):
        raise ConfigError(f"gpu memory must be a positive number of GiB, found {text!r}")
    return Gpu(f"{gib:g} GiB", int(gib * GIB))
