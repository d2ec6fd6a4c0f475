"""Settings that a server chooses: by machines that are described, not by this one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.cache.schema import blocks_for_tokens
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.engine.offload.placement import Placement
from dsv4.engine.schedule.chunk import CHUNK_SPEEDS
from dsv4.tools.auto.choose import MOST_REQUESTS, choose
from dsv4.tools.auto.machine import Accelerator, Machine
from dsv4.tools.auto.settings import DoesNotFit, Wishes, table
from dsv4.tools.plan.budget import MOST_BLOCKS, Budget, WeightBytes
from dsv4.tools.plan.plan import plan
from dsv4.tools.plan.sizes import count_weights

GIB = 2**30
H200 = Accelerator("NVIDIA H200", 140 * GIB, 139 * GIB, 90, "GPU-a")
BUSY = replace(H200, free_bytes=20 * GIB, uuid="GPU-b")
FLASH, PRO, TINY = ModelConfig.flash(), ModelConfig.pro(), ModelConfig.tiny()
RECORDS = Path(__file__).parents[3] / "benchmarks/results/nvidia-h200-model.jsonl"


def weights(config, with_draft=True):
    return WeightBytes.counted(count_weights(config, with_draft=with_draft), config, with_draft=with_draft)


def machine(*gpus, host=400):
    return Machine(gpus, host_bytes=None if host is None else host * GIB)


def chosen(config, where, **options):
    return choose(config, weights(config), Wishes(**options), where)


def of(settings, what):
    return next(choice for choice in settings.choices if choice.what == what)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_flash_on_several_gpus(count):
    """All GPUs, the model's own context, and every byte but the last block's used."""
    found = chosen(FLASH, machine(*[H200] * count))
    limits = found.limits
    assert (found.device, found.gpus, found.drafts, found.offload_experts) == ("cuda", count, "off", None)
    assert limits.max_context_tokens == FLASH.max_position_embeddings
    assert limits.max_concurrent_requests == count * MOST_REQUESTS
    assert (limits.max_chunk_tokens, limits.max_draft_tokens) == (8192, 0)
    usable = int(140 * GIB * 0.92)
    budget = Budget(FLASH, weights(FLASH), count)
    assert found.planned["total"] <= usable < found.planned["total"] + 2 * budget.schema(limits).bytes_per_block
    # the parts are those of `dsv4 plan`, for the cache that was chosen
    planned = plan(FLASH, limits, gpus=count).budget
    assert found.planned == {
        "weights": planned.weights, "cache": planned.cache, "total": planned.total, "reserve": planned.reserve,
    }  # fmt: skip
    # a snapshot for each interval of a long prompt
    schema = budget.schema(limits)
    intervals = schema.num_blocks * 128 / limits.snapshot_interval_tokens
    assert 0.8 * intervals < schema.num_snapshots < 1.25 * intervals


def test_one_gpu_keeps_experts_in_host_memory_and_says_so():
    found = chosen(FLASH, machine(H200))
    assert found.gpus == 1
    assert 100 < found.offload_experts < FLASH.n_routed_experts
    assert "do not all fit" in of(found, "experts").why
    slot = weights(FLASH).routed // FLASH.n_routed_experts
    assert found.planned["total"] <= int(140 * GIB * 0.92) < found.planned["total"] + 2 * slot
    Placement(0, found.offload_experts).check(FLASH.n_routed_experts, FLASH.num_experts_per_tok)
    with pytest.raises(DoesNotFit, match="No setting fits here"):
        chosen(FLASH, machine(H200, host=64))
    with pytest.raises(DoesNotFit, match=r"What fits: no --offload-experts; or --device cpu\Z"):
        chosen(FLASH, machine(H200), offload_experts="off")


def test_gpus_that_are_missing_are_counted():
    with pytest.raises(DoesNotFit, match=r"it needs 8 GPUs such as NVIDIA H200, and this machine shows 6\Z"):
        chosen(PRO, machine(*[H200] * 6))
    chosen(PRO, machine(*[H200] * 8))


def test_little_room_is_shared_between_context_and_requests():
    limits = chosen(PRO, machine(*[H200] * 8)).limits
    assert 8192 <= limits.max_context_tokens < PRO.max_position_embeddings
    assert 8 <= limits.max_concurrent_requests < 8 * MOST_REQUESTS
    assert limits.num_blocks >= 1.3 * blocks_for_tokens(limits.max_context_tokens), "others run beside the longest"


def test_a_small_model_takes_the_freest_gpu_and_no_more_than_it_can_use():
    found = chosen(TINY, machine(BUSY, H200))
    assert (found.device, found.gpus, found.visible) == ("cuda:1", 1, None)
    assert found.limits.num_blocks == MOST_BLOCKS
    assert of(found, "busy").value == "GPU 0: 20.0 GiB of 140.0 GiB are free"
    assert chosen(TINY, machine(H200, BUSY)).device == "cuda"
    assert chosen(TINY, machine(H200, BUSY), device="cuda:1").device == "cuda:1"


def test_a_busy_gpu_is_left_out():
    """Unless as many are asked for as there are: then all get what it has free."""
    where = machine(H200, BUSY, replace(H200, uuid="GPU-c"), replace(H200, uuid="GPU-d"))
    found = chosen(FLASH, where)
    assert (found.gpus, found.visible) == (3, "GPU-a,GPU-c,GPU-d")
    assert of(found, "busy")
    all_of_them = chosen(FLASH, where, gpus=4)
    assert (all_of_them.gpus, all_of_them.visible) == (4, None)
    assert all_of_them.planned["total"] <= 20 * GIB * 0.92, "a margin comes off what is free"


def test_options_win():
    where = machine(*[H200] * 4)
    found = chosen(
        FLASH, where, requests=100, context=65536, chunk=1024, drafts=1, memory=0.5, gpus=2,
        limits=EngineConfig(verify_hits=0.0, cache_host_bytes=GIB),
    )  # fmt: skip
    limits = found.limits
    assert (limits.max_concurrent_requests, limits.max_context_tokens, limits.max_chunk_tokens) == (100, 65536, 1024)
    assert (found.gpus, found.drafts, limits.max_draft_tokens, limits.cache_host_bytes) == (2, 1, 1, GIB)
    assert {choice.why for choice in found.choices if choice.what in ("requests", "context", "chunk")} == {"given"}
    assert found.planned["total"] <= 70 * GIB
    assert chosen(FLASH, where, device="cpu").device == "cpu"
    assert chosen(FLASH, where, offload_experts=64).offload_experts == 64
    assert chosen(TINY, where, gpus=3).gpus == 3
    assert chosen(FLASH, where, limits=EngineConfig(verify_hits=0.1)).gpus == 1, "only one rank can verify"


def test_torchrun_starts_ranks_on_several_machines(monkeypatch):
    """Each machine has its own ranks to find GPUs for."""
    eight = machine(*[H200] * 8).as_if_idle()
    with pytest.raises(ConfigError, match="--gpus 16: this machine shows 8"):
        chosen(PRO, eight, gpus=16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = chosen(PRO, eight, gpus=16)
    assert (found.gpus, found.device, found.visible) == (16, "cuda", None)
    assert found.planned == chosen(PRO, eight, gpus=16).planned
    with pytest.raises(ConfigError, match=r"--gpus 16 \(8 on this machine\): this machine shows 4"):
        chosen(PRO, machine(*[H200] * 4), gpus=16)


def test_a_dspark_head_drafts_by_itself():
    """An MTP block does not: under load it costs more than 1 % where nothing is drafted (docs/drafts.md)."""
    where = machine(*[H200] * 4)
    dspark = FLASH.with_dspark(noise_token_id=3, markov_rank=256, block_size=5)
    found = chosen(dspark, where)
    assert (found.drafts, found.limits.max_draft_tokens) == ("auto", dspark.max_drafts)
    assert "an MTP block costs 3 %" in of(chosen(FLASH, where), "drafts").why
    assert chosen(FLASH, where, drafts="auto").drafts == "auto"


def test_drafts_need_a_drafter():
    where = machine(*[H200] * 4)
    bare = choose(FLASH, weights(FLASH, with_draft=False), Wishes(), where)
    assert (bare.drafts, bare.limits.max_draft_tokens) == ("off", 0)
    assert of(bare, "drafts").why == "this checkpoint has no drafter"
    exact = choose(FLASH, replace(weights(FLASH), plain_itemsize=2), Wishes(numerics="exact", gpus=4), machine(*[
        replace(H200, total_bytes=1000 * GIB, free_bytes=1000 * GIB)] * 4))  # fmt: skip
    assert exact.drafts == "off"


def test_a_machine_without_a_gpu_has_the_limits_it_always_had():
    found = chosen(TINY, Machine(host_bytes=8 * GIB))
    assert (found.device, found.gpus, found.drafts) == ("cpu", 1, "off")
    assert found.limits == EngineConfig(max_context_tokens=16384, max_chunk_tokens=2048)
    assert of(found, "device").why == "this machine has no NVIDIA GPU"
    assert "GPU" not in table(found.choices).partition("\n")[2]
    with pytest.raises(ConfigError, match="--device cuda: no driver; leave --device out"):
        choose(TINY, weights(TINY), Wishes(device="cuda"), Machine(why_no_gpu="no driver"))


def test_processes_that_are_started_apart_choose_alike():
    """Under torchrun each of them chooses, whatever others hold at that moment."""
    first, second = machine(H200, H200), machine(H200, BUSY, host=20)
    assert chosen(FLASH, first.as_if_idle(), gpus=2) == chosen(FLASH, second.as_if_idle(), gpus=2)
    found = chosen(TINY, Machine(host_bytes=1000).as_if_idle(), gpus=2)
    assert found.limits.max_concurrent_requests == 16


def test_a_machine_with_little_memory_gets_less():
    usual = chosen(TINY, Machine(host_bytes=8 * GIB)).planned["total"]
    found = chosen(TINY, Machine(host_bytes=usual), memory=0.5)
    assert found.limits.max_concurrent_requests < 8
    assert of(found, "requests").why == "what the memory holds"
    assert found.planned["total"] <= usual // 2


def test_a_gpu_that_no_kernel_is_for():
    old = replace(H200, name="Tesla V100", architecture=70)
    found = chosen(TINY, machine(old))
    assert found.device == "cpu"
    assert of(found, "device").why == "no kernels for Tesla V100"


@pytest.mark.parametrize(
    ("config", "where", "options"),
    [
        (FLASH, machine(*[H200] * 2), {"requests": 100_000, "context": 2**20}),
        (FLASH, machine(*[H200] * 4), {"requests": 20_000, "chunk": 65536}),
        (PRO, machine(*[H200] * 8), {"requests": 4096, "context": 2**17}),
        (FLASH, machine(*[H200] * 8), {"gpus": 1, "offload_experts": "off"}),
        (TINY, Machine(host_bytes=GIB), {"requests": 50_000}),
        (TINY, Machine(host_bytes=GIB), {"requests": 50_000, "context": 16384}),
    ],
)
def test_the_nearest_settings_fit(config, where, options):
    """Each that is named is taken, one step more is not."""
    with pytest.raises(DoesNotFit) as raised:
        chosen(config, where, **options)
    text = str(raised.value)
    assert "the weights take" in text
    assert "GiB free (--memory 0.92)" in text
    ways = text.partition("What fits: ")[2].split("; or ")
    assert 1 <= len(ways) <= 3
    for way in ways:
        changed = {name: int(value) for name, value in re.findall(r"--(requests|context|chunk|gpus|memory) (\d+)", way)}
        changed |= dict.fromkeys(name.replace("-", "_") for name in re.findall(r"no --([\w-]+)", way))
        if way == "--device cpu":
            changed = {"device": "cpu", "gpus": None, "offload_experts": None}
        chosen(config, where, **{**options, **changed})
        if way.startswith("--requests") and "context" not in changed:
            with pytest.raises(DoesNotFit):
                chosen(config, where, **{**options, "requests": changed["requests"] + 1})


def test_chunk_speeds_are_those_of_the_records():
    found = {}
    for line in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "prefill" and record.get("experts") == "mxfp4":
            found[record["tokens"]] = record["tokens_per_second"]
    assert found == CHUNK_SPEEDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0.0}, "--memory must be a share"),
        ({"memory": float("nan")}, "--memory must be a share"),
        ({"gpus": 0}, "--gpus must be from 1"),
        ({"device": "gpu"}, "--device must be auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:9"}, "numbered from 0"),
        ({"device": "cpu:1"}, "--device must be"),
        ({"gpus": 9}, "--gpus 9: this machine shows 4"),
        ({"context": 2**30}, "max_position_embeddings"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ConfigError, match=message):
        chosen(FLASH, machine(*[H200] * 4), **options)
