"""Logits, tokens and log-probabilities do not depend on the number of ranks: bit for bit those of one process."""

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bare import bare
from rank_cases import HOST, SMALL, prompts_of

from dsv4.config import EngineConfig
from dsv4.dist.exchange import CollectiveExchange
from dsv4.dist.group import gloo_group
from dsv4.dist.shares import expert_range
from dsv4.dist.world import World
from dsv4.engine.link.messages import LAST_HANDLE
from dsv4.engine.offload.placement import Placement
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams

PARAMS = [
    SamplingParams(max_tokens=5, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=1, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=6, seed=2**40, temperature=0.8, top_p=0.9, logprobs=5, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=1, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=3, seed=5, min_p=0.05, presence_penalty=1.0, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(max_tokens=4, seed=6, logprobs=1, allowed_token_ids=tuple(range(1, 30)), min_tokens=3),
    SamplingParams(max_tokens=6, seed=7, logprobs=1, logit_bias={31: 80, 32: 79.5}, bad_words_ids=((31, 31), (33,))),
    SamplingParams(max_tokens=0, prompt_logprobs=30, routed_experts=True, indexer_topk=True),
]


PROMPTS = prompts_of(3, 130, 1, 127, 20, 4, 128, 140)
ALONE: dict = {}


@pytest.fixture
def alone(one):
    """Each request on one process, alone."""
    for numerics in ("official", "exact"):
        if numerics not in ALONE:
            llm = one(numerics)
            ALONE[numerics] = [
                llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
    return ALONE


@pytest.mark.parametrize(
    ("size", "numerics", "limits", "overlap"),
    [
        (2, "official", {}, True),
        (2, "exact", {}, False),
        (4, "official", {"max_chunk_tokens": 23}, True),
        (3, "official", {"max_concurrent_requests": 6, "num_blocks": 2, "max_chunk_tokens": 128}, False),
        (3, "official", {"max_concurrent_requests": 6, "num_blocks": 2, "max_chunk_tokens": 128}, True),
        (5, "official", {"max_concurrent_requests": 5}, False),
    ],
)
def test_tokens_and_logprobs(make_ranks, alone, size, numerics, limits, overlap):
    """Mixed, chunked, scarce blocks, one slot a rank; five ranks have one expert or two. Each step launched before the
    one before it is collected, or after."""
    ranks = make_ranks(size, numerics, limits, overlap=overlap)
    assert ranks.run(zip(PROMPTS, PARAMS, strict=True)) == alone[numerics]
    ranks.engine.check_integrity()
    assert [cache.num_free_slots for cache in ranks.caches] == [ranks.limits.max_concurrent_requests] * size, (
        "every slot is free again"
    )


@pytest.fixture(scope="module")
def arrivals(models):
    """Ten requests, and what comes of them on one process."""
    lengths = torch.randint(118, 136, (10,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = prompts_of(*lengths, seed=9)
    params = [
        SamplingParams(max_tokens=3 + i % 6, seed=i, logprobs=1, ignore_eos=True, priority=i % 3 - 1) for i in range(10)
    ]
    llm = LLM.from_params(SMALL, models["official"][0], engine=EngineConfig(max_context_tokens=512))
    return prompts, params, llm.generate(prompts, params)


@pytest.mark.parametrize("overlap", [False, True])
def test_arrivals_at_random(make_ranks, arrivals, overlap):
    """Six requests at once, others while they run, on three ranks of two slots and few blocks; some are dropped."""
    generator = torch.Generator().manual_seed(4)
    prompts, params, expected = arrivals
    ranks = make_ranks(
        3, limits={"max_concurrent_requests": 6, "num_blocks": 2, "max_chunk_tokens": 200}, overlap=overlap
    )
    engine, dropped = ranks.engine, set()
    requests = [ranks.engine.add(*one) for one in zip(prompts[:6], params[:6], strict=True)]
    while len(requests) < 10 or engine.has_work:
        for _ in range(int(torch.randint(0, 4, (), generator=generator))):
            if len(requests) < 10:
                requests.append(engine.add(prompts[len(requests)], params[len(requests)]))
        if len(requests) > 8 and not dropped:
            engine.abort(requests[8])
            engine.abort(requests[2])
            dropped |= {i for i in (2, 8) if requests[i].is_aborted}
        engine.step()
        engine.check_integrity()
    for place, (request, completion) in enumerate(zip(requests, expected, strict=True)):
        if place not in dropped:
            assert request.completion() == bare(completion), place
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_finished + stats.num_aborted == 10, "one may have been dropped after its end on another rank"
    assert 0 < stats.num_aborted <= len(dropped)


def test_rules_that_end_while_steps_overlap(make_ranks, one):
    """Least lengths: a draw that was to wait for a rule has none when its turn comes, on both ranks."""
    params = SamplingParams(max_tokens=5, seed=4, min_tokens=2, logprobs=1, stop_token_ids=tuple(range(2, 20)))
    prompts = prompts_of(3, 4, 2)
    ranks = make_ranks(2, overlap=True)
    assert ranks.run([(prompt, params) for prompt in prompts]) == one().generate(prompts, params)


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_every_kind_of_layer_and_of_the_mtp_block(make_ranks, one, size):
    ids = prompts_of(133)[0]
    llm, ranks = one(), make_ranks(size)
    other = one()
    other.model, other.cache = ranks.model, ranks.own.cache
    assert torch.equal(other.logits(ids, [5, 100, 28]), llm.logits(ids))
    assert torch.equal(other.mtp_logits(ids[:40], [30, 9]), llm.mtp_logits(ids[:40]))
    for mine, theirs in zip(other.trace(ids[:9]), llm.trace(ids[:9]), strict=True):
        assert torch.equal(mine.streams, theirs.streams)
        assert torch.equal(mine.experts, theirs.experts)
    streams = torch.randn(3, SMALL.hc_mult, SMALL.hidden_size, generator=torch.Generator().manual_seed(1))
    assert torch.equal(other.layer(1, streams, [5, 6, 7]).streams, llm.layer(1, streams, [5, 6, 7]).streams)


def test_a_rank_that_is_idle_and_one_whose_experts_nobody_chose(make_ranks, one):
    """One request on two ranks: the other only serves. Its first layer's choices (by token id) may all be elsewhere."""
    own = expert_range(SMALL.n_routed_experts, 2, 1)
    llm = one()
    table = llm.model.weights.layers[0].ffn.tid2eid
    lonely = [token for token in range(2, SMALL.vocab_size) if not any(int(e) in own for e in table[token])]
    assert lonely, "some token's experts are all on rank 0"
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, ignore_eos=True)
    ranks = make_ranks(2)
    assert ranks.run([(lonely[:1], params)]) == llm.generate([lonely[:1]], params)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_rank_offloads_its_own_experts(threaded, overlap):
    """Four slots for each rank's six experts: prompts go through staging, decoding through slots that come and go."""
    config = replace(SMALL, n_routed_experts=12, num_nextn_predict_layers=0, compress_ratios=SMALL.compress_ratios[:-1])
    params, limits = random_params(config), EngineConfig(max_context_tokens=512, max_concurrent_requests=2)
    requests = list(zip(prompts_of(30, 2, 9), PARAMS[:3], strict=True))
    expected = LLM.from_params(config, params, engine=limits).generate(*map(list, zip(*requests, strict=True)))
    ranks = threaded(config, params, 2, limits, placement=Placement(1, 3), overlap=overlap)
    assert ranks.run(requests) == expected
    assert ranks.own.pool.stats.num_staged_layers > 0
    until = time.monotonic() + 5
    while not (stats := ranks.engine.stats()).num_expert_hits > stats.num_expert_misses > 0:
        assert time.monotonic() < until, "what a rank did for others it says once a second"
        time.sleep(0.05)


def test_ranks_agree_on_the_least_number():
    store, found = dist.HashStore(), {}

    def ask(rank):
        world = World(rank, 3, gloo_group(store, rank, 3, HOST), None, None)
        found[rank] = world.least([5, 3, 4][rank])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: 3, 1: 3, 2: 3}


def test_waiting_counts_where_rank_0_only_pads(make_ranks):
    """What waits grows older with the steps of all ranks."""
    ranks = make_ranks(2, limits={"max_concurrent_requests": 2})
    engine = ranks.engine
    short, long = (
        engine.add([5, 6, 7], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)) for count in (2, 20)
    )
    while not short.is_done:
        engine.step()
    ages, num_steps = [], ranks.own.engine.scheduler.num_steps
    while not long.is_done:
        waiting = engine.prepare([5], PARAMS[0])
        engine.submit(waiting)
        ages.append(engine._router._queue[0].order[0])
        engine.abort(waiting)
        engine.step()
    assert ranks.own.engine.scheduler.num_steps == num_steps
    assert ages[-1] - ages[0] > 10


def test_padding_is_poisoned(make_ranks, alone):
    """Padded rows carry token 0, whose embedding is NaN here, on every rank; more rows than the busiest rank has."""
    assert all(0 not in done.token_ids for done in alone["official"])

    def poison(rank, made):
        made.model.weights.embed = made.model.weights.embed.clone()
        made.model.weights.embed[0] = float("nan")
        agree = made.agreement.agree
        made.agreement.agree = lambda own: (size := agree(own)) and size._replace(num_rows=size.num_rows + 3)

    ranks = make_ranks(2, change=poison)
    assert ranks.run(zip(PROMPTS, PARAMS, strict=True)) == alone["official"]


def test_a_wrong_order_would_be_seen(make_ranks, one, monkeypatch):
    """The tests above can fail: parts folded in another order are other bits (in fp64: sums of bf16 are exact)."""
    collect = CollectiveExchange.collect
    monkeypatch.setattr(CollectiveExchange, "collect", lambda self, parts, rows: collect(self, parts, rows).flip(1))
    llm, other = one("exact"), one("exact")
    ranks = make_ranks(2, "exact")
    other.model, other.cache = ranks.model, ranks.own.cache
    mine, theirs = (model.trace([5, 6, 7, 8])[0].ffn_out for model in (other, llm))
    assert not torch.equal(mine, theirs)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("overlap", [False, True])
def test_picks_of_one_rank_under_graphs(make_ranks, one, overlap):
    """No graph keeps picks, so all ranks make such a step's calls directly, of as many rows, the idle one too."""
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, indexer_topk=True, routed_experts=True)
    (prompt,) = prompts_of(5)
    ranks = make_ranks(2, buckets=(2, 8, 32), overlap=overlap)
    assert ranks.run([(prompt, params)]) == one().generate([prompt], params)
    plain = replace(params, indexer_topk=False)
    replays = [engine.runner.num_replays for engine in ranks.engines]
    assert ranks.run([(prompt, plain)]) == one().generate([prompt], plain)
    assert all(engine.runner.num_replays > before for engine, before in zip(ranks.engines, replays, strict=True))


def test_more_requests_than_there_are_handles(make_ranks, one):
    """Behind the last handle the first ones are used again."""
    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    prompts = prompts_of(3, 4, 2, 5, 6, 7)
    ranks = make_ranks(2)
    ranks.engine.remotes[0]._next_handle = LAST_HANDLE
    assert ranks.run([(prompt, params) for prompt in prompts]) == one().generate(prompts, params)
    assert ranks.engine.remotes[0]._next_handle < 10
