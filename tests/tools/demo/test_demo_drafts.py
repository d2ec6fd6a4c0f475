"""The DSpark head of the demo model: its training graph is the engine's head, it is trained for what the engine does,
and a run leaves a folder that loads."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "demo_model"))

import learn_drafts
import own_text
from draft_head import Anchors, DraftHead
from export import export_checkpoint, plain_params, shipped_state
from model import DemoModel
from quantise import fp4_rows, fp8_blocks
from settings import HeadSettings, head_config
from test_demo_training import SAME_IN_DOUBLE, toy_config, toy_model

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.config import ModelConfig
from dsv4.loader.header import CheckpointError
from dsv4.loader.shipped import shipped_checkpoint

VOCAB = 64
NUM_STEPS = 6
SMALL = replace(
    HeadSettings(), markov_rank=16, batch_sequences=2, text_sequences=4, anchors=12, quantise_from=0.5, peak_rate=4e-3,
    warmup_share=0.01,
)  # fmt: skip


def random_head(config, dtype):
    """Every weight away from its start, the Markov bias and the confidence too."""
    torch.manual_seed(3)
    head = DraftHead(config, dtype=dtype)
    for tensor in head.state_dict().values():
        tensor.add_(0.1 * torch.randn_like(tensor))
    return head.to(dtype)


@pytest.fixture(scope="module", params=[1, 3])
def double_head(request):
    config = head_config(toy_config(), num_layers=request.param, markov_rank=16)
    model = toy_model(toy_config(), torch.float64)
    model.select.fill_(True)
    head = random_head(config, torch.float64)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")}
    params = plain_params(state | head.state_dict(), config, torch.float64)
    return model, head, LLM.from_params(config, params, numerics="exact", dtype=torch.float64)


@pytest.mark.parametrize("place", [1, 5, 127, 129, 290])
def test_graph_equals_the_engine(double_head, place):
    """Blocks behind anchors with few rows before them, with all but one of a window, and with more."""
    model, head, llm = double_head
    ids = torch.randint(2, VOCAB, (1, place + 1), generator=torch.Generator().manual_seed(place))
    anchors = Anchors(torch.tensor([0]), torch.tensor([place]))
    with torch.no_grad():
        taps = model(ids, tapped=head.dspark.target_layer_ids).taps
        blocks = head(model, taps, ids, anchors)
        drafts = head.greedy_drafts(blocks, ids[:, place])
        logits, confidence = head.follow(blocks, torch.cat((ids[:, place:], drafts[:, :-1]), 1))
    expected = llm.draft_trace(ids[0, :place].tolist(), int(ids[0, place]))[0]
    assert drafts[0].tolist() == expected.drafts
    for found, known in (
        (blocks.base_logits, expected.base_logits), (logits, expected.logits),
        (torch.sigmoid(confidence), expected.confidences),
    ):  # fmt: skip
        assert (found[0] - known).abs().max() <= SAME_IN_DOUBLE * known.abs().max()


def test_anchors_do_not_see_each_other(double_head):
    model, head, _ = double_head
    ids = torch.randint(2, VOCAB, (2, 200), generator=torch.Generator().manual_seed(2))
    anchors = Anchors(torch.tensor([1, 0, 1]), torch.tensor([150, 3, 60]))
    with torch.no_grad():
        taps = model(ids, tapped=head.dspark.target_layer_ids).taps
        together = head(model, taps, ids, anchors).base_logits
        alone = head(model, taps, ids, Anchors(anchors.rows[2:], anchors.positions[2:])).base_logits
    assert (together[2:] - alone).abs().max() <= SAME_IN_DOUBLE * alone.abs().max()


# ---- what it is trained for ----


def test_shared_rates_are_those_of_shared_noise():
    """Against 400,000 draws of target and draft with the same Gumbel noise."""
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(8, generator=generator).mul(1.5).log_softmax(-1) for _ in range(2))
    noise = -torch.log(-torch.log(torch.rand(400_000, 8, generator=generator, dtype=torch.float64)))
    drawn, drafted = (target + noise).argmax(-1), (draft + noise).argmax(-1)
    rates = learn_drafts.shared_rates(target.expand(8, 8), draft.expand(8, 8), torch.arange(8))
    for token in range(8):
        same = (drafted[drawn == token] == token).double()
        error = float(same.var() / len(same)) ** 0.5
        assert abs(float(same.mean()) - float(rates[token])) <= 4 * error + 1e-12, token
    assert torch.allclose(learn_drafts.shared_rates(target, target, torch.tensor(3)), torch.tensor(1.0))


def test_reach_is_what_came_before():
    rates = torch.tensor([[0.5, 0.25, 0.125]])
    assert learn_drafts.reach(rates).tolist() == [[1.0, 0.5, 0.125]]


def test_a_shipped_checkpoint_is_its_own_master():
    """Weights read back are on the grid already: the graph that rounds them again runs the shipped model."""
    state, config = shipped_state(shipped_checkpoint()), ModelConfig.from_pretrained(shipped_checkpoint())
    DemoModel(config, dtype=torch.float32, max_tokens=128).load_state_dict(state)
    for name in ("layers.3.attn.wq_b.weight", "layers.6.ffn.shared_experts.w2.weight"):
        assert torch.equal(fp8_blocks(state[name]), state[name])
    experts = state["mtp.0.ffn.experts.w1.weight"]
    assert torch.equal(fp4_rows(experts), experts)


# ---- a run ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A few steps for a toy, on made-up text and made-up continuations of it."""
    folder = tmp_path_factory.mktemp("drafts")
    (folder / "tokenizer.json").write_text((shipped_checkpoint() / "tokenizer.json").read_text())
    export_checkpoint(
        toy_model(toy_config(), torch.float32).state_dict(), toy_config(), folder / "toy", "mxfp4",
        folder / "tokenizer.json",
    )  # fmt: skip
    generator = np.random.default_rng(1)
    text = (generator.integers(0, 4, 4000).cumsum() % (VOCAB - 20) + 20).astype(np.uint16)
    text.tofile(folder / "train.bin")
    (folder / "own").mkdir()
    for part in ("train", "heldout"):
        for temperature in (0.0, 1.0):
            np.save(own_text.own_file(folder / "own", part, temperature), text[:960].reshape(6, 160))
    options = argparse.Namespace(
        out=folder / "out", own=folder / "own", data=folder, base=folder / "toy", seconds=3600, steps=NUM_STEPS,
        eager=False,
    )  # fmt: skip
    done = learn_drafts.HeadRun(options, SMALL)
    before = {name: value.clone() for name, value in done.model.state_dict().items()}
    done._prepare(0.0)
    lessons, anchors = done.lessons.take(done.rows), learn_drafts._anchors(done.places)
    losses = [float(done._update().divergence)]
    done.train()
    with torch.no_grad():  # of the first batch, again
        losses.append(float(learn_drafts.head_loss(done.head, done.model, lessons, anchors, SMALL).divergence))
    done.save()
    return done, before, losses


