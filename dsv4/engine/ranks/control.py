"""`RanksControl`: commands to the engines of all ranks (`EngineControl` of each)."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from dsv4.engine.control import EngineControl
from dsv4.engine.engine import Engine
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.ops.backend import Backend
from dsv4.request import RequestError


class RanksControl(EngineControl):
    """Rank 0's control. It forwards each command to the other ranks, unless rank 0 itself refuses it."""

    def __init__(self, llm: Any, backend: Backend, engine: RanksEngine) -> None:
        super().__init__(_OwnView(llm, engine.own), backend)
        self._engine = engine
        for verb in ("pause", "resume", "reset_prefix_cache", "set_weight_version"):
            self._verbs[verb] = getattr(self, verb)

    def pause(self, mode: Any = "keep") -> None:
        super().pause(mode)
        self._engine.begin_pause(mode)

    def resume(self, later: bool = False) -> None:
        self._engine.tell("resume", {})
        super().resume(later)

    def reset_prefix_cache(self, running: bool = False, name: str | None = None) -> None:
        if self._engine.has_work:
            raise RequestError(
                "the prefix cache can be reset only while no request runs, or while the engine is paused"
            )
        name = name or uuid4().hex
        self._engine.tell("reset_prefix_cache", {"running": running, "name": name})
        super().reset_prefix_cache(running, name)
        self._engine.forget_prefixes()

    def set_weight_version(self, version: str) -> str:
        found = super().set_weight_version(version)
        self._engine.tell("set_weight_version", {"version": version})
        return found

    def info(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return super().info() | {
            "num_requests": stats.num_waiting + stats.num_running, "num_slots": self._engine.num_slots
        }  # fmt: skip


class _OwnView:
    """An `LLM`, and this rank's engine as its engine."""

    def __init__(self, llm: Any, engine: Engine) -> None:
        self.__dict__.update(_llm=llm, engine=engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._llm, name, value)
