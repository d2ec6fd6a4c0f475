"""The programs of examples/, run as they stand on the miniature; the client's against a live server."""

import asyncio
import importlib.util
import json
import re
import runpy
import signal
import subprocess
import sys
import time
import types
from copy import deepcopy
from pathlib import Path

import pytest
from safetensors.torch import load_file
from server_cases import SERVED, make_llm, start_server
from server_fixtures import live, served_params

from dsv4 import LLM, AsyncLLM, SamplingParams
from dsv4.loader.write.synth import write_checkpoint

__all__ = ["live", "served_params"]  # fixtures
EXAMPLES = Path(__file__).parents[1] / "examples"
HAS_SERVER = all(importlib.util.find_spec(library) is not None for library in ("starlette", "uvicorn", "openai"))


def run(name, *arguments):
    runpy.run_path(str(EXAMPLES / name))["main"](*arguments)


def test_offline(capsys):
    run("offline.py")
    out = capsys.readouterr().out
    assert "the scores of 12 tokens are those of the rollout, bit for bit" in out
    assert out.count("| length") == 2


def test_custom_op(capsys):
    run("custom_op.py")
    changed = re.search(r"other bits: (\d+)%", capsys.readouterr().out)
    assert changed is not None
    assert int(changed[1]) > 0, "the model did not call the op"


@pytest.mark.skipif(not HAS_SERVER, reason="the server's libraries are not installed")
def test_client(live, capsys):
    run("client.py", live.url)
    assert re.search(r"the sea is (calm|rough)\n", capsys.readouterr().out)


# ---- reinforcement learning ----

PARTS = ("policy.py", "server.py")  # of the loop: its first line of work imports them


def training(folder, *arguments):
    command = [sys.executable, str(EXAMPLES / "rl" / "train.py"), str(folder), "--group", "2", "--tokens", "6"]
    return subprocess.Popen([*command, "--no-plot", "--steps", "3", *arguments], cwd=EXAMPLES.parent)


def record(folder):
    """Everything of a run that is not a time, and where it went on."""
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name not in ("seconds", "resumed")} for line in lines], [
        line["step"] for line in lines if line["resumed"]
    ]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SERVER, reason="the server's libraries are not installed")
def test_the_training_loop_goes_on_where_it_was_killed(tmp_path):
    """A short form of examples/rl, with the trainer killed in the middle: the record
    is that of a run in one go, down to every token and log-probability that was drawn."""
    assert training(tmp_path / "whole").wait(300) == 0
    lines, resumed = record(tmp_path / "whole")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert resumed == []
    assert {line["equal"] for line in lines} == {1.0}, "a log-probability is not that of the recomputation"
    assert all(0 < line["kl"] < 0.1 for line in lines)
    killed = training(tmp_path / "killed")
    while not (tmp_path / "killed" / "state.pt").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert training(tmp_path / "killed").wait(300) == 0
    again, resumed = record(tmp_path / "killed")
    assert resumed in ([1], [2])
    assert again == lines


@pytest.mark.skipif(not HAS_SERVER, reason="the server's libraries are not installed")
def test_the_loops_own_half(served_params, tmp_path, monkeypatch):
    """Everything of it but the trained model: rollouts, their scores, rewards, new weights, rollouts of those."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "rl"))
    monkeypatch.setitem(sys.modules, "policy", types.ModuleType("policy"))  # it needs transformers
    train = runpy.run_path(str(EXAMPLES / "rl" / "train.py"))
    write_checkpoint(tmp_path / "next", SERVED, experts="bf16", seed=2)
    live = start_server(make_llm(deepcopy(served_params)), rl=True, rl_roots=(str(tmp_path),))
    client = train["Server"](live.url)
    prompts = [client.encode("And it"), client.encode("The king")]
    first = client.rollouts(prompts, 12, seed=5)
    assert train["share_of_equal"](first, client.score(first)) == 1.0
    client.update(tmp_path / "next", "1")
    second = client.rollouts(prompts, 12, seed=5)
    assert [one.weight_version for one in (*first, *second)] == ["0", "0", "1", "1"]
    assert train["share_of_equal"](second, client.score(second)) == 1.0
    assert train["share_of_equal"](first, client.score(first)) < 1.0, "scores of other weights look the same"
    assert train["reward"]("No words, three good, The end") == 1 / 2
    assert train["reward"]("...") == 0.0
    above = train["advantages"]([0.0, 1.0, 3.0, 3.0], 2)
    assert above[0] == -above[1] < 0
    assert above[2:] == [0.0, 0.0]
    live.stop()


def test_verl_adapter(served_params, tmp_path):
    """Rollouts, new weights between an abort and the next, and rollouts of those."""
    server_class = runpy.run_path(str(EXAMPLES / "rl" / "verl_adapter.py"))["RolloutServer"]
    prompt, asked = [0, 261, 106], {"max_tokens": 6, "logprobs": True, "temperature": 1.0, "top_k": -1}
    write_checkpoint(tmp_path / "next", SERVED, experts="bf16", seed=2)
    weights = {}
    for file in (tmp_path / "next").glob("*.safetensors"):
        weights |= load_file(file)

    def wanted(llm):
        completion = llm.generate(prompt, SamplingParams(max_tokens=6, seed=7, logprobs=0))[0]
        return list(completion.token_ids), [one.logprob for one in completion.logprobs]

    async def run():
        async with AsyncLLM.over(make_llm(served_params)) as llm:
            server = server_class(llm)
            first = await server.generate(prompt, {**asked, "seed": 7})
            assert (first.token_ids, first.log_probs) == wanted(make_llm(served_params))
            assert first.stop_reason == "completed"
            long = asyncio.create_task(server.generate(prompt, {"ignore_eos": True}))
            while (await llm.stats()).num_output_tokens < 10:
                await asyncio.sleep(0.01)
            await server.abort_all_requests()
            ended = await long
            assert ended.stop_reason == "aborted"
            assert 0 < len(ended.token_ids) < 2000
            waiting = asyncio.create_task(server.generate(prompt, {**asked, "seed": 7}))
            assert await server.update_weights(weights.items(), version="next") == "next"
            assert not waiting.done()
            await server.resume_generation()
            found = await waiting
            assert (found.token_ids, found.log_probs) == wanted(LLM(tmp_path / "next", numerics="exact"))
            assert found.weight_versions == ((0, "next"),)
            replayed = await server_class(llm, routed_experts=True).generate(prompt, {**asked, "seed": 7})
            assert replayed.token_ids == found.token_ids
            shape = (len(prompt) + 5, SERVED.num_hidden_layers, SERVED.num_experts_per_tok)
            assert replayed.routed_experts.shape == shape
            with pytest.raises(ValueError, match="sampling_params: lora"):
                await server.generate(prompt, {"lora": 1})

    asyncio.run(run())


def test_every_example_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [file.name for file in EXAMPLES.rglob("*.py") if f'"{file.name}"' not in source] == []
