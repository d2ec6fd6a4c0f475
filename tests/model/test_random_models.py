"""Whole models of shapes nobody chose: a prompt in one go, token by token and in chunks, the same bits of every logit.

On a GPU 50 models, as many of them as three minutes allow: what differs is named with the first op that differs. On a
CPU one model runs on the oracles, and a mistake that the comparison must see and name.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

from dsv4.ops import TORCH, TRITON
from dsv4.testing.model_cuts import CutModel
from dsv4.testing.random_shapes import random_model

NUM_MODELS, SECONDS = 50, float(os.environ.get("DSV4_SHAPES_SECONDS", "170"))
NUM_TOKENS = 330
# calls of one token, up to 16, up to 64, and more; both sides of where forms change
CUTS = ([1] * 18 + [16, 17, 40, 239], [300, 13, 17], [257, 64, 9])
SMALL_TOKENS, SMALL_CUTS = 19, ([1, 17, 1], [16, 3])


@pytest.mark.gpu
def test_random_models_in_pieces():
    started, found, num_models = time.monotonic(), [], 0
    for seed in range(NUM_MODELS):
        if time.monotonic() - started > SECONDS:
            break
        shape = random_model(seed)
        cut_model = CutModel(shape, NUM_TOKENS, TRITON, torch.device("cuda"))
        cut_model.precompile(CUTS)
        for cut in CUTS:
            rows = cut_model.differing_rows(cut)
            if rows:
                found.append(
                    f"model {seed} ({shape}): {len(rows)} of {NUM_TOKENS} rows differ, the first {rows[:3]}; "
                    f"{cut_model.first_difference(cut)}"
                )
                print(found[-1], flush=True)
                break
        num_models += 1
    print(f"{num_models} of {NUM_MODELS} models in {time.monotonic() - started:.0f} s, {len(found)} differ")
    assert num_models
    assert not found


@pytest.fixture(scope="module")
def small_model():
    return CutModel(random_model(3, most_groups=2), SMALL_TOKENS, TORCH, torch.device("cpu"))


@pytest.mark.parametrize("cut", SMALL_CUTS)
def test_a_small_random_model_in_pieces(small_model, cut):
    assert small_model.differing_rows(cut) == []


def test_an_op_that_follows_the_number_of_tokens_is_named(small_model, monkeypatch):
    def mistaken(*arguments, **options):
        made = TORCH.ops.hc_enter(*arguments, **options)
        return replace(made, comb=made.comb + 2**-22) if len(made.comb) <= 16 else made

    context = small_model.model.context
    monkeypatch.setattr(small_model.model, "context", replace(context, backend=TORCH.with_ops(hc_enter=mistaken)))
    assert small_model.differing_rows([1, 17, 1])
    assert small_model.first_difference([1, 17, 1]).startswith("hc_enter, call 0, output 5 (19, 4, 4): token 0 of 19")
