"""`ModelConfig`: the published presets, every spelling of config.json, and a named error for everything else."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import ConfigError, DSparkConfig, EngineConfig, ModelConfig, RopeScaling

SET_A = Path(__file__).parent / "vectors" / "setA" / "model"

# the published table, one row a key: (key, Flash, Pro)
PUBLISHED = [
    ("vocab_size", 129280, 129280),
    ("hidden_size", 4096, 7168),
    ("num_hidden_layers", 43, 61),
    ("num_attention_heads", 64, 128),
    ("head_dim", 512, 512),
    ("qk_rope_head_dim", 64, 64),
    ("nope_head_dim", 448, 448),
    ("q_lora_rank", 1024, 1536),
    ("o_groups", 8, 16),
    ("o_lora_rank", 1024, 1024),
    ("sliding_window", 128, 128),
    ("n_routed_experts", 256, 384),
    ("n_shared_experts", 1, 1),
    ("num_experts_per_tok", 6, 6),
    ("moe_intermediate_size", 2048, 3072),
    ("routed_scaling_factor", 1.5, 2.5),
    ("swiglu_limit", 10.0, 10.0),
    ("num_hash_layers", 3, 3),
    ("num_nextn_predict_layers", 1, 1),
    ("num_mtp_layers", 1, 1),
    ("hc_mult", 4, 4),
    ("hc_sinkhorn_iters", 20, 20),
    ("hc_eps", 1e-6, 1e-6),
    ("rms_norm_eps", 1e-6, 1e-6),
    ("index_n_heads", 64, 64),
    ("index_head_dim", 128, 128),
    ("index_topk", 512, 1024),
    ("rope_theta", 10000, 10000),
    ("compress_rope_theta", 160000, 160000),
    ("max_position_embeddings", 1048576, 1048576),
    ("bos_token_id", 0, 0),
    ("eos_token_id", 1, 1),
    ("weight_block_size", (128, 128), (128, 128)),
    ("dspark", None, None),
    (
        "rope_scaling",
        RopeScaling(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
        RopeScaling(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
    ),
    (
        "compress_ratios",
        (0, 0, *[4, 128] * 20, 4, 0),
        (128, 128, *[4, 128] * 29, 4, 0),
    ),
]


def official(**changes):
    """The published Flash config.json; a value of `...` removes the key."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000,
        "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
        "index_topk": 512, "initializer_range": 0.02, "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hash_layers": 3,
        "num_hidden_layers": 43, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8,
        "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
        "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 129280, **changes,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not ...}


