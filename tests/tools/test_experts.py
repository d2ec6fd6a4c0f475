"""`ExpertCounter` against the experts a trace shows."""

import torch

from dsv4 import LLM, SamplingParams
from dsv4.config import ModelConfig
from dsv4.loader.write.synth import random_params
from dsv4.tools.experts import ExpertCounter, LayerExperts


def test_counts_are_those_of_the_trace():
    config = ModelConfig.tiny(num_hidden_layers=2, compress_ratios=(0, 4, 0))
    llm = LLM.from_params(config, random_params(config, dequantize_to=torch.float32), numerics="exact")
    counter = ExpertCounter(config)
    assert [layer.num_used for layer in counter.layers()] == [0, 0]
    assert set(counter.layers()[0].shares) == {0.0}
    llm.engine.observers.append(counter)
    done = llm.generate([5, 6, 7, 8, 9], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    llm.engine.observers.remove(counter)
    fed = [*done.prompt_token_ids, *done.token_ids[:-1]]
    for found, traced in zip(counter.layers(), llm.trace(fed), strict=True):
        chosen = traced.experts.flatten().tolist()
        assert list(found.counts) == [chosen.count(expert) for expert in range(config.n_routed_experts)]
        assert found.num_used == len(set(chosen))


def test_shares():
    layer = LayerExperts(layer=None, counts=(3, 0, 1))
    assert layer.num_used == 2
    assert layer.shares == (0.75, 0.0, 0.25)
