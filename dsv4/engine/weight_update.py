"""`WeightUpdate`: new weights into a model that runs, in place: captured graphs, addresses and kernels stay.

A source is checked whole before the first byte changes: names, shapes, formats, tables. Then one part of the model at a
time (a layer, an MTP block, a DSpark head, embedding and head) is read, prepared as at load, and copied into the
tensors in use. The extra memory is one such part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule
from dsv4.engine.offload.load import ExpertsOnTheirWay
from dsv4.engine.offload.pool import ExpertPool
from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import AnyWeight, QuantTensor, as_loaded, dequantize
from dsv4.loader.assemble import ParameterStore
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.memory_source import TensorSource
from dsv4.loader.names import Role
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.resolve import Source, plan_load
from dsv4.loader.weights import check_tables, expert_by_expert, read_weight
from dsv4.model.assign import assign
from dsv4.model.parameters import BlockParams, ModelParams
from dsv4.model.prepare import prepare_block
from dsv4.ops.backend import Backend

WeightSource = str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def open_source(source: WeightSource, config: ModelConfig) -> Checkpoint:
    """A checkpoint folder of the same model, or named tensors of this process. Reads headers only."""
    if not isinstance(source, (str, Path)):
        return TensorSource(source)
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
    """An update that fits: made by checking it, carried out by `run`.

    params         of the model, as its backend wants them
    backend        that prepared them
    pool           of offloaded experts, if there is one
    dequantize_to  the dtype of every weight in `exact` numerics; None keeps stored formats
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, params: ModelParams, backend: Backend, *,
        pool: ExpertPool | None = None, dequantize_to: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint, self._config, self._params, self._backend = checkpoint, config, params, backend
        self._pool = pool
        self._dequantize_to = dequantize_to
        self.plan = plan_load(checkpoint, config)
        num_drafts = len(params.draft_blocks)
        if num_drafts and not self.plan.num_mtp:
            raise CheckpointError(f"{checkpoint.path} has no mtp.* tensors; the engine's drafter needs new weights too")
        self._schedule = build_schedule(config, with_mtp=num_drafts > 0)
        self._sources = [one for one in self.plan.sources if num_drafts or not one.tensor.name.startswith("mtp.")]
        if dequantize_to is None:
            self._check_formats()
        check_tables(checkpoint, self.plan, config)

    @property
    def is_from_memory(self) -> bool:
        return isinstance(self.checkpoint, TensorSource)

    @property
    def nbytes(self) -> int:
        """What will be read."""
        return sum(source.nbytes for source in self._sources)

    def run(self, progress: Progress = False) -> None:
        """Part by part, in the order of the source's files. If it raises, the weights are neither old nor new."""
        parts: dict[str, list[Source]] = {}
        for source in self._sources:
            parts.setdefault(self._part_of(source.tensor.name), []).append(source)
        with byte_progress(progress, self.nbytes, "updating weights") as advance:
            for part, sources in parts.items():
                self._replace(part, sources)
                advance(sum(source.nbytes for source in sources))
        self.checkpoint.close()
        if self._params.embed.is_cuda:
            torch.cuda.synchronize()

    def _part_of(self, name: str) -> str:
        """`layers.3`, `mtp.0`, or `ends`; a DSpark head is one part."""
        block, number, *_ = f"{name}.".split(".")
        if block == "mtp" and self._params.dspark is not None:
            return "mtp"
        return f"{block}.{number}" if block in ("layers", "mtp") else "ends"

    def _replace(self, part: str, sources: list[Source]) -> None:
        home = None if self._pool is None else ExpertsOnTheirWay(self._pool, self._pool.layers)
        store = ParameterStore(self._config, self._params.embed.device, home)
        for source in sources if home is None else expert_by_expert(sources):
            weight = read_weight(self.checkpoint, source, self._config)
            if self._dequantize_to is not None and source.tensor.role is not Role.TABLE:
                weight = dequantize(weight, self._dequantize_to)
            store.put(source.tensor, weight)
        for live, fresh in self._built(part, store):
            assign(live, fresh, part)
        if home is not None:
            home.forget_copies()

    def _built(self, part: str, store: ParameterStore) -> Iterator[tuple[Any, Any]]:
        """Pairs of what runs and what takes its place."""
        params, num_layers = self._params, self._config.num_hidden_layers
        block, _, number = part.partition(".")
        if block == "ends":
            fresh = store.ends()
            for name in ("embed", "lm_head", "head"):
                yield getattr(params, name), getattr(fresh, name)
        elif block == "layers":
            yield params.layers[int(number)], self._prepared(store.block(self._schedule[int(number)]))
        elif params.dspark is not None:
            head = store.dspark(self._schedule[num_layers:])
            head.blocks[:] = map(self._prepared, head.blocks)
            yield params.dspark, head
        else:
            layer: LayerSpec = self._schedule[num_layers + int(number)]
            draft = store.mtp(int(number), layer)
            draft.block = self._prepared(draft.block)
            yield params.mtp[int(number)], draft

    def _prepared(self, block: BlockParams) -> BlockParams:
        return prepare_block(block, self._backend.layout)

    def _check_formats(self) -> None:
        """Weights keep the formats they were loaded in: kernels, graphs and memory were made for those."""
        live = dict(_named_weights(_Names(self._config, "meta").build(len(self._params.draft_blocks)), self._params))
        wrong = []
        for source in self._sources:
            expected, found = _format_of(live[source.tensor.parameter]), _format_of_source(source)
            if expected != found:
                wrong.append(f"{source.data} is {found}, the engine runs {expected}")
        if wrong:
            more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CheckpointError(f"{self.checkpoint.path}: {wrong[0]}{more}; `dsv4 quantize` makes other formats")


class _Names(ParameterStore):
    """Builds the tree of parameters with names in place of tensors."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        super().__init__(config, device)
        self._weights = _OwnName()

    def _plain(self, name: str) -> Any:
        return name


class _OwnName(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return name


def _named_weights(names: Any, live: Any) -> Iterator[tuple[str, AnyWeight | ShuffledTensor]]:
    """Every weight with its parameter's name."""
    if isinstance(names, str):
        yield names, live
    elif isinstance(names, list):
        for pair in zip(names, live, strict=True):
            yield from _named_weights(*pair)
    elif is_dataclass(names):
        stack = getattr(live, "stack", None)  # offloaded experts
        for place, field in enumerate(fields(names)):
            yield from _named_weights(
                getattr(names, field.name), getattr(live, field.name) if stack is None else stack[place]
            )


def _format_of(weight: AnyWeight | ShuffledTensor) -> str:
    if isinstance(weight, ShuffledTensor):
        return str(weight.format)
    loaded = as_loaded(weight)
    return str(loaded.format) if isinstance(loaded, QuantTensor) else str(loaded.dtype).removeprefix("torch.")


_PLAIN_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64"}


def _format_of_source(source: Source) -> str:
    if source.format.quant is not None:
        return str(source.format.quant)
    return "float32" if source.tensor.role is Role.CONTROL else _PLAIN_DTYPES[source.format.dtype]
