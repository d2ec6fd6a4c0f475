"""Helpers of the loader's tests: headers without data, and bitwise comparison of whole models."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantTensor
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint, CheckpointError, TensorInfo
from dsv4.loader.header import ITEM_BYTES
from dsv4.loader.layout import StoredTensor
from dsv4.loader.names import expected_tensors
from dsv4.loader.resolve import plan_load
from dsv4.loader.write.random_weights import Recipe
from dsv4.loader.write.synth import stored_tensors

VECTORS = Path(__file__).parents[1] / "vectors"
SET_A = VECTORS / "setA" / "model"

SMALL = ModelConfig.tiny(
    vocab_size=64, hidden_size=64, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128, 0),
    num_attention_heads=2, head_dim=128, q_lora_rank=64, o_lora_rank=32, n_routed_experts=4, moe_intermediate_size=32,
    index_n_heads=2,
)  # fmt: skip


def header_of(config, experts="mxfp4", mtp_experts=None, with_mtp=True):
    """name -> StoredTensor of a correct checkpoint; tests edit it."""
    recipe = Recipe(config, experts, mtp_experts)
    parts = [part for tensor in expected_tensors(config, with_mtp) for part in stored_tensors(tensor, recipe)]
    return {part.name: part for part in parts}


def entries_of(header):
    """name -> what a file's header says of it, one tensor behind the other; and all of their bytes."""
    entries, position = {}, 0
    for name, part in header.items():
        places = [position, position := position + part.nbytes]
        entries[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": places}
    return entries, position


def write_raw(file, header, data=b"", header_bytes=None):
    """A file of this header (entries, or bytes as they are), which is said to be `header_bytes` long."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    file.write_bytes(length.to_bytes(8, "little") + text + data)
    return file


def checkpoint_of(header):
    """A `Checkpoint` that has headers only: enough for everything that reads no data."""
    entries, file = entries_of(header)[0], Path("model.safetensors")
    places = {name: entry["data_offsets"] for name, entry in entries.items()}
    tensors = {name: TensorInfo(name, part.dtype, part.shape, file, *places[name]) for name, part in header.items()}
    return Checkpoint(Path("folder"), tensors)


def error_of(header, config=SMALL):
    """Why such headers do not fit."""
    with pytest.raises(CheckpointError) as caught:
        plan_load(checkpoint_of(header), config)
    return str(caught.value)


def gathered(folder):
    """All tensors of a checkpoint, whose files are then gone."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX_FILE).unlink(missing_ok=True)
    return tensors


def stored(name, dtype, *shape):
    assert dtype in ITEM_BYTES
    return StoredTensor(name, dtype, shape)


def flatten(value, path="params"):
    """(path, tensor or None or constant) of everything in a parameter tree."""
    if isinstance(value, list):
        yield f"{path}.len", len(value)
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{path}.type", type(value).__name__
        for spec in fields(value):
            yield from flatten(getattr(value, spec.name), f"{path}.{spec.name}")
    else:
        yield path, value


def same_bits(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))
    )


def assert_same_params(left, right):
    lefts, rights = list(flatten(left)), list(flatten(right))
    assert [path for path, _ in lefts] == [path for path, _ in rights]
    num_tensors = 0
    for (path, one), (_, other) in zip(lefts, rights, strict=True):
        if isinstance(one, torch.Tensor):
            assert same_bits(one, other), f"{path} differs: {one.dtype} {one.shape}, {other.dtype} {other.shape}"
            num_tensors += 1
        else:
            assert one == other, f"{path}: {one!r} and {other!r}"
    assert num_tensors > 20


def total_bytes(params):
    return sum(item.nbytes for _, item in flatten(params) if isinstance(item, torch.Tensor))


def format_name(weight):
    return str(weight.format) if isinstance(weight, QuantTensor) else str(weight.dtype)
