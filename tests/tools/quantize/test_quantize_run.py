"""Whole checkpoints quantised: formats, layouts, refusals, and runs that die at any moment."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, namedtuple
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4.config import ModelConfig
from dsv4.formats.tensors import QuantTensor
from dsv4.loader.checkpoint import Checkpoint, CheckpointError
from dsv4.loader.names import Naming, expected_tensors, stored_names
from dsv4.loader.resolve import plan_load
from dsv4.loader.weights import load_params, read_weight
from dsv4.loader.write.synth import write_checkpoint
from dsv4.tools.audit.run import AuditOptions, audit_checkpoint
from dsv4.tools.quantize import run
from dsv4.tools.quantize.plan import Target
from dsv4.tools.quantize.run import STATE_FILE, QuantizeOptions, quantize_checkpoint

CONFIG = ModelConfig.tiny(
    vocab_size=64, hidden_size=128, num_hidden_layers=2, compress_ratios=(0, 4, 0), n_routed_experts=4,
    moe_intermediate_size=128, index_n_heads=2,
)  # fmt: skip
SMALL_SHARDS = QuantizeOptions(shard_bytes=200_000)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    formats = ("bf16", "fp8", "mxfp4", "nvfp4")
    return {
        name: write_checkpoint(root / name, CONFIG, experts=name, extra_files={"tokenizer.json": "{}"})
        for name in formats
    }


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def weights(folder):
    config = ModelConfig.from_pretrained(folder)
    with Checkpoint.open(folder) as checkpoint:
        for source in plan_load(checkpoint, config).sources:
            yield source, read_weight(checkpoint, source, config)


@pytest.mark.parametrize("source", ["bf16", "fp8", "mxfp4"])
@pytest.mark.parametrize(
    ("experts", "linears"), [("nvfp4", None), ("mxfp4", "fp8"), ("nvfp4", "bf16"), ("mxfp4", "bf16")]
)
def test_formats(sources, tmp_path, source, experts, linears):
    target = tmp_path / "out"
    if (source, experts, linears) == ("mxfp4", "mxfp4", "fp8"):
        with pytest.raises(CheckpointError, match="nothing to do"):
            quantize_checkpoint(sources[source], target, Target(experts, linears))
        return
    quantize_checkpoint(sources[source], target, Target(experts, linears), SMALL_SHARDS)
    assert (target / "tokenizer.json").read_text() == "{}"
    before = {one.tensor.name: (one, weight) for one, weight in weights(sources[source])}
    for one, weight in weights(target):
        role = one.tensor.role.value
        stored = before[one.tensor.name][0].format.quant
        linear = {"fp8": "fp8", "bf16": None, None: stored}[linears]
        assert one.format.quant == {"expert": experts, "linear": linear}.get(role), one
        if role not in ("expert", "linear"):
            assert torch.equal(weight, before[one.tensor.name][1])
    report = audit_checkpoint(target, AuditOptions(against=sources[source]))
    assert [finding for finding in report.faults if finding.kind != "tokenizer"] == []
    largest = max(one.error for unit in report.units for one in unit.comparisons if ".experts." in one.name)
    bounds = (0.0, 0.0) if source == "mxfp4" else (0.07, 0.09) if experts == "nvfp4" else (0.09, 0.12)
    assert bounds[0] <= largest <= bounds[1]
    load_params(Checkpoint.open(target), ModelConfig.from_pretrained(target))


def test_nvfp4_is_modelopts_layout(sources, tmp_path):
    quantize_checkpoint(sources["bf16"], tmp_path / "out", Target("nvfp4"))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["quantization_config"]["moe_quant_algo"] == "NVFP4"
    assert "attn" in raw["quantization_config"]["modules_to_not_convert"]
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["group_size"] == 16
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        for expert_idx in range(4):
            base = f"layers.1.ffn.experts.{expert_idx}"
            assert float(checkpoint.read(f"{base}.w1.weight_scale_2")) == float(
                checkpoint.read(f"{base}.w3.weight_scale_2")
            )
            assert float(checkpoint.read(f"{base}.w2.input_scale")) == 1.0


def test_search_lowers_the_error(sources, tmp_path):
    errors = {}
    for search in (True, False):
        target = tmp_path / f"{search}"
        quantize_checkpoint(sources["bf16"], target, Target("nvfp4"), QuantizeOptions(search=search))
        exact = {source.tensor.name: weight for source, weight in weights(sources["bf16"])}
        errors[search] = sum(
            float((weight.dequantize() - exact[source.tensor.name].float()).square().sum())
            for source, weight in weights(target)
            if isinstance(weight, QuantTensor)
        )
    assert errors[True] < 0.8 * errors[False]


def test_refusals(sources, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"w1.weight is nvfp4 already: rounding it again to mxfp4 can only lose"):
        quantize_checkpoint(sources["nvfp4"], out, Target("mxfp4"))
    with pytest.raises(CheckpointError, match="nothing to do"):
        quantize_checkpoint(sources["nvfp4"], out, Target("nvfp4"))
    with pytest.raises(CheckpointError, match="is the source, or lies in it"):
        quantize_checkpoint(sources["bf16"], sources["bf16"] / "out", Target("nvfp4"))
    with pytest.raises(CheckpointError, match="never overwritten"):
        quantize_checkpoint(sources["bf16"], sources["fp8"], Target("nvfp4"))
    assert not out.exists()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**28))
    with pytest.raises(CheckpointError, match=r"needs 0.0 GiB more, its disk has 0.2 GiB free"):
        quantize_checkpoint(sources["bf16"], out, Target("nvfp4"))
    assert [file.name for file in out.iterdir()] == [STATE_FILE]
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="unfinished run of other files or options"):
        quantize_checkpoint(sources["bf16"], out, Target("mxfp4"))
    quantize_checkpoint(sources["bf16"], out, Target("nvfp4"))
    with pytest.raises(CheckpointError, match="never overwritten"):
        quantize_checkpoint(sources["bf16"], out, Target("nvfp4"))


def test_weights_that_are_not_numbers(sources, tmp_path):
    folder = shutil.copytree(sources["bf16"], tmp_path / "damaged")
    name = "layers.1.ffn.experts.2.w3.weight"
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensors[name]
    with info.file.open("r+b") as stream:
        stream.seek(info.start)
        stream.write(b"\xc0\x7f")
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        quantize_checkpoint(folder, tmp_path / "out", Target("mxfp4"))


class Crash(BaseException):
    """Stands for a kill: nothing catches it, nothing cleans up."""


@pytest.fixture(scope="module")
def finished(sources, tmp_path_factory):
    """A run that was left alone, and the bytes after which each of its shards is whole."""
    whole = tmp_path_factory.mktemp("finished") / "whole"
    quantize_checkpoint(sources["fp8"], whole, Target("nvfp4"), SMALL_SHARDS)
    with Checkpoint.open(whole) as checkpoint:
        sizes = Counter()
        for info in checkpoint.tensors.values():
            sizes[info.file.name] += info.nbytes
    return whole, list(accumulate(sizes[name] for name in sorted(sizes)))


@pytest.mark.parametrize(("shard", "before_end"), [(0, 10**9), (0, 0), (4, 9), (6, 9), (3, 50_000)])
def test_a_run_that_dies_goes_on_to_the_same_bytes(sources, finished, tmp_path, shard, before_end):
    """Nine bytes before its end a shard has its full length, but not the last matrix's two FP32 scales."""
    whole, ends = finished
    broken = tmp_path / "broken"
    limit = ends[shard] - before_end

    def crash(done, total):
        if done > limit:
            raise Crash

    options = QuantizeOptions(shard_bytes=SMALL_SHARDS.shard_bytes, progress=crash)
    with pytest.raises(Crash):
        quantize_checkpoint(sources["fp8"], broken, Target("nvfp4"), options)
    assert not (broken / "config.json").exists()  # nobody takes it for a checkpoint
    if before_end == 9:
        (unfinished,) = broken.glob("*.partial")
        assert unfinished.stat().st_size == (whole / unfinished.stem).stat().st_size
    limit = ends[shard] + 100_000
    with pytest.raises(Crash):
        quantize_checkpoint(sources["fp8"], broken, Target("nvfp4"), options)
    quantize_checkpoint(sources["fp8"], broken, Target("nvfp4"), SMALL_SHARDS)
    assert contents(broken) == contents(whole)


