"""`WeightGroup`: named tensors from a trainer's process: torch.distributed broadcasts, gloo on CPUs, NCCL on GPUs.

The trainer is rank 0 and makes the store, as torch's rendezvous of `tcp://address:port` does; engines come behind it.
`send` is the trainer's side, `receive` the engine's: names, dtypes and shapes reach it by another way (HTTP), so that
nothing that arrives is unpickled. Stores have the prefixes of torch's own groups, so a trainer may also make its side
with `torch.distributed` (`PrefixStore(name, store)`, a group of that name).
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4.loader.header import CheckpointError
from dsv4.loader.memory_source import TENSOR_DTYPES
from dsv4.request import RequestError

BACKENDS = ("gloo", "nccl")
_TIMEOUT = timedelta(minutes=5)  # for the others to join, and for one tensor
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TENSOR_DTYPES}


class WeightGroup:
    """One member of a group. `device`: where its tensors are."""

    def __init__(
        self, address: str, port: int, *, rank: int, world_size: int, device: torch.device | str = "cpu",
        backend: str = "gloo", name: str = "weight_update_group", timeout: timedelta = _TIMEOUT,
    ) -> None:  # fmt: skip
        if backend not in BACKENDS:
            raise RequestError(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}", field="backend")
        if not 0 <= rank < world_size:
            raise RequestError(f"rank must be from 0 to {world_size - 1}, found {rank}", field="rank_offset")
        self.device = torch.device("cpu") if backend == "gloo" else torch.device(device)
        if backend == "nccl" and self.device.type != "cuda":
            raise RequestError("backend nccl needs an engine on a GPU: use gloo", field="backend")
        store: Any = dist.TCPStore(address, port, world_size, rank == 0, timeout)
        for prefix in (name, f"{name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)
        self._rank = rank
        if backend == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            torch.cuda.set_device(self.device)
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send to all engines, in the order that was announced to them."""
        for _, tensor in tensors:
            self._broadcast(tensor.detach().to(self.device).contiguous())

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """What the trainer sends next. `CheckpointError` for a dtype no checkpoint has, before anything is read."""
        known = [dtype_named(dtype, name) for name, dtype in zip(names, dtypes, strict=True)]
        for name, dtype, shape in zip(names, known, shapes, strict=True):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
            self._broadcast(tensor)
            yield name, tensor

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        data = tensor.view(-1).view(torch.uint8) if tensor.element_size() == 1 else tensor
        self._group.broadcast([data], options).wait()

    def close(self) -> None:
        """Leave. The others need not."""
        self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def dtype_named(name: str, tensor: str) -> torch.dtype:
    """`bfloat16` or `torch.bfloat16`."""
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{tensor} is {name}, expected one of: {', '.join(_DTYPES)}")
    return dtype
