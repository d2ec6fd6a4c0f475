"""`RanksControl`: commands to the engines of all ranks; `ShareControl`: what it has the others do to their shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from dsv4.dist.control import Progress
from dsv4.dist.group import Group
from dsv4.engine.control import EngineControl
from dsv4.engine.ranks.engine import RanksEngine
from dsv4.engine.weights.group import Coming, RanksGroup
from dsv4.engine.weights.target import WeightTarget
from dsv4.engine.weights.update import IncomingWeights, WeightUpdate, open_source
from dsv4.loader import progress as loader_progress
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.memory_source import TensorSource
from dsv4.ops.backend import Backend
from dsv4.request import RequestError

_JOIN_SECONDS = 5.0  # behind rank 0


class RanksControl(EngineControl):
    """Rank 0's control. It forwards each command to the other ranks, unless rank 0 itself refuses it; where the engine
    does so, nothing stands here."""

    def __init__(self, llm: Any, backend: Backend, engine: RanksEngine, group: Group) -> None:
        super().__init__(llm, backend)
        self._engine, self._group = engine, RanksGroup(group)

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

    def _check_shares(self, folder: Checkpoint, search_scales: bool) -> None:
        where = str(folder.path.resolve())
        self._engine.tell("check_share", folder=where, search_scales=search_scales, patience=inf)

    def _write(self, update: WeightUpdate, progress: loader_progress.Progress = False) -> None:
        """All ranks at once."""
        writing = self._engine.ask_all("write_share")
        super()._write(update, progress)
        self._engine.answers(writing, inf)

    def _let_join(self, group: Mapping[str, Any]) -> None:
        """Whether they have is asked for by `receive_weights`."""
        first, size = group["rank_offset"], group["world_size"]
        if first + self._llm.num_ranks > size:
            raise RequestError(
                f"world_size must leave room for {self._llm.num_ranks} ranks from rank_offset {first} on, found {size}",
                field="world_size",
            )
        for one in self._engine.remotes:
            one.control("init_group", {**group, "rank_offset": first + one.rank})

    @contextmanager
    def _receiving(self, coming: Coming, incoming: IncomingWeights) -> Iterator[None]:
        is_first = incoming.is_empty
        self._engine.tell("check_group")
        incoming.begin()  # once they receive, they hear of nothing else
        receiving = self._engine.ask_all("receive_share", **coming._asdict(), is_first=is_first, is_trainers=True)
        try:
            yield
        finally:
            self._engine.answers(receiving, inf)

    def _sharing_target(self, search_scales: bool = False) -> WeightTarget:
        """Whose parts go to the other ranks before they are written here."""
        target, others = self._target(search_scales), {"search_scales": search_scales, "is_first": True}

        @contextmanager
        def sharing(source: TensorSource, names: Sequence[str]) -> Iterator[None]:
            tensors = {name: source.values[name] for name in names}
            writing = self._engine.ask_all("receive_share", **Coming.of(tensors)._asdict(), **others)
            others["is_first"] = False
            with self._engine.working():
                self._group.send(tensors.items())
            yield
            self._engine.answers(writing, inf)

        target.sharing = sharing
        return target

    def set_weight_version(self, version: str) -> str:
        found = super().set_weight_version(version)
        self._engine.tell("set_weight_version", version=version)
        return found


class ShareControl(EngineControl):
    """Of a rank besides the first: some commands more. What comes before and after an update is rank 0's to say."""

    def __init__(self, llm: Any, backend: Backend, progress: Progress, group: Group) -> None:
        super().__init__(llm, backend)
        self._progress, self.on_turn, self._group = progress, progress.turn, RanksGroup(group)
        self._verbs |= {
            "check_share": self.check_share, "write_share": self.write_share, "check_group": self.check_group,
            "receive_share": self.receive_share,
        }  # fmt: skip
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

    def check_group(self) -> None:
        """`RequestError` unless this rank has its place in the trainer's group: rank 0 has."""
        self._inbox.group(_JOIN_SECONDS)

    def receive_share(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], is_first: bool,
        is_trainers: bool = False, search_scales: bool = False,
    ) -> None:  # fmt: skip
        """Tensors of a new model, of which rank 0 has checked what it can: from the trainer's group, or from rank 0."""
        with self._progress.busy():
            if is_first:
                self._inbox.incoming = None
            incoming = self._inbox.next(lambda: IncomingWeights(self._target(search_scales), lambda: None))
            group = self._inbox.group() if is_trainers else self._group
            if self._inbox.receive(incoming, group, Coming(names, dtypes, shapes)):
                self._llm.engine.gate.refusal = None
