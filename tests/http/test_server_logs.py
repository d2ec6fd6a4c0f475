"""What the server says of itself: lines, metrics, the dashboard that shows them."""

import json
import logging
import re
import time
from pathlib import Path

import pytest
from server_cases import NAME, chat_body, make_llm, start_server

from dsv4.engine.link.throughput import ThroughputLog
from dsv4.http.telemetry.logs import JsonFormatter, RepeatFilter, TextFormatter

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


def record(message, *values, level=logging.INFO, **fields):
    made = logging.LogRecord("dsv4.serve", level, "file", 1, message, values, None)
    if fields:
        made.fields = fields
    return made


def test_lines():
    text = TextFormatter().format(record("%d things", 3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO 3 things", text)
    parsed = json.loads(JsonFormatter().format(record("é %d\n", 3, request_id="x")))
    assert (parsed["message"], parsed["level"], parsed["request_id"]) == ("é 3\n", "info", "x")
    assert "\n" not in JsonFormatter().format(record("a\nb"))
    try:
        raise ValueError("why")
    except ValueError as error:
        failed = record("no")
        failed.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: why" in json.loads(JsonFormatter().format(failed))["traceback"]


def test_repeats_are_left_out_and_counted():
    now = 0.0
    limit = RepeatFilter(lambda: now)
    assert [limit.filter(record("client %d is slow", number)) for number in range(100)] == [True] * 5 + [False] * 95
    assert limit.filter(record("another kind"))
    assert all(limit.filter(record("a request", request_id=str(number))) for number in range(100))
    now = 11.0
    late = record("client %d is slow", 7)
    assert limit.filter(late)
    assert late.getMessage() == "client 7 is slow (95 more like it before)"
    for number in range(10_000):
        limit.filter(record(f"kind {number}"))
    assert len(limit._seen) <= 256


@pytest.fixture
def lines(caplog):
    """Messages of the server's own logger, with their fields."""
    logging.getLogger("dsv4").setLevel(logging.INFO)
    caplog.set_level(logging.INFO, logger="dsv4.serve")
    return lambda: [(one.getMessage(), one.__dict__.get("fields", {})) for one in caplog.records]


def test_a_line_for_every_request(live, lines):
    live.client.post(CHAT, json=chat_body(max_tokens=5, ignore_eos=True, n=2), headers={"x-request-id": "whole"})
    with live.client.stream(
        "POST", CHAT, json=chat_body(max_tokens=5, ignore_eos=True, stream=True), headers={"x-request-id": "stream"}
    ) as response:
        response.read()
    with live.client.stream(
        "POST", CHAT, json=chat_body(max_tokens=1500, ignore_eos=True, stream=True), headers={"x-request-id": "left"}
    ) as response:
        next(response.iter_lines())
    live.wait_until_free()
    live.get("/health")  # a round trip later the line is written
    live.post(CHAT, {})  # refused: no line
    fields = {one["request_id"]: one for _, one in lines() if "request_id" in one}
    assert set(fields) == {"whole", "stream", "left"}
    assert (fields["whole"]["output_tokens"], fields["whole"]["reason"]) == (10, "length")
    assert (fields["stream"]["output_tokens"], fields["stream"]["route"]) == (5, CHAT)
    assert fields["left"]["reason"] == "disconnected"
    for one in fields.values():
        assert one["prompt_tokens"] > 0
        assert one["cached_tokens"] == 0
        assert one["seconds"] > 0
    assert any(text.startswith(f"stream {CHAT}: ") and text.endswith("tokens/s, length") for text, _ in lines())


def test_throughput_is_told_while_something_runs(served_params, lines, caplog):
    server = start_server(make_llm(served_params))
    caplog.set_level(logging.INFO, logger="dsv4.engine")  # the server has set its own
    loop = server.engine
    loop._throughput = ThroughputLog(loop.engine.stats(), seconds=0.05)
    time.sleep(0.2)
    server.get("/health")
    assert not any("running" in text for text, _ in lines()), "nothing runs, nothing is said"
    with server.client.stream(
        "POST", CHAT, json=chat_body(max_tokens=2000, ignore_eos=True, stream=True)
    ) as response:  # fmt: skip
        deadline = time.monotonic() + 20
        for _ in response.iter_lines():
            if any("1 running, 0 waiting" in text and one["output_tokens_per_second"] > 0 for text, one in lines()):
                break
            assert time.monotonic() < deadline
    server.wait_until_free()
    server.stop()


def exported(live):
    return set(re.findall(r"^(dsv4_\w+)(?:\{| )", live.get("/metrics").text, re.MULTILINE))


def test_the_dashboard_asks_for_metrics_there_are(live):
    live.chat()
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    asked = {name for panel in board["panels"] for one in panel["targets"]
             for name in re.findall(r"dsv4_\w+", one["expr"])}  # fmt: skip
    assert len(asked) >= 15
    assert asked - exported(live) == set()
    assert all('model_name="$model_name"' in one["expr"] for panel in board["panels"] for one in panel["targets"])
    assert f'model_name="{NAME}"' in live.get("/metrics").text
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_documented_metrics_exist(live):
    """The table of names in docs/serving.md, ours and vLLM's, which differ in the prefix alone."""
    live.chat()
    rows = re.findall(
        r"^\| `(dsv4_\w+)` \| `vllm:(\w+)` \|", (ROOT / "docs" / "serving.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) >= 8
    stems = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported(live)}
    # one with labels has no sample before it has something to count
    stems |= set(re.findall(r"^# TYPE (dsv4_\w+)", live.get("/metrics").text, re.MULTILINE))
    for ours, theirs in rows:
        assert ours == f"dsv4_{theirs}"
        assert ours in stems, ours
