"""Claude Code and Codex themselves, on a small model with the miniature's tokenizer and a longer context: a script says
which of their tools it calls, they run them and send the results back. They reach loopback alone."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from client_cases import call
from server_cases import SERVED, let_it_say, start_server

from dsv4 import LLM, EngineConfig
from dsv4.loader.shipped import shipped_checkpoint
from dsv4.loader.write.synth import random_params
from dsv4.text.tokenizer import Tokenizer

pytestmark = pytest.mark.client
MODEL = replace(SERVED, vocab_size=4096, max_position_embeddings=65536)
NAME = "mini"  # not a name that Claude Code knows: it then sends what a new model gets


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL, dequantize_to=torch.float32)


@pytest.fixture
def says(params):
    """`says(text, ...)`: the address of a server that says one text after the other."""
    servers = []

    def start(*texts):
        llm = LLM.from_params(
            MODEL, params, numerics="exact", tokenizer=Tokenizer.from_pretrained(shipped_checkpoint()),
            engine=EngineConfig(max_context_tokens=49152, max_concurrent_requests=2),
        )  # fmt: skip
        servers.append(start_server(let_it_say(llm, *texts, in_turn=True), name=NAME))
        return servers[-1].url

    yield start
    for server in servers:
        server.wait_until_free()
        server.stop()


@pytest.fixture
def run(tmp_path):
    """`run(program, arguments, **environment)`: what it prints, in a new home and a new project."""
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    folder = Path(os.environ.get("CLIENT_PROGRAMS", ".venv-clients/npm/node_modules/.bin")).absolute()
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}

    def start(program, *arguments, **environment):
        ran = subprocess.run(
            [folder / program, *arguments], cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={"PATH": os.environ["PATH"], "HOME": str(home), **nowhere, **environment}, timeout=300, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    start.project, start.home = project, home
    return start


def test_claude_code(says, run):
    """With the settings of docs/serving.md: a file is written and read, then the conversation goes on. Its list of
    messages has one of the system's in the middle."""
    file = run.project / "hello.txt"
    url = says(
        "hm</think>I write it." + call("Write", file_path=str(file), content="Hello from the model\n"),
        "hm</think>I read it." + call("Bash", command="cat hello.txt", description="Read the file"),
        "hm</think>The file says hello.",
        "hm</think>It still does.",
    )
    settings = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "unused", "ANTHROPIC_MODEL": NAME,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # requests beside the conversation would take its answers
    }  # fmt: skip
    options = ("--output-format", "json", "--allowedTools", "Write,Bash", "-p")
    first = json.loads(run("claude", *options, "Greet me in a file", **settings))
    assert (first["result"], first["num_turns"]) == ("The file says hello.", 3)
    assert file.read_text() == "Hello from the model\n"
    usage = first["usage"]
    assert usage["cache_read_input_tokens"] > 1.8 * usage["input_tokens"] > 20_000, "two turns of three were known"
    second = json.loads(run("claude", "--continue", *options, "And now?", **settings))
    assert (second["result"], second["num_turns"]) == ("It still does.", 1)
    assert second["usage"]["input_tokens"] < 2000


def test_codex(says, run):
    """With the tools it offers by default: a command is run, and a function of a namespace is found."""
    url = says(
        "I look." + call("exec_command", cmd="echo hello > made.txt; cat made.txt"),
        "I end it." + call("multi_agent_v1.close_agent", target="01a1f179-ffab-7332-8f53-0d359279d14a"),
        "It says hello.",
    )
    (run.home / ".codex").mkdir()
    (run.home / ".codex" / "config.toml").write_text(
        f'model = "{NAME}"\nmodel_provider = "dsv4"\n\n[model_providers.dsv4]\nname = "dsv4"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
    lines = [json.loads(line) for line in run("codex", "exec", *options, "Greet me in a file").splitlines()]
    done = [line["item"] for line in lines if line["type"] == "item.completed"]
    assert [one["text"] for one in done if one["type"] == "agent_message"] == [
        "I look.", "I end it.", "It says hello.",
    ]  # fmt: skip
    (command,) = (one for one in done if one["type"] == "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("hello\n", 0)
    (ended,) = (one for one in done if one["type"] == "collab_tool_call")
    assert (ended["tool"], [state["status"] for state in ended["agents_states"].values()]) == (
        "close_agent", ["not_found"],
    )  # fmt: skip
    assert (run.project / "made.txt").read_text() == "hello\n"
