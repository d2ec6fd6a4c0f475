"""The same request, the same bits: alone, batched, cut differently, preempted and resumed, beside poisoned padding."""

from dataclasses import replace

import pytest
import torch
from bare import bare
from engine_cases import SMALL, assert_all_free, finish

from dsv4.engine.engine import Engine
from dsv4.engine.run.runner import Runner
from dsv4.engine.step.size import Sizes
from dsv4.http.telemetry.metrics import Metrics
from dsv4.http.telemetry.shared_metrics import SharedMetrics
from dsv4.request import SamplingParams

RUNS_BOTH_WAYS = True

LENGTHS = (3, 129, 2, 126, 20)
PARAMS = [
    SamplingParams(max_tokens=7, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=5, seed=1, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=2**40, temperature=0.8, top_p=0.9, logprobs=5, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=1, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=4, seed=4, min_p=0.05, presence_penalty=1.0, logprobs=2, ignore_eos=True),
]


def random_prompts(*lengths):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, SMALL.vocab_size, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts(*LENGTHS)
ALONE: list = []


@pytest.fixture
def alone(make_llm):
    """Each request on an engine of its own, one chunk a prompt; computed once."""
    if not ALONE:
        llm = make_llm("official", max_concurrent_requests=1)
        ALONE.extend(llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True))
    return ALONE


@pytest.mark.parametrize(
    ("limits", "is_scarce"),
    [
        ({"max_concurrent_requests": 5}, False),
        ({"max_concurrent_requests": 5, "max_chunk_tokens": 13}, False),
        ({"max_concurrent_requests": 5, "num_blocks": 4}, True),
        ({"max_concurrent_requests": 4, "num_blocks": 2, "max_chunk_tokens": 200}, True),
        ({"max_concurrent_requests": 5, "num_blocks": 3, "max_chunk_tokens": 128}, True),
    ],
)
def test_the_same_bits_whatever_the_load(make_llm, alone, limits, is_scarce):
    llm = make_llm("official", **limits)
    requests = [llm.engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert [request.completion() for request in requests] == bare(alone)
    assert (llm.engine.stats().num_preemptions > 0) == is_scarce
    assert llm.engine.stats().num_prompt_tokens == sum(LENGTHS)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 6])
def test_preempted_at_any_moment(make_llm, alone, num_steps):
    """One slot: an urgent request takes it after so many steps: while the prompt is read (three steps), or later."""
    llm = make_llm("official", max_concurrent_requests=1, max_chunk_tokens=50, prefix_cache_bytes=0)
    request = llm.engine.add(PROMPTS[1], PARAMS[1])
    for _ in range(num_steps):
        llm.engine.step()
    num_output, known = request.num_output, list(request.token_ids)
    urgent = llm.engine.add(PROMPTS[0], replace(PARAMS[0], priority=1))
    llm.engine.step()
    assert (request.slot, request.num_preemptions) == (None, 1)
    assert num_output <= request.num_output <= num_output + 1, "no more than a token that was under way"
    finish(llm.engine)
    assert urgent.completion() == bare(alone[0])
    assert request.completion() == bare(alone[1])
    assert [*request.token_ids[: len(known)]] == known
    stats = llm.engine.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (1, min(129, 50 * num_steps) + max(0, num_steps - 3))
    assert stats.num_output_tokens == 7 + 5, "no token is drawn twice"


class PaddedSizes(Sizes):
    """Each step has more rows than it needs, as where another rank needs more."""

    def __init__(self, padded):
        self.padded = padded

    def agree(self, own):
        return None if own is None else own._replace(num_rows=self.padded(own.num_rows))


def padding_engine(llm, padded):
    runner = Runner(llm.model, llm.cache, buckets=(), use_graphs=False)
    return Engine(llm.model, llm.cache, runner=runner, sizes=PaddedSizes(padded))


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 3, "max_chunk_tokens": 60}])
def test_poisoned_padding(make_llm, alone, monkeypatch, limits):
    """Padded rows carry token 0, whose embedding is NaN here. Nobody else sees one."""
    assert all(0 not in done.token_ids for done in alone)
    llm = make_llm("official", **limits)
    embed = llm.model.weights.embed.clone()
    embed[0] = float("nan")
    monkeypatch.setattr(llm.model, "weights", replace(llm.model.weights, embed=embed))
    sizes = []

    def bucket(num_tokens):
        sizes.append(num_tokens)
        return num_tokens + 1 + num_tokens % 3

    llm.engine = padding_engine(llm, bucket)
    assert llm.generate(PROMPTS, PARAMS) == alone
    assert len(sizes) == llm.engine.stats().num_steps
    monkeypatch.undo()


def test_padding_with_a_real_slot_would_show(make_llm, alone, monkeypatch):
    """The test above can fail: the same rows, but written into a request's slot."""
    llm = make_llm("official")
    embed = llm.model.weights.embed.clone()
    embed[0] = float("nan")
    monkeypatch.setattr(llm.model, "weights", replace(llm.model.weights, embed=embed))
    monkeypatch.setattr("dsv4.cache.batch.PADDED_SLOT", 0)
    llm.engine = padding_engine(llm, lambda num: num + 2)
    request = llm.engine.add(PROMPTS[0], PARAMS[0])
    finish(llm.engine)
    assert request.error is not None or request.completion() != bare(alone[0])


def test_a_runner_of_ones_own(make_llm, alone):
    """The engine asks it for exactly the rows that draw."""
    llm = make_llm("official", max_chunk_tokens=60, prefix_cache_bytes=0)
    asked = []

    class Watching(Runner):
        def forward(self, batch, draw_rows):
            asked.append((batch.num_tokens, draw_rows.tolist()))
            return super().forward(batch, draw_rows)

    runner = Watching(llm.model, llm.cache, buckets=(), use_graphs=False)
    llm.engine = Engine(llm.model, llm.cache, runner=runner)
    assert llm.generate([PROMPTS[1]], PARAMS[1]) == [alone[1]]
    assert asked == [(60, []), (60, []), (9, [8]), *[(1, [0])] * 4]
    assert_all_free(llm)


def test_metrics_tell_preemptions(make_llm):
    llm = make_llm(max_concurrent_requests=1)
    llm.engine.add([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    llm.engine.step()
    llm.engine.add([5], SamplingParams(max_tokens=1, priority=1))
    finish(llm.engine)
    text = SharedMetrics(Metrics("m"), "m").text(llm.engine.stats()).decode()
    assert 'dsv4_num_preemptions_total{model_name="m"} 1.0' in text
    assert 'dsv4_recomputed_tokens_total{model_name="m"} 3.0' in text
