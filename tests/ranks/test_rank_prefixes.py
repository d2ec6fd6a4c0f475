"""Prefixes on several ranks: requests go where their tokens are known, hits have the bits of cold runs, and rank 0's
books of other caches stay equal to those caches."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import SMALL
from test_rank_scheduler import books_of, feed, run_step, sequence_of

from dsv4.cache.manager import KVCacheManager
from dsv4.config import ConfigError, EngineConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.errors import RankFailed
from dsv4.dist.messages import pack, unpack
from dsv4.dist.shares import rank_limits
from dsv4.engine.ranks import scheduler as rank_scheduler
from dsv4.engine.ranks.engine import _opening
from dsv4.engine.ranks.scheduler import RankScheduler, StepSize
from dsv4.engine.ranks.wire import RankShare, decode_plan, encode_plan
from dsv4.engine.ranks.worker import RankExecutor
from dsv4.llm import LLM
from dsv4.request import SamplingParams

PREFIX_BYTES = 64 * 2**20


def prompt_of(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SMALL.vocab_size, (length,), generator=generator).tolist()


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


def test_books_that_differ_end_all(make_ranks):
    """A rank whose cache forgot what rank 0 counts on says so."""
    caches = {}
    ranks = make_ranks(2, change=lambda rank, made: caches.__setitem__(rank, made.cache))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [prompt_of(130, seed) for seed in (1, 2)]
    ranks.run([(prompt, params) for prompt in prompts])
    for prompt in prompts:
        caches[1].forget(caches[1].chain(prompt, None).up_to(128))
    with pytest.raises(RankFailed, match=r"rank 1: RanksDiverged: the cache gave slot 0 at token 0 where .* at 128"):
        ranks.run([(prompt, params) for prompt in prompts])


# ---- placing ----


def run_all(scheduler, *requests):
    """Together; where each of them lived."""
    homes = {}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        run_step(scheduler)
        homes |= scheduler._homes
    return [homes[request] for request in requests]


def ranks_with_prefixes(num_ranks, num_slots=40, num_blocks=200):
    books = [books_of(num_slots, num_blocks, PREFIX_BYTES) for _ in range(num_ranks)]
    return RankScheduler(books, max_batched_tokens=4096)


def test_a_conversation_stays_on_its_rank():
    scheduler = ranks_with_prefixes(3)
    talks = [sequence_of(prompt_of(300, seed), 4) for seed in range(3)]
    homes = run_all(scheduler, *talks)
    assert sorted(homes) == [0, 1, 2]
    for order in ([2, 0, 1], [1, 2, 0]):
        again = [sequence_of([*talks[i].token_ids, 5, 6], 4) for i in order]
        assert run_all(scheduler, *again) == [homes[i] for i in order]
        assert all(request.num_cached_tokens == 256 for request in again)


def test_a_prefix_that_many_share_does_not_crowd_one_rank():
    """Up to as many requests more as the prefix is worth; then another rank reads it too, and has it from then on."""
    scheduler = ranks_with_prefixes(2)
    system = prompt_of(520, 1)
    (home,) = run_all(scheduler, sequence_of(system, 2))
    many = [sequence_of(system + prompt_of(5, 2 + i), 3) for i in range(12)]
    homes = run_all(scheduler, *many)
    worth = 512 // rank_scheduler.IMBALANCE_TOKENS
    assert homes[:worth] == [home] * worth
    assert abs(homes.count(0) - homes.count(1)) <= worth
    assert sum(request.num_cached_tokens == 0 for request in many) <= 2, "the other rank reads it once or twice"


def test_a_full_rank_is_not_waited_for():
    scheduler = ranks_with_prefixes(2, num_slots=1)
    talk = sequence_of(prompt_of(300, 1), 4)
    (home,) = run_all(scheduler, talk)
    blocker, again = sequence_of(talk.token_ids, 30), sequence_of([*talk.token_ids, 5], 4)
    homes = run_all(scheduler, blocker, again)
    assert homes == [home, 1 - home]
    assert (blocker.num_cached_tokens, again.num_cached_tokens) == (256, 0)


# ---- books and caches ----


class Follower:
    """A rank's cache that repeats what its books did, as told over the wire."""

    def __init__(self, books):
        self.books = books
        schedule = build_schedule(SMALL, with_mtp=False)
        self.cache = KVCacheManager(
            SMALL, schedule, books.limits, device="cpu", plain_dtype=None, fingerprint=books.fingerprint
        )
        self.executor = RankExecutor(SimpleNamespace(cache=self.cache, draft_table=None))
        self.opened = {}

    def hear(self, pieces):
        new = [piece for piece in pieces if self.opened.get(piece.request) != piece.request.num_preemptions]
        self.opened |= {piece.request: piece.request.num_preemptions for piece in new}
        openings = tuple(_opening(piece.request, piece.slot) for piece in new)
        share = RankShare(self.books.take_changes(), openings)
        share = decode_plan(unpack(pack(encode_plan(1, StepSize(0), True, [share]))), 1).share
        self.executor.repeat(share.changes)
        for opening in share.openings:
            self.executor._open(opening)
        feed(self.books, pieces)
        feed(self.cache, pieces)

    def drew(self, piece, token_id):
        self.executor._requests[piece.slot].token_ids.append(token_id)

    def check(self):
        self.books.check_integrity()
        self.cache.check_integrity()
        if not self.books._changes:
            for name in ("_blocks", "_positions", "_free_slots", "_max_tokens"):
                assert list(getattr(self.books, name)) == list(getattr(self.cache, name))
            mine, theirs = self.books.prefix.tree, self.cache.prefix.tree
            assert [node.key for node in mine._lru] == [node.key for node in theirs._lru]
            assert mine._nodes.keys() == theirs._nodes.keys()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(4, 8), st.integers(1, 4), st.booleans())
