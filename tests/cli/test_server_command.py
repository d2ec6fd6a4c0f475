"""`dsv4 serve` as a process: it starts, answers, finishes what runs when told to stop, and refuses what cannot be."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from server_cases import HEADERS

from dsv4.cli.serve import command as command_module
from dsv4.config import EngineConfig, ModelConfig
from dsv4.http.processes.supervisor import Supervisor
from dsv4.request import RequestError
from dsv4.tools.memory_check import check_gpu_memory

BODY = {"model": "small", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}


def test_a_process_serves_and_stops_gracefully(start):
    """On IPv6, with a log of JSON lines. A request that runs is finished; one that came by half is not waited for."""
    running, url, log = start("--host", "::1", "--log-format", "json")
    assert url.startswith("http://[::1]:")
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"][0]["id"] == "small"
    half = socket.create_connection(("::1", int(url.rpartition(":")[2])), timeout=30)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n")
    half.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**BODY, "max_tokens": 60, "stream": True},
        headers={**HEADERS, "x-request-id": "mine"}, timeout=60,
    ) as response:  # fmt: skip
        assert response.headers["x-request-id"] == "mine"
        lines = response.iter_lines()
        next(lines)
        running.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert running.wait(15) == 0, "the drain of 60 s was not waited for"
    half.close()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    request = next(record for record in records if record.get("request_id") == "mine")
    assert (request["output_tokens"], request["reason"], request["level"]) == (60, "length", "info")
    assert request["seconds"] >= request["first_token_seconds"] > 0
    assert request["tokens_per_second"] > 0
    assert not any("traceback" in record for record in records)


def ask_in_threads(url, *bodies):
    """Send each body from a thread; the texts of the answers appear in the list that is returned."""
    answers = [None] * len(bodies)

    def ask(place):
        answers[place] = httpx.post(f"{url}/v1/chat/completions", json=bodies[place], headers=HEADERS, timeout=60)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    return answers, threads


def wait_until_running(url, number):
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/live", headers=HEADERS).json()["running"] < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_finished_is_told_so(start):
    running, url, log = start("--drain-seconds", "2")
    long = {**BODY, "max_tokens": 4000}
    answers, threads = ask_in_threads(url, long, {**long, "stream": True})
    wait_until_running(url, 2)
    began = time.monotonic()
    running.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    refused = httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=HEADERS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "takes no more requests" in refused.json()["error"]["message"]
    assert httpx.get(f"{url}/ready").status_code == 503
    alive = httpx.get(f"{url}/health")
    assert (alive.status_code, alive.json()) == (200, {"status": "stopping"})
    assert running.wait(20) == 0
    assert time.monotonic() - began < 15
    for thread in threads:
        thread.join()
    whole, stream = answers
    assert whole.status_code == 503
    last = [line for line in stream.text.splitlines() if line][-1]
    for error in (whole.json()["error"], json.loads(last.removeprefix("data: "))["error"]):
        assert error["code"] == "shutting_down"
        assert "could not finish this request; send it again" in error["message"]
    text = log.read_text()
    assert "2 requests are dropped" in text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 20


def test_more_connections_than_descriptors(start):
    """Half-sent requests take every descriptor there is: the server says so in a few lines, and others get through."""
    running, url, log = start(descriptors=100)
    port = int(url.rpartition(":")[2])
    halves = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(150)]
    for half in halves:
        with contextlib.suppress(OSError):  # some were told that there is no room
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
    time.sleep(2)
    assert running.poll() is None
    for half in halves:
        half.close()
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
    text = log.read_text()
    assert "this process may open 100 files" in text
    assert "further ones are refused" in text
    assert "Traceback" not in text
    assert len(text.splitlines()) < 30


# ---- before anything slow ----


@pytest.fixture
def no_loading(monkeypatch):
    """Reading weights is a mistake here."""

    def load(*arguments, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr("dsv4.engine.ranks.load.load_params", load)


def refused(ran, *words):
    assert ran.code == 2, ran.err
    assert ran.err.startswith("dsv4: error: ")
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err, ran.err


@pytest.mark.usefixtures("no_loading")
def test_an_address_that_cannot_be_had(dsv4, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(dsv4("serve", "--model", checkpoint, "--port", port), f"127.0.0.1 port {port} is in use", "--port")
    refused(dsv4("serve", "--model", checkpoint, "--host", "no.such.host.invalid"), "no.such.host.invalid")
    refused(dsv4("serve", "--model", checkpoint, "--host", "192.0.2.1"), "192.0.2.1", "--host")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("command", [["chat"], ["generate", "x"]])
def test_too_little_memory_is_a_sentence(dsv4, checkpoint, monkeypatch, command):
    monkeypatch.setattr("dsv4.tools.memory_check.free_host_bytes", lambda: 1000)
    refused(
        dsv4(*command, "--model", checkpoint), "requests of 16384 tokens takes", "free: lower --requests or --context"
    )


def test_memory_that_runs_out_all_the_same(dsv4, checkpoint, monkeypatch):
    def load(*arguments, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 10 bytes")

    monkeypatch.setattr("dsv4.engine.ranks.load.load_params", load)
    refused(dsv4("generate", "x", "--model", checkpoint), "no room for the model", "lower --requests")


@pytest.mark.usefixtures("no_loading")
def test_what_does_not_fit_this_machine(dsv4, checkpoint, monkeypatch):
    """The nearest settings that fit are named, and taken."""
    monkeypatch.setattr("dsv4.tools.auto.machine.free_host_bytes", lambda: 8 << 30)
    serve = ("serve", "--host", "no.such.host.invalid", "--model", checkpoint)
    asked = dsv4(*serve, "--requests", "10000000")
    refused(asked, "the cache of 10000000 requests", "GiB free (--memory 0.92)", "What fits: --requests ")
    fewer = asked.err.partition("fits: --requests ")[2].partition(";")[0]
    refused(dsv4(*serve, "--requests", fewer), "no.such.host.invalid")  # what is looked at next
    if not Path("/dev/nvidiactl").exists():
        refused(dsv4(*serve, "--device", "cuda"), "--device cuda: this machine has no NVIDIA GPU", "to use the CPU")
    monkeypatch.setattr("dsv4.tools.auto.machine.free_host_bytes", lambda: 1000)
    refused(dsv4(*serve), "this machine has 0.0 MiB free", "No setting fits here")


def test_memory_of_a_gpu(checkpoint):
    """By arithmetic: what is free on the GPU is given."""
    config, limits = (
        ModelConfig.from_pretrained(checkpoint),
        EngineConfig(max_context_tokens=1024, prefix_cache_bytes=0),
    )
    check = partial(check_gpu_memory, checkpoint, config, limits, numerics="official", dtype=None)
    check(2**40, keeps_experts=True)
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    with pytest.raises(RequestError, match="the GPU has .* --offload-experts auto"):
        check(weights, keeps_experts=True)
    check(weights, keeps_experts=False)
    with pytest.raises(RequestError, match="lower --requests or --context"):
        check(1000, keeps_experts=False)


def test_an_empty_key_is_no_key(dsv4, checkpoint, monkeypatch):
    monkeypatch.setenv("DSV4_API_KEY", "")
    refused(dsv4("serve", "--model", checkpoint), "DSV4_API_KEY is empty")


@pytest.mark.usefixtures("no_loading")
def test_certificates_are_checked_first(dsv4, checkpoint, tmp_path):
    refused(dsv4("serve", "--model", checkpoint, "--ssl-keyfile", "k.pem"), "--ssl-keyfile needs --ssl-certfile")
    refused(dsv4("serve", "--model", checkpoint, "--ssl-certfile", tmp_path / "c.pem"), "c.pem does not exist")
    (tmp_path / "c.pem").write_text("no certificate")
    refused(dsv4("serve", "--model", checkpoint, "--ssl-certfile", tmp_path / "c.pem"), "not a PEM certificate")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "99999"), "--port must be from 0 to 65535"),
        (("--requests", "0"), "--requests must be"),
        (("--context", "10000000"), "max_position_embeddings"),
        (("--numerics", "fast"), "--numerics must be one of official, exact"),
        (("--max-waiting", "0"), "--max-waiting must be"),
        (("--api-key", "ü"), "--api-key must be ASCII"),
        (("--allowed-host", "a b"), "--allowed-host must be names"),
        (("--max-connections", "0"), "--max-connections must be"),
        (("--log-format", "xml"), "--log-format must be one of text, json"),
        (("--threads", "0"), "--threads must be at least 1"),
    ],
)
def test_impossible_options(dsv4, checkpoint, options, message):
    ran = dsv4("serve", "--model", checkpoint, *options)
    assert ran.code == 2
    assert message in ran.err


def test_a_shipped_model_is_known_under_any_name(dsv4, checkpoint, monkeypatch):
    """The page introduces the miniature; what another checkpoint's folder is called stays here."""
    seen = []
    monkeypatch.setattr(Supervisor, "run", lambda self: seen.append(self._server) or 0)
    monkeypatch.setattr(command_module.logging.config, "dictConfig", lambda settings: None)
    for folder, root in (("flash-mini", "flash-mini"), (checkpoint, None)):
        assert dsv4("serve", folder, "--name", "mine", "--port", "0", "--device", "cpu").code == 0
        assert (seen[-1].name, seen[-1].root) == ("mine", root)


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
    assert (ran.code, "needs uvicorn: pip install -e '.[serve]'" in ran.err) == (2, True)
