"""`WeightUpdate` and `IncomingWeights`: whole sources of new weights, checked before the first byte changes; and
tensors that come one by one, written as soon as their part of the model is whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.engine.weights.target import WeightTarget
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError, TensorInfo
from dsv4.loader.memory_source import TensorSource
from dsv4.loader.names import Naming, Role, detect_naming
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.resolve import NVFP4_SUFFIXES, SCALE_SUFFIXES, Source, match_tensors, plan_load

WeightSource = str | Path | TensorSource | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def open_source(source: WeightSource, config: ModelConfig) -> Checkpoint | None:
    """A checkpoint folder of the same model, or named tensors of this process; None for tensors that come one by one.
    Reads headers only."""
    if isinstance(source, TensorSource):
        return source
    if not isinstance(source, (str, Path)):
        return None if isinstance(source, Iterator) else TensorSource(source)
    checkpoint = Checkpoint.open(source)
    if (Path(source) / "config.json").exists():
        found = ModelConfig.from_pretrained(source)
        names = [field.name for field in fields(config)]
        differing = [name for name in names if getattr(found, name) != getattr(config, name)]
        if differing:
            name = differing[0]
            raise CheckpointError(
                f"{source} is another model: its {name} is {getattr(found, name)}, the engine's {getattr(config, name)}"
            )
    return checkpoint


class WeightUpdate:
    """A whole source that fits: made by checking it, carried out by `run`."""

    def __init__(self, checkpoint: Checkpoint, target: WeightTarget) -> None:
        self.checkpoint, self._target = checkpoint, target
        plan = plan_load(checkpoint, target.config)
        if target.has_drafter and not plan.num_mtp:
            raise CheckpointError(f"{checkpoint.path} has no mtp.* tensors; the engine's drafter needs new weights too")
        self._sources = [one for one in plan.sources if target.has_drafter or not one.tensor.name.startswith("mtp.")]
        target.check_formats(self._sources)
        target.check_values(checkpoint, self._sources)

    def run(self, progress: Progress = False) -> None:
        """Part by part, in the order of the source's files. If it raises, the weights are neither old nor new."""
        parts: dict[str, list[Source]] = {}
        for source in self._sources:
            parts.setdefault(self._target.part_of(source.tensor.name), []).append(source)
        with byte_progress(progress, sum(one.nbytes for one in self._sources), "updating weights") as advance:
            for part, sources in parts.items():
                self._target.write(part, sources, self.checkpoint)
                advance(sum(source.nbytes for source in sources))
        self.checkpoint.close()
        if self._target.weights.embed.is_cuda:
            torch.cuda.synchronize()