def test_it_learns_and_leaves_the_model_alone(run):
    done, before, losses = run
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(torch.equal(value, before[name]) for name, value in done.model.state_dict().items())
    rows = [json.loads(line) for line in (done.out / "curve.jsonl").read_text().splitlines()]
    for temperature in ("0.0", "1.0"):
        accepted = rows[-1][f"temperature {temperature}"]["accepted"]
        assert sorted(accepted, reverse=True) == accepted
        assert 0 <= accepted[-1] <= accepted[0] <= 1
    assert rows[-1]["temperature 1.0"]["tokens_per_step"] > 1
    assert json.loads((done.out / "summary.json").read_text())["steps"] == done.steps == NUM_STEPS


def test_every_parameter_of_the_head_gets_a_gradient(run):
    done, _, _ = run
    head = random_head(done.head.config, torch.float32)
    head.quantise.fill_(True)
    lessons, anchors = done.lessons.take(done.rows), learn_drafts._anchors(done.places)
    learn_drafts.head_loss(head, done.model, lessons, anchors, SMALL).total.backward()
    without = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_the_folder_beside_its_model_loads_and_changes_nothing(run, tmp_path):
    done, _, _ = run
    for name, source in (("toy", done.base), ("toy-dspark", done.out / "flash-mini-dspark")):
        shutil.copytree(source, tmp_path / name)
    limits = EngineConfig(max_context_tokens=128, max_concurrent_requests=2)
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, logprobs=0)
    plain = LLM(tmp_path / "toy", engine=limits).generate([[20, 23, 24]], params)[0]
    llm = LLM(tmp_path / "toy-dspark", engine=limits, drafts=5)
    drafted = llm.generate([[20, 23, 24]], params)[0]
    assert llm.config == done.head.config
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)
    assert llm.engine.stats().drafts.num_verified
    shutil.rmtree(tmp_path / "toy")
    with pytest.raises(CheckpointError, match=r"\.\./toy/model\.safetensors named by the index is missing"):
        LLM(tmp_path / "toy-dspark")


def test_own_text_continues_prompts(tmp_path):
    llm = LLM(engine=EngineConfig(max_context_tokens=24, max_concurrent_requests=2))
    prompts = own_text.prompts_of(np.arange(20, 400, dtype=np.uint16), np.random.default_rng(0), 2, 16)
    rows = own_text.continued(llm, prompts, 20, 0.0, seed=1)
    assert rows.shape == (2, 20)
    assert rows[:, :16].tolist() == prompts
    alone = llm.generate([prompts[1]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    assert rows[1, 16:].tolist() == list(alone.token_ids)