def test_other_sources_do_not_continue(sources, tmp_path):
    folder = shutil.copytree(sources["bf16"], tmp_path / "source")

    def crash(done, total):
        raise Crash

    with pytest.raises(Crash):
        quantize_checkpoint(folder, tmp_path / "out", Target("nvfp4"), QuantizeOptions(progress=crash))
    os.utime(folder / "model-00001-of-00001.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="unfinished run of other files or options"):
        quantize_checkpoint(folder, tmp_path / "out", Target("nvfp4"))


def test_tensors_the_model_does_not_read_are_copied(sources, tmp_path):
    folder = shutil.copytree(sources["fp8"], tmp_path / "source")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    quantize_checkpoint(folder, tmp_path / "out", Target("nvfp4"))
    with Checkpoint.open(folder) as before, Checkpoint.open(tmp_path / "out") as after:
        drafts = [name for name in before.tensors if name.startswith("mtp.")]
        assert len(drafts) > 20
        for name in drafts:
            assert torch.equal(before.read(name).view(torch.uint8), after.read(name).view(torch.uint8))
        plan = plan_load(after, ModelConfig.from_pretrained(tmp_path / "out"))
        assert plan.notes


def write_stacked(folder, source):
    """The BF16 source in Hugging Face's module names, experts stacked."""
    folder.mkdir()
    tensors = {}
    with Checkpoint.open(source) as checkpoint:
        for tensor in expected_tensors(CONFIG, with_mtp=False):
            tensors.setdefault(stored_names(tensor, Naming.HF)[0], []).append(checkpoint.read(tensor.name))

    def stack(name, parts):
        if not name.endswith("gate_up_proj"):
            return torch.stack(parts) if name.endswith("experts.down_proj") else parts[0].clone()
        return torch.stack([torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)])  # w1, w3 in turn

    save_file({name: stack(name, parts) for name, parts in tensors.items()}, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder)


