"""`RanksControl`: commands to the engines of all ranks; `ShareControl`: what it has the others do to their shares."""

from collections.abc import Sequence
from math import inf
from typing import Any

from dsv4.dist.control import Progress
from dsv4.engine.control import EngineControl
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.engine.weight_update import WeightUpdate, open_source
from dsv4.loader import progress as loader_progress
from dsv4.loader.checkpoint import Checkpoint
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

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None, resumes: bool | None = None) -> None:
        super().sleep(level, tags, resumes)
        self._engine.tell("sleep", level=level, tags=tags, resumes=False, patience=inf)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """All ranks at once: a captured step is replayed once, and its exchange waits for the other ranks'."""
        waking = self._engine.ask_all("wake", tags=tags)
        super().wake(tags)
        self._engine.answers(waking, inf)

    def _check_shares(self, folder: Checkpoint | None, search_scales: bool) -> None:
        assert folder is not None, "tensors were refused before"
        where = str(folder.path.resolve())
        self._engine.tell("check_share", folder=where, search_scales=search_scales, patience=inf)

    def _write(self, update: WeightUpdate, progress: loader_progress.Progress = False) -> None:
        """All ranks at once."""
        writing = self._engine.ask_all("write_share")
        super()._write(update, progress)
        self._engine.answers(writing, inf)

    def set_weight_version(self, version: str) -> str:
        found = super().set_weight_version(version)
        self._engine.tell("set_weight_version", version=version)
        return found


class ShareControl(EngineControl):
    """Of a rank besides the first: two commands more. What comes before and after an update is rank 0's to say."""

    def __init__(self, llm: Any, backend: Backend, progress: Progress) -> None:
        super().__init__(llm, backend)
        self._progress, self.on_turn = progress, progress.turn
        self._verbs |= {"check_share": self.check_share, "write_share": self.write_share}
        self._update: WeightUpdate | None = None

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None, resumes: bool | None = None) -> None:
        with self._progress.busy():
            super().sleep(level, tags, resumes)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        with self._progress.busy():
            super().wake(tags)

    def check_share(self, folder: str, search_scales: bool) -> None:
        """`CheckpointError` if this rank's experts and the rest of the folder cannot be taken."""
        checkpoint = open_source(folder, self._llm.config)
        assert checkpoint is not None
        self._update = WeightUpdate(checkpoint, self._target(search_scales))

    def write_share(self) -> None:
        assert self._update is not None, "checked before"
        self._update.run()
        self._update = None
        self._llm.engine.gate.refusal = None  # where it slept with its weights dropped
