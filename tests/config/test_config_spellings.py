"""Every spelling of config.json gives the same `ModelConfig`; contradictions are named."""

import dataclasses
import json
from pathlib import Path

import pytest
from config_cases import inference, official

from dsv4.config import ConfigError, DSparkConfig, ModelConfig, RopeScaling

SET_A = Path(__file__).parents[1] / "vectors" / "setA" / "model"


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
