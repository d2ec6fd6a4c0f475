"""`WeightTarget`: the weights of a model that runs, written in place: captured graphs, addresses and kernels stay.

One part of the model at a time (a layer, an MTP block, a DSpark head, embedding and head) is read, prepared as at load,
and copied into the tensors in use; routed experts a few at a time. Beside the source, no part is in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch

from dsv4.config import ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.fingerprint import TensorsDigest
from dsv4.engine.offload.load import ExpertsOnTheirWay
from dsv4.engine.offload.pool import ExpertPool
from dsv4.formats.layouts import LayoutError, ShuffledTensor, check_values
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight, dequantize
from dsv4.formats.trees import assign, map_tensors
from dsv4.loader.assemble import ParameterStore
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.memory_source import TensorSource
from dsv4.loader.names import LogicalTensor, Role, expected_tensors
from dsv4.loader.quantise import Quantiser, finite_values
from dsv4.loader.resolve import Source, StoredFormat
from dsv4.loader.weights import expert_by_expert, own_sources, read_weight
from dsv4.model.parameters import BlockParams, ExpertParams, ModelParams
from dsv4.model.prepare import prepare_block, prepare_experts
from dsv4.ops.backend import Backend

_BLOCK = re.compile(r"\b(layers|mtp)\.(\d+)\.")
_EXPERTS_AT_ONCE = 8


class WeightTarget:
    """weights        of the model, as its backend wants them; kernels, graphs and memory were made for their `formats`
    backend        that prepared them
    pool           of offloaded experts, if there is one
    dequantize_to  the dtype of every weight in `exact` numerics; None keeps stored formats
    search         whether FP4 scales are searched where plain weights are rounded, as `dsv4 quantize` does by default
    experts        those of every layer that are here, all by default
    on_turn        called now and then
    sharing        while this rank writes what came from no file, other ranks get the same tensors
    digest         of the tensors written so far that came from no file
    """

    def __init__(
        self, config: ModelConfig, weights: ModelParams, backend: Backend, *, pool: ExpertPool | None = None,
        dequantize_to: torch.dtype | None = None, search: bool = False, experts: range | None = None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.config, self.weights, self._backend, self._pool = config, weights, backend, pool
        self._formats: dict[str, StoredFormat] = weights.formats
        self._dequantize_to, self._search, self._on_turn = dequantize_to, search, on_turn
        self.sharing: Callable[[TensorSource, Sequence[str]], AbstractContextManager[None]] = lambda *_: nullcontext()
        self._own = range(config.n_routed_experts) if experts is None else experts
        self._schedule = build_schedule(config, with_mtp=self.has_drafter)
        self.digest = TensorsDigest()

    @property
    def has_drafter(self) -> bool:
        return bool(self.weights.draft_blocks)

    def part_of(self, name: str) -> str:
        """Of a tensor in any spelling: `layers.3`, `mtp.0`, or `ends`; a DSpark head is one part."""
        found = _BLOCK.search(name)
        if found is None:
            return "ends"
        return "mtp" if found[1] == "mtp" and self.weights.dspark is not None else f"{found[1]}.{found[2]}"

    @cached_property
    def parts(self) -> dict[str, list[LogicalTensor]]:
        """The tensors of each part."""
        parts: dict[str, list[LogicalTensor]] = {}
        for tensor in expected_tensors(self.config, with_mtp=self.has_drafter):
            parts.setdefault(self.part_of(tensor.name), []).append(tensor)
        return parts

    # ---- checks, before anything is written ----

    def check_formats(self, sources: Iterable[Source]) -> None:
        """`CheckpointError` for a weight in another format than the engine's, unless it can be rounded to that."""
        if self._dequantize_to is not None:
            return
        wrong = []
        for source in sources:
            found, expected = StoredFormat.in_memory(source), self._formats[source.tensor.parameter]
            can_round = self._is_rounded(source) and expected.scale_dtype != "F32"
            if found != expected and not can_round:
                wrong.append(f"{source.data} is {found}, the engine runs {expected}")
        if wrong:
            more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CheckpointError(f"{wrong[0]}{more}; `dsv4 quantize` makes other formats")

    def check_values(self, checkpoint: Checkpoint, sources: Iterable[Source]) -> None:
        """`CheckpointError` for values that cannot be loaded, rounded or laid out. Of a folder, what would need all of
        its bytes a second time is left for the writing: plain weights to be rounded, and FP8 codes of experts."""
        in_memory = isinstance(checkpoint, TensorSource)
        # ranks that have all tensors find the same: none writes what another cannot
        for source in sources if in_memory else own_sources(sources, self._own):
            self._on_turn()
            if source.tensor.role is Role.TABLE:
                read_weight(checkpoint, source, self.config)
            elif self._dequantize_to is not None:
                continue
            elif self._is_rounded(source):
                if in_memory:
                    finite_values(source, read_weight(checkpoint, source, self.config))
            elif source.format.quant is not None and self._is_shuffled(source):
                is_large = source.format.quant is QuantFormat.FP8_BLOCK and source.tensor.role is Role.EXPERT
                if in_memory or not is_large:
                    try:
                        check_values(cast(QuantTensor, read_weight(checkpoint, source, self.config)))
                    except LayoutError as error:
                        raise CheckpointError(f"{source.data}: {error}") from None

    def _is_rounded(self, source: Source) -> bool:
        wanted = None if self._dequantize_to is not None else self._formats[source.tensor.parameter].quant
        return wanted is not None and source.format.quant is None

    def _is_shuffled(self, source: Source) -> bool:
        """Whether the kernels have it in their own order."""
        name = source.tensor.name
        if "experts." in name:
            ffn = self._block(name).ffn
            held = (ffn.shared if "shared_experts." in name else ffn.experts).matrices
            return isinstance(getattr(held, "stack", held)[0], ShuffledTensor)  # offloaded, or whole
        return name.endswith(".wo_a.weight") and isinstance(self._block(name).attn.wo_a, ShuffledTensor)

    def _block(self, name: str) -> BlockParams:
        found = _BLOCK.search(name)
        assert found is not None, name
        blocks = self.weights.layers if found[1] == "layers" else self.weights.draft_blocks
        return blocks[int(found[2])]

    # ---- writing ----

    def write(self, part: str, sources: Sequence[Source], checkpoint: Checkpoint) -> None:
        """If it raises, the part is neither old nor new."""
        if not isinstance(checkpoint, TensorSource):
            self._write(part, sources, checkpoint)
            return
        names = list(dict.fromkeys(name for source in sources for name in source.stored_names))
        with self.sharing(checkpoint, names):
            self._write(part, sources, checkpoint)
        for name in names:
            self.digest.add(name, checkpoint.read(name))

    def _write(self, part: str, sources: Sequence[Source], checkpoint: Checkpoint) -> None:
        blocks = [*self.weights.layers, *self.weights.draft_blocks]
        pool, device = self._pool, self.weights.embed.device
        home = _LiveExperts(blocks, self._backend) if pool is None else ExpertsOnTheirWay(pool, pool.layers)
        store = ParameterStore(self.config, device, home, self._own)
        quantiser = Quantiser(checkpoint, self.config, sources, search=self._search, device=device)
        for source in expert_by_expert(own_sources(sources, self._own)):
            self._on_turn()
            weight = read_weight(checkpoint, source, self.config)
            if self._is_rounded(source):
                weight = quantiser.quantise(source, weight, self._formats[source.tensor.parameter].quant)
            elif self._dequantize_to is not None and source.tensor.role is not Role.TABLE:
                weight = dequantize(weight, self._dequantize_to)
            store.put(source.tensor, weight)
        for live, fresh in self._built(part, store):
            assign(live, fresh, part)
        home.forget_copies()

    def _built(self, part: str, store: ParameterStore) -> Iterator[tuple[Any, Any]]:
        """Pairs of what runs and what takes its place."""
        weights, num_layers = self.weights, self.config.num_hidden_layers
        block, _, number = part.partition(".")
        if block == "ends":
            fresh = store.ends()
            for name in ("embed", "lm_head", "head"):
                yield getattr(weights, name), getattr(fresh, name)
        elif block == "layers":
            live = weights.layers[int(number)]
            yield live, self._prepared(store.block(self._schedule[int(number)]), live)
        elif weights.dspark is not None:
            head = store.dspark(self._schedule[num_layers:])
            head.blocks[:] = map(self._prepared, head.blocks, weights.dspark.blocks)
            yield weights.dspark, head
        else:
            draft, running = store.mtp(int(number), self._schedule[num_layers + int(number)]), weights.mtp[int(number)]
            draft.block = self._prepared(draft.block, running.block)
            yield running, draft

    def _prepared(self, block: BlockParams, live: BlockParams) -> BlockParams:
        layout = self._backend.layout
        if not isinstance(live.attn.wo_a, ShuffledTensor):  # its first scales had no shuffled form
            layout = replace(layout, grouped=None)
        return prepare_block(block, layout)


