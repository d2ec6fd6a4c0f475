"""Drafts change nothing on a GPU either: kernels, graphs, up to 64 requests at once, prompts and preemption."""

import random
from dataclasses import replace
from functools import cache

import pytest
from draft_cases import ForcedDrafts, ToldDrafter, run, truth_of
from engine_cases import SMALL, finish
from load_cases import Alternating

from dsv4 import LLM
from dsv4.config import EngineConfig
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.draft.round import make_drafter
from dsv4.engine.engine import Engine
from dsv4.engine.run.bucket import Drafting
from dsv4.engine.run.bucket_sizes import decode_buckets
from dsv4.engine.run.runner import Runner
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams

pytestmark = pytest.mark.gpu

CONFIGS = {"mtp": SMALL, "dspark": SMALL.with_dspark(noise_token_id=3, markov_rank=128, block_size=5)}


@cache
def params_of(kind):
    return random_params(CONFIGS[kind], device="cuda")


def requests(count):
    source = random.Random(count)
    lengths = [source.choice((1, 3, 40, 120, 126, 131, 250)) for _ in range(count)]
    prompts = [[source.randrange(4, SMALL.vocab_size) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(
            max_tokens=source.randint(1, 40), seed=place, temperature=(0.0, 0.7, 1.0)[place % 3],
            top_p=(1.0, 0.9)[place % 2], logprobs=(None, 0, 5)[place % 3], ignore_eos=place % 4 > 0,
            presence_penalty=(0.0, 0.8)[place // 2 % 2], repetition_penalty=(1.0, 1.3)[place // 4 % 2],
        )
        for place in range(count)
    ]  # fmt: skip
    return prompts, params


def limits_for(count, **limits):
    defaults = {"max_context_tokens": 512, "max_concurrent_requests": min(count, 64), "max_chunk_tokens": 256}
    return EngineConfig(**{**defaults, **limits})


@cache
def expected(kind, count):
    """Without drafts."""
    llm = LLM.from_params(CONFIGS[kind], params_of(kind), engine=limits_for(count))
    return run(llm, *requests(count))


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize(
    ("count", "drafts", "limits"),
    [
        (1, "partly", {}),
        (8, "real", {}),
        (8, "partly", {"num_blocks": 9, "max_chunk_tokens": 64}),
        (8, "unread", {}),
        (64, "partly", {}),
        (64, "unread", {"num_blocks": 100}),
        (64, "wrong", {}),
        (64, "real", {"num_blocks": 100}),
    ],
)
@pytest.mark.parametrize("use_graphs", [False, True])
def test_the_bits_without_drafts(kind, count, drafts, limits, use_graphs):
    config, plain = CONFIGS[kind], expected(kind, count)
    most, truth, each = config.max_drafts, truth_of(plain), lambda engine: None
    choice = ForcedDrafts(most, drafts, truth, random_count=drafts == "partly", vocab_size=SMALL.vocab_size)
    llm = LLM.from_params(config, params_of(kind), engine=limits_for(count, max_draft_tokens=most, **limits))
    drafter = make_drafter(llm.model, llm.cache)
    if drafts == "unread":
        drafter, choice = ToldDrafter(drafter, llm.cache.schema.num_slots, 512, llm.cache.device), FixedDrafts(most)
        each = lambda engine: drafter.tell(engine, truth)  # noqa: E731
    drafting = Drafting(drafter, most, choice.choices)
    buckets = decode_buckets(min(count, 64) * (1 + most))
    runner = Runner(llm.model, llm.cache, buckets=buckets, use_graphs=use_graphs, drafting=drafting)
    runner.warm_up()
    llm.engine = Engine(llm.model, llm.cache, runner=runner, drafts=choice)
    prompts, params = requests(count)
    assert run(llm, prompts, params, each) == plain
    llm.engine.check_integrity()
    assert drafts in ("real", "wrong") or llm.engine.stats().drafts.num_accepted > 0
    assert not runner.compiled_late
    assert (runner.num_replays > 0) == use_graphs


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_under_rules(kind):
    """A grammar, least lengths and bad words of several tokens: masks of every row of a request."""
    prompts, params = requests(8)
    params = [replace(one, min_tokens=min(one.max_tokens, 4), bad_words_ids=((7, 8),)) for one in params]
    found = []
    for drafts in ("off", config_most := CONFIGS[kind].max_drafts):
        llm = LLM.from_params(CONFIGS[kind], params_of(kind), engine=limits_for(8), drafts=drafts)
        if found:
            llm.engine._drafts = ForcedDrafts(config_most, "partly", truth_of(found), vocab_size=SMALL.vocab_size)
        sequences = [
            llm.engine.prepare(prompt, one, Alternating() if place % 2 else None)
            for place, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        for sequence in sequences:
            llm.engine.submit(sequence)
        finish(llm.engine)
        completions = [sequence.completion() for sequence in sequences]
        assert not found or completions == found
        found = completions
    assert llm.engine.stats().drafts.num_accepted > 0


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_as_users_ask_for_them(kind):
    prompts, params = requests(8)
    for drafts in (1, "auto"):
        llm = LLM.from_params(CONFIGS[kind], params_of(kind), engine=limits_for(8), drafts=drafts)
        assert run(llm, prompts, params) == expected(kind, 8)
        assert llm.engine.stats().drafts is not None
