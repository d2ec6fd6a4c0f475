"""`Group`: bytes between ranks through a process group of torch: gloo on CPUs, NCCL on GPUs. Nothing is ever added up.

Not torch's default process group: that is global to a process, and belongs to the program that uses this one.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4.dist.errors import ExchangeDamaged, PeerLost

# A rank that dies or stops is seen within seconds (control.py); this only bounds how long a bug could wait.
_TIMEOUT = timedelta(minutes=10)
_LOOK_UP = timedelta(seconds=0.5)
_CHECK_BYTES = 8
_CPU = torch.device("cpu")


class Group(Protocol):
    """What an exchange needs. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where the tensors of calls are."""

    def all_gather(self, mine: Tensor) -> Tensor:
        """uint8 [B], the same B on every rank -> [N, B], by rank."""

    def all_to_all(self, mine: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """uint8 rows [sum(num_sent), W], those for rank 0 first -> [sum(num_received), W], those of rank 0 first."""

    def broadcast(self, data: Tensor) -> None:
        """uint8 [B]: those of rank 0, written in place on every other rank."""


class TorchGroup:
    """A process group of torch.

    tick     called when a call begins and ends: a sign of life (control.py)
    is_lost  asked while a call waits: whether another rank is known to have failed, so that it waits in vain. None
             where a call does not wait (NCCL: its stream does)
    """

    def __init__(
        self, process_group: Any, tick: Callable[[], None] = lambda: None, is_lost: Callable[[], bool] | None = None,
        device: torch.device = _CPU,
    ) -> None:  # fmt: skip
        self._group = process_group
        self.device = device
        self._tick = tick
        self._is_lost = is_lost

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    @property
    def size(self) -> int:
        return int(self._group.size())

    def all_gather(self, mine: Tensor) -> Tensor:
        gathered = mine.new_empty((self.size, mine.shape[0]))
        self._wait(lambda: self._group._allgather_base(gathered, mine.unsqueeze(0)))
        return gathered

    def all_to_all(self, mine: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        received = mine.new_empty((sum(num_received), mine.shape[1]))
        self._wait(
            lambda: self._group.alltoall_base(received, mine.contiguous(), list(num_received), list(num_sent))
        )
        return received

    def broadcast(self, data: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(lambda: self._group.broadcast([data], options))

    def _wait(self, start: Callable[[], Any]) -> None:
        self._tick()
        try:
            work = start()
            while not self._is_done(work):
                if self._is_lost is not None and self._is_lost():
                    # destroyed, a group waits for what is pending, holding the interpreter's lock: it must never be
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                    raise PeerLost("an exchange will never be complete: another rank has failed")
        except RuntimeError as error:
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(f"an exchange failed: {str(error).splitlines()[0]}") from error
        self._tick()

    def _is_done(self, work: Any) -> bool:
        """Waits, but not for ever."""
        if self._is_lost is None:
            work.wait()
            return True
        try:
            work.wait(_LOOK_UP)
        except RuntimeError:
            if work.is_completed():  # it failed; otherwise only our patience has ended
                raise
            return False
        return True


class CheckedGroup:
    """A group whose messages carry a checksum: what a transport damages is an error that names sender and receiver."""

    def __init__(self, inner: Group) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def all_gather(self, mine: Tensor) -> Tensor:
        gathered = self._inner.all_gather(torch.cat([mine, _checksum(mine)]))
        for sender, row in enumerate(gathered):
            self._compare(sender, row[:-_CHECK_BYTES], row[-_CHECK_BYTES:])
        return gathered[:, :-_CHECK_BYTES]

    def all_to_all(self, mine: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        received = self._inner.all_to_all(mine, num_sent, num_received)
        sums = torch.stack([_checksum(rows) for rows in mine.split(list(num_sent))])  # [N, 8]
        expected = self._inner.all_to_all(sums, [1] * self.size, [1] * self.size)
        for sender, rows in enumerate(received.split(list(num_received))):
            self._compare(sender, rows, expected[sender])
        return received

    def broadcast(self, data: Tensor) -> None:
        self._inner.broadcast(data)
        self._compare(0, data, self._inner.all_gather(_checksum(data))[0])

    def _compare(self, sender: int, data: Tensor, expected: Tensor) -> None:
        if not torch.equal(_checksum(data), expected):
            raise ExchangeDamaged(f"what rank {sender} sent arrived damaged at rank {self.rank}: checksums differ")


def _checksum(data: Tensor) -> Tensor:
    """uint8 [8]."""
    value = zlib.crc32(data.contiguous().cpu().numpy().data)
    return torch.tensor([value], dtype=torch.int64).view(torch.uint8).to(data.device)


def gloo_group(
    store: Any, rank: int, size: int, host: str, tick: Callable[[], None] = lambda: None,
    is_lost: Callable[[], bool] = lambda: False,
) -> TorchGroup:  # fmt: skip
    """For CPUs. `host`: the address this rank is reached at."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return TorchGroup(gloo(dist.PrefixStore("gloo", store), rank, size, options), tick, is_lost)


def nccl_group(
    store: Any, rank: int, size: int, device: torch.device, tick: Callable[[], None] = lambda: None
) -> TorchGroup:  # fmt: skip
    """For GPUs that cannot write into one another's memory: between nodes, or without peer access. `device`: this
    rank's own."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _TIMEOUT
    return TorchGroup(nccl(dist.PrefixStore("nccl", store), rank, size, options), tick, device=device)