def test_caches_follow_their_books(seed, num_slots, num_blocks, num_snapshots, late):
    """Random lives with common beginnings, few blocks and few snapshots; tokens known a step late, or at once."""
    one = books_of(1, 4, PREFIX_BYTES).schema.bytes_per_snapshot
    books = [books_of(num_slots, num_blocks, num_snapshots * one) for _ in range(2)]
    live_at_random(random.Random(seed), books, [Follower(one) for one in books], late=late)


def live_at_random(rng, books, followers, *, late, num_stems=2, before=lambda: None):
    """`before` every step."""
    scheduler = RankScheduler(books, max_batched_tokens=rng.choice([100, 300]), aging_steps=5)
    stems = [prompt_of(rng.randint(100, 300), number) for number in range(num_stems)]
    alive, owed = [], []
    for step in range(60):
        if step < 40 and rng.random() < 0.4:
            prompt = rng.choice(stems)[: rng.choice([300, rng.randint(1, 300)])] + prompt_of(
                rng.randint(1, 40), rng.randint(0, 3)
            )
            salt = rng.choice([None, None, "a"])
            alive.append(sequence_of(prompt, rng.randint(1, 140), priority=rng.randint(-1, 1), cache_salt=salt))
            scheduler.add(alive[-1])
        if alive and rng.random() < 0.1:
            scheduler.abort(rng.choice(alive))
        before()
        plan = scheduler.schedule()
        for follower, share in zip(followers, plan.shares, strict=True):
            follower.hear(share.pieces)
            follower.check()
        scheduler.commit(plan)
        drawn = [(piece, rng.randint(2, 9)) for piece in plan.pieces if piece.draws]
        settle, owed = (owed, drawn) if late else (drawn, [])
        for piece, token_id in settle:
            home = next(i for i, share in enumerate(books) if followers[i].opened.get(piece.request) is not None)
            if piece.request.slot is not None and not piece.request.is_done:
                followers[home].drew(piece, token_id)
            piece.request.num_unread -= 1
            if not piece.request.is_done:
                piece.request.append(token_id, None)
            scheduler.settle(piece.request)
        scheduler.check_integrity()


def test_what_needs_one_rank_is_said():
    with pytest.raises(ConfigError, match="verify_hits needs one rank, found gpus 2"):
        rank_limits(EngineConfig(verify_hits=0.5), 2)
    assert rank_limits(EngineConfig(), 2).prefix_cache_bytes == EngineConfig().prefix_cache_bytes
