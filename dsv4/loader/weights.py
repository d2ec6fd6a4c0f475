"""A checkpoint's tensors -> `ModelParams`, streamed in file order. Strict: see `resolve.plan_load`.

Peak memory is the model itself plus what is read ahead for a GPU (read_ahead.py), or half a gigabyte of mapped files
for a CPU (checkpoint.py). Each weight is copied once into its place, and experts go straight into preallocated stacks,
or one whole expert at a time to a home of their own (`ExpertHome`).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import groupby

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight, dequantize
from dsv4.loader.assemble import ExpertHome, ParameterStore
from dsv4.loader.checkpoint import STORED_DTYPES, Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.names import Role
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.read_ahead import AHEAD_BYTES, Files, Span, read_ahead
from dsv4.loader.resolve import LoadPlan, Source, plan_load
from dsv4.model.parameters import ModelParams

__all__ = ["CheckpointWarning", "LoadPlan", "check_tables", "load_params", "plan_load"]


class CheckpointWarning(UserWarning):
    """Something in a checkpoint was left out on purpose; `LoadPlan.notes` holds the same texts."""


def load_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dequantize_to: torch.dtype | None = None,
    home: ExpertHome | None = None,
    experts: range | None = None,
    progress: Progress = False,
) -> ModelParams:
    """Read the whole model.

    dequantize_to: None keeps every weight as stored (quantised weights become `QuantTensor`; hyper-connections, `ape`,
    sinks and router bias are fp32); a float dtype makes every weight that dtype (the `exact` numerics) except tables.
    home: takes the routed experts, one at a time; None stacks them on `device`.
    experts: of every layer only these are read, and stacked from the first one on; None reads all.
    progress: True for a bar on stderr, or a function of (bytes done, bytes in total).
    """
    if dequantize_to is not None and not dequantize_to.is_floating_point:
        raise ValueError(f"dequantize_to must be a float dtype or None, found {dequantize_to}")
    plan = plan_load(checkpoint, config)
    for note in plan.notes:
        warnings.warn(note, CheckpointWarning, stacklevel=2)
    own = range(config.n_routed_experts) if experts is None else experts
    store = ParameterStore(config, device, home, own)
    sources = own_sources(plan.sources, own)
    if home is not None:
        sources = expert_by_expert(sources)
    found = (_pinned if store.device.type == "cuda" else _mapped)(checkpoint, sources, config)
    with closing(found), byte_progress(progress, share_bytes(plan, own), "loading weights") as advance:
        for source, weight in found:
            if dequantize_to is not None and source.tensor.role is not Role.TABLE:
                weight = dequantize(weight, dequantize_to)
            store.put(source.tensor, weight)
            advance(source.nbytes)
    if store.device.type == "cuda":
        torch.cuda.synchronize(store.device)
        if hasattr(torch.accelerator.memory, "empty_host_cache"):  # newer than the oldest torch that is admitted
            torch.accelerator.memory.empty_host_cache()  # the memory that was read into
    return store.build(plan.num_mtp)


_Weights = Generator[tuple[Source, Weight], None, None]


def _mapped(checkpoint: Checkpoint, sources: Iterable[Source], config: ModelConfig) -> _Weights:
    """For a CPU: copied once, from the system's cache, into which the system reads ahead."""
    wanted, to_come, num_ahead = list(sources), deque(sources), 0
    with checkpoint, ExitStack() as opened:
        files = Files(opened)
        for source in wanted:
            while to_come and num_ahead < AHEAD_BYTES:
                num_ahead += to_come[0].nbytes
                for span in _spans(checkpoint, to_come.popleft()):
                    files.advise(span)
            yield source, read_weight(checkpoint, source, config)
            num_ahead -= source.nbytes


def _pinned(checkpoint: Checkpoint, sources: Iterable[Source], config: ModelConfig) -> _Weights:
    """For a GPU, read ahead. An expert's matrices come together: a home takes all three at once."""
    groups = [tuple(group) for _, group in groupby(sources, _owner)]
    wanted = ((group, tuple(span for one in group for span in _spans(checkpoint, one))) for group in groups)
    with closing(read_ahead(wanted, is_pinned=True)) as found:
        for group, tensors in found:
            parts = iter(tensors)
            for source in group:
                yield source, _weight(source, [next(parts) for _ in _names(source)], config)


