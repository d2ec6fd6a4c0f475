"""Random checkpoints: complete or absent, reproducible, and shaped so that a model built from them behaves."""

import json
from dataclasses import replace

import pytest
import torch
from loader_cases import SMALL, assert_same_params, header_of, same_bits
from safetensors import safe_open

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantTensor
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint, CheckpointError
from dsv4.loader.names import Role, expected_tensors
from dsv4.loader.write import synth
from dsv4.loader.write.random_weights import Recipe, random_weight
from dsv4.loader.write.synth import config_to_dict, random_params, write_checkpoint


def test_files_are_what_the_safetensors_library_expects(tmp_path):
    folder = write_checkpoint(tmp_path / "a" / "model", SMALL, experts="nvfp4", shard_bytes=60_000)
    header = header_of(SMALL, "nvfp4")
    seen = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118 - not a mapping
                part = stream.get_slice(name)
                seen[name] = (part.get_dtype(), tuple(part.get_shape()))
    assert seen == {name: (part.dtype, part.shape) for name, part in header.items()}
    index = json.loads((folder / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(header)
    assert index["metadata"]["total_size"] == sum(part.nbytes for part in header.values())
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]


def test_tensors_are_aligned_to_their_items(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", SMALL, experts="fp8"))
    for info in checkpoint.tensors.values():
        assert info.start % (info.nbytes // info.numel) == 0, info


def test_shard_size_is_respected_and_does_not_change_values(tmp_path):
    large = write_checkpoint(tmp_path / "large", SMALL, seed=5)
    small = write_checkpoint(tmp_path / "small", SMALL, seed=5, shard_bytes=70_000)
    assert len(list(large.glob("*.safetensors"))) == 1
    one, other = Checkpoint.open(large), Checkpoint.open(small)
    sizes = {}
    for info in other.tensors.values():
        sizes[info.file] = sizes.get(info.file, 0) + info.nbytes
    assert len(sizes) > 8
    assert max(sizes.values()) <= 70_000
    assert all(same_bits(one.read(name), other.read(name)) for name in one.tensors)


def test_seed_and_name_decide_the_values():
    first, second = random_params(SMALL, seed=1), random_params(SMALL, seed=1)
    assert_same_params(first, second)
    other = random_params(SMALL, seed=2)
    assert not same_bits(first.embed, other.embed)
    assert not same_bits(first.layers[0].attn.wkv.data, first.layers[1].attn.wkv.data)
    assert not same_bits(first.layers[0].ffn.experts.w1.data[0], first.layers[0].ffn.experts.w1.data[1])


def test_values_keep_activations_of_order_one():
    recipe = Recipe(ModelConfig.tiny(), "bf16")
    for tensor in expected_tensors(recipe.config, with_mtp=True):
        weight = random_weight(tensor, recipe)
        if tensor.role in (Role.LINEAR, Role.EXPERT) or tensor.name == "head.weight":
            gain = weight.float().square().sum(1).mean().sqrt()  # of a unit-variance input
            assert 0.9 < gain < 1.1, tensor.name
        if tensor.name.endswith("norm.weight"):
            assert 0.9 < weight.float().mean() < 1.1
        if tensor.name.endswith(("_base", "_fn", "attn_sink", ".ape")):
            assert weight.std() > 0


def test_weight_larger_than_a_shard_gets_its_own(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", SMALL, shard_bytes=1))
    files = [info.file for info in checkpoint.tensors.values()]
    assert len(set(files)) == len(expected_tensors(SMALL, with_mtp=True))


def test_hash_tables_have_distinct_experts():
    table = random_params(SMALL).layers[0].ffn.tid2eid
    assert table.shape == (64, 2)
    assert int(table.min()) >= 0
    assert int(table.max()) < 4
    assert bool((table[:, 0] != table[:, 1]).all())
    assert table.unique().numel() == 4


def test_quantised_values_follow_the_plain_ones():
    plain = random_params(SMALL, experts="bf16", seed=9, dequantize_to=torch.float32)
    for experts in ("mxfp4", "nvfp4", "fp8"):
        params = random_params(SMALL, experts=experts, seed=9, dequantize_to=torch.float32)
        one, other = params.layers[1].ffn.experts.w1, plain.layers[1].ffn.experts.w1
        cosine = torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0)
        assert 0.98 < cosine < 1.0, experts


def test_w1_and_w3_share_the_nvfp4_scale():
    experts = random_params(SMALL, experts="nvfp4").layers[1].ffn.experts
    assert all(isinstance(stack, QuantTensor) for stack in (experts.w1, experts.w2, experts.w3))
    assert same_bits(experts.w1.global_scale, experts.w3.global_scale)
    assert not same_bits(experts.w1.global_scale, experts.w2.global_scale)
    assert experts.w1.global_scale.shape == (4,)


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL, ModelConfig.flash(), ModelConfig.pro(), replace(SMALL, rope_scaling=None),
        replace(SMALL, weight_block_size=(32, 64)), replace(SMALL, compress_ratios=(0, 4, 128)),
    ],
)  # fmt: skip
def test_config_round_trip(config, experts):
    raw = json.loads(json.dumps(config_to_dict(config, experts)))
    assert ModelConfig.from_dict(raw) == config
    assert raw.get("quantization_config", {}).get("moe_quant_algo") == ("NVFP4" if experts == "nvfp4" else None)


def test_target_is_never_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "empty", SMALL)
    before = sorted(path.name for path in (tmp_path / "empty").iterdir())
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        write_checkpoint(tmp_path / "empty", SMALL, seed=1)
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        write_checkpoint(tmp_path / "file", SMALL)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_nothing_half_written_is_left(tmp_path, monkeypatch, error):
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) > 20:
            raise error
        return random_weight(*args)

    monkeypatch.setattr(synth, "random_weight", fail)
    with pytest.raises(type(error)):
        write_checkpoint(tmp_path / "model", SMALL, shard_bytes=50_000)
    assert list(tmp_path.iterdir()) == []
    assert len(calls) == 21


def test_only_one_weight_is_in_memory_while_writing(tmp_path, monkeypatch):
    """Every weight is asked for once, in order, and written before the next one is made."""
    names, progress = [], []

    def record(tensor, recipe, device):
        names.append((tensor.name, progress[-1][0] if progress else 0))
        return random_weight(tensor, recipe, device)

    monkeypatch.setattr(synth, "random_weight", record)
    write_checkpoint(tmp_path / "model", SMALL, progress=lambda done, total: progress.append((done, total)))
    recipe, written = Recipe(SMALL), 0
    for (name, done), tensor in zip(names, expected_tensors(SMALL, with_mtp=True), strict=True):
        assert (name, done) == (tensor.name, written)
        written += sum(part.nbytes for part in synth.stored_tensors(tensor, recipe))
    assert progress[-1] == (written, written)


def test_impossible_requests():
    with pytest.raises(ValueError, match="experts must be 'mxfp4'"):
        random_params(SMALL, experts="int4")
    with pytest.raises(ValueError, match="mtp_experts must be"):
        random_params(SMALL, mtp_experts="int4")
    with pytest.raises(ValueError, match="moe_intermediate_size must be a multiple of 32 for FP4 experts, found 40"):
        random_params(replace(SMALL, moe_intermediate_size=40))
    with pytest.raises(ValueError, match="shard_bytes must be positive"):
        write_checkpoint("never", SMALL, shard_bytes=0)
