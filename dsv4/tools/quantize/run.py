"""Quantises a checkpoint weight by weight. A run that was killed goes on where it stood, and ends in the same bytes.

The output folder gets whole shards, one after another (a shard is renamed into place when it is on the disk), and
config.json last: until then nothing takes the folder for a checkpoint. What a run needs to know about itself lies in
`STATE_FILE` in the meantime.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantTensor, Weight
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.quantise import Quantiser
from dsv4.loader.resolve import LoadPlan, Source, plan_load
from dsv4.loader.weights import read_weight
from dsv4.loader.write.shards import (
    DEFAULT_SHARD_BYTES,
    StoredWeight,
    index_text,
    shard_header,
    shard_name,
    split_shards,
    write_shard,
)
from dsv4.tools.quantize.plan import (
    Target,
    check_target,
    copied_tensors,
    modelopt_config,
    output_config,
    stored_parts,
)

STATE_FILE = "quantize-state.json"
_PARTIAL = ".partial"
_SPARE_BYTES = 2**28  # for the small files, and so that a disk is not filled to the brim
_INPUT_SCALE = 1.0  # activations are scaled as they come


@dataclass(frozen=True)
class QuantizeOptions:
    """search False takes the scale that just reaches each group's largest value, as most tools do."""

    shard_bytes: int = DEFAULT_SHARD_BYTES
    device: str = "cpu"
    search: bool = True
    progress: Progress = False


def quantize_checkpoint(source: Path, target: Path, formats: Target, options: QuantizeOptions | None = None) -> None:
    """Write `source` to the folder `target` in other formats, or go on with what an earlier run began there."""
    options = options or QuantizeOptions()
    if options.shard_bytes <= 0:
        raise ValueError(f"shard_bytes must be positive, found {options.shard_bytes}")
    config = ModelConfig.from_pretrained(source)
    with Checkpoint.open(source) as checkpoint:
        plan = plan_load(checkpoint, config)
        check_target(formats, plan, config)
        shards = list(split_shards(_Output(checkpoint, config, plan, formats, options).weights(), options.shard_bytes))
        # sums on another device may round another way: its bytes are not continued
        state = {"formats": asdict(formats), "shard_bytes": options.shard_bytes, "search": options.search,
                 "device": torch.device(options.device).type, "source": checkpoint.file_state()}  # fmt: skip
        _claim(target, source, state)
        _write_shards(target, shards, options.progress)
    _finish(target, source, index_text(shards), config, formats, plan)


class _Output:
    """Makes each weight's output from its source; one matrix (of an expert: two) is in memory at a time."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, plan: LoadPlan, target: Target, options: QuantizeOptions
    ) -> None:
        self.checkpoint, self.config, self.plan, self.target = checkpoint, config, plan, target
        self.quantiser = Quantiser(checkpoint, config, plan.sources, search=options.search, device=options.device)

    def weights(self) -> Iterator[StoredWeight]:
        """Everything the output holds, in the source's file order."""
        for source in self.plan.sources:
            yield StoredWeight(stored_parts(source, self.target, self.config), partial(self._make, source))
        for part in copied_tensors(self.checkpoint, self.plan):
            yield StoredWeight((part,), partial(self._copy, part.name))

    def _copy(self, name: str) -> list[Tensor]:
        return [self.checkpoint.read(name)]

    def _make(self, source: Source) -> list[Tensor]:
        weight: Weight
        if source.format.quant is None:
            weight = self._stored(source)  # as it is in the file, not as the model takes it
        else:
            weight = read_weight(self.checkpoint, source, self.config)
        wanted = self.target.format_of(source)
        if source.format.quant is not wanted:
            weight = self.quantiser.quantise(source, weight, wanted)
        if not isinstance(weight, QuantTensor):
            return [weight.cpu()]
        unused = [] if weight.global_scale is None else [torch.tensor(_INPUT_SCALE)]
        return [*(part.cpu() for part in weight.parts), *unused]

    def _stored(self, source: Source) -> Tensor:
        data = self.checkpoint.read(source.data)
        return data if source.rows is None else data[source.tensor.expert_idx, source.rows[0] : source.rows[1]]


def _claim(target: Path, source: Path, state: dict[str, object]) -> None:
    """The output folder is new, or holds an unfinished run of the same thing."""
    resolved, inside = target.resolve(), source.resolve()
    if resolved == inside or inside in resolved.parents:
        raise CheckpointError(f"{target} is the source, or lies in it")
    file = target / STATE_FILE
    if file.is_file():
        try:
            found = json.loads(file.read_bytes())
        except ValueError:
            found = None
        if found != state:
            raise CheckpointError(
                f"{target} holds an unfinished run of other files or options; delete it to start anew"
            )
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; a checkpoint is never overwritten")
    target.mkdir(parents=True, exist_ok=True)
    _write_durably(file, json.dumps(state))


def _write_shards(folder: Path, shards: list[list[StoredWeight]], progress: Progress) -> None:
    files = [folder / shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    sizes = [len(shard_header(shard)[0]) + sum(weight.nbytes for weight in shard) for shard in shards]
    # a shard gets its name when it is whole, and `_claim` has seen that it is this run's
    is_done = [file.is_file() and file.stat().st_size == size for file, size in zip(files, sizes, strict=True)]
    for file in folder.glob(f"*{_PARTIAL}"):
        file.unlink()
    missing = sum(size for size, done in zip(sizes, is_done, strict=True) if not done)
    free = shutil.disk_usage(folder).free
    if missing + _SPARE_BYTES > free:
        raise CheckpointError(
            f"{folder} needs {missing / 2**30:,.1f} GiB more, its disk has {free / 2**30:,.1f} GiB free"
        )
    with byte_progress(progress, sum(sizes), "quantising") as advance:
        for file, shard, size, done in zip(files, shards, sizes, is_done, strict=True):
            if done:
                advance(size)
                continue
            unfinished = file.with_name(file.name + _PARTIAL)
            write_shard(unfinished, shard, advance)
            unfinished.replace(file)
            _sync_folder(folder)


def _finish(target: Path, source: Path, index: str, config: ModelConfig, formats: Target, plan: LoadPlan) -> None:
    """Everything that is not a weight; config.json comes last, then the state goes."""
    for file in sorted(source.iterdir()):
        is_weight = file.name.endswith((".safetensors", ".safetensors.index.json"))
        if is_weight or file.name in ("config.json", "hf_quant_config.json", "README.md"):
            continue
        if file.is_dir():
            shutil.copytree(file, target / file.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(file, target / file.name)
    (target / INDEX_FILE).write_text(index, encoding="utf-8")
    for_modelopt = modelopt_config(formats)
    if for_modelopt is not None:
        (target / "hf_quant_config.json").write_text(json.dumps(for_modelopt, indent=2) + "\n", encoding="utf-8")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_durably(target / "config.json", json.dumps(output_config(raw, config, formats, plan), indent=2) + "\n")
    (target / STATE_FILE).unlink()


def _write_durably(file: Path, text: str) -> None:
    """Whole or not at all, also when the machine loses power."""
    unfinished = file.with_name(file.name + _PARTIAL)
    with unfinished.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