class IncomingWeights:
    """Tensors in any order, each held until its part of the model is whole; then the part is checked and written.

    In the order of layers, one layer is held. `on_begin` is called before the first part is written.
    """

    def __init__(self, target: WeightTarget, on_begin: Callable[[], None]) -> None:
        self.target, self._on_begin, self._has_begun = target, on_begin, False
        self._held: dict[str, dict[str, Tensor]] = {}  # by part
        self._written: set[str] = set()
        self._last = ""
        self._borrowed: set[str] = set()

    def announce(self, infos: Iterable[TensorInfo]) -> None:
        """`CheckpointError` if tensors that are to come can be no part of the model; nothing has changed then."""
        coming: dict[str, dict[str, TensorInfo]] = {}
        for info in infos:
            part = self.target.part_of(info.name)
            if part in self._written or info.name in coming.get(part, {}) or info.name in self._held.get(part, {}):
                raise CheckpointError(f"{info.name} is given twice")
            coming.setdefault(part, {})[info.name] = info
        for part, tensors in coming.items():
            self._match(part, TensorSource(self._held.get(part, {})).tensors | tensors)

    def add(self, name: str, tensor: Tensor) -> None:
        """The next one. What is whole once another part begins is written."""
        part = self.target.part_of(name)
        if part in self._written or name in self._held.get(part, {}):
            raise CheckpointError(f"{name} is given twice")
        if part != self._last:
            self._write(self._whole(self._last))
        self._last = part
        self._held.setdefault(part, {})[name] = tensor

    def hold(self, given: TensorSource) -> None:
        """Tensors that were announced, for the next `settle`; what that leaves is copied: they may go then."""
        for name, tensor in given.values.items():
            self._held.setdefault(self.target.part_of(name), {})[name] = tensor
        self._borrowed |= given.values.keys()

    def settle(self) -> bool:
        """Write what is whole, all of it checked before; whether the model is."""
        self._write([whole for part in list(self._held) for whole in self._whole(part)])
        for held in self._held.values():
            held.update({name: held[name].clone() for name in self._borrowed & held.keys()})
        self._borrowed.clear()
        return self._written >= set(self.target.parts)

    def finish(self) -> None:
        """`CheckpointError` if the model is not whole."""
        if not self.settle():
            raise CheckpointError(f"the given tensors are no whole model: {self.what_is_missing()}")
        if self.target.weights.embed.is_cuda:
            torch.cuda.synchronize()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come yet."""
        return not self._written and not self._held

    def begin(self) -> None:
        """From now on the weights are not the old ones."""
        if not self._has_begun:
            self._has_begun = True
            self._on_begin()

    def what_is_missing(self) -> str:
        parts = [part for part in self.target.parts if part not in self._written]
        held = sum(map(len, self._held.values()))
        _, missing = self._match(parts[0], TensorSource(self._held.get(parts[0], {})).tensors)
        return (
            f"{len(parts)} of its {len(self.target.parts)} parts are not whole ({held} of their tensors are here); "
            f"missing: {missing[0]}"
        )

    def _match(self, part: str, tensors: Mapping[str, TensorInfo]) -> tuple[list[Source], list[str]]:
        """A part's sources, and what is missing of it. `CheckpointError` for what can be no part of the model."""
        if part.startswith("mtp") and not self.target.has_drafter and self.target.config.num_draft_layers:
            return [], []  # the engine has no use for them
        expected = self.target.parts.get(part, [])
        # the few tensors of the ends do not say which spelling they have
        namings = list(Naming) if part == "ends" else [detect_naming(tensors)]
        found = [match_tensors(tensors, self.target.config, naming, expected) for naming in namings]
        sources, problems = min(
            found, key=lambda one: (len(one[1].keys() - {"missing"}), len(one[1].get("missing", [])))
        )
        missing = problems.pop("missing", [])
        strange = [name for name in problems.pop("unexpected", []) if not _waits_for_weight(name, tensors, missing)]
        problems |= {"unexpected": strange} if strange else {}
        if problems:
            kind, texts = next(iter(problems.items()))
            raise CheckpointError(f"the given tensors do not fit the model: {kind}: {texts[0]}")
        self.target.check_formats(sources)
        return sources, missing

    def _whole(self, part: str) -> list[tuple[str, list[Source], TensorSource]]:
        """The part with its sources, once all of it is held and has been checked; else nothing."""
        held = self._held.get(part, {})
        # stacks of Hugging Face's are two tensors for all experts; to look for nothing after every tensor is slow
        fewest = sum(tensor.role is not Role.EXPERT for tensor in self.target.parts.get(part, [])) + 2
        if not held or (len(held) < fewest and part in self.target.parts and part != "ends"):
            return []
        source = TensorSource(held)
        sources, missing = self._match(part, source.tensors)
        if missing:
            return []
        self.target.check_values(source, sources)
        return [(part, sources, source)]

    def _write(self, parts: Iterable[tuple[str, list[Source], TensorSource]]) -> None:
        for part, sources, source in parts:
            if sources:
                self.begin()
                self.target.write(part, sources, source)
                self._written.add(part)
            del self._held[part]


def _waits_for_weight(name: str, tensors: Collection[str], missing: Collection[str]) -> bool:
    """Whether it is a scale that came before its weight."""
    base = next((name.removesuffix(end) for end in (*SCALE_SUFFIXES, *NVFP4_SUFFIXES) if name.endswith(end)), None)
    return base is not None and f"{base}.weight" not in tensors and f"{base}.weight" in missing
