"""Ranks as processes: the same bits, and no process outlives the others, whoever is killed and when."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import torch
from draft_cases import ForcedDrafts, truth_of
from process_cases import children_of, descendants_of, free_port, ranks_under, wait_until_gone
from rank_cases import SMALL
from safetensors.torch import load_file

from dsv4.cli.main import main
from dsv4.config import ConfigError, EngineConfig
from dsv4.dist import world
from dsv4.dist.control import Leader, Progress
from dsv4.dist.errors import RankFailed
from dsv4.dist.world import _can_share_memory
from dsv4.engine.fingerprint import Identity
from dsv4.engine.offload.placement import OffloadError
from dsv4.engine.ranks.load import check_alike, rank_device
from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weights.group import Coming, WeightGroup
from dsv4.formats.tensors import as_loaded
from dsv4.llm import LLM
from dsv4.loader.header import CheckpointError
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import RequestError, SamplingParams

LIMITS = EngineConfig(max_context_tokens=256, max_concurrent_requests=8)
PROMPTS = [[5, 6, 7, 8], [9] * 140, [10, 11], [12, 13, 14], [15]]
PARAMS = [SamplingParams(max_tokens=4, seed=i, logprobs=2, temperature=0.9, ignore_eos=True) for i in range(5)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "small"
    write_checkpoint(path, SMALL)
    return path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As many threads in every rank as here; a CPU's sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Saying:
    """A world in which rank 1 says something else."""

    def __init__(self, **differences):
        self.differences = differences

    def gather_texts(self, text):
        return [text, json.dumps(json.loads(text) | self.differences)]


IDENTITY = Identity(
    checkpoint="c", numerics="official", kernels="k", libraries="torch 1, Triton 2", processor="sm_90.NVIDIA-H200",
    package="p",
)  # fmt: skip


def test_ranks_on_gpus_of_other_kinds_are_refused():
    check_alike(Saying(), IDENTITY)
    check_alike(Saying(), replace(IDENTITY, processor="sm_90.NVIDIA-H100"))  # the same bits
    with pytest.raises(ConfigError, match=r"rank 1 and rank 0 must agree in processor, found sm_80 and sm_90: tokens"):
        check_alike(Saying(processor="sm_80"), IDENTITY)
    with pytest.raises(ConfigError, match="must agree in libraries, found torch 0 and torch 1, Triton 2"):
        check_alike(Saying(libraries="torch 0"), IDENTITY)


def test_ranks_with_other_checkpoints_are_refused(folder, tmp_path, monkeypatch):
    """As where each machine has a copy of its own: here with other weights in tensors of the same shapes."""
    write_checkpoint(tmp_path / "other", SMALL, seed=1)
    start = world._start

    def with_another_folder(rank, size, port, settings):
        return start(rank, size, port, dict(settings) | {"path": str(tmp_path / "other")})

    monkeypatch.setattr(world, "_start", with_another_folder)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="rank 1 and rank 0 must agree in checkpoint"):
        LLM(folder, gpus=2, engine=LIMITS)
    assert time.monotonic() - began < 30  # most of it is a process that imports torch


def processes_of(llm):
    return llm.engine._link.processes


def check_commands(llm, alone):
    """Pauses, versions and resets reach every rank; answers stay what they are."""
    requests = [llm.start(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    llm.step()
    llm.pause()
    assert not llm.engine.has_work
    assert llm.info()["is_paused"]
    counts = [len(output.token_ids) for _, output in requests]
    late = llm.start(PROMPTS[1], PARAMS[1])
    llm.reset_prefix_cache(running=True)
    assert llm.set_weight_version("second") == "second"
    assert [len(output.token_ids) for _, output in requests] == counts, "nothing runs"
    llm.resume()
    while not all(output.is_done for _, output in (*requests, late)):
        llm.step()
    expected = [done.token_ids for done in alone.generate(PROMPTS, PARAMS)]
    assert [tuple(output.token_ids) for _, output in requests] == expected
    assert tuple(late[1].token_ids) == expected[1]
    assert {output.weight_versions[-1][1] for _, output in (*requests, late)} == {"second"}
    llm.pause("wait")
    llm.resume()
    with pytest.raises(CheckpointError, match="layers"):
        llm.update_weights({})
    llm.engine.check_integrity()


def test_new_weights_and_sleep_on_two_ranks(folder, tmp_path):
    """Each rank takes its experts; nobody changes anything unless all can."""
    other = write_checkpoint(tmp_path / "other", SMALL, seed=7)
    expected = {path: LLM(path, engine=LIMITS).generate(PROMPTS, PARAMS) for path in (folder, other)}
    llm = LLM(folder, engine=LIMITS, gpus=2, check_exchange=True)

    def answers():
        return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]

    wanted = {path: [(one.token_ids, one.logprobs) for one in found] for path, found in expected.items()}
    assert wanted[folder] != wanted[other]
    for path in (other, folder):
        llm.update_weights(path)
        assert answers() == wanted[path]
    with pytest.raises(CheckpointError, match="does not exist"):
        llm.update_weights(tmp_path / "nothing")
    for level in (1, 2):
        llm.sleep(level)
        assert llm.info()["asleep"] == ["kv_cache", "weights"]
        llm.wake(["weights"])
        if level == 2:
            llm.update_weights(other)
        llm.wake(["kv_cache"])
        assert not llm.info()["is_paused"]
        assert answers() == wanted[folder if level == 1 else other]
    llm.engine.check_integrity()
    llm.close()


def test_new_tensors_on_two_ranks(folder, tmp_path):
    """Of this process, whole and one by one, and of a trainer's group, in which each rank has a place: each rank takes
    its experts. What one rank cannot take, none writes."""
    other = write_checkpoint(tmp_path / "other", SMALL, seed=7)
    wanted = {path: found(LLM(path, engine=LIMITS)) for path in (folder, other)}
    assert wanted[folder] != wanted[other]
    new, old = (load_file(next(path.glob("*.safetensors"))) for path in (other, folder))
    llm = LLM(folder, engine=LIMITS, gpus=2, check_exchange=True)
    llm.update_weights(new)
    assert found(llm) == wanted[other]
    digest = llm.weights_digest
    llm.update_weights(iter(reversed(old.items())))
    assert found(llm) == wanted[folder]

    plain = {name: one for name, one in new.items() if ".w1." not in name or "layers.1.ffn.experts." not in name}
    for expert_idx in range(SMALL.n_routed_experts):
        values = torch.randn(SMALL.moe_intermediate_size, SMALL.hidden_size).bfloat16()
        plain[f"layers.1.ffn.experts.{expert_idx}.w1.weight"] = values
    values[3, 4] = torch.nan  # of the last expert, which is rank 1's
    with pytest.raises(CheckpointError, match=r"layers.1.ffn.experts.5.w1.weight holds NaN"):
        llm.update_weights(plain)
    assert found(llm) == wanted[folder], "the old weights run on"
    with pytest.raises(CheckpointError, match="no whole model"):
        llm.update_weights(iter(list(new.items())[:-1]))
    with pytest.raises(WeightsIncomplete):
        found(llm)
    llm.update_weights(old)
    assert found(llm) == wanted[folder]

    port = free_port()
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "backend": "gloo"}
    with pytest.raises(RequestError, match="world_size must leave room for 2 ranks from rank_offset 1 on, found 2"):
        llm.control.obey("init_group", {**group, "world_size": 2})
    with ThreadPoolExecutor(1) as trainer:
        making = trainer.submit(WeightGroup, "127.0.0.1", port, rank=0, world_size=3)
        llm.control.obey("init_group", {**group, "world_size": 3}).result(60)
        items = list(new.items())
        llm.pause()
        for part, version in ((items[:20], None), (items[20:50], None), (items[50:], "7")):
            sending = trainer.submit(making.result(30).send, part)
            assert llm.control.obey("receive_weights", {**Coming.of(dict(part))._asdict(), "version": "7"}) == version
            sending.result(30)
        llm.resume()
        assert found(llm) == wanted[other]
        assert (llm.weights_digest, llm.weight_version) == (digest, "7")
    llm.engine.check_integrity()
    llm.close()


def found(llm):
    return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]


def test_four_processes_and_one_killed_while_nothing_runs(folder):
    alone = LLM(folder, engine=LIMITS)
    shown = []
    llm = LLM(
        folder, engine=LIMITS, gpus=4, check_exchange=True, progress=lambda done, total: shown.append((done, total))
    )
    assert shown[-1][0] == shown[-1][1], "every byte of every rank was counted"
    assert llm.generate(PROMPTS, PARAMS) == alone.generate(PROMPTS, PARAMS)
    assert torch.equal(llm.logits(PROMPTS[1], [100, 40]), alone.logits(PROMPTS[1]))
    assert torch.equal(llm.mtp_logits(PROMPTS[1][:20]), alone.mtp_logits(PROMPTS[1][:20]))
    sizes = [len(as_loaded(llm.model.weights.layers[0].ffn.experts.w1).data), SMALL.n_routed_experts]
    assert sizes == [1, 6], "rank 0 of four has one of six experts, the others one or two"
    check_commands(llm, alone)
    pids = [process.pid for process in processes_of(llm)]
    told = []
    llm.engine.sizes.when_failed(told.append)
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids)
    expected = rf"rank 2 \(process {pids[1]}\) was ended by SIGKILL"
    with pytest.raises(RankFailed, match=expected):
        llm.generate(PROMPTS[:1], PARAMS[:1])
    assert len(told) == 1
    connections = [*llm.engine.sizes.sockets, *(one.socket for one in llm.engine.remotes)]
    llm.close()
    assert [one.fileno() for one in connections] == [-1] * 6, "three others, for steps and for requests"
    with pytest.raises(RankFailed, match=expected):
        llm.logits([5])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.processes)], ids=["killed", "stopped"]
)
def test_the_miniature_on_two_and_one_killed_or_stopped_in_a_step(number):
    limits = EngineConfig(max_context_tokens=64, max_concurrent_requests=4)
    params = SamplingParams(max_tokens=3, seed=7, logprobs=3)
    llm = LLM(engine=limits, gpus=2)
    (pid,) = (process.pid for process in processes_of(llm))
    if number is signal.SIGKILL:
        assert llm.generate(["SCENE I.", "And"], params) == LLM(engine=limits).generate(["SCENE I.", "And"], params)
    stream = llm.stream("SCENE I.", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    os.kill(pid, number)
    start = time.monotonic()
    name = "was ended by SIGKILL" if number is signal.SIGKILL else "has not been heard of for 6 s"
    with pytest.raises(RankFailed, match=rf"rank 1 \(process {pid}\) {name}"):
        list(stream)
    assert time.monotonic() - start < 10
    wait_until_gone([pid])
    assert not llm.engine.has_work
    llm.close()


def test_a_process_ends_though_its_gpu_does_not(folder):
    """After a failure a GPU may wait for ever, and with it whatever Python does when a process ends."""
    program = (
        "import atexit, os, signal, sys, time\nfrom dsv4 import LLM, SamplingParams\n"
        "atexit.register(time.sleep, 100)\n"
        "link = (llm := LLM(sys.argv[1], gpus=2)).engine._link\n"
        "link._may_be_stuck = True\n"
        "os.kill(link.processes[0].pid, signal.SIGKILL)\n"
        "llm.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("was ended by SIGKILL")


@pytest.mark.processes
def test_ranks_end_with_the_model(folder):
    """Without `close`: nothing that outlives the `LLM` refers to it."""
    llm = LLM(folder, engine=LIMITS, gpus=2)
    pids = [process.pid for process in processes_of(llm)]
    assert len(llm.generate(PROMPTS, PARAMS)) == 5
    del llm
    gc.collect()
    wait_until_gone(pids)


@pytest.mark.processes
def test_no_rank_outlives_the_first(folder, tmp_path):
    """Killed without a word, in the middle of generating."""
    program = (
        "import sys\nfrom dsv4 import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], gpus=2)\n"
        "print(llm.engine._link.processes[0].pid, flush=True)\n"
        "while True: llm.generate([[5, 6, 7]], SamplingParams(max_tokens=50, ignore_eos=True))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    child = int(run.stdout.readline())
    time.sleep(0.5)
    run.kill()
    run.wait()
    run.stdout.close()
    wait_until_gone([child])


@pytest.mark.processes
def test_torchrun_and_an_interrupt(folder):
    """Every process runs the same command; rank 0 alone prints. Ctrl-C ends all of them."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        "-m", "dsv4", "generate", "--model", str(folder), "--gpus", "2", "--ids", "5,6,7", "--seed", "3", "--json",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--max-tokens", "4", "--ignore-eos"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    (expected,) = LLM(folder, engine=LIMITS).generate([[5, 6, 7]], params)
    assert json.loads(done.stdout)["token_ids"] == list(expected.token_ids)
    endless = [sys.executable, *command[command.index("-m", 3) :], "--max-tokens", "100000", "--ignore-eos"]
    run = subprocess.Popen(
        endless, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    while not (children := children_of(run.pid)):
        time.sleep(0.1)
    time.sleep(6)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(10) == 130
    wait_until_gone(children)


@pytest.mark.processes
def test_a_server_ends_with_its_ranks(tmp_path):
    """Its client is told why; it exits with code 1. Told to end while it loads, it leaves nobody either."""
    command = [sys.executable, "-m", "dsv4", "serve", "--gpus", "2", "--context", "128"]
    log = (tmp_path / "log").open("w+")
    run = subprocess.Popen([*command, "--port", str(port := free_port())], stderr=log)
    while "running on" not in (tmp_path / "log").read_text():
        assert run.poll() is None
        time.sleep(0.2)
    (child,) = ranks_under(run.pid)
    everyone = descendants_of(run.pid)
    url = f"http://127.0.0.1:{port}/v1/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99}}}
    bounded = {"model": "flash-mini", "prompt": "SCENE", "max_tokens": 8, "seed": 3, "response_format": schema}
    with ThreadPoolExecutor(4) as pool:  # as many on each rank
        found = list(pool.map(lambda _: httpx.post(url, json=bounded, timeout=60).json(), range(4)))
    texts = [one["choices"][0]["text"] for one in found]
    assert len(set(texts)) == 1, "the same answer wherever it was made"
    assert int(texts[0]) <= 99
    body = {"model": "flash-mini", "prompt": "SCENE", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(child, signal.SIGKILL)
        assert f"rank 1 (process {child}) was ended by SIGKILL" in "".join(lines)
    assert run.wait(10) == 1
    assert f"dsv4: error: rank 1 (process {child}) was ended by SIGKILL" in (tmp_path / "log").read_text()
    wait_until_gone(everyone)
    run = subprocess.Popen([*command, "--port", str(free_port())], stderr=log)
    while not ranks_under(run.pid):
        time.sleep(0.05)
    everyone = descendants_of(run.pid)
    run.terminate()
    run.wait(10)
    wait_until_gone(everyone)
    log.close()


def test_mistakes_are_told_before_anything_starts(folder, capsys, monkeypatch):
    with pytest.raises(ConfigError, match="gpus must be from 1 to the number of experts 6, found 7"):
        LLM(folder, gpus=7)
    with pytest.raises(OffloadError, match=r"to 3 \(all there are on a rank\), found 4"):
        LLM(folder, gpus=2, offload_experts=4)
    with pytest.raises(OffloadError, match="needs as many experts on every rank.*: 6 experts on 4 ranks; change gpus"):
        LLM(folder, gpus=4, offload_experts="auto")
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(folder), "--ids", "5", "--gpus", "0"])
    assert ended.value.code == 2
    assert "gpus must be from 1" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="gpus is 2, but torchrun started 4 processes"):
        LLM(folder, gpus=2)


