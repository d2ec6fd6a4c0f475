"""Prefixes below the devices of several ranks: host memory, files, restarts and damage give the bits of cold runs, and
rank 0's books stay equal to caches whose tiers change by themselves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import SMALL
from test_rank_prefixes import PARAMS, PREFIX_BYTES, Follower, live_at_random, prompt_of
from test_rank_scheduler import books_of

from dsv4.cache.tiers.host import UNIT_BYTES
from dsv4.config import EngineConfig
from dsv4.dist.errors import RankFailed
from dsv4.dist.messages import pack, unpack
from dsv4.engine.ranks.tiers import Lookups, RankTiers, SyncEndpoint
from dsv4.llm import LLM

HOST_BYTES = 2**24
PROMPTS = [prompt_of(258 + 7 * i, 20 + i) for i in range(6)]


@pytest.fixture(scope="module")
def cold(models):
    limits = EngineConfig(max_context_tokens=512, max_concurrent_requests=8, prefix_cache_bytes=0)
    llm = LLM.from_params(SMALL, models["official"][0], engine=limits)
    return [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]


def scarce(**more):
    """Devices that keep one prefix each."""
    one = books_of(1, 4, PREFIX_BYTES).schema.bytes_per_snapshot
    limits = {"prefix_cache_bytes": one + 4096, "num_blocks": 4, "max_chunk_tokens": 200}
    return limits | {"max_concurrent_requests": 2, "cache_host_bytes": HOST_BYTES} | more


def run(ranks, prompts=PROMPTS):
    return ranks.run([(prompt, PARAMS) for prompt in prompts])


def hits_of(ranks, name):
    return [getattr(books.prefix.stats, name) for books in ranks.engine.scheduler.books]


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (3, True)])
def test_host_memory(make_ranks, cold, size, overlap):
    ranks = make_ranks(size, limits=scarce(max_concurrent_requests=size), overlap=overlap)
    for _ in range(2):
        assert run(ranks) == cold
    assert all(hits_of(ranks, "num_host_hits")), "every rank had something to fetch"
    assert hits_of(ranks, "num_disk_hits") == [0] * size
    assert ranks.engine.stats().num_prefix_host_hits == sum(hits_of(ranks, "num_host_hits"))


def test_files_outlive_the_ranks(make_ranks, cold, tmp_path):
    """Each rank finds its own; the last of rank 1's is damaged: it is not used, and no bit changes."""
    limits = scarce(cache_dir=str(tmp_path))
    first = make_ranks(2, limits=limits)
    assert run(first) == cold
    first.close()
    folders = tmp_path / "fingerprint", tmp_path / "rank-1" / "fingerprint"
    files = [sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns) for folder in folders]
    assert all(files)
    content = bytearray(files[1][-1].read_bytes())
    content[-1] ^= 1
    files[1][-1].write_bytes(content)
    second = make_ranks(2, limits=limits, overlap=True)
    assert run(second) == cold
    assert all(hits_of(second, "num_disk_hits"))
    second.close()
    assert sum(hits_of(second, "num_hits")) == len(PROMPTS) - 1, "one file could not be trusted"


def test_a_promise_that_is_not_kept_ends_all(make_ranks):
    """The comparison above can fail: a rank that lost what it told of says so, and says who."""

    def forgetful(rank, made):
        promise = made.cache.tiers.promise
        made.cache.tiers.promise = lambda keys: (promise(keys)[0] + (rank == 1 and len(keys) > 1), False)

    ranks = make_ranks(2, limits=scarce(), change=forgetful)
    with pytest.raises(RankFailed, match=r"rank 1: RanksDiverged: host memory has no prefix of \d blocks"):
        run(ranks)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 2), st.integers(4, 5), st.integers(1, 2), st.booleans(), st.booleans(),
    st.integers(1, 12),
)  # fmt: skip
def test_caches_follow_their_books(tmp_path_factory, seed, num_slots, num_blocks, num_snapshots, late, files, units):
    """Random lives as without tiers, with little host memory: what a rank tells of would often be gone when it is
    needed. Files come and go at their own pace."""
    one = books_of(1, 4, PREFIX_BYTES).schema.bytes_per_snapshot
    more = {"cache_host_bytes": 2 * units * UNIT_BYTES}
    folder = tmp_path_factory.mktemp("files") if files else None
    followers = []

    def ask(question):
        question = unpack(pack(question))
        asked = [SyncEndpoint.decode(question, rank, 3) for rank in (1, 2)]
        return [unpack(pack(one.executor.look(own))) for one, own in zip(followers, asked, strict=True)]

    lookups = Lookups(ask)
    for rank in (1, 2):
        own = more | ({"cache_dir": str(folder / str(rank))} if files else {})
        books = books_of(num_slots, num_blocks, num_snapshots * one, RankTiers(lookups, rank), **own)
        books.fingerprint = "fingerprint"
        lookups.books.append(books)
        followers.append(Follower(books))
    rng = random.Random(seed)
    for _ in range(3):  # each time with what the one before has left
        live_at_random(rng, lookups.books, followers, late=late, num_stems=4, before=lookups.forget)
    for follower in followers:
        tree = follower.cache.tiers.host.tree
        follower.cache.close()
        assert not any(segment.num_pins for segment in tree._segments.values()), "every promise has ended"
