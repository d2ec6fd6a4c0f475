"""DSpark checkpoints: the published layouts by count and byte, loaded strictly, in the format of every tensor."""

from dataclasses import replace

import pytest
from loader_cases import SMALL, assert_same_params, checkpoint_of, error_of, format_name, header_of, stored, total_bytes

from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.resolve import plan_load
from dsv4.loader.summary import checkpoint_summary
from dsv4.loader.weights import load_params
from dsv4.loader.write.synth import random_params, write_checkpoint

DSPARK = SMALL.with_dspark(noise_token_id=7, markov_rank=16)
PUBLISHED = {  # tensors and bytes of the whole, of all mtp.*, and of one ordinary draft layer
    "flash_0731": (72_317, 166_878_536_440, 4_705, 10_862_838_300, 1_565, 3_559_944_536),
    "pro_0813": (149_782, 892_727_580_904, 7_009, 41_979_375_900, 2_333, 13_853_319_192),
}


def count_and_bytes(header, prefix=""):
    parts = [part for name, part in header.items() if name.startswith(prefix)]
    return len(parts), sum(part.nbytes for part in parts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts(name):
    config = getattr(ModelConfig, name)()
    header = header_of(config)
    expected = PUBLISHED[name]
    assert count_and_bytes(header) == expected[:2]
    assert count_and_bytes(header, "mtp.") == expected[2:4]
    assert count_and_bytes(header, "mtp.1.") == expected[4:]


def test_flash_0731_fits_its_config_to_the_byte():
    config = ModelConfig.flash_0731()
    checkpoint = checkpoint_of(header_of(config))
    plan = plan_load(checkpoint, config)
    num_tensors, num_bytes = PUBLISHED["flash_0731"][:2]
    assert (plan.num_mtp, plan.nbytes) == (3, num_bytes)
    summary = checkpoint_summary(checkpoint)
    assert (summary.num_tensors, summary.num_bytes) == (num_tensors, num_bytes)
    assert not [row for row in summary.rows if row.part == "other"]


@pytest.mark.parametrize("draft_experts", ["mxfp4", "nvfp4", "bf16"])
def test_written_and_loaded(tmp_path, draft_experts):
    folder = write_checkpoint(tmp_path / "model", DSPARK, experts="nvfp4", mtp_experts=draft_experts)
    config = ModelConfig.from_pretrained(folder)
    assert config == DSPARK
    params = load_params(Checkpoint.open(folder), config)
    assert params.mtp == []
    assert params.dspark is not None
    assert params.draft_blocks is params.dspark.blocks
    assert len(params.dspark.blocks) == 3
    names = {"bf16": "torch.bfloat16"}
    for block in params.dspark.blocks:
        assert format_name(block.ffn.experts.w2) == names.get(draft_experts, draft_experts)
    assert format_name(params.layers[1].ffn.experts.w2) == "nvfp4"
    assert format_name(params.dspark.main_proj) == "fp8"
    assert_same_params(params, random_params(DSPARK, experts="nvfp4", mtp_experts=draft_experts))
    # everything that was stored was loaded, but for what NVFP4 carries along unused
    unread = sum(info.nbytes for name, info in Checkpoint.open(folder).tensors.items() if name.endswith(".input_scale"))
    assert total_bytes(params) == checkpoint_summary(Checkpoint.open(folder)).num_bytes - unread


def test_layers_of_one_head_may_differ_in_format():
    mixed = header_of(DSPARK, "nvfp4", "mxfp4")
    nvfp4 = header_of(DSPARK, "nvfp4", "nvfp4")
    prefix = "mtp.1.ffn.experts."
    mixed = {name: part for name, part in mixed.items() if not name.startswith(prefix)} | {
        name: part for name, part in nvfp4.items() if name.startswith(prefix)
    }
    formats = {
        source.tensor.name.split(".")[1]: str(source.format.quant)
        for source in plan_load(checkpoint_of(mixed), DSPARK).sources
        if source.tensor.name.startswith("mtp.") and source.tensor.expert_idx is not None
    }
    assert formats == {"0": "mxfp4", "1": "nvfp4", "2": "mxfp4"}


def test_every_draft_tensor_is_required_and_none_is_taken_for_another():
    header = header_of(DSPARK)
    names = [name for name in header if name.startswith("mtp.") and (".experts." not in name or ".experts.3." in name)]
    assert {"mtp.2.markov_head.markov_w1.weight", "mtp.0.main_proj.scale", "mtp.1.ffn.shared_experts.w2.scale"} < {
        *names
    }
    for name in names:
        missing = {other: part for other, part in header.items() if other != name}
        assert f"missing (1): {name}" in error_of(missing, DSPARK)
        wrong = f"{name}x"
        message = error_of(missing | {wrong: replace(header[name], name=wrong)}, DSPARK)
        assert f"missing (1): {name}" in message
        assert wrong in message.partition("unexpected")[2]


@pytest.mark.parametrize(
    "name",
    [
        "mtp.3.attn_norm.weight",  # one layer too many
        "mtp.1.norm.weight",  # only the last layer has a head
        "mtp.1.main_norm.weight",  # only the first takes taps
        "mtp.2.confidence_head.proj.bias",
        "mtp.0.embed.weight",  # heads with a vocabulary of their own
        "mtp.2.head.weight",
        "mtp.2.markov_head.embed.weight",  # V4.1's name
        "mtp.0.attn.compressor.ape",
        "mtp.0.ffn.gate.tid2eid",
    ],
)
def test_extra_draft_tensors(name):
    assert f"unexpected (1): {name}" in error_of(header_of(DSPARK) | {name: stored(name, "BF16", 64)}, DSPARK)


def test_names_decide_which_drafter_there_is():
    """The config of one drafter over the tensors of the other is an error that says which tensors those are."""
    message = error_of(header_of(SMALL), DSPARK)
    assert (
        "holds mtp.0.e_proj.weight (6 such tensors), part of an MTP block, but its config has dspark_* keys" in message
    )
    message = error_of(header_of(DSPARK), SMALL)
    assert "part of a DSpark draft head, but its config has no dspark_* keys" in message
    for name in ("0.main_proj", "1.norm", "2.markov_head.markov_w1", "2.confidence_head.proj"):
        header = header_of(SMALL) | {f"mtp.{name}.weight": stored(f"mtp.{name}.weight", "BF16", 64)}
        assert "part of a DSpark draft head, but its config has no dspark_* keys" in error_of(header, SMALL)
    # a head that lost its projection is still a head
    header = header_of(DSPARK)
    del header["mtp.0.main_proj.weight"], header["mtp.0.main_proj.scale"]
    assert "missing (1): mtp.0.main_proj.weight" in error_of(header, DSPARK)


def test_a_head_may_be_left_out_as_a_whole():
    without = {name: part for name, part in header_of(DSPARK).items() if not name.startswith("mtp.")}
    assert plan_load(checkpoint_of(without), DSPARK).num_mtp == 0
    params = random_params(DSPARK, with_mtp=False)
    assert (params.dspark, params.draft_blocks) == (None, [])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_heads_of_other_depths(num_layers):
    config = replace(DSPARK, compress_ratios=(*SMALL.layer_ratios, *(0,) * num_layers))
    header = header_of(config)
    last = num_layers - 1
    assert f"mtp.{last}.markov_head.markov_w1.weight" in header
    assert f"mtp.{last + 1}.attn_norm.weight" not in header
    assert plan_load(checkpoint_of(header), config).num_mtp == num_layers
    assert len(random_params(config).draft_blocks) == num_layers
