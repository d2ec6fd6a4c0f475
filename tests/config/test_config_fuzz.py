"""Whatever config.json holds: a config or a ConfigError, never anything else."""

import copy

import pytest
from config_cases import inference, official
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import ConfigError, ModelConfig

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
@settings(max_examples=300)
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
