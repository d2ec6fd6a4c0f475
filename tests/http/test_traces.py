"""Traces of requests: what a collector on loopback receives, and what is said where there can be none."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server_cases import HEADERS, chat_body, make_llm, start_server

from dsv4.http.telemetry import traces
from dsv4.http.telemetry.traces import ENDPOINTS, Tracer

CHAT = "/v1/chat/completions"
PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector:
    """As much of one as an exporter needs: bodies of POST /v1/traces."""

    def __init__(self):
        self.bodies = bodies = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.stop()


def test_spans_of_requests(collector, served_params, monkeypatch):
    """Queue, prefill and decode follow one another inside the request, under the client's own span."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `traces` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv(ENDPOINTS[0], collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    server = start_server(make_llm(served_params))
    headers = {**HEADERS, "traceparent": f"00-{PARENT}-00f067aa0ba902b7-01", "x-request-id": "mine"}
    answer = server.client.post(CHAT, json=chat_body(max_tokens=5, ignore_eos=True), headers=headers, timeout=60)
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    server.client.post(CHAT, json=chat_body(max_tokens=1), timeout=60)
    server.stop()
    spans = []
    for path, body in collector.bodies:
        assert path == "/v1/traces"
        found = ExportTraceServiceRequest.FromString(body)
        spans += [span for one in found.resource_spans for scope in one.scope_spans for span in scope.spans]
    assert len(spans) == 8
    mine = [span for span in spans if span.trace_id.hex() == PARENT]
    root = next(span for span in mine if span.name == f"POST {CHAT}")
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    values = {one.key: one.value for one in root.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert values["gen_ai.usage.output_tokens"].int_value == 5
    assert values["dsv4.request_id"].string_value == "mine"
    queue, prefill, decode = (next(span for span in mine if span.name == name) for name in
                              ("queue", "prefill", "decode"))  # fmt: skip
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {root.span_id}
    times = [root.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano,
             prefill.start_time_unix_nano, prefill.end_time_unix_nano, decode.start_time_unix_nano,
             decode.end_time_unix_nano, root.end_time_unix_nano]  # fmt: skip
    assert times == sorted(times)
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(traces, "_is_installed", lambda name: False)
    monkeypatch.setattr(traces._LOG, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_nobody_asked(monkeypatch, said):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert Tracer.make("m") is None
    assert said == []


def test_without_the_sdk_the_log_says_how_to_get_it(monkeypatch, said):
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:9")
    assert Tracer.make("m") is None
    (line,) = said
    assert "no traces are sent" in line
    assert "[traces]" in line
