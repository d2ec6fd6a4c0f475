"""Numbers between host and device without waiting: out of pinned memory, and into it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. On a GPU the copy is only launched; torch keeps the pinned source until then."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory to write a device's numbers into, uninitialised: pinned for a GPU, so that `to_device` is one copy."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


class HostCopy:
    """Copies of device tensors to the host, launched when this is made; `wait` gives them. Without any, it
    waits all the same for what was launched on `device` before."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        # a copy to the host that does not block lands in pinned memory; on a CPU it is a copy all the same, since the
        # next step may write where this one did
        self._tensors = tuple(tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors)
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    @property
    def is_there(self) -> bool:
        """Whether `wait` would not wait."""
        return self._copied is None or self._copied.query()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host. Waits for the device, no longer than for these copies."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
