"""Models that no kernel takes are refused by name; what the kernels take runs, at shapes unlike Flash's and Pro's."""

import random

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.errors import Dsv4Error
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.ops import TORCH, TRITON
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.shapes import check_shapes
from dsv4.testing.random_shapes import random_model
from dsv4.testing.vectors import relative_l2

ORACLES = TORCH.ops
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


# sizes that no release has, good ones and bad ones
CHOICES = {
    "hidden_size": (64, 128, 200, 384), "num_attention_heads": (1, 2, 3, 5, 6), "head_dim": (64, 65, 128, 192, 320),
    "qk_rope_head_dim": (2, 62, 64, 128), "q_lora_rank": (100, 128, 384), "o_groups": (1, 2, 3),
    "o_lora_rank": (32, 128),
    "n_routed_experts": (1, 2, 3, 5, 17), "num_experts_per_tok": (1, 2, 3, 7), "moe_intermediate_size": (64, 100, 384),
    "index_n_heads": (16, 24, 32), "index_head_dim": (32, 64, 96, 128, 256), "index_topk": (3, 16, 1000),
    "sliding_window": (1, 3, 7, 127, 129, 513), "compress_ratios": ((128, 4, 4), (4, 4, 0), (8, 4, 128), (0, 4)),
    "hc_mult": (1, 2, 3, 5), "num_hash_layers": (1, 3, 4), "vocab_size": (100, 513),
}  # fmt: skip
BASE = {"num_hidden_layers": 3, "compress_ratios": (0, 4, 128), "num_hash_layers": 0, "num_nextn_predict_layers": 0}
NUM_SEEDS, NUM_TOKENS = 24, 24


def odd_model(seed):
    """A tiny model with up to four odd sizes, and what they are."""
    chance = random.Random(seed)
    changes = {name: chance.choice(CHOICES[name]) for name in chance.sample(sorted(CHOICES), chance.randint(1, 4))}
    return BASE | {"o_groups": 1, "index_n_heads": 32} | changes, changes


def told_from_exact(config, seed):
    """Whether `official` numerics follow the oracle in `exact`, with the same bits in one go and in pieces. Quantised
    activations cost a few per cent, a wrong head or expert everything."""
    token_ids = torch.randint(config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    official = LLM.from_params(config, random_params(config, with_mtp=False), backend=TORCH)
    found = official.logits(token_ids)
    assert torch.equal(found, official.logits(token_ids, [1, 2, 9, NUM_TOKENS - 12]))
    plain = random_params(config, with_mtp=False, dequantize_to=torch.float32)
    exact = LLM.from_params(config, plain, numerics="exact").logits(token_ids)
    return relative_l2(found, exact) < relative_l2(exact.roll(1, 0), exact) / 3


def test_odd_models_run_right_or_are_refused_by_name():
    ran = refused = 0
    for seed in range(NUM_SEEDS):
        sizes, changes = odd_model(seed)
        try:
            config = ModelConfig.tiny(**sizes)
            assert told_from_exact(config, seed), changes
            ran += 1
        except Dsv4Error as error:
            refused += any(name in str(error) for name in changes)
    assert ran + refused == NUM_SEEDS, "an error names none of the odd sizes"
    assert min(ran, refused) >= NUM_SEEDS // 4


def test_a_model_of_other_experts_is_told_from_its_own(monkeypatch):
    """The comparison above fails where one op is wrong."""

    def others(*arguments, **options):
        experts, weights = ORACLES.route(*arguments, **options)
        return (experts + 1) % 8, weights

    monkeypatch.setattr(f"{__name__}.TORCH", TORCH.with_ops(route=others))
    assert not told_from_exact(ModelConfig.tiny(**BASE), 0)
