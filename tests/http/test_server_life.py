"""Health, metrics, the live view, keys, queue, vanishing clients and failing requests."""

import json
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_cases import NAME, TWO_LAYERS, chat_body, make_llm, start_server

from dsv4.config import ConfigError
from dsv4.http.engine_side import engine_loop
from dsv4.http.settings import ServerConfig

CHAT = "/v1/chat/completions"


@pytest.fixture
def start(served_params):
    servers = []

    def make(limits=None, **settings):
        servers.append(start_server(make_llm(served_params, **(limits or {})), **settings))
        return servers[-1]

    yield make
    for server in servers:
        if server.thread.is_alive():
            server.wait_until_free()
            server.stop()


def metrics_of(server):
    """Without the label that names the model, which every metric has."""
    return {
        (sample.name, *sorted(pair for pair in sample.labels.items() if pair != ("model_name", NAME))): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }


def read_lines(response, count):
    return [line for line, _ in zip(response.iter_lines(), range(count), strict=False)]


# ---- looking ----


def test_health_and_metrics(live):
    assert live.get("/health").json() == {"status": "ok"}
    before = metrics_of(live)
    with live.client.stream("POST", CHAT, json=chat_body(max_tokens=6, ignore_eos=True, stream=True)) as response:
        response.read()
    after = metrics_of(live)

    def grown(name, *labels):
        return after[(name, *labels)] - before.get((name, *labels), 0)

    assert grown("dsv4_generation_tokens_total") == 6
    assert grown("dsv4_prompt_tokens_total") > 0
    assert grown("dsv4_steps_total") == 6
    assert grown("dsv4_requests_finished_total") == 1
    assert grown("dsv4_time_to_first_token_seconds_count") == 1
    assert grown("dsv4_inter_token_latency_seconds_count") == 5
    assert 1 <= grown("dsv4_delivery_seconds_count") <= 6
    assert grown("dsv4_http_responses_total", ("route", CHAT), ("status", "200")) == 1
    assert after[("dsv4_num_requests_running",)] == after[("dsv4_num_requests_waiting",)] == 0
    assert after[("dsv4_cache_blocks_used",)] == 0
    assert after[("dsv4_cache_blocks",)] == live.llm.cache.schema.num_blocks
    assert after[("dsv4_num_preemptions_total",)] == 0


def test_unknown_addresses_do_not_make_metrics(live):
    for path in ("/a", "/b", "/v1/models/x"):
        live.get(path)
    routes = {label[1] for key in metrics_of(live) for label in key[1:] if label[0] == "route"}
    assert {"other", "/v1/models/{name}"} <= routes
    assert not routes & {"/a", "/b", "/v1/models/x"}


def test_the_live_view(two_layer_params):
    server = start_server(make_llm(two_layer_params, TWO_LAYERS))
    server.get("/live")  # from now on experts are counted
    stop = threading.Event()

    def generate():
        with server.client.stream("POST", CHAT, json=chat_body("x" * 200, max_tokens=400, stream=True)) as response:
            for _ in response.iter_lines():
                if stop.is_set():
                    return

    thread = threading.Thread(target=generate)
    thread.start()
    deadline = time.monotonic() + 20
    while (view := server.get("/live").json())["output_tokens"] < 5:
        assert time.monotonic() < deadline
    stop.set()
    thread.join()
    assert (view["running"], view["slots"], view["model"]) == (1, 8, NAME)
    assert view["blocks_used"] == 2
    assert len(view["experts"]) == 2
    assert all(len(row) == 4 and row.isdigit() for row in view["experts"])
    assert "9" in "".join(view["experts"])
    kinds = {kind["name"]: kind for kind in view["cache"]}
    schema = server.llm.cache.schema
    by_block = sum(kind["used_bytes"] for kind in kinds.values() if kind["unit"] == "block")
    by_request = sum(kind["used_bytes"] for kind in kinds.values() if kind["unit"] == "request")
    assert by_block == 2 * schema.bytes_per_block
    assert by_block + by_request == schema.request_bytes(2 * 128)
    server.wait_until_free()
    observers, mine = server.llm.engine.observers, []
    assert len(observers) == 1, "still watched"
    observers.append(mine.append)
    deadline = time.monotonic() + 20
    while len(observers) > 1:  # the view looks away a few seconds after the last question
        server.chat()
        assert time.monotonic() < deadline
    server.chat()
    assert observers == [mine.append], "nobody looks: nothing is counted; another's observer stays"
    assert mine
    assert set("".join(server.get("/live").json()["experts"])) == {"0"}, "nothing of the last watch is left"
    server.stop()


