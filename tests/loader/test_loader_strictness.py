"""A checkpoint that does not fit its config is one error that says everything; headers only, no files."""

from dataclasses import replace
from itertools import cycle

import pytest
from loader_cases import SMALL, checkpoint_of, error_of, header_of, stored

from dsv4.config import ModelConfig
from dsv4.loader.resolve import plan_load

EXPERT = "layers.1.ffn.experts.2.w1"


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "fp8", "bf16"])
def test_correct_headers_pass(experts):
    header = header_of(SMALL, experts)
    plan = plan_load(checkpoint_of(header), SMALL)
    assert plan.notes == ()
    assert plan.num_mtp == 1
    unread = sum(part.nbytes for name, part in header.items() if name.endswith(".input_scale"))
    assert plan.nbytes == sum(part.nbytes for part in header.values()) - unread


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "fp8", "bf16"])
def test_every_single_tensor_is_required(experts):
    header = header_of(SMALL, experts)
    for name in [name for name in header if ".experts." not in name or EXPERT in name]:
        if name.endswith(".input_scale"):
            continue
        rest = {other: part for other, part in header.items() if other != name}
        message = error_of(rest)
        if name == f"{EXPERT}.weight_scale":  # weight_scale_2 still says NVFP4
            assert f"missing (1): {name}" in message
        elif name.endswith(".weight") and f"{name.removesuffix('.weight')}.scale" in header:
            assert f"missing (1): {name}\n" in message
            assert "unexpected (1)" in message  # its scale is left alone
        else:
            assert f"missing (1): {name}" in message


@pytest.mark.parametrize("name", ["layers.3.attn_norm.weight", "layers.0.attn.compressor.ape", "mtp.0.embed.weight",
                                  "layers.0.ffn.gate.bias", "model.norm_extra", "layers.0.attn.q_norm.scale",
                                  f"{EXPERT}.zero_point"])  # fmt: skip
def test_unexpected_tensor(name):
    header = header_of(SMALL) | {name: stored(name, "BF16", 64)}
    if name.startswith("model."):
        assert "unexpected" in error_of(header)
    else:
        assert f"unexpected (1): {name}" in error_of(header)


def test_every_wrong_shape_is_named():
    header = header_of(SMALL, "nvfp4", mtp_experts="mxfp4")
    for name, part in header.items():
        if ".experts." in name and ".experts.1." not in name:
            continue
        wrong = replace(part, shape=(*part.shape, 2))
        assert f"misshapen (1): {name} is {list(wrong.shape)}, expected {list(part.shape)}" in error_of(
            header | {name: wrong}
        )


def test_every_wrong_dtype_is_named():
    header = header_of(SMALL, "nvfp4", mtp_experts="mxfp4")
    names = [name for name in header if ".experts." not in name or ".experts.1." in name]
    for name, dtype in zip(names, cycle(("I32", "F64", "F8_E5M2"))):
        assert f"{name} is {dtype}, expected" in error_of(header | {name: replace(header[name], dtype=dtype)})


@pytest.mark.parametrize(
    ("experts", "suffix", "dtype"),
    [
        ("mxfp4", "scale", "U8"),  # could be a numerically copied exponent
        ("mxfp4", "scale", "F32"),
        ("nvfp4", "weight", "I8"),
        ("nvfp4", "weight_scale", "F8_E8M0"),
        ("nvfp4", "weight_scale_2", "BF16"),
        ("nvfp4", "input_scale", "BF16"),
        ("fp8", "scale", "BF16"),
    ],
)
def test_siblings_have_one_dtype(experts, suffix, dtype):
    header = header_of(SMALL, experts)
    name = f"{EXPERT}.{suffix}"
    assert f"{name} is {dtype}, expected" in error_of(header | {name: replace(header[name], dtype=dtype)})


def test_quantised_tensors_where_only_plain_ones_belong():
    for name in ("layers.1.ffn.gate.weight", "embed.weight", "layers.1.attn.compressor.wkv.weight"):
        header = header_of(SMALL)
        header[name] = replace(header[name], dtype="F8_E4M3")
        assert f"mistyped (1): {name} is F8_E4M3, expected BF16 or F16 or F32" in error_of(header)


