"""A whole training run in miniature: it learns, ends in time, and leaves loadable checkpoints behind."""

from __future__ import annotations

import argparse
import copy
import io
import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "demo_model"))

import corpus
import refrain
import train
from model import DemoModel
from settings import Lesson, SecondSettings, TrainSettings

from dsv4 import LLM
from dsv4.config import ModelConfig
from dsv4.config.layers import AttentionKind

SMALL = replace(
    TrainSettings(), sequence_tokens=384, batch_sequences=1, needle_share=0.5, needle_questions=2, max_facts=1
)
NUM_STEPS = 6


def small_config(vocab_size, ratios=(0, 4, 128, 0)):
    return ModelConfig.tiny(
        vocab_size=vocab_size, num_hidden_layers=len(ratios) - 1, compress_ratios=ratios, hc_sinkhorn_iters=4
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder as corpus.py writes it, from made-up words."""
    out = tmp_path_factory.mktemp("demo") / "data"
    out.mkdir()
    names = [f"Name{chr(97 + i)}{chr(97 + j)}x" for i in range(8) for j in range(8)]
    things = [f"thing{chr(97 + i)}{chr(97 + j)}" for i in range(13) for j in range(13)]
    generator = np.random.default_rng(0)
    text = " ".join(generator.choice(names + things, 9000))
    tokenizer = corpus.train_tokenizer([text], vocab_size=1024)
    tokenizer.save(str(out / "tokenizer.json"))
    ids = corpus.encode(tokenizer, [("text", text)])
    ids[:-2000].tofile(out / "train.bin")
    ids[-2000:].tofile(out / "heldout.bin")
    meta = {
        "token_counts": np.bincount(ids, minlength=1024).tolist(), "train_tokens": len(ids) - 2000,
        "heldout_tokens": 2000, "unigram_perplexity": 200.0,
    }  # fmt: skip
    (out / "meta.json").write_text(json.dumps(meta))
    return out


@pytest.fixture(scope="module")
def run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "demo_config", lambda: small_config(1024))
        options = argparse.Namespace(out=folder.parent / "out", minutes=60, data=folder, backend="none")
        done = train.Run(options, SMALL)
        for step in range(NUM_STEPS):  # by count, not by the clock: a test must not depend on how busy the machine is
            done._step(step / NUM_STEPS)
        patch.setattr(train.Run, "progress", 1.0)
        done.train()
        done.save()
    return done


def test_it_learns_and_ends(run):
    rows = [json.loads(line) for line in (run.out / "curve.jsonl").read_text().splitlines()]
    assert rows[-1]["progress"] == 1.0
    assert rows[-1]["heldout_perplexity"] < 1024, "an untrained model gives about the size of the vocabulary"
    assert run.steps == NUM_STEPS
    assert json.loads((run.out / "summary.json").read_text())["best"] == run.best


def test_routers_moved_towards_balance(run):
    bias = run.model.layers[2].ffn.gate.bias
    assert bool(bias.any())
    assert float(bias.abs().max()) <= SMALL.bias_step * run.steps * 1.01


@pytest.mark.parametrize("name", ["flash-mini", "flash-mini-nvfp4"])
def test_checkpoints_load(run, name, tmp_path):
    with tarfile.open(run.out / f"{name}.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    llm = LLM(tmp_path / name)
    assert llm.config == small_config(1024)
    assert llm.logits([20, 21, 22]).isfinite().all()


def test_master_weights_survive(run, tmp_path):
    train.save_master(run.best_state, tmp_path)
    loaded = train.load_master(tmp_path)
    assert loaded.keys() == run.best_state.keys()
    for name, value in run.best_state.items():
        exact = value if not value.is_floating_point() or ".gate.bias" in name else value.bfloat16().float()
        assert torch.equal(loaded[name], exact), name


def test_the_second_run_goes_on_from_the_first(run, folder, tmp_path):
    """Two steps: HCA's attention moves most, and everything is saved."""
    settings = replace(SecondSettings(), sequence_tokens=640, shapes=((2, 640),), refrain_share=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refrain, "demo_config", lambda: small_config(1024))
        patch.setattr(refrain, "NEAR", (400, 160))
        patch.setattr(refrain, "FAR", (400, 180))
        options = argparse.Namespace(
            out=tmp_path, master=run.out, data=folder, learn=False, seconds=3600, steps=2, questions=1, heldout=1
        )
        model = refrain.run(options, settings)
    before = train.load_master(run.out)
    moved = {name: float((value.detach() - before[name]).abs().max()) for name, value in model.named_parameters()}
    assert moved["layers.2.attn.wq_a.weight"] > 3 * moved["layers.1.attn.wq_a.weight"] > 0
    assert {file.name for file in tmp_path.iterdir()} >= {
        "curve.jsonl", "flash-mini.tar", "flash-mini-nvfp4.tar", "master-0.safetensors"
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2]


def test_a_lesson_changes_the_attention_of_hca_layers_only(run, folder):
    """With everything else learning beside it and put back afterwards."""
    corpus_ = train.Corpus(folder, torch.device("cpu"))
    model = copy.deepcopy(run.model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lesson = Lesson(steps=2, shapes=((1, 384, 1),), copies=(4,), hca_rate=1e-3, rest_rate=1e-3)
    curve = io.StringIO()
    refrain.teach(model, corpus_, lesson, curve)
    assert json.loads(curve.getvalue().splitlines()[-1])["step"] == 2
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "layers.2.attn.compressor.wkv.weight" in changed
    assert all(name.startswith("layers.2.attn.") for name in changed)


def test_what_a_lesson_trains(run):
    beside, alone = (
        refrain.rates(
            run.model, Lesson(steps=1, shapes=((1, 384, 1),), copies=(4,), hca_rate=1e-3, rest_rate=rest_rate)
        )
        for rest_rate in (1e-4, None)
    )
    assert {name: beside[name] for name in alone} == alone
    assert set(alone.values()) == {1e-3}
    assert all(name.startswith("layers.2.attn.") for name in alone)
    assert beside["norm.weight"] == 1e-4
    assert not any(name.startswith(("layers.0.", "layers.1.", "embed", "head.", "mtp")) for name in beside)
    assert not any("experts" in name or "indexer" in name for name in beside)


def test_batches_of_the_second_run(folder):
    corpus_ = train.Corpus(folder, torch.device("cpu"))
    words = refrain.refrain_words(corpus_)
    settings = replace(
        SecondSettings(), shapes=((40, 640),), refrain_share=0.5, needle_share=0.25, csa_hidden=0.5, hca_hidden=0.25
    )
    batch, asked = refrain.make_batch(corpus_, words, np.random.default_rng(1), settings)
    csa, hca = (batch.hidden[kind] for kind in (AttentionKind.CSA, AttentionKind.HCA))
    has_refrain = asked.any(1)
    assert has_refrain.any()
    assert not has_refrain.all()
    assert csa.any()
    assert hca.any()
    assert not (csa & hca).any(), "one kind is always left"
    assert not ((csa | hca) & ~has_refrain).any()
    assert not ((batch.weights > 1) & has_refrain.unsqueeze(1)).any(), "facts and refrains are not mixed"
    assert not batch.weights[asked].any(), "planted words are no text to learn"
    assert torch.equal((batch.weights == 0).sum(1) > 8, has_refrain), "nor is any copy of them"
    assert set(batch.ids[:, 1:-1][asked].tolist()) <= set(words.words)


def test_rate_schedule():
    settings = TrainSettings()
    rates = [train.learning_rate(progress / 100, settings) for progress in range(101)]
    peak = rates.index(max(rates))
    assert peak == round(100 * settings.warmup_share)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(settings.final_rate_share * settings.peak_rate)


def test_a_diverged_run_stops(run):
    with pytest.raises(ValueError, match="training diverged"):
        run._record(0.5, {"loss": float("nan")})


def test_compiling_changes_nothing(folder):
    """`eager` traces the blocks without generating code."""
    config = small_config(1024, (0, 0))
    torch.manual_seed(0)
    model = DemoModel(config, dtype=torch.float32, max_tokens=256)
    data = train.Corpus(folder, torch.device("cpu"))
    batch = data.batch(np.random.default_rng(0), 1, 256, 0.0, 1, 1.0)
    plain = model(batch.ids[:, :-2]).logits
    train.compile_blocks(model, batch, SMALL, "eager")
    with train.uncompiled(model):
        assert all(block._compiled_call_impl is None for block in model.layers)
    assert torch.equal(model(batch.ids[:, :-2]).logits, plain)
