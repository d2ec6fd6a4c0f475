"""Clocks and power of the GPU while something is measured, sampled by a thread beside it.

An H200 that reaches its power limit lowers its clock: two times are comparable only if their clocks are.
"""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from typing import Any, Protocol

SAMPLE_SECONDS = 0.02


class Meter(Protocol):
    def read(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Load:
    """Of a `with` block; `summary` afterwards."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            for name, value in self._meter.read().items():
                self._samples[name].append(value)
            if self._ended.wait(SAMPLE_SECONDS):
                return

    def summary(self) -> dict[str, dict[str, Any]]:
        """Least, median and most of each; building and warming up is in it too."""
        return {
            name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
            for name, values in self._samples.items()
        }


def open_meter() -> Meter | None:
    """Of the GPU that this process uses; None where the driver cannot say, and a line why."""
    import torch

    from dsv4.tools.auto.nvml import LoadMeter, NoDriver

    try:
        meter = LoadMeter(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        meter.read()
    except NoDriver as error:
        print(f"records have no clocks and no power: {error}", flush=True)
        return None
    return meter
