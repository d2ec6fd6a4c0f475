"""Which sizes of steps are captured, and that memory is reserved for as many layers as warm-up captures."""

from dataclasses import replace

import pytest
import torch
from draft_cases import CONFIGS, make_limits, params_of

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.draft.options import make_choice
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.run.bucket import Drafting
from dsv4.engine.run.bucket_sizes import captured_layers, decode_buckets, step_buckets
from dsv4.engine.run.runner import Runner
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH


def test_buckets():
    assert decode_buckets(1) == (1,)
    assert decode_buckets(8) == (1, 2, 4, 8)
    assert decode_buckets(100) == (1, 2, 4, 8, 16, 32, 64, 100)
    with pytest.raises(ValueError, match="positive numbers of tokens, found \\[0\\]"):
        Runner(None, None, buckets=(0,), use_graphs=False)


def test_buckets_of_an_engine():
    few = EngineConfig(max_concurrent_requests=3, max_chunk_tokens=64)
    assert step_buckets(few) == (1, 2, 4, 8, 16, 32, 64), "a short prompt is captured too"
    assert step_buckets(EngineConfig(max_concurrent_requests=200))[-2:] == (128, 200)
    assert step_buckets(EngineConfig(max_concurrent_requests=100), max_drafts=3)[-2:] == (256, 400)
    assert step_buckets(EngineConfig(max_concurrent_requests=300), max_drafts=3)[-1] == 512
    assert step_buckets(EngineConfig(max_concurrent_requests=1, max_chunk_tokens=1)) == (1,)


class RunOnce:
    """A capture that runs the call, and replays that do not."""

    def __init__(self, call):
        self.result = call()

    def __call__(self):
        return self.result


@pytest.mark.parametrize(
    ("kind", "drafts"), [("mtp", "off"), ("mtp", "auto"), ("mtp", 2), ("dspark", "auto"), ("dspark", 3)]
)
def test_layers_are_those_that_warm_up_captures(kind, drafts):
    """Every layer runs its experts once. A fixed number of drafts captures less than all numbers up to it."""
    counted = []

    def moe(x, *given, **options):
        counted.append(x.shape[0])
        return TORCH.ops.moe(x, *given, **options)

    config, choice = CONFIGS[kind], make_choice(CONFIGS[kind], drafts)
    most = 0 if choice is None else choice.max_drafts
    limits = make_limits(kind, max_concurrent_requests=3, max_chunk_tokens=2, max_draft_tokens=most)
    model = Transformer(config, params_of(kind), torch.bfloat16, backend=TORCH.with_ops(moe=moe))
    cache = KVCacheManager(config, model.schedule, limits, device="cpu", plain_dtype=None)
    drafting = None if choice is None else Drafting(make_drafter(model, cache), most, choice.choices)
    buckets = step_buckets(limits, most)
    runner = Runner(model, cache, buckets=buckets, use_graphs=True, capture=RunOnce, drafting=drafting)
    runner.warm_up()
    assert runner.captured == buckets
    assert len(counted) <= captured_layers(config, limits)
    if drafts != 2:  # which leaves out the graph for one draft: it runs the block no second time
        assert len(counted) == captured_layers(config, limits)
    assert captured_layers(config, limits) > len(buckets) * config.num_hidden_layers or choice is None


def test_drafts_that_no_drafter_makes_are_not_counted():
    limits = EngineConfig(max_concurrent_requests=3, max_chunk_tokens=2, max_draft_tokens=9)
    without = replace(CONFIGS["mtp"], num_nextn_predict_layers=0)
    assert captured_layers(without, limits) == captured_layers(without, replace(limits, max_draft_tokens=0)) == 3 * 2