def test_each_rank_takes_its_own_gpu(monkeypatch):
    """And makes it the current one, where kernels are launched."""
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    cuda = torch.device("cuda")
    assert rank_device(cuda, 2) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="gpus is 4, which needs 4 CUDA devices here; this machine has 2"):
        rank_device(cuda, 4)
    with pytest.raises(ConfigError, match="device must be 'cuda' with gpus 2.*found 'cuda:1'"):
        rank_device(torch.device("cuda:1"), 2)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    assert rank_device(cuda, 8) == torch.device("cuda", 1), "the second of this node"
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError, match="needs 4 CUDA devices here; this machine has 2"):
        rank_device(cuda, 8)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert rank_device(cuda, 8) == torch.device("cuda", 1)
    assert current == [torch.device("cuda", place) for place in (0, 1, 1)]
    assert rank_device(torch.device("cpu"), 2) == torch.device("cpu")


def test_memory_is_shared_by_the_first_model_of_a_process(monkeypatch):
    """Torch counts a process's meetings, so new ranks would not find a rank 0 that has met others before."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert _can_share_memory(2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not _can_share_memory(2)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.setenv(name, "2")
    assert _can_share_memory(2), "torchrun's ranks have all met as often"
    assert not _can_share_memory(4), "two of them are on another machine"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert not _can_share_memory(2)


def test_rank_0_is_watched_where_memory_meets(monkeypatch):
    """A rank that fails there would be waited for: all come together before, and the leader looks on meanwhile."""
    seen = []

    class Watched(Leader):
        def __init__(self):
            pass

        @contextmanager
        def working(self):
            seen.append("begins")
            yield
            seen.append("ends")

    monkeypatch.setattr(world.World, "least", lambda self, number: seen.append("together"))
    monkeypatch.setattr(world, "symmetric_exchange", lambda group, **sizes: seen.append("meets"))
    for link in (Watched(), object()):
        rank = world.World(0, 2, None, link, Progress(), meeting=object())
        rank.exchange(SMALL, LIMITS, torch.device("cpu"), torch.bfloat16)
    assert seen == ["together", "begins", "meets", "ends", "together", "meets"]


@pytest.mark.processes
def test_files_of_two_processes(folder, tmp_path):
    """What both ranks wrote before they ended is found by those that come after them."""
    limits = replace(LIMITS, max_context_tokens=512, cache_dir=str(tmp_path), cache_host_bytes=2**24)
    prompts = [[5 + i] * 260 for i in range(4)]
    params = SamplingParams(max_tokens=3, seed=2, logprobs=2, ignore_eos=True)
    plain = LLM(folder, engine=replace(limits, cache_dir=None, cache_host_bytes=0, prefix_cache_bytes=0))
    expected = [plain.generate([prompt], params)[0] for prompt in prompts]
    for num_found in (0, 4):
        llm = LLM(folder, engine=limits, gpus=2)
        assert llm.generate(prompts, params) == expected
        assert llm.engine.stats().num_prefix_disk_hits == num_found
        llm.close()


@pytest.mark.processes
def test_offloaded_experts_of_two_processes(tmp_path):
    """The draft block's too; all ranks keep as many on the device as the one that has least room."""
    folder = write_checkpoint(tmp_path / "twelve", replace(SMALL, n_routed_experts=12), experts="nvfp4")
    alone, llm = LLM(folder, engine=LIMITS), LLM(folder, engine=LIMITS, gpus=2, offload_experts=4)
    assert llm.generate(PROMPTS, PARAMS) == alone.generate(PROMPTS, PARAMS)
    assert torch.equal(llm.mtp_logits(PROMPTS[1][:20]), alone.mtp_logits(PROMPTS[1][:20]))
    assert llm.engine.stats().num_expert_misses > 0
    assert llm.pool.placement.num_slots == 4
    llm.close()
    llm = LLM(folder, engine=LIMITS, gpus=2, offload_experts="auto")
    assert llm.pool is None, "all of them fit"
    llm.close()


