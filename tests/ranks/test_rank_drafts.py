"""Drafts on several ranks: tokens and log-probabilities are those of one process without drafts, bit for bit.

Draft blocks have experts of every rank, so all ranks run the drafter's calls together, those that draw nothing too.
"""

import copy
import random
from dataclasses import replace
from functools import cache, partial

import pytest
from bare import bare
from draft_cases import ForcedDrafts, assert_same_drafts, run, truth_of
from load_cases import Alternating
from rank_cases import SMALL, prompts_of

from dsv4.config import EngineConfig
from dsv4.dist.errors import RankFailed
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.offload.placement import Placement
from dsv4.engine.request import RequestFailed
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams

MTP = replace(SMALL, num_hidden_layers=2, compress_ratios=(4, 128, 0))
CONFIGS = {"mtp": MTP, "dspark": MTP.with_dspark(noise_token_id=3, markov_rank=16, block_size=4)}
PROMPTS = prompts_of(3, 126, 1, 20, 4)
PARAMS = [
    SamplingParams(max_tokens=7, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=2**40, temperature=0.8, top_p=0.9, logprobs=5, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=1, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=5, seed=6, logprobs=1, allowed_token_ids=tuple(range(1, 30)), min_tokens=3),
    SamplingParams(max_tokens=6, seed=7, logprobs=1, logit_bias={31: 80, 32: 79.5}, bad_words_ids=((31, 31), (33,))),
]
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=8)
slow = partial(pytest.param, marks=pytest.mark.slow)


@cache
def params_of(kind):
    return random_params(CONFIGS[kind])


