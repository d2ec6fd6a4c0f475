"""Whole models of shapes nobody chose: a prompt in one go, token by token, in chunks and beside another request gives
the same bits of every logit.

On a GPU as many models as the limit of three minutes allows (`python -m benchmarks bits`): what differs is named with
the first op that differs. On a CPU one model runs on the oracles, and mistakes that the comparison must see and name.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as benchmarks
from dsv4.ops import TORCH, TRITON
from dsv4.testing.inputs import kernel_device
from dsv4.testing.model_cuts import Cut, CutModel, compile_models, random_cuts
from dsv4.testing.random_shapes import random_model

DEVICE = kernel_device()
BACKEND = TRITON if DEVICE.type == "cuda" else TORCH
NUM_TOKENS = 19


@pytest.mark.gpu
def test_random_models_in_pieces(tmp_path, capsys):
    status = benchmarks.main(["bits", "--seconds", "150", "--out", str(tmp_path / "bits.jsonl")])
    printed = capsys.readouterr().out
    print(printed)
    assert "model 0: " in printed
    assert status == 0, printed


@pytest.fixture(scope="module")
def small_model():
    model = CutModel.random(random_model(3, most_groups=2), NUM_TOKENS, BACKEND, DEVICE)
    if DEVICE.type == "cuda":
        compile_models([model])
    return model


@pytest.mark.parametrize("name", ["tokens", "chunks", "batch"])
def test_a_small_random_model_in_pieces(small_model, name):
    cut = random_cuts(NUM_TOKENS, 2)[name]
    assert sum(cut.beside) > 0 or name != "batch"
    assert small_model.differing_rows(cut) == []


def few_tokens_differ(streams, *arguments, **options):
    """Up to 16 tokens are summed in another order."""
    made = BACKEND.ops.hc_enter(streams, *arguments, **options)
    return replace(made, comb=made.comb + 2**-12) if len(made.comb) <= 16 else made


def tail_is_masked(x, *arguments, **options):
    """The last row of a tile that is not full reads the row before it."""
    made = BACKEND.ops.hc_head_norm(x, *arguments, **options)
    return torch.cat([made[:-1], made[-2:-1]]) if len(made) % 2 == 0 else made


@pytest.mark.parametrize(
    ("op", "mistake", "cut", "named"),
    [
        ("hc_enter", few_tokens_differ, Cut([1, 17, 1]), "hc_enter, call 0, output 5 (19, 4, 4): token 0 of 19"),
        ("hc_head_norm", tail_is_masked, Cut([9, 10]), "hc_head_norm, call "),
        ("hc_enter", few_tokens_differ, Cut([10, 9], [7, 2]), "hc_enter, call 0, output 5 (19, 4, 4): token 10 of 19"),
    ],
)
def test_a_mistake_is_seen_and_named(small_model, monkeypatch, op, mistake, cut, named):
    context = small_model.model.context
    monkeypatch.setattr(small_model.model, "context", replace(context, backend=BACKEND.with_ops(**{op: mistake})))
    assert small_model.differing_rows(cut)
    assert small_model.first_difference(cut).startswith(named)


def test_random_cuts_are_whole():
    for seed in range(40):
        for cut in random_cuts(400, seed).values():
            assert sum(cut.lengths) == 400
            assert sum(cut.beside) <= 400
            assert min(cut.lengths) > 0
            assert len(cut.beside) <= len(cut.lengths)