def meta_params(
    checkpoint: Checkpoint, config: ModelConfig, *, dequantize_to: torch.dtype | None = None
) -> ModelParams:  # fmt: skip
    """As `load_params` makes them, on "meta": shapes and formats of all weights, without reading any."""
    plan, store = plan_load(checkpoint, config), ParameterStore(config, "meta")
    for source in plan.sources:
        parts = [torch.empty(span.shape, dtype=span.dtype, device="meta") for span in _spans(checkpoint, source)]
        weight = _weight(source, parts, config, check=False)
        if dequantize_to is not None and source.tensor.role is not Role.TABLE:
            weight = torch.empty(weight.shape, dtype=dequantize_to, device="meta")
        store.put(source.tensor, weight)
    return store.build(plan.num_mtp)


def check_tables(checkpoint: Checkpoint, plan: LoadPlan, config: ModelConfig) -> None:
    """`CheckpointError` for a hash table that names an expert the model has not."""
    for source in plan.sources:
        if source.tensor.role is Role.TABLE:
            _check_table(source.data, checkpoint.read(source.data), config.n_routed_experts)


def share_bytes(plan: LoadPlan, experts: range) -> int:
    """What `load_params` reads if only these experts are asked for."""
    return sum(source.nbytes for source in own_sources(plan.sources, experts))


def own_sources(sources: Iterable[Source], experts: range) -> list[Source]:
    """Without routed experts that are not among these."""
    return [one for one in sources if one.tensor.expert_idx is None or one.tensor.expert_idx in experts]


def expert_by_expert(sources: Sequence[Source]) -> list[Source]:
    """The same in file order, except that the matrices of one expert stand together, where the first of them is."""
    first: dict[str, int] = {}
    for place, source in enumerate(sources):
        first.setdefault(_owner(source), place)
    return sorted(sources, key=lambda source: first[_owner(source)])


def _owner(source: Source) -> str:
    """The weight itself, or the expert whose matrix it is."""
    tensor = source.tensor
    return tensor.name if tensor.expert_idx is None else tensor.base.rpartition(".")[0]


def read_weight(checkpoint: Checkpoint, source: Source, config: ModelConfig, *, check: bool = True) -> Weight:
    """One weight in its stored format, as views of the mapped file. `check` False lets a wrong hash table through."""
    data, *others = (checkpoint.read(name) for name in _names(source))
    if source.rows is not None:
        data = data[source.tensor.expert_idx, source.rows[0] : source.rows[1]]
    return _weight(source, [data, *others], config, check=check)


def _names(source: Source) -> list[str]:
    return [name for name in (source.data, source.scale, source.global_scale) if name is not None]


def _spans(checkpoint: Checkpoint, source: Source) -> Iterator[Span]:
    """Where the stored tensors of a weight lie."""
    for name in _names(source):
        info = checkpoint.info(name)
        start, end, shape = info.start, info.end, info.shape
        if source.rows is not None and name == source.data:
            assert source.tensor.expert_idx is not None
            _, num_rows, width = info.shape
            row_bytes = info.nbytes // (info.shape[0] * num_rows)
            first = source.tensor.expert_idx * num_rows
            start, end = (info.start + row_bytes * (first + row) for row in source.rows)
            shape = (source.rows[1] - source.rows[0], width)
        yield Span(name, info.file, start, end, STORED_DTYPES[info.dtype], shape)


def _weight(source: Source, parts: Sequence[Tensor], config: ModelConfig, *, check: bool = True) -> Weight:
    """A weight of its stored tensors: data, and where it has them scale and global scale."""
    data, *scales = parts
    if check and source.tensor.role is Role.TABLE:
        _check_table(source.data, data, config.n_routed_experts)
    if source.format.quant is None:
        return data.float() if source.tensor.role is Role.CONTROL else data
    if source.format.quant is QuantFormat.FP8_BLOCK:
        return QuantTensor(data, scales[0], QuantFormat.FP8_BLOCK, block=config.weight_block_size)
    global_scale = None if source.global_scale is None else scales[1].reshape(())
    return QuantTensor(data.view(torch.uint8), scales[0], source.format.quant, global_scale)


def _check_table(name: str, table: Tensor, num_experts: int) -> None:
    lowest, highest = int(table.min()), int(table.max())
    if lowest < 0 or highest >= num_experts:
        bad = lowest if lowest < 0 else highest
        raise CheckpointError(f"{name} names expert {bad}; the model has experts 0 to {num_experts - 1}")