@cache
def alone(kind):
    """One process, no drafts, each request by itself."""
    llm = LLM.from_params(CONFIGS[kind], params_of(kind), engine=LIMITS)
    return [run(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@cache
def drafted_alone(kind):
    """One process with drafts: what its drafter said."""
    llm = LLM.from_params(CONFIGS[kind], params_of(kind), engine=LIMITS, drafts="auto")
    choice = llm.engine._drafts = forced(kind, "wrong", alone(kind))
    assert run(llm, PROMPTS, PARAMS) == alone(kind)
    return choice


@pytest.fixture
def make_ranks(threaded):
    def make(kind, size, choice, limits=None, **options):
        given = replace(LIMITS, max_draft_tokens=CONFIGS[kind].max_drafts, **(limits or {}))
        return threaded(CONFIGS[kind], params_of(kind), size, given, drafts=choice, **options)

    return make


def forced(kind, drafts, completions, **options):
    return ForcedDrafts(
        CONFIGS[kind].max_drafts, drafts, truth_of(completions), vocab_size=SMALL.vocab_size, **options
    )  # fmt: skip


def said_on(ranks):
    """What the drafters of all ranks said."""
    found = copy.copy(ranks.own.choice)
    found.offered = {
        key: one for made in (ranks.own, *ranks.others.values()) for key, one in made.choice.offered.items()
    }
    return found


def finished(completions):
    return [replace(one, num_cached_tokens=0) for one in completions]


@pytest.mark.parametrize(
    ("kind", "size", "drafts", "options"),
    [
        ("mtp", 4, "real", {"limits": {"max_concurrent_requests": 4, "max_chunk_tokens": 64}}),
        ("dspark", 2, "partly", {"overlap": True}),
        ("mtp", 2, "partly", {"buckets": (2, 8, 32), "placement": Placement(0, 3)}),
        slow("mtp", 3, "partly", {"limits": {"num_blocks": 2, "max_chunk_tokens": 128}}),
        slow("dspark", 4, "real", {}),
        slow("dspark", 2, "partly", {"buckets": (2, 8, 32)}),
        *(slow(kind, 2, drafts, {}) for kind in CONFIGS for drafts in ("right", "wrong", "random", "real")),
    ],
)
def test_tokens_and_logprobs(make_ranks, kind, size, drafts, options):
    """Five requests on two to four ranks: some have more than others. Chunked, where blocks are scarce, over padded
    static buffers, with offloaded experts."""
    choice = forced(kind, drafts, alone(kind))
    ranks = make_ranks(kind, size, choice, **options)
    assert finished(ranks.run(zip(PROMPTS, PARAMS, strict=True))) == alone(kind)
    assert [cache.num_free_slots for cache in ranks.caches] == [ranks.limits.max_concurrent_requests] * size
    assert_same_drafts(said_on(ranks), drafted_alone(kind))
    stats = ranks.engine.stats().drafts
    assert stats.num_steps > 5
    assert stats.num_accepted > 5 or drafts not in ("right", "partly")
    assert stats.num_accepted == 0 or drafts != "wrong"


@pytest.mark.parametrize("kind", ["dspark", slow("mtp")])
def test_ranks_without_requests_run_the_drafter_too(make_ranks, kind):
    """One request on three ranks, wherever it lives; then none at all on the rank that had it."""
    choice = forced(kind, "partly", alone(kind))
    ranks = make_ranks(kind, 3, choice)
    for prompt, params, expected in list(zip(PROMPTS, PARAMS, alone(kind), strict=True))[:2]:
        assert finished(ranks.run([(prompt, params)])) == [expected]
    assert_same_drafts(said_on(ranks), drafted_alone(kind))


@pytest.mark.parametrize("overlap", [slow(False), True])
def test_arrivals_at_random(make_ranks, overlap):
    """Four requests at once, others while they run, with another number of drafts in every step; one is dropped."""
    source = random.Random(3)
    prompts = prompts_of(*(source.choice((119, 122, 126)) for _ in range(6)), seed=9)
    params = [
        SamplingParams(
            max_tokens=6 + i, seed=i, logprobs=1, ignore_eos=True, priority=i % 3 - 1, min_tokens=3 * (i % 2),
            presence_penalty=0.5 * (i % 3),
        )
        for i in range(6)
    ]  # fmt: skip
    llm = LLM.from_params(MTP, params_of("mtp"), engine=LIMITS)
    expected = run(llm, prompts, params)
    choice = forced("mtp", "partly", expected, random_count=True)
    limits = {"max_concurrent_requests": 4, "num_blocks": 2, "max_chunk_tokens": 140}
    ranks = make_ranks("mtp", 2, choice, limits, overlap=overlap)
    engine, requests = ranks.engine, [ranks.engine.add(*one) for one in zip(prompts[:4], params[:4], strict=True)]
    while len(requests) < 6 or engine.has_work:
        for _ in range(source.randrange(3)):
            if len(requests) < 6:
                requests.append(engine.add(prompts[len(requests)], params[len(requests)]))
        if len(requests) == 5:
            engine.abort(requests[4])
        engine.step()
        engine.check_integrity()
    for place, (request, completion) in enumerate(zip(requests, expected, strict=True)):
        if place != 4:
            assert replace(request.completion(), num_cached_tokens=0) == bare(completion), place
    assert engine.stats().num_preemptions > 0
    assert engine.stats().drafts.num_accepted > 0


def test_a_second_turn_on_the_same_rank(make_ranks):
    """Prefixes kept while drafts were verified: hits have the bits of cold runs."""
    params = SamplingParams(max_tokens=8, seed=3, logprobs=2, ignore_eos=True)
    llm = LLM.from_params(MTP, params_of("mtp"), engine=replace(LIMITS, prefix_cache_bytes=0))
    firsts = prompts_of(123, 140, seed=2)
    first = run(llm, firsts, [params] * 2)
    seconds = [[*one.prompt_token_ids, *one.token_ids, 7] for one in first]
    second = run(llm, seconds, [params] * 2)
    ranks = make_ranks("mtp", 2, forced("mtp", "partly", [*first, *second]))
    assert finished(ranks.run([(prompt, params) for prompt in firsts])) == first
    assert finished(ranks.run([(prompt, params) for prompt in seconds])) == second
    assert ranks.engine.stats().num_prefix_hits == 2


@pytest.mark.parametrize("kind", [slow("mtp"), "dspark"])
def test_drafts_are_looked_at(make_ranks, kind):
    """`draft_trace` beside an engine of ranks: its calls are everybody's."""
    llm, other = (LLM.from_params(CONFIGS[kind], params_of(kind), engine=LIMITS) for _ in range(2))
    other.model = make_ranks(kind, 2, FixedDrafts(2)).model
    asked = (PROMPTS[4], 11, [(1, 12), (0, 13)])
    for mine, theirs in zip(other.draft_trace(*asked), llm.draft_trace(*asked), strict=True):
        assert mine.drafts == theirs.drafts
        assert mine.logits.equal(theirs.logits)


class Sourced(Alternating):
    """A rule that other ranks make from its text."""

    source = ("alternating", [])


@pytest.mark.parametrize("rule", [Alternating, Sourced])
def test_rules_hold_on_every_rank(make_ranks, rule):
    """A rule of this process stays on rank 0, one with a source goes anywhere."""
    llm = LLM.from_params(MTP, params_of("mtp"), engine=LIMITS)
    params = SamplingParams(max_tokens=8, seed=1, logprobs=1, ignore_eos=True)

    def serve(engine):
        requests = [engine.prepare(prompt, params, rule()) for prompt in PROMPTS[2:]]
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            engine.step()
        return [request.completion() for request in requests]

    expected = serve(llm.engine)
    ranks = make_ranks("mtp", 2, forced("mtp", "partly", expected), constrain=lambda text, opening: Sourced)
    assert serve(ranks.engine) == expected
    assert ranks.engine.stats().drafts.num_accepted > 5
    assert [engine.scheduler.num_finished for engine in ranks.engines] == ([2, 1] if rule is Sourced else [3, 0])


# ---- mistakes, planted ----


def one_rank_keeps_a_draft_too_many(made):
    keep = made.engine._keep
    made.engine._keep = lambda piece, num_true, num_taken: keep(piece, min(num_true + 1, piece.num_drafts), num_taken)


def one_rank_does_not_go_back(made):
    made.cache.rewind = lambda slot, position: None


def one_rank_asks_its_drafter_for_less(made):
    agree = made.agreement.agree
    made.agreement.agree = lambda own: (size := agree(own)) and size._replace(num_drafts=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [one_rank_keeps_a_draft_too_many, one_rank_does_not_go_back, one_rank_asks_its_drafter_for_less]
)
def test_planted_mistakes_show(make_ranks, mistake):
    choice = forced("mtp", "partly", alone("mtp"))
    ranks = make_ranks("mtp", 2, choice, change=lambda rank, made: mistake(made) if rank == 1 else None)
    try:
        found = finished(ranks.run(zip(PROMPTS, PARAMS, strict=True)))
    except (RankFailed, RequestFailed):
        return  # noticed by the ranks themselves
    assert found != alone("mtp")
