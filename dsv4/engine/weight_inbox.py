"""`WeightInbox`: tensors of a trainer's group, call by call, until they are a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.engine.weight_group import WeightGroup
from dsv4.loader.header import CheckpointError
from dsv4.loader.memory_source import TensorSource
from dsv4.loader.resolve import resolve_tensors
from dsv4.model.transformer import Transformer
from dsv4.request import RequestError


class Receiver(Protocol):
    config: ModelConfig
    model: Transformer


class WeightInbox:
    def __init__(self, llm: Receiver) -> None:
        self._llm = llm
        self._group: WeightGroup | None = None
        self._tensors: dict[str, Tensor] = {}
        self._missing: list[str] = []

    def join(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, backend: str = "nccl",
        group_name: str = "weight_update_group",
    ) -> None:  # fmt: skip
        """Join the trainer's group, whose rank 0 waits at that address; the one before is left."""
        if self._group is not None:
            self._group.close()
            self._group = None
        self.clear()
        device = self._llm.model.params.embed.device
        try:
            self._group = WeightGroup(
                master_address, master_port, rank=rank_offset, world_size=world_size, device=device, backend=backend,
                name=group_name,
            )  # fmt: skip
        except RuntimeError as error:  # torch's: no master there, or a member is missing
            raise RequestError(f"master_address: no group at {master_address}:{master_port}: {error}") from None

    def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
        """Whether the model is whole with these. `CheckpointError` if they can be no part of it: all are dropped."""
        if self._group is None:
            raise RequestError("there is no group to receive from: init_group first")
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: expected as many")
        twice = [name for name in names if name in self._tensors]
        if twice or len(set(names)) < len(names):
            self.clear()
            raise CheckpointError(f"{twice[0] if twice else 'a tensor'} was sent twice; all were dropped")
        try:
            self._tensors |= self._group.receive(names, dtypes, shapes)
        except RuntimeError as error:
            self._group = None
            self.clear()
            raise RequestError(f"the group is lost: {error}; init_group again") from None
        config = self._llm.config
        source = TensorSource(self._tensors)
        problems: dict[str, Any] = resolve_tensors(source, config).problems
        self._missing = problems.pop("missing", [])
        if problems:
            self.clear()
            kind, texts = next(iter(problems.items()))
            raise CheckpointError(f"the tensors received do not fit the model: {kind}: {texts[0]}; all were dropped")
        return not self._missing

    def take(self) -> dict[str, Tensor]:
        tensors, self._tensors = self._tensors, {}
        return tensors

    def clear(self) -> None:
        self._tensors, self._missing = {}, []

    def check_empty(self) -> None:
        """`RequestError` while a model has come in part."""
        if self._tensors:
            raise RequestError(
                f"new weights have come in part: {len(self._tensors)} tensors are here, {len(self._missing)} missing, "
                f"such as {self._missing[0]}: send the rest, or update_weights with a whole model"
            )