def inference(**changes):
    """The same model as DeepSeek's inference/config.json spells it."""
    config = {
        "vocab_size": 129280, "dim": 4096, "moe_inter_dim": 2048, "n_layers": 43, "n_hash_layers": 3, "n_heads": 64,
        "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus",
        "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64,
        "norm_eps": 1e-6, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128, "original_seq_len": 65536,
        "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "n_mtp_layers": 1, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        "compress_rope_theta": 160000, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], **changes,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not ...}


# ---- presets ----


@pytest.mark.parametrize(("key", "flash", "pro"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_presets_are_the_published_configs(key, flash, pro):
    assert getattr(ModelConfig.flash(), key) == flash
    assert getattr(ModelConfig.pro(), key) == pro


def test_the_published_table_covers_every_field():
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= {row[0] for row in PUBLISHED}


def test_layer_ratios_leave_out_the_mtp_entry():
    assert len(ModelConfig.flash().compress_ratios) == 44
    assert len(ModelConfig.flash().layer_ratios) == 43
    assert ModelConfig.flash().layer_ratios[42] == 4
    assert len(ModelConfig.pro().layer_ratios) == 61


def test_tiny_has_every_mechanism_and_takes_changes():
    tiny = ModelConfig.tiny()
    assert set(tiny.layer_ratios) == {0, 4, 128}
    assert 0 < tiny.num_hash_layers < tiny.num_hidden_layers
    assert tiny.num_mtp_layers == 1
    assert ModelConfig.tiny(vocab_size=300).vocab_size == 300
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer, found -1"):
        ModelConfig.tiny(hidden_size=-1)


def test_configs_are_frozen_and_hashable():
    config = ModelConfig.flash()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    assert hash(config) == hash(ModelConfig.flash())


# ---- spellings ----


def test_official_flash_equals_the_preset():
    assert ModelConfig.from_dict(official()) == ModelConfig.flash()


def test_official_set_a_from_folder_and_from_file():
    config = ModelConfig.from_pretrained(SET_A)
    assert config == ModelConfig.from_pretrained(str(SET_A / "config.json"))
    assert config.layer_ratios == (0, 0, 4, 128, 4, 128, 4)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (256, 4, 128)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.index_topk) == (8, 2, 16)
    assert config.num_hash_layers == 3
    assert config.rope_scaling == RopeScaling(factor=16, original_max_position_embeddings=1024)


def test_inference_spelling_equals_the_preset():
    assert ModelConfig.from_dict(inference()) == ModelConfig.flash()
    # the trained length and the number of MTP blocks follow from the keys beside them
    assert ModelConfig.from_dict(inference(n_mtp_layers=..., rope_factor=16.0)) == ModelConfig.flash()
    assert ModelConfig.from_dict(inference(max_position_embeddings=4096)).max_position_embeddings == 4096


@pytest.mark.parametrize("experts", ["fp4", "fp8", "bf16", None, ...])
def test_expert_dtype_does_not_change_the_config(experts):
    assert ModelConfig.from_dict(official(expert_dtype=experts)) == ModelConfig.flash()


def test_modelopt_quantization_config_is_known():
    quantization = official()["quantization_config"] | {"moe_quant_algo": "NVFP4"}
    assert ModelConfig.from_dict(official(quantization_config=quantization)) == ModelConfig.flash()


def test_weight_block_size_comes_from_the_quantization_config():
    quantization = official()["quantization_config"] | {"weight_block_size": [64, 32]}
    assert ModelConfig.from_dict(official(quantization_config=quantization)).weight_block_size == (64, 32)
    assert ModelConfig.from_dict(official(quantization_config=...)).weight_block_size == (128, 128)


def test_dspark_is_recognised_and_is_not_mtp():
    dspark = {
        "dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }  # fmt: skip
    ratios = [0, 0, *[4, 128] * 20, 4, 0, 0, 0]
    config = ModelConfig.from_dict(official(compress_ratios=ratios, **dspark))
    assert config.dspark == DSparkConfig(
        block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256
    )
    assert config.num_nextn_predict_layers == 1
    assert config.num_mtp_layers == 0
    assert config.layer_ratios == ModelConfig.flash().layer_ratios

    with pytest.raises(ConfigError, match="missing dspark_markov_rank"):
        ModelConfig.from_dict(official(compress_ratios=ratios, **dspark | {"dspark_markov_rank": ...}))
    for key, bad in (
        ("dspark_block_size", "five"),
        ("dspark_noise_token_id", -1),
        ("dspark_markov_rank", 2.5),
        ("dspark_target_layer_ids", [40, 41, 43]),
        ("dspark_target_layer_ids", 42),
    ):
        with pytest.raises(ConfigError, match=key):
            ModelConfig.from_dict(official(compress_ratios=ratios, **dspark | {key: bad}))


def hugging_face(tmp_path, **changes):
    import transformers  # only here: importing it takes seconds

    transformers.DeepseekV4Config(**official(**changes)).save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def without_draft_entries(config):
    """Hugging Face keeps no compression ratio for the MTP blocks."""
    return dataclasses.replace(config, compress_ratios=config.layer_ratios)


@pytest.mark.thorough
def test_hugging_face_spelling_as_transformers_writes_it(tmp_path):
    raw = hugging_face(tmp_path)
    assert "layer_types" in raw
    assert "compress_ratios" not in raw
    assert "rope_scaling" not in raw
    assert ModelConfig.from_pretrained(tmp_path) == without_draft_entries(ModelConfig.flash())


def test_hugging_face_full_dump_and_set_a(tmp_path):
    import transformers

    config = transformers.DeepseekV4Config.from_pretrained(SET_A)
    file = tmp_path / "config.json"
    config.to_json_file(file, use_diff=False)
    assert ModelConfig.from_pretrained(file) == without_draft_entries(ModelConfig.from_pretrained(SET_A))


def test_hugging_face_defaults_have_no_yarn(tmp_path):
    hugging_face(tmp_path, rope_scaling=...)
    assert ModelConfig.from_pretrained(tmp_path).rope_scaling is None


def test_hugging_face_nested_theta_is_what_transformers_uses(tmp_path):
    raw = hugging_face(tmp_path)
    raw["rope_parameters"]["main"]["rope_theta"] = 5000.0
    raw["rope_parameters"]["compress"]["rope_theta"] = 7000.0
    config = ModelConfig.from_dict(raw)
    assert (config.rope_theta, config.compress_rope_theta) == (5000.0, 7000.0)


def test_hugging_face_rope_width_from_the_fraction_alone(tmp_path):
    raw = hugging_face(tmp_path)
    del raw["qk_rope_head_dim"]
    assert ModelConfig.from_dict(raw).qk_rope_head_dim == 64


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["layer_types", 0], "full_attention", "layer_types may hold"),
        (["layer_types", 0], ["sliding_attention"], "layer_types may hold"),
        (["layer_types"], "sliding_attention", "layer_types must be a list"),
        (["layer_types"], ["sliding_attention"] * 42, "compress_ratios has 42 values; expected 43"),
        (["compress_ratios"], [4] * 43, "contradict layer_types"),
        (["mlp_layer_types", 5], "hash_moe", "'hash_moe' layers first"),
        (["mlp_layer_types", 5], "dense", "'hash_moe' layers first"),
        (["mlp_layer_types"], ["moe"] * 42, "mlp_layer_types has 42 values"),
        (["num_hash_layers"], 2, "num_hash_layers 2 contradicts mlp_layer_types"),
        (["compress_rates", "compressed_sparse_attention"], 8, "compress_rates must be"),
        (
            ["rope_parameters", "main"],
            {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8},
            "main",
        ),
        (["rope_parameters", "main"], 3, "rope_parameters.main must be an object"),
        (["rope_parameters", "compress", "attention_factor"], 1.277, "attention_factor must be 1"),
        (["rope_parameters", "compress", "mscale"], 1.0, "unknown keys: mscale"),
        (["rope_parameters", "compress", "rope_type"], "llama3", "must be 'yarn' or 'default', found 'llama3'"),
        (["rope_parameters", "compress", "rope_type"], "default", "but its type is not 'yarn'"),
        (["rope_parameters"], {"rope_type": "default"}, "must hold 'main' and 'compress'"),
        (["rope_parameters", "compress", "partial_rotary_factor"], 0.25, "rope width of 128"),
        (["partial_rotary_factor"], 1.5, "between 0 and 1"),
        (["partial_rotary_factor"], float("nan"), "between 0 and 1"),
        (["rope_scaling"], {"type": "yarn"}, "given more than once: rope_scaling, rope_parameters"),
    ],
)
def test_hugging_face_contradictions_are_named(tmp_path, path, value, message):
    raw = hugging_face(tmp_path)
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw)


