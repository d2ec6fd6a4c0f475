"""What a command line means by a model: a preset, a shipped checkpoint, a folder, or a config.json. No torch."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsv4.config import ConfigError, ModelConfig
from dsv4.loader.shipped import find_checkpoint, shipped_names
from dsv4.loader.write.config_file import ExpertFormat

GIB = 2**30

# GiB a process sees as the device's total, rounded down; the CUDA context comes off it (see tools/plan.py). Boards
# differ by a few hundred MiB: pass the number itself where that matters.
GPU_GIB = {
    "b300": 267, "gb200": 184, "b200": 178, "h200": 139, "h20": 95, "rtx6000": 94, "h100": 79, "a100": 79,
    "rtx6000ada": 47, "l40s": 44, "a100-40": 39, "rtx5090": 31, "rtx4090": 23,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU by name, or just an amount of memory."""

    name: str
    usable_bytes: int


def known_gpus() -> tuple[Gpu, ...]:
    """Every named GPU, largest first."""
    return tuple(Gpu(name, gib * GIB) for name, gib in GPU_GIB.items())


def parse_gpu(text: str) -> Gpu:
    """A name of the table (any case) or a number of GiB, e.g. `h200`, `141`, `79.5`, `96GiB`."""
    name = text.strip().lower()
    if name in GPU_GIB:
        return Gpu(name, GPU_GIB[name] * GIB)
    try:
        gib = float(name.removesuffix("gib").strip())
    except ValueError:
        raise ConfigError(f"gpu must be one of {', '.join(GPU_GIB)} or a number of GiB, found {text!r}") from None
    if not (math.isfinite(gib) and 0 < gib <= 2**20):
        raise ConfigError(f"gpu memory must be a positive number of GiB, found {text!r}")
    return Gpu(f"{gib:g} GiB", int(gib * GIB))


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "flash": ModelConfig.flash,
    "pro": ModelConfig.pro,
    "tiny": ModelConfig.tiny,
    "flash-0731": ModelConfig.flash_0731,
    "pro-0813": ModelConfig.pro_0813,
    "tiny-dspark": lambda: ModelConfig.tiny().with_dspark(noise_token_id=2, markov_rank=64),
}
_FORMAT_OF_DTYPE: dict[str | None, ExpertFormat] = {None: "mxfp4", "fp4": "mxfp4", "fp8": "fp8", "bf16": "bf16"}


@dataclass(frozen=True)
class Target:
    """A model by name, and the format its config announces for the routed experts."""

    name: str
    config: ModelConfig
    experts: ExpertFormat


def resolve_target(text: str) -> Target:
    """A preset's name, a shipped checkpoint, a folder with a config.json, or such a file."""
    preset = PRESETS.get(text.lower())
    if preset is not None:
        return Target(text.lower(), preset(), "mxfp4")
    path = find_checkpoint(text, weights=False)
    if not path.exists():
        raise ConfigError(
            f"{text!r} is neither a preset ({', '.join(PRESETS)}), a shipped checkpoint ({', '.join(shipped_names())}) "
            "nor an existing folder or config.json, nor a name on the hub (ORG/NAME)"
        )
    config = ModelConfig.from_pretrained(path)
    return Target(path.resolve().name if path.is_dir() else str(path), config, _announced_experts(path))


def _announced_experts(path: Path) -> ExpertFormat:
    """From `quantization_config.moe_quant_algo` and `expert_dtype`; the first DeepSeek release announced neither."""
    raw = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    quantization = raw.get("quantization_config") or {}
    algorithm = quantization.get("moe_quant_algo")
    if algorithm is not None:
        if algorithm != "NVFP4":
            raise ConfigError(
                f"quantization_config.moe_quant_algo must be 'NVFP4', found {algorithm!r}; pass --experts"
            )
        return "nvfp4"
    dtype = raw.get("expert_dtype", quantization.get("expert_dtype"))
    if dtype not in _FORMAT_OF_DTYPE:
        raise ConfigError(f"expert_dtype must be 'fp4', 'fp8' or 'bf16', found {dtype!r}")
    return _FORMAT_OF_DTYPE[dtype]
