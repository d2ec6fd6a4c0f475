"""Models that no kernel takes are refused by name; what the kernels take runs, at shapes unlike Flash's and Pro's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.ops import TORCH, TRITON
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.shapes import check_shapes
from dsv4.testing.random_shapes import random_model
from dsv4.testing.vectors import relative_l2

ODD = {
    "hc_mult": 2, "head_dim": 192, "qk_rope_head_dim": 32, "index_head_dim": 64, "index_topk": 1025,
    "hidden_size": 16512, "q_lora_rank": 32768, "n_routed_experts": 4097,
}  # fmt: skip


def test_published_and_random_models_are_taken():
    for config in (
        ModelConfig.flash(),
        ModelConfig.pro(),
        ModelConfig.tiny(),
        *(random_model(i).config for i in range(50)),
    ):
        check_shapes(config)


@pytest.mark.parametrize("name", ODD)
def test_what_no_kernel_takes_is_named(name):
    config = ModelConfig.tiny(**{name: ODD[name]})
    with pytest.raises(KernelInputError, match=rf"the kernels need {name} to be .*, found {ODD[name]}; the TORCH"):
        check_shapes(config)


def test_an_index_that_no_layer_has_may_be_anything():
    check_shapes(ModelConfig.tiny(index_head_dim=64, compress_ratios=(0, 128, 128, 0, 128, 0)))


def test_it_is_refused_when_the_model_is_made():
    config = ModelConfig.tiny(head_dim=192, num_nextn_predict_layers=0)
    params = random_params(config, with_mtp=False)
    with pytest.raises(KernelInputError, match="head_dim"):
        LLM.from_params(config, params, backend=TRITON)
    LLM.from_params(config, params, backend=TORCH)


@pytest.mark.parametrize("seed", [1, 2])
def test_official_follows_exact_at_odd_shapes(seed):
    """The oracle in `exact` numerics is the reference: quantised activations cost a few per cent, a wrong head or
    expert everything."""
    config = replace(random_model(seed, most_groups=3).config, num_hash_layers=0)
    token_ids = torch.randint(256, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    official = LLM.from_params(config, random_params(config, with_mtp=False), backend=TORCH).logits(token_ids)
    plain = random_params(config, with_mtp=False, dequantize_to=torch.float32)
    exact = LLM.from_params(config, plain, numerics="exact").logits(token_ids)
    shuffled = exact.roll(1, 0)
    assert relative_l2(official, exact) < relative_l2(shuffled, exact) / 4