def test_the_openapi_document(live):
    document = live.get("/openapi.json").json()
    assert set(document["paths"]) == {
        CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
        "/detokenize", "/v1/models", "/v1/models/{name}", "/version", "/live", "/health", "/ready", "/metrics", "/",
        "/server_info", "/get_server_info",
    }  # fmt: skip
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


# ---- keys and settings ----


def test_an_api_key(start):
    server = start(api_key="s3cret")
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
        {"authorization": b"Bearer \xff"},
    ):
        for path in ("/v1/models", "/live"):
            response = server.get(path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert server.client.post(CHAT, json=chat_body(), headers=headers).status_code == 401
    good = {"authorization": "Bearer s3cret"}
    assert server.get("/v1/models", headers=good).status_code == 200
    assert server.client.post(CHAT, json=chat_body(), headers=good, timeout=30).status_code == 200
    twice = [("authorization", "Bearer s3cret"), ("authorization", "Bearer s3cret")]
    assert server.get("/v1/models", headers=twice).status_code == 401
    assert server.get("/health").status_code == server.get("/").status_code == 200


@pytest.mark.parametrize(
    "settings",
    [{"name": ""}, {"port": 70000}, {"port": True}, {"api_key": ""}, {"api_key": "é"}, {"max_answer_bytes": 0},
     {"max_body_bytes": -1}, {"drain_seconds": 0}, {"max_output_tokens": 0}, {"stall_seconds": float("nan")}],
)  # fmt: skip
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**{"name": "x", **settings})


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_loopback(host, is_loopback):
    assert ServerConfig(name="x", host=host).is_loopback is is_loopback
    assert ServerConfig(name="x").is_loopback


def test_a_server_needs_a_tokenizer(served_params):
    llm = make_llm(served_params)
    llm.tokenizer = None
    with pytest.raises(ValueError, match="tokenizer"):
        engine_loop(llm)


def test_the_longest_answer(start):
    server = start(max_output_tokens=5)
    assert "this server allows 5" in server.chat(max_tokens=6).json()["error"]["message"]
    body = chat_body(ignore_eos=True)
    del body["max_tokens"]
    assert server.post(CHAT, body).json()["usage"]["completion_tokens"] == 5


# ---- clients that go, requests that fail, a queue that is full ----


def test_a_client_that_goes_frees_its_request(live):
    before = live.engine.engine.stats().num_aborted
    with live.client.stream("POST", CHAT, json=chat_body(max_tokens=1500, ignore_eos=True, stream=True)) as response:
        assert len(read_lines(response, 8)) == 8
        assert live.engine.num_open == 1
    live.wait_until_free(5)
    with pytest.raises(httpx.ReadTimeout):
        live.client.post(CHAT, json=chat_body(max_tokens=1500, ignore_eos=True), timeout=0.5)
    live.wait_until_free(5)
    assert live.engine.engine.stats().num_aborted == before + 2


def test_a_failing_request_ends_with_an_error(start, monkeypatch):
    server = start()
    logits, poison = server.llm.model.logits, threading.Event()

    def poisoned(streams):
        values = logits(streams)
        return values * float("nan") if poison.is_set() else values

    monkeypatch.setattr(server.llm.model, "logits", poisoned)
    with server.client.stream("POST", CHAT, json=chat_body(max_tokens=500, ignore_eos=True, stream=True)) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        poison.set()
        rest = [line for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert "NaN" in error["message"]
    assert error["code"] == "request_failed"
    response = server.chat()
    assert response.status_code == 500
    assert "NaN" in response.json()["error"]["message"]
    poison.clear()
    assert server.chat().status_code == 200


def test_a_full_queue_is_said(start):
    server = start(limits={"max_concurrent_requests": 1}, max_waiting=1)
    bodies = chat_body(max_tokens=1000, ignore_eos=True, stream=True)
    with (
        server.client.stream("POST", CHAT, json=bodies) as first,
        server.client.stream("POST", CHAT, json=bodies) as second,
    ):
        assert first.status_code == second.status_code == 200
        response = server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
    server.wait_until_free()
    assert server.chat().status_code == 200
