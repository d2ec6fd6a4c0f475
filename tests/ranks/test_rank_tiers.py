"""Prefixes below the devices of several ranks: host memory, files, restarts and damage give the bits of cold runs."""

import pytest
from rank_cases import SMALL, prompt_of
from test_rank_prefixes import PARAMS
from test_rank_router import PREFIX_BYTES, books_of

from dsv4.config import EngineConfig
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


def one_by_one(ranks):
    """Each goes to the rank that has its prefix."""
    return [done for prompt in PROMPTS for done in run(ranks, [prompt])]


def hits_of(ranks, name):
    return [getattr(books.prefix.stats, name) for books in ranks.caches]


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (3, True)])
def test_host_memory(make_ranks, cold, size, overlap):
    ranks = make_ranks(size, limits=scarce(max_concurrent_requests=size), overlap=overlap)
    assert run(ranks) == cold
    assert one_by_one(ranks) == cold
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
    assert one_by_one(second) == cold
    assert all(hits_of(second, "num_disk_hits"))
    second.close()
    assert sum(hits_of(second, "num_hits")) == len(PROMPTS) - 1, "one file could not be trusted"
