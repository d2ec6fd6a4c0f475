"""Random models of any size: as a checkpoint in the official layout, or straight as `ModelParams`.

Both make the same tensors, so a checkpoint written and loaded equals `random_params` of the same seed bit for bit. Only
one matrix is in memory at a time while a checkpoint is written.
"""

from __future__ import annotations

import functools
import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantTensor, dequantize
from dsv4.loader.assemble import ParameterStore
from dsv4.loader.checkpoint import INDEX_FILE
from dsv4.loader.header import CheckpointError
from dsv4.loader.layout import StoredTensor, weight_tensors
from dsv4.loader.names import LogicalTensor, Role, expected_tensors
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.write.config_file import ExpertFormat, config_to_dict
from dsv4.loader.write.random_weights import Recipe, random_weight
from dsv4.loader.write.shards import (
    DEFAULT_SHARD_BYTES,
    StoredWeight,
    index_text,
    shard_name,
    split_shards,
    write_shard,
)
from dsv4.model.parameters import ModelParams

_INPUT_SCALE = 8.0 / (6.0 * 448.0)  # ModelOpt's rule for activations up to 8; nothing here uses it


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    *,
    experts: ExpertFormat = "mxfp4",
    mtp_experts: ExpertFormat | None = None,
    seed: int = 0,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    with_mtp: bool = True,
    extra_files: Mapping[str, str] | None = None,
    progress: Progress = False,
    device: torch.device | str = "cpu",
) -> Path:
    """Write config.json, shards, index and `extra_files` (name: text) to the new folder `path` and return it.

    mtp_experts: format of the draft blocks' routed experts, by default the same. A shard holds at most `shard_bytes` of
    data (a larger single weight gets its own). The folder appears complete or not at all. `device` is where numbers are
    drawn: a GPU is a thousand times faster, and draws others than a CPU.
    """
    recipe = Recipe(config, experts, mtp_experts, seed)
    if shard_bytes <= 0:
        raise ValueError(f"shard_bytes must be positive, found {shard_bytes}")
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; a checkpoint is never overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        _write_folder(partial, recipe, with_mtp, shard_bytes, progress, device)
        for name, text in (extra_files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.replace(target)
    except BaseException:  # an interrupt must not leave gigabytes behind either
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def random_params(
    config: ModelConfig,
    *,
    experts: ExpertFormat = "mxfp4",
    mtp_experts: ExpertFormat | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dequantize_to: torch.dtype | None = None,
    with_mtp: bool = True,
    own: range | None = None,
) -> ModelParams:
    """The model `write_checkpoint` would write and `load_params` would read, made in memory on `device`. `own`: the
    routed experts of one rank alone.

    Bit for bit the same on the CPU; a GPU draws its own numbers of the same kind, and is much faster for large models.
    """
    recipe = Recipe(config, experts, mtp_experts, seed)
    store = ParameterStore(config, device, experts=own)
    for tensor in expected_tensors(config, with_mtp):
        if own is not None and tensor.expert_idx is not None and tensor.expert_idx not in own:
            continue
        weight = random_weight(tensor, recipe, device)
        if dequantize_to is not None and tensor.role is not Role.TABLE:
            weight = dequantize(weight, dequantize_to)
        store.put(tensor, weight)
    return store.build(config.num_draft_layers if with_mtp else 0)


def stored_tensors(tensor: LogicalTensor, recipe: Recipe) -> tuple[StoredTensor, ...]:
    """What the file holds for one weight of the model: the weight, then its scales. Nothing is generated."""
    scale_dtype = "F32" if recipe.has_fp32_scales else "F8_E8M0"
    return weight_tensors(tensor, recipe.format_of(tensor), recipe.config.weight_block_size, scale_dtype=scale_dtype)


def _stored_data(tensor: LogicalTensor, recipe: Recipe, device: torch.device | str) -> list[Tensor]:
    """The data of `stored_tensors`, in the same order."""
    weight = random_weight(tensor, recipe, device)
    if not isinstance(weight, QuantTensor):
        return [weight.cpu()]
    unused = [] if weight.global_scale is None else [torch.tensor(_INPUT_SCALE, dtype=torch.float32)]
    return [*(part.cpu() for part in weight.parts), *unused]


def _write_folder(
    folder: Path, recipe: Recipe, with_mtp: bool, shard_bytes: int, progress: Progress, device: torch.device | str
) -> None:  # fmt: skip
    weights = [
        StoredWeight(stored_tensors(tensor, recipe), functools.partial(_stored_data, tensor, recipe, device))
        for tensor in expected_tensors(recipe.config, with_mtp)
    ]
    shards = list(split_shards(weights, shard_bytes))
    with byte_progress(progress, sum(weight.nbytes for weight in weights), "writing weights") as advance:
        for number, shard in enumerate(shards, start=1):
            write_shard(folder / shard_name(number, len(shards)), shard, advance)
    (folder / INDEX_FILE).write_text(index_text(shards), encoding="utf-8")
    raw_config = config_to_dict(recipe.config, recipe.experts)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n", encoding="utf-8")
