"""Loading: every format bit for bit, formats decided per tensor, nothing copied twice."""

import json
import warnings

import numpy as np
import pytest
import torch
from loader_cases import SET_A, SMALL, assert_same_params, flatten, format_name, gathered, same_bits, total_bytes
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantTensor
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint, CheckpointError
from dsv4.loader.summary import checkpoint_summary
from dsv4.loader.weights import load_params
from dsv4.loader.write.config_file import config_to_dict
from dsv4.loader.write.synth import random_params, write_checkpoint

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
LINEAR_OF = {"mxfp4": "fp8", "nvfp4": "fp8", "fp8": "fp8", "bf16": "torch.bfloat16"}
EXPERTS_OF = LINEAR_OF | {"mxfp4": "mxfp4", "nvfp4": "nvfp4"}


@pytest.fixture(scope="module")
def set_a():
    return load_params(Checkpoint.open(SET_A), ModelConfig.from_pretrained(SET_A))


def raw_bytes(checkpoint, name):
    info = checkpoint.tensors[name]
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        return np.frombuffer(stream.read(info.nbytes), dtype=np.uint8).reshape(info.shape)


def edit_single_file(folder, change):
    """Gather a checkpoint into one file after `change(tensors)`; returns the folder."""
    tensors = gathered(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_set_a_formats_and_shapes(set_a):
    config = ModelConfig.from_pretrained(SET_A)
    assert set_a.embed.shape == (256, 256)
    assert set_a.embed.dtype == set_a.lm_head.dtype == torch.bfloat16
    assert len(set_a.layers) == 7
    assert len(set_a.mtp) == 1
    for layer_idx, layer in enumerate([*set_a.layers, set_a.mtp[0].block]):
        ratio = config.compress_ratios[layer_idx]
        assert (layer.attn.compressor is None) == (ratio == 0)
        assert (layer.attn.indexer is None) == (ratio != 4)
        assert (layer.ffn.tid2eid is None) == (layer_idx >= 3) == (layer.ffn.bias is not None)
        assert {format_name(w) for w in (layer.ffn.experts.w1, layer.ffn.experts.w2, layer.ffn.experts.w3)} == {"mxfp4"}
        assert layer.ffn.experts.w1.shape == (8, 128, 256)
        assert layer.ffn.experts.w2.shape == (8, 256, 128)
        for weight in (layer.attn.wq_a, layer.attn.wo_a, layer.ffn.shared.w2):
            assert format_name(weight) == "fp8"
            assert weight.scale.dtype == torch.uint8
        assert layer.hc_attn.fn.dtype == layer.attn.sink.dtype == torch.float32
        assert layer.attn_norm.dtype == torch.bfloat16
    assert set_a.layers[0].ffn.tid2eid.dtype == torch.int64


def test_set_a_values_decode_as_published(set_a):
    checkpoint = Checkpoint.open(SET_A)
    config = ModelConfig.from_pretrained(SET_A)
    exact = load_params(Checkpoint.open(SET_A), config, dequantize_to=torch.float32)
    for expert_idx, part in ((0, "w1"), (5, "w2"), (7, "w3")):
        name = f"layers.3.ffn.experts.{expert_idx}.{part}"
        packed, scale = raw_bytes(checkpoint, f"{name}.weight"), raw_bytes(checkpoint, f"{name}.scale")
        values = np.stack((E2M1[packed & 15], E2M1[packed >> 4]), -1).reshape(packed.shape[0], -1)
        expected = values * np.repeat(np.exp2(scale.astype(np.float32) - 127), 32, axis=1)
        stack = getattr(set_a.layers[3].ffn.experts, part)
        assert np.array_equal(stack[expert_idx].dequantize().numpy(), expected)
        assert np.array_equal(getattr(exact.layers[3].ffn.experts, part)[expert_idx].numpy(), expected)
    name = "mtp.0.e_proj"
    codes = torch.from_numpy(raw_bytes(checkpoint, f"{name}.weight").copy()).view(torch.float8_e4m3fn).float().numpy()
    scale = np.exp2(raw_bytes(checkpoint, f"{name}.scale").astype(np.float32) - 127)
    expected = codes * np.repeat(np.repeat(scale, 128, 0), 128, 1)
    assert np.array_equal(set_a.mtp[0].e_proj.dequantize().numpy(), expected)
    assert np.array_equal(exact.mtp[0].e_proj.numpy(), expected)


def test_exact_numerics_make_every_float_one_dtype():
    params = load_params(Checkpoint.open(SET_A), ModelConfig.from_pretrained(SET_A), dequantize_to=torch.float64)
    tensors = [item for _, item in flatten(params) if isinstance(item, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors} == {torch.float64, torch.int64}
    assert not [path for path, item in flatten(params) if isinstance(item, QuantTensor)]
    with pytest.raises(ValueError, match="float dtype"):
        load_params(Checkpoint.open(SET_A), SMALL, dequantize_to=torch.int8)


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "fp8", "bf16"])
def test_written_checkpoints_load_back_bit_for_bit(tmp_path, experts):
    folder = write_checkpoint(tmp_path / "model", SMALL, experts=experts, seed=3, shard_bytes=150_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    config = ModelConfig.from_pretrained(folder)
    assert config == SMALL
    params = load_params(Checkpoint.open(folder), config)
    assert_same_params(params, random_params(SMALL, experts=experts, seed=3))
    assert format_name(params.layers[1].ffn.experts.w2) == EXPERTS_OF[experts]
    assert format_name(params.layers[1].attn.wq_b) == LINEAR_OF[experts]
    if experts == "fp8":
        assert params.layers[1].ffn.experts.w1.scale.dtype == params.layers[0].attn.wkv.scale.dtype == torch.float32
    exact = load_params(Checkpoint.open(folder), config, dequantize_to=torch.float32)
    assert_same_params(exact, random_params(SMALL, experts=experts, seed=3, dequantize_to=torch.float32))
    w2 = params.layers[1].ffn.experts.w2
    assert same_bits(exact.layers[1].ffn.experts.w2[2], w2[2].dequantize() if experts != "bf16" else w2[2].float())


def test_every_layer_may_have_its_own_format(tmp_path):
    """Formats follow the tensors: layer 0 is NVFP4, layer 1 MXFP4, layer 2 BF16, and MTP is FP8 with FP32 scales."""
    formats = ("nvfp4", "mxfp4", "bf16", "fp8")
    prefixes = [f"{name}.ffn.experts." for name in ("layers.0", "layers.1", "layers.2", "mtp.0")]
    sources = {}
    for experts in formats:
        write_checkpoint(tmp_path / experts, SMALL, experts=experts, seed=1)
        sources[experts] = load_file(tmp_path / experts / "model-00001-of-00001.safetensors")

    def mix(tensors):
        for prefix, experts in zip(prefixes, formats, strict=True):
            for name in [name for name in tensors if name.startswith(prefix)]:
                del tensors[name]
            tensors.update({name: value for name, value in sources[experts].items() if name.startswith(prefix)})

    folder = edit_single_file(tmp_path / "mxfp4", mix)
    params = load_params(Checkpoint.open(folder), SMALL)
    blocks = [*params.layers, params.mtp[0].block]
    for block_idx, (block, experts) in enumerate(zip(blocks, formats, strict=True)):
        reference = random_params(SMALL, experts=experts, seed=1)
        expected = [*reference.layers, reference.mtp[0].block][block_idx].ffn.experts
        assert format_name(block.ffn.experts.w1) == EXPERTS_OF[experts]
        for (path, one), (_, other) in zip(flatten(block.ffn.experts), flatten(expected), strict=True):
            assert same_bits(one, other) if isinstance(one, torch.Tensor) else one == other, path


def test_nvfp4_scalars_may_have_one_element_and_input_scale_may_be_absent(tmp_path):
    folder = write_checkpoint(tmp_path / "model", SMALL, experts="nvfp4")

    def change(tensors):
        for name in list(tensors):
            if name.endswith(".input_scale"):
                del tensors[name]
            elif name.endswith(".weight_scale_2"):
                tensors[name] = tensors[name].reshape(1)

    folder = edit_single_file(folder, change)
    assert_same_params(load_params(Checkpoint.open(folder), SMALL), random_params(SMALL, experts="nvfp4"))


def test_checkpoint_without_mtp(tmp_path):
    folder = write_checkpoint(tmp_path / "model", SMALL, with_mtp=False)
    config = ModelConfig.from_pretrained(folder)
    assert config.num_nextn_predict_layers == 1
    params = load_params(Checkpoint.open(folder), config)
    assert params.mtp == []
    assert_same_params(params, random_params(SMALL, with_mtp=False))


def test_fp32_block_scales_with_blocks_that_do_not_divide(tmp_path):
    config = ModelConfig.from_dict(config_to_dict(SMALL) | {"quantization_config": {"weight_block_size": [48, 40]}})
    folder = write_checkpoint(tmp_path / "model", config, experts="fp8")
    params = load_params(Checkpoint.open(folder), ModelConfig.from_pretrained(folder))
    assert params.layers[0].attn.wq_a.block == (48, 40)
    assert params.layers[0].attn.wq_a.scale.shape == (2, 2)
    assert_same_params(params, random_params(config, experts="fp8"))


@pytest.mark.parametrize("value", [-1, 4, 2**40])
def test_hash_table_outside_the_experts(tmp_path, value):
    folder = write_checkpoint(tmp_path / "model", SMALL)

    def change(tensors):
        tensors["layers.0.ffn.gate.tid2eid"][5, 1] = value

    folder = edit_single_file(folder, change)
    with pytest.raises(CheckpointError, match=rf"names expert {value}; the model has experts 0 to 3"):
        load_params(Checkpoint.open(folder), SMALL)


class AllocatedBytes(TorchDispatchMode):
    """Adds up the storages that operations create (views of their inputs are free)."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in inputs:
            self.total += result.untyped_storage().nbytes()
        return result


def test_every_byte_is_allocated_once(tmp_path):
    """No weight is copied twice and no stack of experts is built beside its parts."""
    config = ModelConfig.tiny()
    folder = write_checkpoint(tmp_path / "model", config)
    checkpoint = Checkpoint.open(folder)
    with AllocatedBytes() as allocated:
        params = load_params(checkpoint, config)
    assert total_bytes(params) == checkpoint.nbytes
    largest = max(info.nbytes for info in checkpoint.tensors.values())
    assert checkpoint.nbytes <= allocated.total < checkpoint.nbytes + largest
    data = params.layers[2].ffn.experts.w1.data
    assert data.untyped_storage().nbytes() == data.nbytes


def test_parameters_do_not_depend_on_the_file_once_loaded(tmp_path):
    folder = write_checkpoint(tmp_path / "model", SMALL)
    params = load_params(Checkpoint.open(folder), SMALL)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert_same_params(params, random_params(SMALL))


def test_progress_reports_every_byte_once(tmp_path, capsys):
    calls = []
    checkpoint = Checkpoint.open(SET_A)
    config = ModelConfig.from_pretrained(SET_A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an ordinary checkpoint has nothing to remark on
        load_params(checkpoint, config, progress=lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {checkpoint.nbytes}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == checkpoint.nbytes
    load_params(checkpoint, config, progress=True)
    assert capsys.readouterr().out == ""


def test_summary_of_set_a_reads_no_data(monkeypatch):
    checkpoint = Checkpoint.open(SET_A)
    monkeypatch.setattr(Checkpoint, "read", None)
    summary = checkpoint_summary(checkpoint)
    assert summary.num_bytes == json.loads((SET_A / INDEX_FILE).read_text())["metadata"]["total_size"]
    assert {row.format for row in summary.rows} == {"bf16", "f32", "i64", "fp8", "mxfp4"}
