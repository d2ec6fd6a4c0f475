"""What a GPU ran during a call, by its profiler."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """One kernel or copy: microseconds since some start, and the stream."""

    name: str
    start: float
    duration: float
    stream: int

    @property
    def end(self) -> float:
        return self.start + self.duration


def launches_of(call: Callable[[], Any], device: torch.device) -> list[Launch] | None:
    """All of them in order of their start; None where they cannot be seen (no GPU, no profiler). A process's first
    profile starts slowly: call twice where gaps matter."""
    if device.type != "cuda":
        call()
        return None
    from torch.autograd import DeviceType

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        events = profiler.events() or ()
    except RuntimeError:  # the machine keeps its counters to itself
        return None
    found = [
        Launch(plain_name(event.name), event.time_range.start, event.time_range.elapsed_us(), event.device_resource_id)
        for event in events
        if event.device_type == DeviceType.CUDA and event.time_range.elapsed_us() > 0
    ]
    return sorted(found, key=lambda launch: launch.start) or None


def busy_us(launches: Iterable[Launch]) -> float:
    """The union of the intervals in which something ran; `launches` in order of their start."""
    total, reached = 0.0, float("-inf")
    for launch in launches:
        total += max(0.0, launch.end - max(launch.start, reached))
        reached = max(reached, launch.end)
    return total


def plain_name(name: str) -> str:
    """The function's own name: no return type, namespaces, template or call arguments."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = shorter
    return name.split()[-1].split("::")[-1]
