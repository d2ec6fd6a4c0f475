"""What a command line means by a model: a preset, a shipped checkpoint, a folder, or a config.json. No torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsv4.config import ConfigError, ModelConfig
from dsv4.loader.shipped import find_checkpoint, shipped_names
from dsv4.loader.write.config_file import ExpertFormat

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
