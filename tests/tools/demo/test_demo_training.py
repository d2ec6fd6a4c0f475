"""The demo model's training graph is DeepSeek-V4: it computes what the engine computes, and rounds where it rounds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "demo_model"))

import functions
import needle
import quantise
from export import export_checkpoint, plain_params
from model import DemoModel
from settings import TrainSettings, demo_config

from dsv4 import LLM
from dsv4.config import ModelConfig
from dsv4.config.layers import AttentionKind

NEARLY_PARALLEL = 0.999
SAME_IN_DOUBLE = 1e-9  # two orders of summation in fp64; a wrong mask, index or rotation is off by more than 1e-2


def toy_config():
    return ModelConfig.tiny(
        vocab_size=64, num_hidden_layers=4, compress_ratios=(0, 4, 128, 4, 0), index_n_heads=8, index_topk=8
    )


def toy_model(config, dtype, seed=1, max_tokens=384):
    """Random weights of every kind, far from the initial ones where those are trivial (sinks, tables, norms)."""
    torch.manual_seed(seed)
    model = DemoModel(config, dtype=dtype, max_tokens=max_tokens)
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : config.num_experts_per_tok])
        else:
            tensor.add_(0.1 * torch.randn_like(tensor) if tensor.dim() == 1 or "ape" in name else 0.0)
    return model.to(dtype).eval() if dtype == torch.float64 else model.eval()


@pytest.fixture(scope="module")
def double_model():
    model = toy_model(toy_config(), torch.float64)
    model.select.fill_(True)
    return model, LLM.from_params(
        model.config, plain_params(model.state_dict(), model.config, torch.float64), numerics="exact",
        dtype=torch.float64,
    )  # fmt: skip


@pytest.mark.parametrize("length", [3, 4, 37, 129, 300])
def test_graph_equals_the_engine(double_model, length):
    """Lengths cross 4 (first CSA entry), 32 (the indexer begins to select), 128 (window and HCA) and 256."""
    model, llm = double_model
    ids = torch.randint(2, 64, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    expected = llm.logits(ids.tolist()).double()  # the engine hands out fp32
    assert (logits.float() - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_streams_equal_the_engine_in_double(double_model):
    """Per layer, in full precision: what the engine's trace shows is what the training blocks compute."""
    model, llm = double_model
    ids = torch.randint(2, 64, (200,), generator=torch.Generator().manual_seed(5))
    seen = []
    hooks = [layer.register_forward_hook(lambda *args: seen.append(args[-1][0])) for layer in model.layers]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    for streams, layer in zip(seen, llm.trace(ids.tolist()), strict=True):
        assert (streams[0, :200] - layer.streams).abs().max() < SAME_IN_DOUBLE


