"""The examples of docs/serving.md, run as they stand against a live server; only the address is replaced."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


def blocks(language):
    return [match[2] for match in BLOCK.finditer(DOCUMENT.read_text(encoding="utf-8")) if match[1] == language]


def test_python_examples(live):
    """They are one program, cut into pieces."""
    program = "\n".join(blocks("python"))
    assert len(blocks("python")) >= 5
    assert ADDRESS in program
    ran = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, live.url)], capture_output=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    out = ran.stdout.decode("utf-8")
    assert re.search(r"(good|mixed|bad) [1-5]\n", out)


@pytest.mark.parametrize("example", blocks("bash"))
def test_curl_examples(live, example):
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.replace(ADDRESS, live.url).replace("curl -s", "curl --fail -s")],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr.decode() + ran.stdout.decode()
    out = ran.stdout.decode("utf-8")
    if "stream" in example:
        lines = [line for line in out.split("\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] <= 16
    elif "/v1/chat" in example:
        assert json.loads(out)["choices"][0]["message"]["role"] == "assistant"
    else:
        assert '"object":"text_completion"' in out
        assert '"status":"ok"' in out
        assert "dsv4_delivery_seconds_bucket" in out


def test_every_field_is_documented():
    from dsv4.http.apis.chat.request import ChatRequest
    from dsv4.http.apis.completions.request import CompletionRequest

    table = (DOCUMENT.parent / "fields.md").read_text(encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8") + table
    for name in {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"prompt"}:
        assert f"`{name}`" in text or f"`{name}." in text, name


def test_every_option_of_the_command_that_is_named_exists():
    from typer.main import get_command

    from dsv4.cli.main import app

    params = get_command(app).commands["serve"].params
    options = {name for option in params for name in (*option.opts, *option.secondary_opts)}
    named = set(re.findall(r"`(--[a-z-]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert named
    assert named <= options
