"""Numbers between host and device without waiting: out of pinned memory, and into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. On a GPU the copy is only launched; torch keeps the pinned source until then."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies of device tensors to the host, launched when this is made; `wait` gives them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copied: torch.cuda.Event | None = None
        # a copy to the host that does not block lands in pinned memory; on a CPU it is a copy all the same, since the
        # next step may write where this one did
        self._tensors = tuple(tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors)
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(on_gpu[0].device))

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host. Waits for the device, no longer than for these copies."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
