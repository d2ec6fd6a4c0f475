"""Hugging Face's two spellings, made by transformers itself from an official checkpoint: all three load alike."""

import json

import pytest
import torch
from loader_cases import assert_same_params, flatten
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from dsv4.config import ModelConfig
from dsv4.loader.checkpoint import Checkpoint, CheckpointError
from dsv4.loader.names import Naming
from dsv4.loader.summary import checkpoint_summary
from dsv4.loader.weights import load_params, plan_load
from dsv4.loader.write.synth import random_params, write_checkpoint

CONFIG = ModelConfig.tiny(
    vocab_size=64, hidden_size=128, num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), n_routed_experts=4,
    moe_intermediate_size=32, num_attention_heads=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """naming -> folder; transformers reads the official one with its own name map and writes the other two."""
    root = tmp_path_factory.mktemp("huggingface")
    official = write_checkpoint(root / "official", CONFIG, experts="bf16", seed=4)
    model, report = DeepseekV4ForCausalLM.from_pretrained(official, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    model.save_pretrained(root / "saved")
    plain = root / "plain"
    plain.mkdir()
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, plain / "model.safetensors")
    (plain / "config.json").write_text((root / "saved" / "config.json").read_text())
    return {Naming.OFFICIAL: official, Naming.HF_SAVED: root / "saved", Naming.HF: plain}


def load(folder, **options):
    return load_params(Checkpoint.open(folder), ModelConfig.from_pretrained(folder), **options)


@pytest.mark.parametrize("naming", list(Naming))
def test_all_spellings_load_the_same_values(folders, naming):
    checkpoint, config = Checkpoint.open(folders[naming]), ModelConfig.from_pretrained(folders[naming])
    plan = plan_load(checkpoint, config)
    assert plan.naming is naming
    assert plan.nbytes == checkpoint.nbytes
    assert plan.num_mtp == (1 if naming is Naming.OFFICIAL else 0)
    params = load_params(checkpoint, config, dequantize_to=torch.float32)
    expected = random_params(CONFIG, experts="bf16", seed=4, dequantize_to=torch.float32)
    expected.mtp = expected.mtp[: plan.num_mtp]
    expected.formats = {name: expected.formats[name] for name in params.formats}
    assert_same_params(params, expected)


@pytest.mark.parametrize("naming", [Naming.HF, Naming.HF_SAVED])
def test_half_precision_models(folders, tmp_path, naming):
    """Saved in BF16, the fp32 tensors of the model come back as fp32, everything else as stored."""
    tensors = load_file(folders[naming] / "model.safetensors")
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    params = load_params(Checkpoint.open(tmp_path), CONFIG)
    fp32 = {path for path, item in flatten(params) if isinstance(item, torch.Tensor) and item.dtype == torch.float32}
    assert fp32
    assert all(path.endswith((".fn", ".base", ".scale", ".sink", ".bias", ".ape")) for path in fp32)
    assert params.layers[1].ffn.experts.w1.dtype == params.embed.dtype == torch.bfloat16


def test_older_name_of_the_indexer_weights(folders, tmp_path):
    tensors = load_file(folders[Naming.HF] / "model.safetensors")
    newer = [name for name in tensors if ".scorer." in name]
    assert newer
    for name in newer:
        tensors[name.replace(".scorer.", ".")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_params(load_params(Checkpoint.open(tmp_path), CONFIG), load(folders[Naming.HF]))
    tensors[newer[0]] = tensors[newer[0].replace(".scorer.", ".")].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected"):
        load_params(Checkpoint.open(tmp_path), CONFIG)


@pytest.mark.parametrize("naming", [Naming.HF, Naming.HF_SAVED])
def test_missing_names_are_reported_in_the_files_own_spelling(folders, tmp_path, naming):
    tensors = load_file(folders[naming] / "model.safetensors")
    for name in list(tensors):
        shorter = {key: value for key, value in tensors.items() if key != name}
        if ".experts." in name and ".experts.1." not in name and not name.endswith("_proj"):
            continue
        save_file(shorter, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}$"):
            plan_load(Checkpoint.open(tmp_path), CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stack: stack[:, :-1], r"misshapen \(1\): .*gate_up_proj is \[4, 63, 128\], expected \[4, 64, 128\]"),
        (lambda stack: stack[:3], "misshapen"),
        (lambda stack: stack.to(torch.float8_e4m3fn), r"mistyped \(1\): .*gate_up_proj is F8_E4M3"),
    ],
)
def test_wrong_stack_of_experts(folders, tmp_path, change, message):
    tensors = load_file(folders[Naming.HF] / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        plan_load(Checkpoint.open(tmp_path), CONFIG)


def test_mtp_names_do_not_belong_to_hugging_face_checkpoints(folders, tmp_path):
    tensors = load_file(folders[Naming.HF] / "model.safetensors") | {"mtp.0.enorm.weight": torch.ones(128)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): mtp\.0\.enorm\.weight"):
        plan_load(Checkpoint.open(tmp_path), CONFIG)


def test_scales_under_transformers_name(folders, tmp_path):
    """A quantised matrix in Hugging Face's spelling carries `weight_scale_inv`."""
    tensors = load_file(folders[Naming.HF] / "model.safetensors")
    name = "model.layers.0.self_attn.o_b_proj"
    weight = tensors[f"{name}.weight"]
    tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale_inv"] = torch.full([-(-size // 128) for size in weight.shape], 2.0)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_params(Checkpoint.open(tmp_path), CONFIG).layers[0].attn.wo_b
    assert torch.equal(loaded.dequantize(), weight.to(torch.float8_e4m3fn).float() * 2)


def test_summary_knows_every_spelling(folders):
    counts = {}
    for naming, folder in folders.items():
        summary = checkpoint_summary(Checkpoint.open(folder))
        assert summary.naming is naming
        parts = {}
        for row in summary.rows:
            if not row.is_draft:
                parts[row.part] = parts.get(row.part, 0) + row.num_parameters
        counts[naming] = parts
    assert counts[Naming.OFFICIAL] == counts[Naming.HF] == counts[Naming.HF_SAVED]
    assert json.loads((folders[Naming.HF] / "config.json").read_text())["model_type"] == "deepseek_v4"
