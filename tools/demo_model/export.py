"""A trained `DemoModel` -> `ModelParams` in memory, or a checkpoint folder in the official or the NVFP4 format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX
from dsv4.formats.fp4 import mxfp4_quantize, nvfp4_quantize
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.tensors import dequantize
from dsv4.loader.assemble import ParameterStore
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint
from dsv4.loader.config_write import ExpertFormat, config_to_dict
from dsv4.loader.names import LogicalTensor, Role, expected_tensors
from dsv4.loader.weights import plan_load, read_weight
from dsv4.model.parameters import ModelParams

_INPUT_SCALE = 1.0  # dynamic: NVFP4 experts run weight-only here


def trained_weight(state: dict[str, Tensor], tensor: LogicalTensor) -> Tensor:
    """The master weight of one checkpoint tensor; experts are rows of a stack."""
    weight = state[tensor.parameter]
    return weight if tensor.expert_idx is None else weight[tensor.expert_idx]


def plain_params(state: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype) -> ModelParams:
    """Unquantised parameters of `dtype`, for `LLM.from_params(numerics="exact")`."""
    store = ParameterStore(config, "cpu")
    for tensor in expected_tensors(config, with_mtp=True):
        weight = trained_weight(state, tensor).cpu()
        store.put(tensor, weight if tensor.role is Role.TABLE else weight.to(dtype))
    return store.build(config.num_draft_layers)


def shipped_state(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's weights in fp32 under the names of the training graph, the experts of a layer stacked. Rounding
    them again changes nothing."""
    config = ModelConfig.from_pretrained(folder)
    state: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    with Checkpoint.open(folder) as checkpoint:
        sources = {source.tensor.name: source for source in plan_load(checkpoint, config).sources}
        for tensor in expected_tensors(config, with_mtp=True):
            weight = read_weight(checkpoint, sources[tensor.name], config)
            plain = weight.clone() if tensor.role is Role.TABLE else dequantize(weight, torch.float32)
            if tensor.expert_idx is None:
                state[tensor.name] = plain
            else:
                stacks.setdefault(tensor.parameter, []).append(plain)
    return state | {name: torch.stack(parts) for name, parts in stacks.items()}


def stored_tensors(
    state: dict[str, Tensor], config: ModelConfig, experts: ExpertFormat, prefix: str = ""
) -> dict[str, Tensor]:
    """Every tensor of the file by name, in the dtypes of the official checkpoint. `experts`: mxfp4 or nvfp4. `prefix`:
    of the names that are wanted."""
    stored: dict[str, Tensor] = {}
    for tensor in expected_tensors(config, with_mtp=True):
        if not tensor.name.startswith(prefix):
            continue
        weight = trained_weight(state, tensor).detach().cpu()
        if tensor.role is Role.TABLE:
            stored[tensor.name] = weight
        elif tensor.role is Role.CONTROL:
            stored[tensor.name] = weight.float()
        elif tensor.role is Role.PLAIN:
            stored[tensor.name] = weight.to(torch.bfloat16)
        elif tensor.role is Role.LINEAR:
            codes, scale = fp8_block_quantize(weight, config.weight_block_size)
            stored |= {tensor.name: codes, f"{tensor.base}.scale": scale.view(torch.float8_e8m0fnu)}
        elif experts == "mxfp4":
            packed, scale = mxfp4_quantize(weight)
            stored |= {tensor.name: packed.view(torch.int8), f"{tensor.base}.scale": scale.view(torch.float8_e8m0fnu)}
        elif experts == "nvfp4":
            packed, scale, whole = nvfp4_quantize(weight, _shared_scale(state, tensor))
            stored |= {
                tensor.name: packed,
                f"{tensor.base}.weight_scale": scale,
                f"{tensor.base}.weight_scale_2": whole,
                f"{tensor.base}.input_scale": torch.tensor(_INPUT_SCALE),
            }
        else:
            raise ValueError(f"experts must be 'mxfp4' or 'nvfp4', found {experts!r}")
    return {name: weight.contiguous().clone() for name, weight in stored.items()}


def _shared_scale(state: dict[str, Tensor], tensor: LogicalTensor) -> Tensor:
    """w1 and w3 of an expert share the scale of the whole tensor."""
    parts = ("w2",) if ".w2." in tensor.name else ("w1", "w3")
    stem = tensor.parameter.rsplit(".", 2)[0]
    largest = max(float(state[f"{stem}.{part}.weight"][tensor.expert_idx].abs().max()) for part in parts)
    return torch.tensor(max(largest, 1e-12) / (E2M1_MAX * E4M3_MAX), dtype=torch.float32)


def export_checkpoint(
    state: dict[str, Tensor], config: ModelConfig, folder: Path, experts: ExpertFormat, tokenizer: Path
) -> int:
    """Write weights, configs and tokenizer into `folder`; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(stored_tensors(state, config, experts), weights, metadata={"format": "pt"})
    _write_beside(folder, config, experts, tokenizer)
    return weights.stat().st_size


def export_head(state: dict[str, Tensor], config: ModelConfig, folder: Path, base: Path) -> int:
    """Write a DSpark head into `folder`, beside the checkpoint `base` whose model it drafts for: its own tensors, and
    an index that takes all others from `base`. Returns the bytes of the head."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    stored = stored_tensors(state, config, "mxfp4", prefix="mtp.")
    save_file(stored, weights, metadata={"format": "pt"})
    with Checkpoint.open(base) as checkpoint:
        tensors = {name: info for name, info in checkpoint.tensors.items() if not name.startswith("mtp.")}
        places = {name: f"../{base.name}/{info.file.name}" for name, info in tensors.items()}
    total = sum(info.nbytes for info in tensors.values()) + sum(weight.nbytes for weight in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": places | dict.fromkeys(sorted(stored), weights.name)}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    _write_beside(folder, config, "mxfp4", base / "tokenizer.json")
    return weights.stat().st_size


def _write_beside(folder: Path, config: ModelConfig, experts: ExpertFormat, tokenizer: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config_to_dict(config, experts), indent=2) + "\n", encoding="utf-8")
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "bos_token_id": 0, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
