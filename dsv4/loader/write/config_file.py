"""`ModelConfig` -> config.json with the published keys; the inverse of `ModelConfig.from_dict`. No torch."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Literal

from dsv4.config import ModelConfig

ExpertFormat = Literal["mxfp4", "nvfp4", "fp8", "bf16"]
_EXPERT_DTYPE = {"mxfp4": "fp4", "nvfp4": "fp4", "fp8": "fp8", "bf16": "bf16"}
_CONSTANT = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def config_to_dict(config: ModelConfig, experts: ExpertFormat = "mxfp4") -> dict[str, Any]:
    """The parsed config.json of a checkpoint whose routed experts are in `experts` format."""
    special = {"rope_scaling", "weight_block_size", "dspark", "compress_ratios"}
    raw = dict(_CONSTANT)
    raw |= {f.name: getattr(config, f.name) for f in fields(config) if f.name not in special}
    raw["compress_ratios"] = list(config.compress_ratios)
    raw["rope_scaling"] = None if config.rope_scaling is None else {"type": "yarn", **asdict(config.rope_scaling)}
    raw["expert_dtype"] = _EXPERT_DTYPE[experts]
    if config.dspark is not None:
        raw |= {f"dspark_{key}": value for key, value in asdict(config.dspark).items()}
        raw["dspark_target_layer_ids"] = list(config.dspark.target_layer_ids)
    quantization = quantization_section(config, experts)
    if quantization is not None:
        raw["quantization_config"] = quantization
    return raw


def quantization_section(config: ModelConfig, experts: ExpertFormat) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint with such experts."""
    if experts == "bf16":  # nothing is quantised; the key only carries an unusual block size through a round trip
        return None if config.weight_block_size == (128, 128) else {"weight_block_size": list(config.weight_block_size)}
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(config.weight_block_size),
    }
    if experts != "fp8":  # the Base variants carry FP32 scales
        quantization["scale_fmt"] = "ue8m0"
    if experts == "nvfp4":
        quantization["moe_quant_algo"] = "NVFP4"
    return quantization
