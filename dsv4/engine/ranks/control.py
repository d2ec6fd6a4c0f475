"""`RanksControl`: commands to the engines of all ranks."""

from __future__ import annotations

from typing import Any

from dsv4.engine.control import EngineControl
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.ops.backend import Backend


class RanksControl(EngineControl):
    """Rank 0's control. It forwards each command to the other ranks, unless rank 0 itself refuses it; where the engine
    does so, nothing stands here."""

    def __init__(self, llm: Any, backend: Backend, engine: RanksEngine) -> None:
        super().__init__(llm, backend)
        self._engine = engine

    def pause(self, mode: Any = "keep") -> None:
        super().pause(mode)
        self._engine.begin_pause(mode)

    def set_weight_version(self, version: str) -> str:
        found = super().set_weight_version(version)
        self._engine.tell("set_weight_version", version=version)
        return found
