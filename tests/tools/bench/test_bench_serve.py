"""`dsv4 bench serve`: loads are the same for a seed, times are the caller's, failures are told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli.main import app
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.synth import random_params
from dsv4.tools.bench.serve import EngineTarget, Load, Timeline, UrlTarget, measure_load

CONFIG = ModelConfig.tiny(num_hidden_layers=1, compress_ratios=(0, 0), vocab_size=1000)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, dequantize_to=torch.float32)


def engine_target(params, num_requests=3):
    limits = EngineConfig(max_context_tokens=64, max_concurrent_requests=num_requests)
    llm = LLM.from_params(CONFIG, params, numerics="exact", engine=limits)
    return EngineTarget(llm.engine, "here"), llm


@pytest.mark.parametrize("rate", [None, 200.0])
def test_every_request_gets_all_its_tokens(params, rate):
    target, llm = engine_target(params)
    done = []
    load = Load(requests=7, concurrency=2, rate=rate, prompt_tokens=9, output_tokens=5)
    report, timelines = measure_load(target, load, lambda: done.append(1))
    assert [len(one.tokens) for one in timelines] == [5] * 7
    assert all(one.tokens == sorted(one.tokens) and one.tokens[0] >= one.started for one in timelines)
    assert (len(done), report.failed, report.first_error) == (7, 0, None)
    assert report.total_tokens_per_second == pytest.approx(report.tokens_per_second * 14 / 5)
    assert 0 < report.host_share <= 1
    assert llm.engine.stats().num_finished == 7
    json.dumps(report.to_dict())


def test_a_closed_loop_keeps_its_number(params):
    target, llm = engine_target(params, num_requests=3)
    step, running = llm.engine.step, []

    def watched():
        results = step()
        running.append(llm.engine.stats().num_running + llm.engine.stats().num_waiting)
        return results

    llm.engine.step = watched
    measure_load(target, Load(requests=6, concurrency=2, prompt_tokens=4, output_tokens=4))
    assert max(running) == 2


def test_loads_are_the_same_for_a_seed():
    load = Load(requests=50, rate=10.0, seed=3)
    assert (load.prompts(), load.arrivals()) == (load.prompts(), load.arrivals())
    assert load.prompts() != Load(requests=50, seed=4).prompts()
    assert load.arrivals() == sorted(load.arrivals())
    assert load.arrivals()[-1] == pytest.approx(5, rel=0.5)


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"rate": 0.0}, {"rate": -1.0}, {"prompt_tokens": 0}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
        Load(**wrong)


class Server(BaseHTTPRequestHandler):
    """Three chunks to every request, an error to the second."""

    asked: list = []  # noqa: RUF012

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "theirs"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((body, self.headers.get("Authorization")))
        if len(self.asked) == 2:
            self.send_error(503, "busy")
            return
        self.send_response(200)
        self.end_headers()
        for text in ("a", "b", "c"):
            chunk = {"choices": [{"text": text, "finish_reason": "length" if text == "c" else None}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')


@pytest.fixture
def url():
    Server.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_any_server(url):
    target = UrlTarget(url, api_key="secret")
    report, timelines = measure_load(target, Load(requests=4, concurrency=1, prompt_tokens=3, output_tokens=3))
    assert [len(one.tokens) for one in timelines] == [3, 0, 3, 3]
    assert report.failed == 1
    assert "503" in report.first_error
    body, key = Server.asked[0]
    assert (body["model"], len(body["prompt"]), body["stream"], key) == ("theirs", 3, True, "Bearer secret")
    assert report.host_share is None


def test_the_command(url, tmp_path):
    Server.asked = [None, None]  # no error this time
    arguments = ["bench", "serve", "--url", url, "--requests", "3", "--concurrency", "2", "--output", "3"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "first token" in shown.output
    assert "tokens/s out" in shown.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert (found["kind"], found["failed"], found["load"]["requests"]) == ("serve", 0, 3)


def test_a_server_that_is_not_there():
    with pytest.raises(ConfigError, match="does not answer as an OpenAI server"):
        UrlTarget("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--url must be like"):
        UrlTarget("127.0.0.1:8000")


def test_nothing_came():
    class Silent:
        name = "silent"

        def run(self, load, on_done):
            return [Timeline(0.0, error="no")]

        def host_share(self):
            return None

    report, _ = measure_load(Silent(), Load(requests=1))
    assert (report.failed, report.tokens_per_second, report.first_token_ms) == (1, 0.0, {})
