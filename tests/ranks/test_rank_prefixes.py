"""Prefixes on several ranks: requests go where their tokens are known, and hits have the bits of cold runs."""

from dataclasses import replace

import pytest
import torch
from rank_cases import SMALL, prompt_of

from dsv4.config import ConfigError, EngineConfig
from dsv4.dist.shares import rank_limits
from dsv4.llm import LLM
from dsv4.request import SamplingParams

PARAMS = SamplingParams(max_tokens=3, seed=3, logprobs=2, ignore_eos=True)


def conversation(generate):
    """Two that share their beginning, then a second turn of each, the beginning alone, and two that may not take it."""
    system = prompt_of(130, 1)
    firsts = [system + prompt_of(5 + 9 * i, 2 + i) for i in range(2)]
    done = generate([(prompt, PARAMS) for prompt in firsts])
    seconds = [[*prompt, *one.token_ids, 9 + i] for i, (prompt, one) in enumerate(zip(firsts, done, strict=True))]
    turns = [(prompt, PARAMS) for prompt in [*seconds, system]]
    turns.append((system, replace(PARAMS, cache_salt="another tenant")))
    turns.append((system, replace(PARAMS, prompt_logprobs=1)))
    return done + generate(turns)


@pytest.fixture(scope="module")
def cold(models):
    """The conversation on one process, nothing kept."""
    limits = EngineConfig(max_context_tokens=512, max_concurrent_requests=8, prefix_cache_bytes=0)
    llm = LLM.from_params(SMALL, models["official"][0], engine=limits)
    found = conversation(lambda turns: [llm.generate([prompt], params)[0] for prompt, params in turns])
    assert all(done.num_cached_tokens == 0 for done in found)
    return found


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (3, True)])
def test_hits_have_the_bits_of_cold_runs(make_ranks, cold, size, overlap):
    ranks = make_ranks(size, limits={"max_chunk_tokens": 100}, overlap=overlap)
    found = conversation(ranks.run)
    assert found == cold
    cached = [done.num_cached_tokens for done in found]
    assert cached[2:4] == [128, 128], "the beginning alone may go to a rank that does less"
    assert cached[5:] == [0, 0]
    stats = ranks.engine.stats()
    assert stats.num_cached_tokens == sum(cached)
    assert stats.num_idle_blocks > 0, "kept on all ranks together"


def test_calls_outside_the_engine_take_rank_0s_blocks(make_ranks, one, cold):
    """What they displace is forgotten in its books too."""
    ranks = make_ranks(2, limits={"max_concurrent_requests": 2, "num_blocks": 2})
    other, llm = one(), one()
    other.model, other.cache = ranks.model, ranks.own.cache
    prompt, params = cold[0].prompt_token_ids, replace(PARAMS, max_tokens=1)
    (first,) = ranks.run([(prompt, params)])
    assert ranks.own.cache.prefix_stats()["num_idle_blocks"] == 1
    ids = prompt_of(140, 7)
    assert torch.equal(other.logits(ids), llm.logits(ids))
    assert ranks.own.cache.prefix_stats()["num_idle_blocks"] == 0
    assert ranks.run([(prompt, params)]) == [first]


def test_a_wrong_hit_would_be_seen(make_ranks, cold):
    """The tests above can fail: state that a rank restores from another snapshot gives other tokens or logprobs."""

    def damage(rank, made):
        restore = made.cache._snapshots.restore
        made.cache._snapshots.restore = lambda slot, position, snapshot: restore(slot, position, 15)

    assert conversation(make_ranks(2, change=damage).run) != cold


def test_a_rank_that_forgot_reads_again(make_ranks, cold):
    """What the router believed of it is of no weight for the bits."""
    ranks = make_ranks(2)
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=4, logprobs=1)
    requests = [(prompt_of(130, seed), params) for seed in (1, 2)]
    first = ranks.run(requests)
    for prompt, _ in requests:
        for cache in ranks.caches:
            cache.forget(cache.chain(prompt, None).up_to(128))
    again = ranks.run(requests)
    assert again == first
    assert [done.num_cached_tokens for done in again] == [0, 0]


def test_the_router_knows_what_caches_have(make_ranks):
    """After every load: the keys that each rank has told are those of its snapshots and segments."""
    limits = {"max_concurrent_requests": 2, "num_blocks": 4, "cache_host_bytes": 2**22, "prefix_cache_bytes": 2**20}
    ranks = make_ranks(2, limits=limits)
    for turn in range(3):
        ranks.run([(prompt_of(260 + 9 * seed, seed), replace(PARAMS, seed=turn)) for seed in range(5)])
        for rank, cache in zip(ranks.engine.ranks, ranks.caches, strict=True):
            rank.hear()
            known = rank.known
            assert known == {*cache.prefix.tree.all_keys(), *cache.tiers.host.tree.all_keys()}
            assert known


def test_what_needs_one_rank_is_said():
    with pytest.raises(ConfigError, match="verify_hits needs one rank, found gpus 2"):
        rank_limits(EngineConfig(verify_hits=0.5), 2)
    assert rank_limits(EngineConfig(), 2).prefix_cache_bytes == EngineConfig().prefix_cache_bytes
