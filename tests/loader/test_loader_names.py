"""The tensor list against the published counts, and the spellings against each other."""

import pytest
from loader_cases import SMALL, VECTORS, checkpoint_of, header_of

from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.names import Naming, Role, detect_naming, expected_tensors, stored_names
from dsv4.loader.summary import checkpoint_summary

PUBLISHED = {  # tensors, bytes, parameters of the main model and of MTP in units of 10 million
    "flash": (69187, 159_609_485_896, 28433, 661),
    "pro": (145116, 864_704_792_696, 157300, 2584),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_list_reproduces_the_published_index(name):
    config = getattr(ModelConfig, name)()
    header = header_of(config)
    num_tensors, num_bytes, main, draft = PUBLISHED[name]
    assert len(header) == num_tensors
    assert sum(part.nbytes for part in header.values()) == num_bytes
    summary = checkpoint_summary(checkpoint_of(header))
    assert (summary.num_tensors, summary.num_bytes) == (num_tensors, num_bytes)
    assert round(summary.num_parameters / 1e7) == main
    assert round(summary.num_draft_parameters / 1e7) == draft
    assert summary.naming is Naming.OFFICIAL
    assert not [row for row in summary.rows if row.part == "other"]


def test_one_mtp_block_of_flash_has_1575_tensors():
    assert sum(name.startswith("mtp.0.") for name in header_of(ModelConfig.flash())) == 1575


@pytest.mark.parametrize("name", ["setA", "draftA"])
def test_the_vectors_have_the_tensors_of_their_config(name):
    folder = VECTORS / name / "model"
    found = Checkpoint.open(folder).tensors
    header = header_of(ModelConfig.from_pretrained(folder))
    assert {name: (part.dtype, part.shape) for name, part in header.items()} == {
        name: (info.dtype, info.shape) for name, info in found.items()
    }


def test_experts_share_a_parameter_and_nothing_else_does():
    tensors = expected_tensors(SMALL, with_mtp=True)
    counts = {}
    for tensor in tensors:
        counts.setdefault(tensor.parameter, []).append(tensor)
    for parameter, members in counts.items():
        if members[0].role is Role.EXPERT:
            assert [member.expert_idx for member in members] == list(range(SMALL.n_routed_experts))
            assert parameter.endswith((".ffn.experts.w1.weight", ".ffn.experts.w2.weight", ".ffn.experts.w3.weight"))
        else:
            assert [member.name for member in members] == [parameter]
    assert not [tensor.name for tensor in expected_tensors(SMALL, with_mtp=False) if tensor.name.startswith("mtp.")]


@pytest.mark.parametrize("naming", [Naming.HF, Naming.HF_SAVED])
def test_spellings_are_recognised_and_never_collide(naming):
    spelled = {}
    for tensor in expected_tensors(SMALL, with_mtp=False):
        for name in stored_names(tensor, naming):
            spelled.setdefault(name, set()).add(tensor.parameter)
    stacks = {name: group for name, group in spelled.items() if len(group) > 1}
    if naming is Naming.HF:  # w1 and w3 live in one tensor
        assert set(stacks) == {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(SMALL.num_hidden_layers)}
    else:
        assert not stacks
    assert detect_naming(spelled) is naming
    assert detect_naming(header_of(SMALL)) is Naming.OFFICIAL


def test_summary_by_format_and_part():
    summary = checkpoint_summary(checkpoint_of(header_of(SMALL, experts="nvfp4", mtp_experts="mxfp4")))
    experts = {(row.format, row.is_draft): row for row in summary.rows if row.part == "routed experts"}
    assert set(experts) == {("nvfp4", False), ("mxfp4", True)}
    weights = 3 * SMALL.n_routed_experts * SMALL.hidden_size * SMALL.moe_intermediate_size
    main, draft = experts["nvfp4", False], experts["mxfp4", True]
    assert main.num_parameters == SMALL.num_hidden_layers * weights
    assert main.num_bytes == SMALL.num_hidden_layers * (weights // 2 + weights // 16 + 3 * SMALL.n_routed_experts * 8)
    assert (draft.num_parameters, draft.num_bytes) == (weights, weights // 2 + weights // 32)
    by_format = summary.bytes_by(lambda row: row.format)
    assert set(by_format) == {"bf16", "f32", "i64", "fp8", "nvfp4", "mxfp4"}
    assert sum(by_format.values()) == summary.num_bytes
