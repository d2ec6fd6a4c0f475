"""What is written of new weights: the kernels' layout, rounded weights, refused values, and the memory it takes."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile
from weight_cases import CONFIG, LIMITS, answers, tensors

from dsv4 import LLM
from dsv4.engine.weights import target as weight_target
from dsv4.engine.weights.target import WeightTarget
from dsv4.engine.weights.update import IncomingWeights, WeightUpdate, open_source
from dsv4.formats.trees import tensors_of
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.weights import load_params
from dsv4.loader.write.synth import write_checkpoint
from dsv4.model.prepare import prepare_params
from dsv4.ops import TRITON
from dsv4.tools.quantize.plan import Target
from dsv4.tools.quantize.run import QuantizeOptions, quantize_checkpoint


def target_of(folder, config=CONFIG):
    """The weights of a folder as the kernels have them; nothing can run on them here."""
    return WeightTarget(config, prepare_params(load_params(Checkpoint.open(folder), config), TRITON), TRITON)


def bytes_of(target):
    return [one.contiguous().view(-1).view(torch.uint8).tolist() for one in tensors_of(target.weights)]


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_the_kernels_layout_is_written_whole(tmp_path, experts):
    """Bundles, shuffled experts, output projections: every tensor equals that of a fresh model, at its old place."""
    folders = [write_checkpoint(tmp_path / name, CONFIG, experts=experts, seed=seed) for seed, name in enumerate("AB")]
    live, fresh = map(target_of, folders)
    places = [part.data_ptr() for part in tensors_of(live.weights)]
    assert bytes_of(live) != bytes_of(fresh)
    WeightUpdate(open_source(folders[1], CONFIG), live).run()
    assert bytes_of(live) == bytes_of(fresh)
    assert [part.data_ptr() for part in tensors_of(live.weights)] == places


WRONG = {
    "mxfp4": [
        ("layers.1.ffn.experts.3.w2.scale", 255, "found NaN"),
        ("layers.1.ffn.experts.3.w2.scale", 254, "within a factor of 2"),
        ("layers.2.ffn.shared_experts.w1.weight", 0x7F, "FP8 weights that are numbers"),
    ],
    "nvfp4": [("layers.1.ffn.experts.3.w2.weight_scale", 0x80, "zero or positive")],
}  # fmt: skip


@pytest.mark.parametrize("experts", WRONG)
def test_values_without_a_layout_are_refused_before_anything_changes(tmp_path, experts):
    folders = [write_checkpoint(tmp_path / name, CONFIG, experts=experts, seed=seed) for seed, name in enumerate("AB")]
    live = target_of(folders[0])
    before, good = bytes_of(live), tensors(folders[1])
    for name, value, message in WRONG[experts]:
        bad = good[name].clone()
        bad.view(torch.uint8)[0, 0] = value
        (other := tmp_path / f"{message}{value}").mkdir()
        save_file(good | {name: bad}, other / "model.safetensors")
        weight = name.rpartition(".")[0]
        for source in (good | {name: bad}, other):
            with pytest.raises(CheckpointError, match=f"{weight}.*{message}"):
                WeightUpdate(open_source(source, CONFIG), live)
    assert bytes_of(live) == before


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_plain_weights_are_rounded_as_quantize_does(tmp_path, experts, search):
    """From a folder, from tensors, one by one: the weights are those of the folder that `dsv4 quantize` makes."""
    old = write_checkpoint(tmp_path / "old", CONFIG, experts=experts)
    new = write_checkpoint(tmp_path / "new", CONFIG, experts="bf16", seed=1)
    quantize_checkpoint(new, tmp_path / "new4", Target(experts, "fp8"), QuantizeOptions(search=search))
    fresh = LLM(tmp_path / "new4", engine=LIMITS)
    plain = tensors(new)
    for source in (new, plain, iter(plain.items())):
        llm = LLM(old, engine=LIMITS)
        llm.update_weights(source, search_scales=search)
        for one, wanted in zip(tensors_of(llm.model.weights), tensors_of(fresh.model.weights), strict=True):
            assert torch.equal(one.view(torch.uint8), wanted.view(torch.uint8))
    name = "layers.1.ffn.experts.3.w2.weight"
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        llm.update_weights(plain | {name: plain[name] / 0})
    assert answers(llm) == answers(fresh)


MANY = replace(CONFIG, n_routed_experts=64, num_nextn_predict_layers=0, compress_ratios=CONFIG.compress_ratios[:3])


def peak_bytes(call):
    """The most memory that a call holds beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_memory_of_an_update(tmp_path, monkeypatch):
    """A few experts at a time; of an iterator also the layer and the ends that are not whole yet."""
    folder = write_checkpoint(tmp_path / "A", MANY, experts="mxfp4", seed=0)
    live, given = target_of(folder, MANY), tensors(folder)
    layer = sum(one.nbytes for name, one in given.items() if name.startswith("layers.1."))
    model = sum(one.nbytes for one in given.values())
    assert 2.5 * layer < model

    def from_pairs():
        incoming = IncomingWeights(live, lambda: None)
        for name, tensor in given.items():
            incoming.add(name, tensor.clone())
        incoming.finish()

    monkeypatch.setattr(weight_target, "_EXPERTS_AT_ONCE", 2)
    assert peak_bytes(WeightUpdate(open_source(given, MANY), live).run) < 0.75 * layer
    assert layer < peak_bytes(from_pairs) < 1.75 * layer