class _LiveExperts:
    """New routed experts on their way into the stacks that run, a few at a time. Stands where a home is wanted."""

    def __init__(self, blocks: Sequence[BlockParams], backend: Backend) -> None:
        self._blocks, self._layout = blocks, backend.layout
        self._waiting: list[tuple[int, ExpertParams]] = []
        self._layer_idx = -1

    def put(self, layer_idx: int, expert_idx: int, weights: ExpertParams) -> None:
        if layer_idx != self._layer_idx or len(self._waiting) == _EXPERTS_AT_ONCE:
            self._write()
        self._layer_idx = layer_idx
        self._waiting.append((expert_idx, weights))

    def experts(self, layer_idx: int) -> ExpertParams:
        self._write()
        return self._blocks[layer_idx].ffn.experts

    def forget_copies(self) -> None:
        """There are none."""

    def _write(self) -> None:
        if not self._waiting:
            return
        live = self._blocks[self._layer_idx].ffn.experts
        stacks = (_stack([getattr(one, name) for _, one in self._waiting]) for name in ("w1", "w2", "w3"))
        device = next(iter(self._blocks)).attn_norm.device
        fresh = prepare_experts(ExpertParams(*(stack.to(device) for stack in stacks)), self._layout.routed)
        for place, (expert_idx, _) in enumerate(self._waiting):
            assign(_one(live, expert_idx), _one(fresh, place), f"layer {self._layer_idx}, expert {expert_idx}")
        self._waiting.clear()


def _one(stacks: ExpertParams, place: int) -> Any:
    return map_tensors(stacks, lambda part: part[place], ())


def _stack(weights: list[Weight]) -> Weight:
    first = weights[0]
    if not isinstance(first, QuantTensor):
        return torch.stack(cast(list[torch.Tensor], weights))
    parts = zip(*(one.parts for one in weights if isinstance(one, QuantTensor)), strict=True)
    data, scale, *whole = map(torch.stack, map(list, parts))
    return QuantTensor(data, scale, first.format, whole[0] if whole else None, first.block)