def test_mtp_equals_the_engine(double_model):
    model, llm = double_model
    ids = torch.randint(2, 64, (140,), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        drafted = model(ids[None, :-1], ids[None, 1:]).mtp_logits[0]
    expected = llm.mtp_logits(ids.tolist()).double()
    assert (drafted.float() - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_selection_matters_and_can_be_switched_off(double_model):
    model, _ = double_model
    ids = torch.randint(2, 64, (1, 256), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        chosen = model(ids)
        model.select.fill_(False)
        everything = model(ids)
        model.select.fill_(True)
    few = model.config.index_topk * 4
    assert torch.equal(chosen.logits[0, : few - 1], everything.logits[0, : few - 1])
    assert not torch.allclose(chosen.logits[0, -1], everything.logits[0, -1])
    assert 0 < float(chosen.index_recall) < 1


@pytest.mark.parametrize("kind", [AttentionKind.CSA, AttentionKind.HCA])
def test_entries_can_be_hidden_from_one_sequence(double_model, kind):
    """The engine with that kind of layer blinded computes the same; the other sequence does not notice."""
    model, llm = double_model
    ids = torch.randint(2, 64, (2, 300), generator=torch.Generator().manual_seed(13))  # no two index scores tie
    with torch.no_grad():
        open_eyes = model(ids).logits
        logits = model(ids, hidden={kind: torch.tensor([True, False])}).logits
    expected = needle.hide_entries(llm, (kind,)).logits(ids[0].tolist()).double()
    assert (logits[0].float() - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert not torch.allclose(logits[0], open_eyes[0])
    assert torch.equal(logits[1], open_eyes[1])


def test_gradient_passes_through_rounding():
    x = torch.randn(4, 128, requires_grad=True)
    for on in (True, False):
        (gradient,) = torch.autograd.grad(
            (quantise.straight_through(x, quantise.fp8_rows(x, 128), torch.tensor(on)) * 3).sum(), x
        )
        assert torch.equal(gradient, torch.full_like(x, 3.0))


def test_every_parameter_gets_a_gradient():
    model = toy_model(toy_config(), torch.float32)
    model.quantise.fill_(True)
    model.select.fill_(True)
    ids = torch.randint(2, 64, (1, 257))
    output = model(ids[:, :-1], ids[:, 1:])
    (output.logits.logsumexp(-1).mean() + output.mtp_logits.logsumexp(-1).mean() + output.index_loss).backward()
    without = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()
    ]
    assert without == []


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4"])
def test_export_loads_and_speaks_like_the_quantised_graph(tmp_path, experts):
    config = toy_config()
    model = toy_model(config, torch.float32)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(_tokenizer_json(), encoding="utf-8")
    size = export_checkpoint(model.state_dict(), config, tmp_path / experts, experts, tokenizer)
    assert size == (tmp_path / experts / "model.safetensors").stat().st_size
    llm = LLM(tmp_path / experts)
    assert llm.config == config
    model.select.fill_(True)
    ids = torch.randint(2, 64, (160,), generator=torch.Generator().manual_seed(9))
    # the first layer has neither score routing nor an indexer, so no choice can tip over
    official = llm.trace(ids.tolist())[0].streams.float()
    error, damage = ((official - _first_streams(model, ids, on)).square().mean() for on in (True, False))
    if experts == "mxfp4":  # the graph rounds where the engine rounds
        assert error < damage / 4  # bf16 moves a few codes by one
    else:  # another grid for the experts, of a similar fineness
        assert damage / 64 < error < 4 * damage


def _first_streams(model, ids, quantise):
    seen = []
    hook = model.layers[0].register_forward_hook(lambda *args: seen.append(args[-1][0]))
    model.quantise.fill_(quantise)
    with torch.no_grad():
        model(ids[None])
    hook.remove()
    return seen[0][0, : len(ids)]


def _tokenizer_json():
    from corpus import train_tokenizer

    return train_tokenizer(["some words to learn from, some words"], vocab_size=290).to_str()


def test_demo_config_is_flash_in_miniature():
    config = demo_config()
    assert config.layer_ratios == ModelConfig.flash().layer_ratios[:7]
    sequence = TrainSettings().sequence_tokens
    assert config.index_topk < sequence // 4, "the indexer must have something to leave out"
    assert config.max_position_embeddings >= sequence
    assert replace(config, index_topk=8).index_topk == 8
    for size in (config.hidden_size, config.q_lora_rank, config.moe_intermediate_size):
        assert size % 128 == 0


def test_short_sinkhorn_gradient_is_near_the_whole_one():
    """Only the last steps are differentiated; the direction of the gradient must survive that."""
    logits = torch.randn(4, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    target = torch.rand(4, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    comb = torch.softmax(logits, 1) + 1e-6
    comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
    (whole,) = torch.autograd.grad((comb * target).sum(), logits)
    (short,) = torch.autograd.grad((functions.sinkhorn(logits, 20, 1e-6) * target).sum(), logits)
    assert torch.nn.functional.cosine_similarity(whole.flatten(), short.flatten(), 0) > NEARLY_PARALLEL
