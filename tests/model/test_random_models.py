"""Whole models of shapes nobody chose: a prompt in one go, token by token, in chunks and beside another request gives
the same bits of every logit.

On a GPU as many models as the limit of three minutes allows (`python -m benchmarks bits`): what differs is named with
the first op that differs. On a CPU one model runs on the oracles, and mistakes that the comparison must see and name.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks.kernels.bits import num_tokens
from dsv4.ops import TORCH, TRITON
from dsv4.ops.moe import NARROW_ROWS, Form, pick_moe_config
from dsv4.ops.moe.many.launch_tiles import TIMED
from dsv4.testing import mistakes
from dsv4.testing.inputs import kernel_device
from dsv4.testing.model_cuts import SIZES, Cut, CutModel, compile_models, random_cuts
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


def tail_is_masked(x, *arguments, **options):
    """The last row of a tile that is not full reads the row before it."""
    made = BACKEND.ops.hc_head_norm(x, *arguments, **options)
    return torch.cat([made[:-1], made[-2:-1]]) if len(made) % 2 == 0 else made


@pytest.mark.parametrize(
    ("op", "mistake", "cut", "named"),
    [
        (
            "hc_enter",
            mistakes.follows_rows(BACKEND.ops, 16),
            Cut([1, 17, 1]),
            "hc_enter, call 0, output 5 (19, 4, 4): token 0 of 19",
        ),
        ("hc_head_norm", tail_is_masked, Cut([9, 10]), "hc_head_norm, call "),
        (
            "hc_enter",
            mistakes.follows_rows(BACKEND.ops, 16),
            Cut([10, 9], [7, 2]),
            "hc_enter, call 0, output 5 (19, 4, 4): token 10 of 19",
        ),
    ],
)
def test_a_mistake_is_seen_and_named(small_model, monkeypatch, op, mistake, cut, named):
    context = small_model.model.context
    monkeypatch.setattr(small_model.model, "context", replace(context, backend=BACKEND.with_ops(**{op: mistake})))
    assert small_model.differing_rows(cut)
    assert small_model.first_difference(cut).startswith(named)


def test_long_prompts_reach_every_form_of_experts_in_both_formats():
    """A whole prompt of some model takes each; so do 512 tokens that come before others."""
    found = set()
    for number in range(50):
        config, experts = random_model(number)
        widths = config.moe_intermediate_size, config.hidden_size
        for size in {size for size in (*SIZES, num_tokens(number)) if size <= num_tokens(number)}:
            form = pick_moe_config(
                size, config.num_experts_per_tok, config.n_routed_experts, min(widths), has_tiles=widths in TIMED
            ).form
            found.add((form, experts))
    assert found == {(form, experts) for form in Form for experts in ("mxfp4", "nvfp4")}
    assert {num_tokens(number) > NARROW_ROWS for number in range(50)} == {False, True}


def test_random_cuts_are_whole():
    for seed in range(40):
        for cut in random_cuts(400, seed).values():
            assert sum(cut.lengths) == 400
            assert sum(cut.beside) <= 400
            assert min(cut.lengths) > 0
            assert len(cut.beside) <= len(cut.lengths)