def test_both_kinds_of_scale_are_one_too_many():
    header = header_of(SMALL, "nvfp4")
    header[f"{EXPERT}.scale"] = stored(f"{EXPERT}.scale", "F8_E8M0", 32, 2)
    assert f"unexpected (1): {EXPERT}.scale" in error_of(header)


@pytest.mark.parametrize(("experts", "other"), [("mxfp4", "nvfp4"), ("nvfp4", "mxfp4"), ("fp8", "bf16")])
def test_experts_of_one_matrix_share_a_format(experts, other):
    header, replacement = header_of(SMALL, experts), header_of(SMALL, other)
    mixed = {name: part for name, part in header.items() if not name.startswith(EXPERT)}
    mixed |= {name: part for name, part in replacement.items() if name.startswith(EXPERT)}
    message = error_of(mixed)
    assert f"mixed formats (1): {EXPERT}.weight is" in message
    assert "but layers.1.ffn.experts.0.w1.weight is" in message


def test_fp8_experts_share_the_kind_of_scale():
    header = header_of(SMALL, "fp8")
    name = f"{EXPERT}.scale"
    message = error_of(header | {name: replace(header[name], dtype="F8_E8M0")})
    assert "mixed formats (1)" in message
    assert "with F8_E8M0 scales" in message


def test_one_error_lists_five_of_a_kind_and_counts_the_rest():
    header = header_of(SMALL)
    gone = [name for name in header if name.startswith("layers.1.ffn.experts.") and name.endswith(".scale")]
    for name in gone:
        del header[name]
    header["x"] = stored("x", "F32", 1)
    norm = header["norm.weight"]
    header["norm.weight"] = replace(norm, shape=(63,))
    message = error_of(header)
    assert f"missing ({len(gone)}): {'; '.join(gone[:5])} and {len(gone) - 5} more" in message
    assert "unexpected (1): x" in message
    assert "misshapen (1): norm.weight is [63], expected [64]" in message


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"num_hidden_layers": 2, "compress_ratios": (0, 4, 0)}, {"unexpected"}),
        ({"num_hidden_layers": 4, "compress_ratios": (0, 4, 128, 0, 0)}, {"missing"}),
        ({"compress_ratios": (0, 128, 4, 0)}, {"missing", "unexpected", "misshapen"}),
        ({"num_hash_layers": 2}, {"missing", "unexpected"}),
        ({"n_routed_experts": 5}, {"missing", "misshapen"}),
        ({"hidden_size": 128}, {"misshapen"}),
        ({"vocab_size": 65}, {"misshapen"}),
        ({"weight_block_size": (32, 32)}, {"misshapen"}),
    ],
)
def test_config_that_contradicts_the_tensors(change, kinds):
    message = error_of(header_of(SMALL), replace(SMALL, **change))
    found = {kind for kind in ("missing", "unexpected", "misshapen", "mistyped") if f"  {kind} (" in message}
    assert found == kinds


def test_mtp_is_all_or_nothing():
    header = header_of(SMALL)
    without = {name: part for name, part in header.items() if not name.startswith("mtp.")}
    assert plan_load(checkpoint_of(without), SMALL).num_mtp == 0
    one = without | {"mtp.0.enorm.weight": header["mtp.0.enorm.weight"]}
    assert (
        f"missing ({sum(name.startswith('mtp.') and not name.endswith('.scale') for name in header) - 1})"
        in error_of(one)
    )


def test_several_mtp_blocks_are_not_taken_for_dspark():
    config = ModelConfig.tiny(num_nextn_predict_layers=2, compress_ratios=(0, 4, 128, 4, 128, 0, 0))
    assert plan_load(checkpoint_of(header_of(config)), config).num_mtp == 2


def test_packed_width_that_no_group_divides():
    config = replace(SMALL, moe_intermediate_size=40)
    header = header_of(config, "bf16")
    name = "layers.1.ffn.experts.2.w2.weight"
    message = error_of(header | {name: stored(name, "I8", 64, 20)}, config)
    assert f"misshapen (1): {name} is packed FP4, but 40 columns are not a multiple of 32" in message