# ---- rejections ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "unknown keys: kv_lora_rank"),
        ({f"key{i}": i for i in range(7)}, "unknown keys: key0, key1, key2, key3, key4 and 2 more"),
        ({"\ud800": 1}, r"unknown keys: \\ud800"),
        ({"dspark": {"block_size": 5}}, "unknown keys: dspark"),
        ({"weight_block_size": [32, 32]}, "unknown keys: weight_block_size"),
        ({"model_type": "deepseek_v3"}, "model_type must be 'deepseek_v4', found 'deepseek_v3'"),
        ({"model_type": "deepseek_v41"}, "DeepSeek-V4.1"),
        ({"text_config": {}}, "DeepSeek-V4.1"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must be"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True, found False"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be True, found 1"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"expert_dtype": "int4"}, "expert_dtype must be"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
        ({"dim": 4096}, "hidden_size is given twice"),
        ({"hidden_size": ...}, "missing keys: hidden_size"),
        ({"compress_ratios": ..., "vocab_size": ...}, "missing keys: vocab_size, compress_ratios"),
        ({"hidden_size": "4096"}, "hidden_size must be a positive integer, found '4096'"),
        ({"hidden_size": 4096.0}, "hidden_size must be a positive integer, found 4096.0"),
        ({"hidden_size": True}, "hidden_size must be a positive integer, found True"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, found 0"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
        ({"hidden_size": 10**4000}, "hidden_size must be a positive integer, found 1000.*[.]{3}$"),
        ({"hidden_size": 10**5000}, r"found a value too large to print \(int\)"),
        ({"num_hash_layers": -1}, "num_hash_layers must be an integer >= 0"),
        ({"num_hash_layers": 44}, "num_hash_layers 44 exceeds num_hidden_layers 43"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit must be a positive number, found nan"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit must be a positive number, found inf"),
        ({"swiglu_limit": 10**400}, "swiglu_limit must be a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, found 0"),
        ({"rope_theta": "10000"}, "rope_theta must be a positive number"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim must be even and below head_dim 512"),
        ({"index_head_dim": 96}, "index_head_dim must be a power of two"),
        ({"index_head_dim": 32}, "at least qk_rope_head_dim"),
        ({"o_groups": 7}, "o_groups 7 must divide num_attention_heads 64"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok 257 exceeds n_routed_experts 256"),
        ({"sliding_window": 4097}, "sliding_window must be at most 4096"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers must be at most 4096"),
        ({"eos_token_id": [1, 2]}, "eos_token_id must be one id"),
        ({"eos_token_id": 129280}, "eos_token_id 129280 is outside vocab_size"),
        ({"compress_ratios": [0, 4]}, r"has 2 values; expected 43 \(num_hidden_layers\), or more"),
        ({"compress_ratios": [4] * 43 + [0] * 65}, "has 108 values"),
        ({"compress_ratios": [4] * 44}, "belong to draft blocks and must be 0"),
        ({"compress_ratios": [8] * 43}, "compress_ratios may hold 0, 4 and 128; found 8"),
        ({"compress_ratios": [[4]] * 43}, "compress_ratios must be integers"),
        ({"compress_ratios": [4.0] * 43}, "compress_ratios must be integers"),
        ({"compress_ratios": [False] * 43}, "compress_ratios must be integers"),
        ({"compress_ratios": "4" * 43}, "compress_ratios must be a list, found str"),
        ({"compress_ratios": None}, "compress_ratios must be a list, found NoneType"),
        ({"rope_scaling": [16]}, "rope_scaling must be an object, found list"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type must be 'yarn'"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling.type must be 'yarn'"),
        ({"rope_scaling": {"factor": 16}}, "holds factor but its type is not 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "misses original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "rope_theta": 1}}, "must not hold rope_theta"),
        (
            {"rope_scaling": official()["rope_scaling"] | {"factor": -1}},
            "rope_scaling.factor must be positive, found -1",
        ),
        (
            {"rope_scaling": official()["rope_scaling"] | {"original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings must be an integer, found 0.5",
        ),
        ({"rope_scaling": official()["rope_scaling"] | {"mscale": 1.0}}, "has no mscale"),
        ({"rope_factor": 16}, "given more than once"),
        ({"quantization_config": []}, "quantization_config must be an object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config has unknown keys: bits"),
        ({"quantization_config": {"weight_block_size": [128]}}, "must hold two sizes"),
        ({"quantization_config": {"weight_block_size": [128, 0]}}, "weight_block_size must be two positive integers"),
        ({"quantization_config": {"weight_block_size": 128}}, "weight_block_size must be a list"),
    ],
)
def test_rejections_say_what_was_expected_and_found(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(official(**changes))


def test_keys_that_are_not_strings_are_rejected():
    with pytest.raises(ConfigError, match="keys must be strings, found 3"):
        ModelConfig.from_dict(official() | {3: 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4, 128, 4, 128]}, "compress_ratios must be integers"),
        ({"weight_block_size": 128}, "weight_block_size must be two"),
        ({"rope_scaling": {"factor": 16}}, "rope_scaling must be a RopeScaling or None"),
    ],
)
def test_configs_built_in_python_are_checked_too(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.tiny(**changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[]", "must hold a JSON object, found list"),
        (b"{}", "config.json: missing keys: vocab_size"),
    ],
)
def test_unreadable_files_are_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; expected a checkpoint folder"):
        ModelConfig.from_pretrained(tmp_path / "absent")
    with pytest.raises(ConfigError, match="has no config.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_pretrained(tmp_path)


# ---- engine limits ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context_tokens": 0}, "max_context_tokens must be a positive integer, found 0"),
        ({"max_concurrent_requests": 1.5}, "max_concurrent_requests must be a positive integer"),
        ({"max_chunk_tokens": True}, "max_chunk_tokens must be a positive integer"),
        ({"max_draft_tokens": -1}, "max_draft_tokens must be from 0 to 64, found -1"),
        ({"max_draft_tokens": 65}, "max_draft_tokens must be from 0 to 64, found 65"),
        ({"index_key_format": "fp16"}, "index_key_format must be 'fp4' or 'fp8', found 'fp16'"),
        ({"index_key_format": []}, "index_key_format must be 'fp4' or 'fp8'"),
        ({"num_blocks": 0}, "num_blocks must be a positive integer or None, found 0"),
    ],
)
def test_engine_limits_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_engine_limits_accept_their_bounds():
    engine = EngineConfig(max_context_tokens=1, max_draft_tokens=64, index_key_format="fp8", num_blocks=1)
    assert (engine.max_context_tokens, engine.max_draft_tokens, engine.num_blocks) == (1, 64, 1)