def test_stacked_experts_give_the_same_weights(sources, tmp_path):
    write_stacked(tmp_path / "stacked", sources["bf16"])
    for name, source in (("a", tmp_path / "stacked"), ("b", sources["bf16"])):
        quantize_checkpoint(source, tmp_path / name, Target("nvfp4", "fp8"))
    with Checkpoint.open(tmp_path / "a") as first, Checkpoint.open(tmp_path / "b") as second:
        assert set(first.tensors) == {name for name in second.tensors if not name.startswith("mtp.")}
        for name in first.tensors:
            one, other = (checkpoint.read(name).flatten().view(torch.uint8) for checkpoint in (first, second))
            assert torch.equal(one, other), name


def test_one_flipped_code_is_found_against_the_source(sources, tmp_path):
    quantize_checkpoint(sources["bf16"], tmp_path / "out", Target("nvfp4"))
    name = "layers.1.ffn.experts.2.w2.weight"
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        info = checkpoint.tensors[name]
    with info.file.open("r+b") as stream:
        stream.seek(info.start + 64 * 7 + 5)
        byte = stream.read(1)[0]
        stream.seek(info.start + 64 * 7 + 5)
        stream.write(bytes([byte ^ 0x40]))
    report = audit_checkpoint(tmp_path / "out", AuditOptions(against=sources["bf16"]))
    found = [(one.kind, one.tensor) for one in report.faults if one.kind != "tokenizer"]
    assert found == [("codes moved", name)]
    assert "1 codes are not the nearest" in next(one.text for one in report.faults if one.tensor == name)


KILLED = """
import sys
from pathlib import Path
from dsv4.tools.quantize.plan import Target
from dsv4.tools.quantize.run import QuantizeOptions, quantize_checkpoint
print("started", flush=True)
quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Target("nvfp4"), QuantizeOptions(shard_bytes=200_000))
"""


@pytest.mark.slow
def test_kill_at_random_moments(sources, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    quantize_checkpoint(sources["bf16"], whole, Target("nvfp4"), SMALL_SHARDS)
    started = time.perf_counter()
    quantize_checkpoint(sources["bf16"], tmp_path / "timed", Target("nvfp4"), SMALL_SHARDS)
    seconds = time.perf_counter() - started
    rng = random.Random(0)
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, sources["bf16"], broken],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        assert process.stdout.readline() == b"started\n"
        time.sleep(rng.uniform(0, seconds))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if broken.exists() and not (broken / STATE_FILE).exists() and (broken / "config.json").exists():
            break
    else:
        quantize_checkpoint(sources["bf16"], broken, Target("nvfp4"), SMALL_SHARDS)
    assert contents(broken) == contents(whole)
