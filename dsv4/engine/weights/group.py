"""`WeightGroup`: named tensors from a trainer's process: torch.distributed broadcasts, gloo on CPUs, NCCL on GPUs.

The trainer is rank 0 and makes the store, as torch's rendezvous of `tcp://address:port` does; engines come behind it.
`send` is the trainer's side, `receive` the engine's: names, dtypes and shapes reach it by another way (HTTP), so that
nothing that arrives is unpickled. Stores have the prefixes of torch's own groups, so a trainer may also make its side
with `torch.distributed` (`PrefixStore(name, store)`, a group of that name).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4.dist.group import Group
from dsv4.loader.header import CheckpointError, TensorInfo
from dsv4.loader.memory_source import TENSOR_DTYPES
from dsv4.request import RequestError

BACKENDS = ("gloo", "nccl")
_TIMEOUT = timedelta(minutes=5)  # for the others to join, and for one tensor
_PIECE_BYTES = 64 << 20
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TENSOR_DTYPES}


class Coming(NamedTuple):
    """Tensors that are to come, in this order."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        dtypes = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
        return cls(list(tensors), dtypes, [list(one.shape) for one in tensors.values()])

    def infos(self) -> list[TensorInfo]:
        """`CheckpointError` for what no tensor of a checkpoint can be."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            found = f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes"
            raise RequestError(f"{found}: expected as many")
        return [_info(*one) for one in zip(*self, strict=True)]


class Broadcasts:
    """Named tensors from rank 0 of a group to all others, on `device`."""

    device: torch.device

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send to all engines, in the order that was announced to them."""
        for _, tensor in tensors:
            self._broadcast(tensor.detach().to(self.device).contiguous())

    def receive(self, coming: Coming) -> Iterator[tuple[str, Tensor]]:
        """What rank 0 sends next."""
        for name, dtype, shape in zip(*coming, strict=True):
            tensor = torch.empty(tuple(shape), dtype=dtype_named(dtype, name), device=self.device)
            self._broadcast(tensor)
            yield name, tensor

    def _broadcast(self, tensor: Tensor) -> None:
        raise NotImplementedError


class RanksGroup(Broadcasts):
    """The ranks of one model among themselves. In pieces: a rank shows after each that it goes on."""

    def __init__(self, group: Group) -> None:
        self._group, self.device = group, group.device

    def _broadcast(self, tensor: Tensor) -> None:
        for piece in tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES):
            self._group.broadcast(piece)


class WeightGroup(Broadcasts):
    """One member of a trainer's group. `device`: where its tensors are."""

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


def _info(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    found = dtype_named(dtype, name)
    if not isinstance(name, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CheckpointError(f"{name} cannot have the shape {list(shape)}")
    num_bytes = prod(shape) * found.itemsize
    return TensorInfo(name, TENSOR_DTYPES[found], tuple(shape), Path("the announced tensors"), 0, num_bytes)


def dtype_named(name: str, tensor: str) -> torch.dtype:
    """`bfloat16` or `torch.bfloat16`."""
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{tensor} is {name}, expected one of: {', '.join(_DTYPES)}")
    return dtype