# ---- fuzz: a config or a ConfigError, never anything else ----

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 4, 64, 128, 2**31, 2**63, 10**400]),
    st.floats(),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
TEMPLATES = {
    "official": official(),
    "inference": inference(),
    "hugging_face": {
        **official(compress_ratios=..., num_hash_layers=..., rope_scaling=...),
        "layer_types": ["sliding_attention"] * 2 + ["compressed_sparse_attention"] * 41,
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": official()["rope_scaling"] | {"rope_theta": 160000.0, "attention_factor": 1.0},
        },
    },
    "dspark": official(
        compress_ratios=[0] * 46,
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=[40],
        dspark_markov_rank=256,
    ),
}
KNOWN_KEYS = sorted({key for template in TEMPLATES.values() for key in template})


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_fuzz_templates_are_valid(template):
    assert isinstance(ModelConfig.from_dict(template), ModelConfig)


def accept_or_name(raw):
    try:
        outcome = ModelConfig.from_dict(raw)
    except ConfigError as error:
        outcome = str(error)
    if isinstance(outcome, str):
        assert outcome.isascii()  # can be printed anywhere, whatever the file held
    else:
        assert isinstance(hash(outcome), int)


@given(st.dictionaries(st.one_of(st.text(max_size=8), st.sampled_from(KNOWN_KEYS)), JSON, max_size=12))
def test_fuzz_arbitrary_objects(raw):
    accept_or_name(raw)


def containers(value):
    """Every object and list inside `value`, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, (dict, list)) and value else []
    return own + [found for item in inner for found in containers(item)]


@pytest.mark.thorough
@settings(max_examples=600)
@given(data=st.data())
def test_fuzz_mutated_configs(data):
    raw = copy.deepcopy(data.draw(st.sampled_from(list(TEMPLATES.values()))))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(containers(raw)))
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        action = data.draw(st.sampled_from(["replace", "replace", "replace", "delete", "add"]))
        if action == "replace":
            place[key] = data.draw(JSON)
        elif action == "delete":
            del place[key]
        elif isinstance(place, dict):
            place[data.draw(st.one_of(st.text(max_size=8), st.sampled_from(KNOWN_KEYS)))] = data.draw(JSON)
        else:
            place.append(data.draw(JSON))
        if not containers(raw):
            break
    accept_or_name(raw)


@given(st.binary(max_size=64))
def test_fuzz_file_bytes(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        ModelConfig.from_pretrained(file)
