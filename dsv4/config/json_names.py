"""Reads the spellings of config.json: DeepSeek's own, its `inference/config.json`, and Hugging Face transformers'.

Every key is accounted for: used, checked against the one value this engine implements, or known to be irrelevant to
inference. Anything else is an error, because a key we do not know may change the maths.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from dsv4.config import (
    CSA_RATIO,
    HCA_RATIO,
    ConfigError,
    DSparkConfig,
    ModelConfig,
    RopeScaling,
    is_positive_real,
    is_size,
    shown,
)

# inference/config.json spelling -> published spelling
_ALIASES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim", "window_size": "sliding_window", "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size", "route_scale": "routed_scaling_factor",
    "n_hash_layers": "num_hash_layers", "n_mtp_layers": "num_nextn_predict_layers", "norm_eps": "rms_norm_eps",
    "score_func": "scoring_func",
}  # fmt: skip

# keys with exactly one implemented value
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v4",),
    "architectures": (["DeepseekV4ForCausalLM"], ["DeepseekV4Model"], None),
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "expert_dtype": ("fp4", "fp8", "bf16", None),  # the tensors' dtypes decide, see loader/weights.py
    # what every V4 is, spelled by configs made from V3's or from older transformers
    "n_group": (1, None),
    "topk_group": (1, None),
    "first_k_dense_replace": (0, None),
    "moe_layer_freq": (1,),
    "compress_rate_csa": (CSA_RATIO,),
    "compress_rate_hca": (HCA_RATIO,),
}

# keys that say nothing about the forward pass
_IGNORED = frozenset({
    "attention_dropout", "initializer_range", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "pad_token_id", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "_name_or_path", "auto_map",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder",
    "id2label", "label2id", "problem_type", "scale_fmt", "scale_dtype", "max_batch_size", "max_seq_len",
    "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "tokenizer_class", "attn_implementation",
    "_attn_implementation", "unsloth_version", "unsloth_fixed",
})  # fmt: skip

_HF_KEYS = frozenset({
    "layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor",
})  # fmt: skip
_YARN_KEYS = frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"})
_ROPE_META = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})
_QUANT_KEYS = frozenset({
    "quant_method", "fmt", "scale_fmt", "activation_scheme", "weight_block_size", "moe_quant_algo", "expert_dtype",
    "modules_to_not_convert", "quant_algo", "group_size", "ignored_layers", "exclude_modules", "kv_cache_quant_algo",
    "producer", "config_groups", "ignore", "dequantize", "kv_cache_scheme", "quantized_layers", "quant_library",
})  # fmt: skip
_QUANT_METHODS = ("fp8", "modelopt", "modelopt_mixed")  # the tensors decide; other methods have other tensors
_FLAT_YARN = {"rope_factor": "factor", "original_seq_len": "original_max_position_embeddings",
              "beta_fast": "beta_fast", "beta_slow": "beta_slow"}  # fmt: skip
_DSPARK_KEYS = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
_ATTENTION_RATIO = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}


def parse_model_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `ModelConfig` from a parsed config.json; `ConfigError` names the offending key."""
    is_inference = any(key in _ALIASES for key in raw)
    raw = _rename_aliases(raw)
    _check_fixed(raw)
    # `dspark` and the block size are read from the keys they are published under, not from our names for them
    model_fields = {f.name for f in fields(ModelConfig)} - {"dspark", "weight_block_size"}
    known = model_fields | set(_FIXED) | _IGNORED | _HF_KEYS | set(_DSPARK_KEYS) | set(_FLAT_YARN)
    known.add("quantization_config")
    unknown = sorted(set(raw) - known)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(f"unknown keys: {_names(unknown[:5])}{more}; this may be a different architecture")

    values: dict[str, Any] = {k: v for k, v in raw.items() if k in model_fields}
    values["dspark"] = _parse_dspark(raw)
    values["rope_scaling"] = _parse_rope(raw, values)
    values["weight_block_size"] = _parse_quantization(raw)
    _parse_hf_layers(raw, values)
    _parse_hf_rope_width(raw, values)
    if is_inference:
        _fill_inference(values)
    end = values.get("eos_token_id")
    if isinstance(end, list) and len(end) == 1:
        values["eos_token_id"] = end[0]
    elif isinstance(end, list):
        raise ConfigError("eos_token_id must be one id; pass further stop ids in SamplingParams.stop_token_ids")
    if "compress_ratios" in values:
        values["compress_ratios"] = tuple(_expect_list(values["compress_ratios"], "compress_ratios"))
    required = [f.name for f in fields(ModelConfig) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"missing keys: {', '.join(missing)}")
    return values