@pytest.mark.processes
@pytest.mark.parametrize(("size", "is_dspark", "offload"), [(2, False, None), (4, True, None), (2, True, 3)])
def test_drafts_of_processes(folder, tmp_path, size, is_dspark, offload):
    """Forced and real ones, with checksums on all that is exchanged; two to a rank, one, or none."""
    if is_dspark:
        config = SMALL.with_dspark(noise_token_id=3, markov_rank=128, block_size=4)
        folder = write_checkpoint(tmp_path / "dspark", config)
    alone = LLM(folder, engine=LIMITS)
    expected = alone.generate(PROMPTS, PARAMS)
    llm = LLM(folder, engine=LIMITS, gpus=size, drafts=3, check_exchange=True, offload_experts=offload)
    assert llm.generate(PROMPTS, PARAMS) == expected
    llm.engine.own._drafts = ForcedDrafts(3, "partly", truth_of(expected), vocab_size=SMALL.vocab_size)
    assert [replace(one, num_cached_tokens=0) for one in llm.generate(PROMPTS, PARAMS)] == expected
    assert llm.engine.stats().drafts.num_accepted > 0
    asked = (PROMPTS[1][:20], 11, [(1, 12)])
    assert [one.drafts for one in llm.draft_trace(*asked)] == [one.drafts for one in alone.draft_trace(*asked)]
    llm.engine.check_integrity()
    llm.close()


@pytest.mark.processes
def test_a_rank_that_cannot_load(folder, monkeypatch):
    """Its own error, not a lost connection: here, limits that only it gets."""
    start = world._start

    def wrong(rank, size, port, settings):
        return start(rank, size, port, {**settings, "path": str(folder.parent / "nowhere")})

    monkeypatch.setattr(world, "_start", wrong)
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) ended with code 1 before it was ready"):
        LLM(folder, engine=LIMITS, gpus=2)


@pytest.mark.processes
def test_the_benchmark_of_the_engine(tmp_path):
    """What a GPU runs, tried through gloo: the same tokens on two ranks, with drafts too."""
    options = ("--section", "engine", "--device", "cpu", "--preset", "tiny")
    command = [sys.executable, "-m", "benchmarks", "ranks", *options]
    done = subprocess.run([*command, "--out", str(tmp_path / "found.jsonl")], capture_output=True, text=True)
    records = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert done.returncode == 0, done.stderr
    assert [(one["kind"], one.get("ranks"), one.get("same")) for one in records] == [
        ("rank_engine", ranks, True) for ranks in (1, 2, 2)
    ]
