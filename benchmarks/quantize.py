"""What `dsv4 quantize` does to the shipped miniature, with searched scales and without: error and perplexity.

The miniature's weights lie on the grid of MXFP4, which would flatter any rounding to it. So the source is the same
function with other weights: channels between the norm and the experts, and between up and down projection, are scaled
by random factors and scaled back where they are taken up. In BF16 those weights lie on no grid.

    python -m benchmarks quantize FOLDER [SEEDS]      # a new folder for the checkpoints it makes; 4 draws
"""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.runner import numbers
from dsv4.config import EngineConfig, ModelConfig
from dsv4.formats.tensors import QuantTensor, dequantize
from dsv4.llm import LLM
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.config_write import config_to_dict
from dsv4.loader.layout import StoredTensor
from dsv4.loader.names import Role
from dsv4.loader.resolve import plan_load
from dsv4.loader.shards import StoredWeight, write_shard
from dsv4.loader.shipped import shipped_checkpoint, shipped_text
from dsv4.loader.weights import read_weight
from dsv4.tools.evaluate import cut_contexts, negative_log_likelihood
from dsv4.tools.quantize.plan import Target
from dsv4.tools.quantize.run import QuantizeOptions, quantize_checkpoint

MAX_TOKENS, CONTEXT = 8192, 1024
SPREAD = 0.5  # log2 of the factors, either way
CASES = (("nvfp4", False), ("nvfp4", True), ("mxfp4", False), ("mxfp4", True))


def read_all(folder: Path) -> dict[str, Tensor]:
    """Name -> fp32 values; tables as they are."""
    config = ModelConfig.from_pretrained(folder)
    with Checkpoint.open(folder) as checkpoint:
        return {
            source.tensor.name: (
                read_weight(checkpoint, source, config).clone()
                if source.tensor.role is Role.TABLE
                else dequantize(read_weight(checkpoint, source, config), torch.float32)
            )
            for source in plan_load(checkpoint, config).sources
        }


def moved(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same function, its experts' weights off the grid."""
    generator = torch.Generator().manual_seed(seed)

    def factors(count: int) -> Tensor:
        return torch.exp2(SPREAD * (2 * torch.rand(count, generator=generator) - 1))

    result = dict(weights)
    for name in [name for name in weights if name.endswith("ffn_norm.weight")]:
        prefix = name.removesuffix("ffn_norm.weight") + "ffn."
        on_input = factors(len(weights[name]))
        result[name] = weights[name] / on_input
        result[f"{prefix}gate.weight"] = weights[f"{prefix}gate.weight"] * on_input
        for up in [other for other in weights if other.startswith(prefix) and other.endswith(".w3.weight")]:
            gate, down = up.replace(".w3.", ".w1."), up.replace(".w3.", ".w2.")
            between = factors(len(weights[up]))
            result[gate] = weights[gate] * on_input
            result[up] = weights[up] * on_input * between.unsqueeze(1)
            result[down] = weights[down] / between
    return result


def write_source(folder: Path, seed: int) -> None:
    """That, in BF16; hyper-connections and the like stay FP32."""
    shipped = shipped_checkpoint("flash-mini")
    config = ModelConfig.from_pretrained(shipped)
    values = moved(read_all(shipped), seed)
    with Checkpoint.open(shipped) as checkpoint:
        sources = plan_load(checkpoint, config).sources
    weights = []
    for source in sources:
        name, role = source.tensor.name, source.tensor.role
        dtype = {Role.TABLE: "I64", Role.CONTROL: "F32"}.get(role, "BF16")
        value = values[name].bfloat16() if dtype == "BF16" else values[name]
        part = StoredTensor(name, dtype, tuple(value.shape))
        weights.append(StoredWeight((part,), partial(list, (value,))))
    folder.mkdir(parents=True)
    write_shard(folder / "model.safetensors", weights, lambda num_bytes: None)
    (folder / "config.json").write_text(json.dumps(config_to_dict(config, "bf16")))
    shutil.copy(shipped / "tokenizer.json", folder)


def perplexity(folder: Path) -> float:
    engine = EngineConfig(max_context_tokens=CONTEXT, max_concurrent_requests=1, max_chunk_tokens=CONTEXT)
    llm = LLM(folder, numerics="exact", engine=engine)
    contexts = cut_contexts(llm.encode(shipped_text().read_text(encoding="utf-8")), MAX_TOKENS, CONTEXT)
    total = sum(negative_log_likelihood(llm.logits(ids), ids) for ids in contexts)
    return float(torch.tensor(total / sum(len(ids) - 1 for ids in contexts)).exp())


def layer_errors(folder: Path, exact: dict[str, Tensor]) -> dict[str, float]:
    """Layer -> relative error of all its experts' weights."""
    sums: dict[str, list[float]] = {}
    config = ModelConfig.from_pretrained(folder)
    with Checkpoint.open(folder) as checkpoint:
        for source in plan_load(checkpoint, config).sources:
            weight = read_weight(checkpoint, source, config)
            if source.tensor.role is not Role.EXPERT or not isinstance(weight, QuantTensor):
                continue
            truth = exact[source.tensor.name]
            both = sums.setdefault(".".join(source.tensor.name.split(".")[:2]), [0.0, 0.0])
            both[0] += float((weight.dequantize() - truth).square().sum())
            both[1] += float(truth.square().sum())
    return {layer: sqrt(wrong / total) for layer, (wrong, total) in sorted(sums.items())}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quantize", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new one, for the checkpoints that are made")
    parser.add_argument("seeds", type=numbers, nargs="?", default=[0, 1, 2, 3], help="of the draws, e.g. 0,1")
    options = parser.parse_args(arguments)
    root, seeds = options.folder, options.seeds
    shipped = perplexity(shipped_checkpoint())
    print(f"perplexity of {MAX_TOKENS} held-out tokens, exact numerics; flash-mini: {shipped:.4f}", flush=True)
    for seed in seeds:
        source = root / f"bf16-{seed}"
        write_source(source, seed)
        exact = read_all(source)
        print(f"draw {seed}: BF16 {perplexity(source):.4f}", flush=True)
        for experts, search in CASES:
            kind = "searched" if search else "usual"
            folder = root / f"{experts}-{kind}-{seed}"
            quantize_checkpoint(source, folder, Target(experts), QuantizeOptions(search=search))
            errors = layer_errors(folder, exact)
            mean = sqrt(sum(error**2 for error in errors.values()) / len(errors))
            by_layer = ", ".join(f"{error:.4f}" for error in errors.values())
            found = f"perplexity {perplexity(folder):.4f}, error {mean:.4f}; by layer {by_layer}"
            print(f"draw {seed}: {experts}, {kind} scales: {found}", flush=True)
