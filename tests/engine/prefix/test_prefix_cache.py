"""A hit equals a cold run, bit for bit: on device, host and disk, after a kill, under constraints, beside poison."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bare import bare
from engine_cases import SMALL, assert_all_free, finish

from dsv4.config import EngineConfig
from dsv4.llm import LLM
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import SamplingParams

RUNS_BOTH_WAYS = True

PARAMS = SamplingParams(max_tokens=3, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)
LIMITS = {"max_context_tokens": 512, "max_concurrent_requests": 4, "snapshot_interval_tokens": 256}


def random_ids(seed, length):
    return torch.randint(2, SMALL.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


STEM = random_ids(1, 300)
# the same prompt again, a longer one, a shorter one, one that parts in the second block, and one that is all its own
PROMPTS = [STEM, STEM, [*STEM, *random_ids(2, 90)], STEM[:257], [*STEM[:200], *random_ids(3, 70)], random_ids(4, 140)]
COLD: dict = {}


@pytest.fixture
def cold(make_llm):
    """Completions without a prefix cache, each computed once."""

    def run(prompt, params=PARAMS, model="official"):
        key = (model, tuple(prompt), params)
        if key not in COLD:
            COLD[key] = make_llm(model, prefix_cache_bytes=0).generate([prompt], params)[0]
        return bare(COLD[key])

    return run


def run_poisoned(llm, prompts, params=PARAMS):
    """All at once; between two steps every byte that nobody may read is NaN."""
    requests = [llm.engine.add(prompt, params) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
        poison(llm.cache)
    return [request.completion() for request in requests]


def poison(cache):
    def fill(rows):
        rows.fill_(255 if rows.dtype == torch.uint8 else float("nan"))

    for pool in cache._paged.pools.values():
        for block_id in cache._allocator._free:
            fill(pool.all_layers[:, block_id])
    for slot in cache._free_slots:
        for name, pool in cache._state.pools.items():
            if name != "window.positions":
                fill(pool.all_layers[:, slot])
    for pool in cache._snapshots.pools.values():
        for snapshot in cache.prefix.tree._free_snapshots:
            fill(pool.all_layers[:, snapshot])


def test_one_after_the_other(make_llm, cold):
    llm = make_llm("official", snapshot_interval_tokens=256)
    done = [run_poisoned(llm, [prompt])[0] for prompt in PROMPTS]
    assert done == [cold(prompt) for prompt in PROMPTS]
    assert [one.num_cached_tokens for one in done] == [0, 256, 256, 256, 0, 0]
    # the fifth parted from the first at 128 and has left a snapshot there
    assert run_poisoned(llm, [STEM[:190]])[0].num_cached_tokens == 128


def test_all_at_once_read_the_common_part_once(make_llm, cold):
    llm = make_llm("official", max_concurrent_requests=6)
    done = run_poisoned(llm, PROMPTS)
    assert done == [cold(prompt) for prompt in PROMPTS]
    # the fifth came to the head of the queue when the first had passed the place where they part
    assert [one.num_cached_tokens for one in done] == [0, 256, 256, 256, 0, 0]
    fed = llm.engine.stats().num_prompt_tokens
    assert fed == sum(len(one.prompt_token_ids) - one.num_cached_tokens for one in done)


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_scarce_blocks_and_snapshots(make_llm, cold, num_blocks):
    """Prefixes give way to requests, requests to each other; nothing is lost or wrong."""
    one = make_llm("official").cache.schema.bytes_per_snapshot
    llm = make_llm("official", num_blocks=num_blocks, prefix_cache_bytes=2 * one + 4096, max_chunk_tokens=150)
    assert llm.cache.schema.num_snapshots == 2
    for _ in range(2):
        assert run_poisoned(llm, PROMPTS) == [cold(prompt) for prompt in PROMPTS]


def test_a_preempted_request_comes_back_from_a_snapshot(make_llm, cold):
    llm = make_llm("official", max_concurrent_requests=1, max_chunk_tokens=100)
    request = llm.engine.add(STEM, PARAMS)
    while request.num_output < 2:
        llm.engine.step()
    llm.engine.add(PROMPTS[-1], replace(PARAMS, priority=1))
    finish(llm.engine)
    assert request.completion() == cold(STEM)
    assert (request.num_preemptions, request.num_cached_tokens) == (1, 0)
    assert llm.engine.stats().num_recomputed_tokens in (301 - 256, 0), "no more than what follows the snapshot"


def test_salts_do_not_share_even_in_time(make_llm, cold):
    """What another tenant sent changes neither the result nor the number of tokens read, so not the time either."""
    llm = make_llm("official")
    steps = []
    for salt in ("a", None, "b", "aa", "a"):
        before = llm.engine.stats()
        done = llm.generate([STEM], replace(PARAMS, cache_salt=salt))[0]
        after = llm.engine.stats()
        assert bare(done) == cold(STEM)
        steps.append((after.num_steps - before.num_steps, after.num_prompt_tokens - before.num_prompt_tokens))
    assert steps[:4] == [steps[0]] * 4
    assert steps[4] == (3, 300 - 256), "the same salt does share"


def test_a_failed_call_leaves_nothing(make_llm, cold, monkeypatch):
    llm = make_llm("official")
    monkeypatch.setattr(llm.engine.runner, "forward", lambda *given: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate([STEM], PARAMS)
    monkeypatch.undo()
    assert_all_free(llm)
    assert llm.cache.prefix.tree.num_snapshots == 0
    assert bare(llm.generate([STEM], PARAMS)) == [cold(STEM)]


def test_hits_are_verified_in_idle_time(make_llm, cold, caplog):
    llm = make_llm("official", verify_hits=0.5, max_chunk_tokens=100)
    for _ in range(3):
        llm.generate([STEM], PARAMS)
    assert llm.engine.has_idle_work
    llm.engine.idle_step()
    llm.generate([PROMPTS[-1]], PARAMS)  # takes the slot away; the check begins again
    while llm.engine.has_idle_work:
        llm.engine.idle_step()
        llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert (stats.num_verified_hits, stats.num_wrong_hits) == (1, 0)
    # a block that is damaged in memory is found, named, and not used again
    node = next(node for node in llm.cache.prefix.tree._lru if node.position == 256)
    llm.cache._paged.pools["csa.entries.data"].all_layers[0, node.block, 3, 2] ^= 1
    llm.generate([STEM, STEM], PARAMS)
    with caplog.at_level(logging.ERROR):
        while llm.engine.has_idle_work:
            llm.engine.idle_step()
    assert llm.engine.stats().num_wrong_hits == 1
    assert "256 tokens differs from a cold run in csa.entries.data" in caplog.text
    assert str(STEM[:256]) in caplog.text
    assert bare(llm.generate([STEM], PARAMS)) == [cold(STEM)]


# ---- files ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, replace(SMALL, num_nextn_predict_layers=0, compress_ratios=(0, 4, 128)), experts="mxfp4")
    return path


def engine_of(cache_dir, **limits):
    return EngineConfig(**LIMITS, cache_dir=str(cache_dir), cache_host_bytes=2**24, **limits)


def test_host_disk_and_restart(folder, tmp_path):
    cold_llm = LLM(folder, engine=EngineConfig(**LIMITS, prefix_cache_bytes=0))
    expected = [cold_llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    one = cold_llm.cache.schema.bytes_per_snapshot
    scarce = engine_of(tmp_path, prefix_cache_bytes=one + 4096, num_blocks=4)
    first = LLM(folder, engine=scarce)
    assert [run_poisoned(first, [prompt])[0] for prompt in PROMPTS] == expected
    again = run_poisoned(first, [STEM])[0]
    assert (again, again.num_cached_tokens) == (expected[0], 256)
    assert first.engine.stats().num_prefix_host_hits > 0
    first.close()
    second = LLM(folder, engine=scarce)
    assert run_poisoned(second, PROMPTS) == expected
    stats = second.engine.stats()
    assert stats.num_prefix_disk_hits > 0
    assert stats.num_prefix_bad_files == 0
    second.close()
    # another way to compute has another name: it neither finds nor disturbs these files
    other = LLM(folder, numerics="exact", engine=engine_of(tmp_path))
    other.generate([STEM], PARAMS)
    assert other.engine.stats().num_prefix_hits == 0
    other.close()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


_KILLED = """
import json, os, signal, sys
sys.path[:0] = [sys.argv[3], os.path.dirname(sys.argv[3])]
from test_prefix_cache import PARAMS, STEM, engine_of
from dsv4.llm import LLM

llm = LLM(sys.argv[1], engine=engine_of(sys.argv[2]))
print(json.dumps(llm.generate([STEM], PARAMS)[0].token_ids), flush=True)
if sys.argv[4] == "written":
    llm.cache.tiers.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["written", "at once"])
def test_killed_and_started_again(folder, tmp_path, when):
    program = [sys.executable, "-c", _KILLED, str(folder), str(tmp_path), str(Path(__file__).parent), when]
    run = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert run.returncode == -9, run.stderr
    llm = LLM(folder, engine=engine_of(tmp_path))
    done = llm.generate([STEM], PARAMS)[0]
    assert done == LLM(folder, engine=EngineConfig(**LIMITS, prefix_cache_bytes=0)).generate([STEM], PARAMS)[0]
    assert list(done.token_ids) == json.loads(run.stdout)
    assert done.num_cached_tokens == 256 or when == "at once"
    llm.close()
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_in_memory_model_has_no_fingerprint(models):
    config, params, numerics = models["official"]
    with pytest.raises(ValueError, match="needs the model's fingerprint"):
        LLM.from_params(config, params, numerics=numerics, engine=engine_of("/nowhere"))
