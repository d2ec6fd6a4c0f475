"""`dsv4.tools.evaluate` and its command on a small random model."""

import importlib.util
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from dsv4 import LLM
from dsv4.cli import eval as command
from dsv4.config import ModelConfig
from dsv4.loader.header import CheckpointError
from dsv4.loader.shipped import shipped_checkpoint
from dsv4.loader.write.synth import write_checkpoint
from dsv4.text.protocol import PROTOCOL
from dsv4.tools.evaluate import (
    EvaluationError,
    cut_contexts,
    evaluate,
    negative_log_likelihood,
    shared_share,
    total_tokens,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "demo_model"))

import needle
import tokenizers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "model"
    config = ModelConfig.tiny(vocab_size=320, index_topk=4, num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))
    write_checkpoint(folder, config, seed=3)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        ["a small text with a few words in it, and a few more"], 300, special_tokens=list(PROTOCOL.markers)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def ids():
    return torch.randint(20, 300, (150,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def result(checkpoint, ids):
    steps = []
    done = evaluate(
        checkpoint, ids, context=100, decode_tokens=20, advance=lambda mode, tokens: steps.append((mode, tokens))
    )
    assert sum(tokens for _, tokens in steps) == total_tokens(len(ids), 20)
    assert [mode for mode, _ in steps[::2]] == ["exact", "official", "official, FP8 index keys", "prefill"]
    return done


def test_perplexity_is_that_of_the_engine(checkpoint, ids, result):
    llm = LLM(checkpoint, numerics="exact")
    total = 0.0
    for piece in (ids[:100], ids[100:]):
        log_probs = llm.logits(piece).double().log_softmax(-1)
        total -= sum(float(log_probs[t, piece[t + 1]]) for t in range(len(piece) - 1))
    assert result.modes[0].name == "exact"
    assert result.modes[0].predictions == 148
    assert result.modes[0].perplexity == pytest.approx(math.exp(total / 148))
    assert result.modes[1].perplexity != result.modes[0].perplexity


def test_decode_equals_prefill(result):
    prefill, decode = result.decode
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.perplexity == decode.perplexity


def test_agreement_by_layer(result):
    assert [layer.attention for layer in result.layers] == ["swa", "csa", "hca"]
    assert result.layers[0].router == 1.0, "the first layer's experts come from a table"
    assert 0 < result.layers[1].router <= 1
    assert [layer.index_recall is None for layer in result.layers] == [True, False, True]
    assert 0.3 < result.layers[1].index_recall <= 1


def test_shared_share():
    first = torch.tensor([[0, 1], [2, 5], [3, -1], [-1, -1]])
    second = torch.tensor([[1, 0], [5, 7], [-1, 4], [0, 1]])
    assert shared_share(first, second).tolist() == [1.0, 0.5, 0.0, 0.0]


def test_negative_log_likelihood_of_equal_logits():
    assert negative_log_likelihood(torch.zeros(3, 8), [0, 5, 7]) == pytest.approx(2 * math.log(8))


def test_contexts():
    assert cut_contexts(range(7), 6, 4) == [[0, 1, 2, 3], [4, 5]]
    assert cut_contexts(range(5), 10, 4) == [[0, 1, 2, 3]]
    for tokens, limit, context in ((range(1), 10, 4), (range(9), 1, 4), (range(9), 9, 1)):
        with pytest.raises(EvaluationError, match="at least 2"):
            cut_contexts(tokens, limit, context)


def test_ids_outside_the_vocabulary(checkpoint):
    with pytest.raises(EvaluationError, match="from 0 to 319, found 0 to 320"):
        evaluate(checkpoint, [0, 320])


def run_command(*arguments):
    app = typer.Typer()
    app.command()(command.eval_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command(checkpoint, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 6, encoding="utf-8")
    shared = ("--model", checkpoint, "--text", text, "--max-tokens", 24, "--decode-tokens", 4)
    done = run_command(*shared, "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert [mode["name"] for mode in numbers["modes"]] == ["exact", "official", "official, FP8 index keys"]
    shown = run_command(*shared)
    assert "official, decode (4 tokens)" in shown.output
    assert f"{numbers['modes'][1]['perplexity']:.4f}" in shown.output
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = run_command(*shared, "--plot", tmp_path / "plot.png")
    assert str(refused.exception) == command.MISSING_MATPLOTLIB


def test_needle_runs_with_and_without_entries(checkpoint):
    """Within the window hiding entries changes nothing before the first entry, and something after it."""
    llm = LLM(checkpoint, numerics="exact")
    blind = needle.hide_entries(llm)
    ids = list(range(20, 60))
    seeing, hidden = llm.logits(ids), blind.logits(ids)
    assert torch.equal(seeing[:3], hidden[:3])
    assert not torch.allclose(seeing[-1], hidden[-1])
    best = int(seeing[-1].argmax())
    assert needle.accuracy(llm, [(ids, best), (ids, best + 1)]) == 0.5


def test_unknown_shipped_checkpoint():
    with pytest.raises(CheckpointError, match="no shipped checkpoint 'nothing'; there are: "):
        shipped_checkpoint("nothing")


def test_an_indexer_that_never_chose_has_no_recall(checkpoint, ids):
    """A text so short that every entry could be picked: nothing, not NaN."""
    short = evaluate(checkpoint, ids[:12], decode_tokens=0)
    assert [layer.index_recall for layer in short.layers] == [None, None, None]
    console = Console(file=io.StringIO(), width=100)
    command.print_evaluation(short, console)
    assert "nan" not in console.file.getvalue()
    assert "chose nothing" in console.file.getvalue()
