"""`WeightInbox`: tensors of a trainer's group, call by call, until they are a whole model."""

from collections.abc import Sequence
from datetime import timedelta
from math import prod
from pathlib import Path

import torch

from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weight_group import WeightGroup, dtype_named
from dsv4.engine.weight_update import IncomingWeights
from dsv4.loader.header import CheckpointError, TensorInfo
from dsv4.loader.memory_source import TENSOR_DTYPES
from dsv4.request import RequestError

_WAIT_SECONDS = 300


class WeightInbox:
    """incoming  what has come of a model, if it has come in part"""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None
        self.incoming: IncomingWeights | None = None

    def join(
        self, device: torch.device, address: str, port: int, *, rank: int, world_size: int, backend: str, name: str,
        timeout: float | None,
    ) -> None:  # fmt: skip
        """Join the trainer's group, whose rank 0 waits at that address; the one before is left."""
        if self._group is not None:
            self._group.close()
            self._group = None
        seconds = _WAIT_SECONDS if timeout is None else timeout
        try:
            self._group = WeightGroup(
                address, port, rank=rank, world_size=world_size, device=device, backend=backend, name=name,
                timeout=timedelta(seconds=seconds),
            )  # fmt: skip
        except RuntimeError as error:  # torch's: no master there, or a member is missing
            raise RequestError(f"master_address: no group at {address}:{port} in {seconds} s: {error}") from None

    def receive(
        self, incoming: IncomingWeights, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> bool:  # fmt: skip
        """Whether the model is whole with these. `CheckpointError`, before anything is allocated or received, if they
        can be no part of it. What has come and was not written is dropped by any error."""
        if self._group is None:
            raise RequestError("there is no group to receive from: init_group first")
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: expected as many")
        self.incoming = None
        incoming.announce(_info(*one) for one in zip(names, dtypes, shapes, strict=True))
        try:
            for name, tensor in self._group.receive(names, dtypes, shapes):
                incoming.add(name, tensor)
        except RuntimeError as error:
            self._group = None
            raise RequestError(f"the group is lost: {error}; init_group again") from None
        is_whole = incoming.settle()
        if not is_whole:
            self.incoming = incoming
        return is_whole

    def check_empty(self) -> None:
        """`WeightsIncomplete` while a model has come in part."""
        if self.incoming is not None:
            raise WeightsIncomplete(
                f"new weights have come in part: {self.incoming.what_is_missing()}; send the rest, or update_weights "
                "with a whole model"
            )


def _info(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    found = dtype_named(dtype, name)
    if not isinstance(name, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CheckpointError(f"{name} cannot have the shape {list(shape)}")
    num_bytes = prod(shape) * found.itemsize
    return TensorInfo(name, TENSOR_DTYPES[found], tuple(shape), Path("the announced tensors"), 0, num_bytes)
