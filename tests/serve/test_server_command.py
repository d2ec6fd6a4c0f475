"""`dsv4 serve` as a process: it starts, answers, finishes what runs when told to stop, and refuses what cannot be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def process(checkpoint, tmp_path):
    """A running `dsv4 serve` and its address."""
    log = tmp_path / "log"
    with log.open("w") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", "dsv4", "serve", "--model", str(checkpoint), "--port", "0", "--context", "1024",
             "--drain-seconds", "30"],
            cwd=ROOT, stderr=file, env={**os.environ, "DSV4_API_KEY": "k"},
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while "running on http" not in (text := log.read_text()):
        assert started.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    yield started, text.partition("running on ")[2].split()[0], log
    if started.poll() is None:
        started.kill()
        started.wait()


def test_a_process_serves_and_stops_gracefully(process):
    running, url, log = process
    headers = {"authorization": "Bearer k"}
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "small"
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, headers=headers, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        running.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert running.wait(30) in (0, -signal.SIGTERM)
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "99999"), "port must be from 0 to 65535"),
        (("--requests", "0"), "max_concurrent_requests"),
        (("--context", "10000000"), "max_position_embeddings"),
        (("--numerics", "fast"), "--numerics must be one of official, exact"),
        (("--max-waiting", "0"), "max_waiting"),
        (("--api-key", "ü"), "api_key must be ASCII"),
    ],
)
def test_impossible_options(dsv4, checkpoint, options, message):
    ran = dsv4("serve", "--model", checkpoint, *options)
    assert ran.code == 2
    assert message in ran.err


def test_no_model(dsv4, tmp_path):
    ran = dsv4("serve", "--model", tmp_path / "nothing")
    assert (ran.code, "does not exist" in ran.err) == (2, True)


def test_no_tokenizer(dsv4, checkpoint, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer.json"))
    for command in ("serve", "chat"):
        ran = dsv4(command, "--model", folder)
        assert ran.code == 2
        assert "no tokenizer.json" in ran.err


def test_missing_libraries_are_named(dsv4, checkpoint, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name, *rest)
    )
    ran = dsv4("serve", "--model", checkpoint)
    assert (ran.code, "needs uvicorn: pip install 'dsv4[serve]'" in ran.err) == (2, True)
