"""`ModelConfig`: the published presets, and a named error for everything else; `EngineConfig`: its limits."""

import dataclasses

import pytest
from config_cases import official

from dsv4.config import ConfigError, EngineConfig, ModelConfig, RopeScaling

# what the published config.json of Pro says otherwise than that of Flash
PRO = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5, "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}  # fmt: skip


# ---- presets ----


@pytest.mark.parametrize(("preset", "changes"), [("flash", {}), ("pro", PRO)])
def test_presets_are_the_published_configs(preset, changes):
    """Field by field; what another spelling gives is tests/config/test_config_spellings.py."""
    config, published = getattr(ModelConfig, preset)(), official(**changes)
    assert config == ModelConfig.from_dict(published)
    scaling = {name: value for name, value in published.pop("rope_scaling").items() if name != "type"}
    published |= {
        "rope_scaling": RopeScaling(**scaling), "compress_ratios": tuple(published["compress_ratios"]),
        "weight_block_size": tuple(published["quantization_config"]["weight_block_size"]), "dspark": None,
    }  # fmt: skip
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == {
        field.name: published[field.name] for field in dataclasses.fields(config)
    }


def test_layer_ratios_leave_out_the_mtp_entry():
    assert len(ModelConfig.flash().compress_ratios) == 44
    assert len(ModelConfig.flash().layer_ratios) == 43
    assert ModelConfig.flash().layer_ratios[42] == 4
    assert len(ModelConfig.pro().layer_ratios) == 61


def test_tiny_has_every_mechanism_and_takes_changes():
    tiny = ModelConfig.tiny()
    assert set(tiny.layer_ratios) == {0, 4, 128}
    assert 0 < tiny.num_hash_layers < tiny.num_hidden_layers
    assert tiny.num_nextn_predict_layers == 1
    assert ModelConfig.tiny(vocab_size=300).vocab_size == 300
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer, found -1"):
        ModelConfig.tiny(hidden_size=-1)


def test_configs_are_frozen_and_hashable():
    config = ModelConfig.flash()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1
    assert hash(config) == hash(ModelConfig.flash())


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
        ({"max_chunk_tokens": True}, "max_chunk_tokens must be a positive integer or None"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens must be a positive integer or None, found 0"),
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
