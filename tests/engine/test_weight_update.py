"""New weights in place: the bits of a fresh engine, tensors that stay where they are, nothing of the old weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from engine_cases import assert_all_free
from weight_cases import CONFIG, LIMITS, PARAMS, PROMPTS, answers, tensors

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weights import target as weight_target
from dsv4.formats.tensors import WideWeight
from dsv4.formats.trees import assign, tensors_of
from dsv4.loader.header import CheckpointError
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import RequestError
from dsv4.tools.plan.targets import PRESETS

SETTINGS = {
    "plain": {},
    "drafts": {"drafts": 2},
    "offload": {"offload_experts": 3},
    "offload and drafts": {"offload_experts": 3, "drafts": 1},
    "exact": {"numerics": "exact"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_there_and_back(folders, name):
    """A -> B has the bits of a fresh engine on B, and -> A those of A; no tensor moves."""
    first, second = folders
    llm, other = (LLM(folder, engine=LIMITS, **SETTINGS[name]) for folder in folders)
    fresh = [_everything(one) for one in (llm, other)]
    assert fresh[0] != fresh[1]
    places = [part.data_ptr() for part in tensors_of(_visible(llm))]
    for folder, wanted in ((second, fresh[1]), (first, fresh[0])):
        llm.update_weights(folder)
        assert _everything(llm) == wanted
        llm.engine.check_integrity()
    assert [part.data_ptr() for part in tensors_of(_visible(llm))] == places
    assert llm.weight_version == "2"


def _everything(llm):
    return answers(llm), _drafts(llm) if "exact" not in llm.numerics else None


def _visible(llm):
    """Parameters without what stands for offloaded experts, which is no tree."""
    params = llm.model.weights
    blocks = [*params.layers, *params.draft_blocks]
    return [params.embed, params.lm_head, params.head, [(one.attn, one.ffn.gate, one.hc_attn) for one in blocks]]


def test_from_tensors_of_this_process(folders, expected):
    llm = LLM(folders[0], engine=LIMITS)
    identity = llm.identity()
    assert llm.update_weights(tensors(folders[1]), version="step 7") == "step 7"
    assert answers(llm) == expected[1]
    assert llm.identity().checkpoint != identity.checkpoint
    llm.update_weights(iter(tensors(folders[0]).items()))
    assert answers(llm) == expected[0]


def test_files_are_not_needed_after_an_update(folders, expected, tmp_path):
    """Fingerprints are those of the weights that run, whatever becomes of their folder."""
    first, other = (shutil.copytree(folder, tmp_path / folder.name) for folder in folders)
    wanted = [LLM(folder, engine=LIMITS).identity() for folder in folders]
    llm = LLM(first, engine=LIMITS)
    (file,) = first.glob("*.safetensors")
    shutil.copyfile(next(other.glob("*.safetensors")), file)
    assert llm.identity() == wanted[0], "the files have changed, the weights have not"
    llm.update_weights(other)
    shutil.rmtree(tmp_path / "B")
    assert llm.info()["fingerprint"] == llm.identity().name == wanted[1].name
    llm.set_weight_version("x")
    llm.update_weights(folders[0])
    assert llm.identity() == wanted[0]
    named = []
    for folder in (1, 0, 1):
        llm.update_weights(tensors(folders[folder]))
        named.append(llm.identity().name)
    assert named[0] == named[2] != named[1], "of tensors too: the same weights have the same name"
    assert answers(llm) == expected[1]


FLASH = PRESETS["flash"]()
FOUR_LAYERS = replace(  # SWA, CSA, HCA, CSA and the MTP block
    FLASH, num_hidden_layers=4, compress_ratios=(0, 4, 128, 4, 0), num_hash_layers=1, num_nextn_predict_layers=1
)


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    ("device", "config"),
    [
        ("cpu", CONFIG), pytest.param("cuda", CONFIG, marks=pytest.mark.gpu),
        pytest.param("cuda", FOUR_LAYERS, marks=pytest.mark.gpu, id="cuda, four layers of Flash"),
    ],
)  # fmt: skip
def test_captured_graphs_read_the_new_weights(tmp_path, device, config, experts):
    """Nothing is captured or compiled again: with drafts, from tensors on the device and from folders."""
    folders = [
        write_checkpoint(tmp_path / name, config, experts=experts, seed=seed, device=device)
        for seed, name in enumerate("AB")
    ]
    settings = {"engine": LIMITS, "device": device, "drafts": 2}
    fresh = [_everything(LLM(folder, **settings)) for folder in folders]
    llm = LLM(folders[0], **settings)
    runner = llm.engine.runner
    captured, compiled = runner.captured, runner.compiled_late
    assert bool(captured) == (device == "cuda")
    llm.update_weights((name, tensor.to(device)) for name, tensor in tensors(folders[1]).items())
    assert _everything(llm) == fresh[1]
    llm.update_weights(folders[0])
    assert _everything(llm) == fresh[0]
    assert runner.captured == captured
    assert runner.compiled_late == compiled
    assert fresh[0] != fresh[1]


def test_prefixes_of_old_weights_are_not_used(folders, expected, tmp_path):
    for limits in (LIMITS, replace(LIMITS, cache_dir=str(tmp_path), cache_host_bytes=1 << 24)):
        llm = LLM(folders[0], engine=limits)
        answers(llm)
        assert [one.num_cached_tokens for one in llm.generate(PROMPTS, PARAMS)] == [0, 0, 256, 128]
        llm.update_weights(folders[1])
        found = llm.generate(PROMPTS, PARAMS)
        assert [one.num_cached_tokens for one in found] == [0, 0, 0, 0]
        assert [(one.token_ids, one.logprobs) for one in found] == expected[1]
        llm.close()


def test_nothing_changes_unless_everything_fits(folders, expected, tmp_path):
    llm = LLM(folders[0], engine=LIMITS)
    good = tensors(folders[1])
    norm, gate, scale = "layers.1.attn_norm.weight", "layers.2.ffn.gate.weight", "layers.1.attn.wq_a.scale"
    table = next(name for name in good if name.endswith("tid2eid"))
    for wrong, message in (
        ({name: good[name] for name in good if name != norm}, norm),
        (good | {"layers.99.attn_norm.weight": good[norm]}, "layers.99"),
        (good | {norm: good[norm][:-1]}, norm),
        (good | {norm: "text"}, "expected a tensor"),
        (good | {gate: good[gate].float()}, "is F32, the engine runs BF16"),
        (good | {table: good[table] + 99}, "names expert"),
        (good | {scale: good[scale].float()}, "with F32 scales.*, the engine runs fp8 .*F8_E8M0 scales"),
        ({name: good[name] for name in good if not name.startswith("mtp.")}, "drafter needs new weights"),
        ([*good.items(), (norm, good[norm])], "given twice"),
        (tmp_path / "nothing", "does not exist"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(wrong)
    other = tmp_path / "other"
    other.mkdir()
    for file in folders[1].iterdir():
        (other / file.name).symlink_to(file)
    config = json.loads((folders[1] / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 9.0}))
    with pytest.raises(CheckpointError, match="another model: its routed_scaling_factor"):
        llm.update_weights(other)
    llm.pause()
    with pytest.raises(CheckpointError, match=r"no whole model: 5 of its 5 parts .* missing: embed.weight"):
        llm.update_weights(iter(()))
    llm.resume()
    assert answers(llm) == expected[0]
    assert llm.weight_version == "0"


def test_tensors_one_by_one(folders, expected):
    """What an iterator gives is written layer by layer, in any order; if it breaks off, nobody gets an answer."""
    llm = LLM(folders[0], engine=LIMITS, drafts=2)
    new = list(tensors(folders[1]).items())
    with pytest.raises(CheckpointError, match="no whole model: . of its 5 parts are not whole"):
        llm.update_weights(iter(new[:-1]))
    with pytest.raises(WeightsIncomplete, match="failed half way"):
        llm.generate([1, 2, 3], PARAMS[0])
    for order in (new[::-1], [*new[::3], *new[1::3], *new[2::3]]):
        llm.update_weights(iter(order))
        assert answers(llm) == expected[1]
    without_draft = LLM(folders[0], engine=LIMITS)
    without_draft.update_weights(iter(new))
    assert answers(without_draft) == expected[1]


def test_other_formats_are_refused_by_name(folders, tmp_path):
    other = write_checkpoint(tmp_path / "nvfp4", CONFIG, experts="nvfp4", seed=1)
    llm = LLM(folders[0], engine=LIMITS, offload_experts=3)
    with pytest.raises(CheckpointError, match="is nvfp4 .*, the engine runs mxfp4"):
        llm.update_weights(other)


def test_a_running_request_keeps_its_weights(folders):
    llm = LLM(folders[0], engine=LIMITS)
    request, _ = llm.start([1, 2, 3], PARAMS[0])
    with pytest.raises(RequestError, match="while no request runs"):
        llm.update_weights(folders[1])
    llm.abort(request)
    llm.update_weights(folders[1])


def test_half_an_update_has_a_name(folders, expected, monkeypatch):
    llm = LLM(folders[0], engine=LIMITS)
    original, calls = weight_target.assign, []

    def fails_late(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError("the disk is gone")
        original(*arguments)

    monkeypatch.setattr(weight_target, "assign", fails_late)
    with pytest.raises(OSError, match="gone"):
        llm.update_weights(folders[1])
    with pytest.raises(WeightsIncomplete, match="failed half way"):
        llm.generate([1, 2, 3], PARAMS[0])
    monkeypatch.setattr(weight_target, "assign", original)
    llm.update_weights(folders[1])
    assert answers(llm) == expected[1]


def _one_tensor_is_left_out(live, fresh, name):
    if name == "layers.1":
        fresh.attn.q_norm = live.attn.q_norm.clone()
    assign(live, fresh, name)


def _one_tensor_moves(live, fresh, name):
    assign(live, fresh, name)
    if name == "layers.1":
        live.ffn.gate = WideWeight(live.ffn.gate.source.clone(), live.ffn.gate.dtype)


def _scales_stay_old(live, fresh, name):
    if name.startswith("layer 2, expert"):
        fresh.w1.scale.copy_(live.w1.scale)
    assign(live, fresh, name)


def _the_drafter_stays_old(live, fresh, name):
    if not name.startswith("mtp"):
        assign(live, fresh, name)


@pytest.mark.parametrize(
    "mistake", [_one_tensor_is_left_out, _one_tensor_moves, _scales_stay_old, _the_drafter_stays_old]
)
def test_planted_mistakes_are_seen(folders, expected, mistake, monkeypatch):
    """What the tests above compare sees each of these."""
    llm, fresh = LLM(folders[0], engine=LIMITS, drafts=2), LLM(folders[1], engine=LIMITS, drafts=2)
    places = [part.data_ptr() for part in tensors_of(_visible(llm))]
    monkeypatch.setattr(weight_target, "assign", mistake)
    llm.update_weights(folders[1])
    is_same = answers(llm) == expected[1] and _drafts(llm) == _drafts(fresh)
    assert not is_same or [part.data_ptr() for part in tensors_of(_visible(llm))] != places


def _drafts(llm):
    return [(one.drafts, one.logits.tolist()) for one in llm.draft_trace(PROMPTS[0], anchor=5)]


def test_weights_are_shown_as_copies(folders, expected):
    """Whatever is written into what `llm.model.params` gives, answers stay."""
    llm = LLM(folders[0], engine=LIMITS, offload_experts=3)
    params = llm.model.params
    params.embed.mul_(2)
    params.embed.data.mul_(2)
    params.lm_head.float().numpy()[:] = 0
    params.lm_head.view(torch.int16).numpy()[:] = 0
    params.layers[1].attn.kv_norm[3:4].fill_(2.0)
    params.layers[2].ffn.shared.w1.scale[0, 0].add_(1)
    params.layers[2].ffn.experts.stack[0].scale.zero_()
    for block, name in ((params, "embed"), (params.layers[0].attn, "wq_a"), (params.draft_blocks[0], "attn_norm")):
        with pytest.raises(AttributeError, match=f"{name} cannot be set: weights change by update_weights"):
            setattr(block, name, torch.zeros(1))
    with pytest.raises(TypeError):
        params.layers[0] = params.layers[1]
    assert torch.equal(params.embed, llm.model.weights.embed)
    assert answers(llm) == expected[0]


MANY = EngineConfig(max_context_tokens=512, max_concurrent_requests=16, max_chunk_tokens=128)
MANY_PROMPTS = [[seed + 3, *range(5, 5 + 9 * (seed % 5))] for seed in range(16)]


def _in_the_middle(llm, params):
    """Outputs of 16 requests, paused once all have begun and none is done."""
    outputs = [llm.start(prompt, one)[1] for prompt, one in zip(MANY_PROMPTS, params, strict=True)]
    while min(output.num_output for output in outputs) < 4:
        llm.step()
    assert not any(output.is_done for output in outputs)
    llm.pause("keep")
    return outputs


def _to_the_end(llm, outputs):
    llm.resume()
    while not all(output.is_done for output in outputs):
        llm.step()
    return [output.completion() for output in outputs]


@pytest.mark.parametrize("settings", [{}, {"drafts": 2, "offload_experts": 3}], ids=str)
def test_there_and_back_while_requests_are_paused(folders, settings):
    """16 of them, in the middle of their answers: they never notice."""
    llm = LLM(folders[0], engine=MANY, **settings)
    params = [SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, logprobs=0) for seed in range(16)]
    undisturbed = llm.generate(MANY_PROMPTS, params)
    outputs = _in_the_middle(llm, params)
    for folder in (folders[1], folders[0]):
        llm.update_weights(folder)
    assert _to_the_end(llm, outputs) == undisturbed
    assert_all_free(llm)


def test_operands_made_of_old_weights_are_forgotten(folders, expected, monkeypatch):
    llm = LLM(folders[0], engine=LIMITS)
    answers(llm)
    monkeypatch.setattr(WideWeight, "forget_operands", lambda self: None)
    llm.update_weights(folders[1])
    assert answers(llm) != expected[1], "without forgetting, the test above would fail"