def _rename_aliases(raw: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in raw.items():
        if not isinstance(key, str):
            raise ConfigError(f"keys must be strings, found {shown(key)}")
        name = _ALIASES.get(key, key)
        if name in renamed:
            raise ConfigError(f"{name} is given twice (also as {key})")
        renamed[name] = value
    return renamed


def _check_fixed(raw: Mapping[str, Any]) -> None:
    if raw.get("model_type") == "deepseek_v41" or "text_config" in raw:
        raise ConfigError("this is a DeepSeek-V4.1 model; dsv4 implements DeepSeek-V4 (model_type deepseek_v4) only")
    for key, allowed in _FIXED.items():
        # the type counts too: 1 is not true, and 1.0 is not 1
        if key in raw and not any(type(raw[key]) is type(value) and raw[key] == value for value in allowed):
            raise ConfigError(f"{key} must be {' or '.join(map(repr, allowed))}, found {shown(raw[key])}")


def _names(keys: list[str]) -> str:
    return ", ".join(shown(key).strip("'") for key in keys)


def _expect_list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key} must be a list, found {type(value).__name__}")
    return list(value)


def _expect_dict(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be an object, found {type(value).__name__}")
    return value


def _parse_dspark(raw: Mapping[str, Any]) -> DSparkConfig | None:
    present = [key for key in _DSPARK_KEYS if key in raw]
    if not present:
        return None
    if len(present) != len(_DSPARK_KEYS):
        missing = sorted(set(_DSPARK_KEYS) - set(present))
        raise ConfigError(f"a DSpark config needs all of its keys; missing {', '.join(missing)}")
    targets = _expect_list(raw["dspark_target_layer_ids"], "dspark_target_layer_ids")
    return DSparkConfig(
        block_size=raw["dspark_block_size"],
        noise_token_id=raw["dspark_noise_token_id"],
        target_layer_ids=tuple(targets),
        markov_rank=raw["dspark_markov_rank"],
    )


def _parse_yarn(scaling: dict[str, Any], where: str) -> RopeScaling | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("yarn", "default"):
        raise ConfigError(f"{where}.type must be 'yarn' or 'default', found {shown(kind)}")
    if scaling.get("attention_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}.attention_factor must be 1: DeepSeek-V4 does not rescale attention")
    unknown = sorted(set(scaling) - _YARN_KEYS - _ROPE_META - {"attention_factor"})
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {_names(unknown)} (DeepSeek-V4 has no mscale)")
    if kind == "default":
        if _YARN_KEYS & set(scaling):
            raise ConfigError(f"{where} holds {_names(sorted(_YARN_KEYS & set(scaling)))} but its type is not 'yarn'")
        return None
    missing = sorted({"factor", "original_max_position_embeddings"} - set(scaling))
    if missing:
        raise ConfigError(f"{where} misses {', '.join(missing)}")
    return RopeScaling(**{k: v for k, v in scaling.items() if k in _YARN_KEYS})


def _parse_rope(raw: Mapping[str, Any], values: dict[str, Any]) -> RopeScaling | None:
    """YaRN of the compressed layers, from `rope_scaling`, the flat inference keys, or Hugging Face's nested form."""
    flat = {name: raw[key] for key, name in _FLAT_YARN.items() if key in raw}
    sources = [key for key in ("rope_scaling", "rope_parameters") if raw.get(key) is not None] + ["beta_*"] * bool(flat)
    if len(sources) > 1:
        raise ConfigError(f"rope scaling is given more than once: {', '.join(sources)}")
    if flat:
        return _parse_yarn({"type": "yarn", **flat}, "rope")
    if raw.get("rope_parameters") is not None:
        parameters = _expect_dict(raw["rope_parameters"], "rope_parameters")
        if set(parameters) != {"main", "compress"}:
            raise ConfigError(f"rope_parameters must hold 'main' and 'compress', found {_names(sorted(parameters))}")
        main = _expect_dict(parameters["main"], "rope_parameters.main")
        compress = _expect_dict(parameters["compress"], "rope_parameters.compress")
        if _parse_yarn(main, "rope_parameters.main") is not None:
            raise ConfigError("rope_parameters.main must not be scaled: window layers have plain rope")
        for key, source in (("rope_theta", main), ("compress_rope_theta", compress)):
            if "rope_theta" in source:
                values[key] = source["rope_theta"]
        return _parse_yarn(compress, "rope_parameters.compress")
    if raw.get("rope_scaling") is not None:
        scaling = _expect_dict(raw["rope_scaling"], "rope_scaling")
        misplaced = sorted({"rope_theta", "partial_rotary_factor"} & set(scaling))
        if misplaced:
            raise ConfigError(f"rope_scaling must not hold {', '.join(misplaced)}: they are keys of their own")
        return _parse_yarn(scaling, "rope_scaling")
    return None


def _parse_quantization(raw: Mapping[str, Any]) -> tuple[int, int]:
    quantization = raw.get("quantization_config")
    if quantization is None:
        return (128, 128)
    quantization = _expect_dict(quantization, "quantization_config")
    method = quantization.get("quant_method", "fp8")
    if method not in _QUANT_METHODS:
        raise ConfigError(
            f"quantization_config.quant_method must be {' or '.join(map(repr, _QUANT_METHODS))}, "
            f"found {shown(method)}; dsv4 reads FP8 blocks, MXFP4, NVFP4 as ModelOpt writes it, and BF16"
        )
    unknown = sorted(set(quantization) - _QUANT_KEYS)
    if unknown:
        raise ConfigError(f"quantization_config has unknown keys: {_names(unknown)}")
    block = _expect_list(quantization.get("weight_block_size", [128, 128]), "quantization_config.weight_block_size")
    if len(block) != 2:
        raise ConfigError(f"quantization_config.weight_block_size must hold two sizes, found {shown(block)}")
    return (block[0], block[1])


def _parse_hf_layers(raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Hugging Face keeps layer kinds as words, and has no MTP entries."""
    rates = {"compressed_sparse_attention": CSA_RATIO, "heavily_compressed_attention": HCA_RATIO}
    if raw.get("compress_rates") not in (None, rates):
        raise ConfigError(f"compress_rates must be {rates}, found {shown(raw['compress_rates'])}")
    if raw.get("layer_types") is not None:
        names = _expect_list(raw["layer_types"], "layer_types")
        bad = [name for name in names if not isinstance(name, str) or name not in _ATTENTION_RATIO]
        if bad:
            raise ConfigError(f"layer_types may hold {', '.join(_ATTENTION_RATIO)}; found {shown(bad[0])}")
        ratios = [_ATTENTION_RATIO[name] for name in names]
        given = _expect_list(values.setdefault("compress_ratios", ratios), "compress_ratios")
        if given[: len(ratios)] != ratios:
            raise ConfigError(f"compress_ratios {shown(given)} contradict layer_types")
    if raw.get("mlp_layer_types") is not None:
        kinds = _expect_list(raw["mlp_layer_types"], "mlp_layer_types")
        num_hash = sum(kind == "hash_moe" for kind in kinds)
        if kinds != ["hash_moe"] * num_hash + ["moe"] * (len(kinds) - num_hash):
            raise ConfigError("mlp_layer_types must be 'hash_moe' layers first, then 'moe'")
        if len(kinds) != values.get("num_hidden_layers"):
            raise ConfigError(f"mlp_layer_types has {len(kinds)} values; expected one per hidden layer")
        if values.setdefault("num_hash_layers", num_hash) != num_hash:
            raise ConfigError(f"num_hash_layers {shown(values['num_hash_layers'])} contradicts mlp_layer_types")


def _parse_hf_rope_width(raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Hugging Face keeps the rope width as a fraction of the head, in up to three places."""
    parameters = raw.get("rope_parameters") or {}
    sources = {"config": raw, **{f"rope_parameters.{key}": value for key, value in parameters.items()}}
    for where, source in sources.items():
        fraction, head_dim = source.get("partial_rotary_factor"), values.get("head_dim")
        if fraction is None:
            continue
        if not isinstance(fraction, float) or not 0 < fraction < 1:
            raise ConfigError(f"partial_rotary_factor must be between 0 and 1, found {shown(fraction)}")
        if not isinstance(head_dim, int) or not is_size(head_dim):
            raise ConfigError(f"partial_rotary_factor needs a head_dim, found {shown(head_dim)}")
        width = int(head_dim * fraction)
        if values.setdefault("qk_rope_head_dim", width) != width:
            raise ConfigError(
                f"partial_rotary_factor {fraction} of {where} gives a rope width of {width}, "
                f"but qk_rope_head_dim is {shown(values['qk_rope_head_dim'])}"
            )


def _fill_inference(values: dict[str, Any]) -> None:
    """`inference/config.json` leaves out what its siblings imply: the trained length and the number of MTP blocks."""
    rope, ratios, num_layers = values["rope_scaling"], values.get("compress_ratios"), values.get("num_hidden_layers")
    if rope is not None and is_size(rope.original_max_position_embeddings) and is_positive_real(rope.factor):
        extended = rope.original_max_position_embeddings * rope.factor
        values.setdefault("max_position_embeddings", int(extended) if is_positive_real(extended) else extended)
    if isinstance(ratios, list) and isinstance(num_layers, int) and len(ratios) >= num_layers:
        values.setdefault("num_nextn_predict_layers", len(ratios) - num_layers)
