"""What happens to one process of several ranks: it is named within ten seconds, and nobody is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from process_cases import children_of, command_of, descendants_of, free_port, ranks_under, wait_until_gone
from rank_cases import SMALL

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.dist import world
from dsv4.dist.errors import RankFailed
from dsv4.loader.write.synth import write_checkpoint

pytestmark = pytest.mark.processes
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=4)
PROMPTS = [[5 + place] * 260 for place in range(4)]
PARAMS = SamplingParams(max_tokens=3, seed=2, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("matrix") / "small", SMALL)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_fault(monkeypatch, *fault):
    script = Path(__file__).parent / "faulty_rank.py"
    monkeypatch.setattr(world, "COMMAND", [sys.executable, str(script), *map(str, fault)])


def test_out_of_memory(folder, monkeypatch):
    with_fault(monkeypatch, "out_of_memory")
    with LLM(folder, engine=LIMITS, gpus=2) as llm:
        pids = [process.pid for process in llm.engine._link.processes]
        began = time.monotonic()
        with pytest.raises(RankFailed, match="rank 1: RuntimeError: .*memory"):
            llm.generate(PROMPTS, PARAMS)
        assert time.monotonic() - began < 10
        wait_until_gone(pids)


@contextmanager
def small_disk(folder):
    """A folder on a disk of 64 KiB."""
    folder.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="a small disk needs `mount`")
def test_a_full_disk(folder, tmp_path, capfd):
    """It costs rank 1 its files, which it says, and no request anything."""
    limits = replace(LIMITS, cache_dir=str(tmp_path / "cache"), cache_host_bytes=2**24)
    expected = LLM(folder, engine=LIMITS).generate(PROMPTS, PARAMS)
    with small_disk(tmp_path / "cache" / "rank-1"), LLM(folder, engine=limits, gpus=2) as llm:
        assert llm.generate(PROMPTS, PARAMS) == expected
        again = llm.generate(PROMPTS, PARAMS)
        llm.engine.check_integrity()
        pids = [process.pid for process in llm.engine._link.processes]
        llm.close()
        wait_until_gone(pids)
    assert again == expected
    assert "No space left on device" in capfd.readouterr().err


def test_killed_while_it_loads(folder, tmp_path, monkeypatch):
    flag, killed = tmp_path / "loads", []
    with_fault(monkeypatch, "slow_to_load", flag)

    def kill():
        while not flag.exists():
            time.sleep(0.05)
        (pid,) = (one for one in children_of(os.getpid()) if b"slow_to_load" in command_of(one))
        killed.extend([pid, time.monotonic()])
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
        LLM(folder, engine=LIMITS, gpus=2)
    seconds = time.monotonic() - killed[1]
    thread.join()
    assert seconds < 10
    wait_until_gone(killed[:1])


def test_a_server_that_restarts_gets_new_ranks(tmp_path):
    """All of the old ones are gone; clients are told why, and later ones are answered."""
    log, port = tmp_path / "log", free_port()
    with log.open("w") as file:
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "dsv4", "serve", "--gpus", "2", "--context", "128", "--restart"),
                *("--port", str(port)),
            ],
            stderr=file,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    body = {"model": "flash-mini", "prompt": "SCENE", "max_tokens": 8, "seed": 3, "ignore_eos": True}

    def ready():
        assert run.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(ready)
        text = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        (child,) = ranks_under(run.pid)
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"max_tokens": 100, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            began = time.monotonic()
            os.kill(child, signal.SIGKILL)
            assert f"rank 1 (process {child}) was ended by SIGKILL" in "".join(lines)
        assert time.monotonic() - began < 10
        wait_until_gone([child])
        wait_for(lambda: ranks_under(run.pid) not in ([], [child]) and ready())
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"] == text
        everyone = descendants_of(run.pid)
    finally:
        run.terminate()
        run.wait(20)
    wait_until_gone(everyone)


def wait_for(what, seconds=90):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.2)
