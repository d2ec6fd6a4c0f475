"""Connections that do not behave: requests that never come whole, too many of them, clients that leave or go on."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import subprocess
import sys
import time

import httpx
import pytest
from server_cases import NAME, chat_body, make_llm, start_server

from dsv4.http.errors import ApiError
from dsv4.http.gate import Gate
from dsv4.http.settings import ServerConfig, TlsFiles

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def hasty(served_params):
    """A server that does not wait long for the rest of a request, and wants a key."""
    server = start_server(
        make_llm(served_params), header_seconds=0.3, body_seconds=0.6, max_connections=20, api_key="k"
    )
    yield server
    server.wait_until_free()
    server.stop()


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(connection):
    """What comes until the server closes."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def refusal(data):
    """Status, the error's code, and whether the connection was announced to close."""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"], b"connection: close" in head.lower()


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (b"", 0.3),
        (b"POST /v1/chat/comp", 0.3),
        (HEAD, 0.3),
        (HEAD + b"Authorization: Bearer k\r\nContent-Length: 100\r\n\r\n", 0.6),
        (HEAD + b"Authorization: Bearer k\r\nContent-Length: 100\r\n\r\n{", 0.6),
        (HEAD + b"Authorization: Bearer k\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", 0.6),
    ],
)
def test_half_a_request_times_out(hasty, data, least):
    began = time.monotonic()
    with connect(hasty) as connection:
        connection.sendall(data)
        assert refusal(read_all(connection)) == (408, "timeout", True)
    assert least <= time.monotonic() - began + 0.01 < least + 3


def test_a_request_that_trickles_times_out(hasty):
    """A byte now and then does not start the clock again."""
    began = time.monotonic()
    with connect(hasty) as connection:
        connection.settimeout(0.05)
        answer = b""
        for byte in b"X-Slow: " + b"a" * 200:
            try:
                connection.sendall(bytes([byte]))
                answer = connection.recv(65536)
                break
            except TimeoutError:
                continue
        connection.settimeout(10)
        assert refusal(answer + read_all(connection))[:2] == (408, "timeout")
    assert time.monotonic() - began < 3


def test_a_second_request_is_timed_like_the_first(hasty):
    with connect(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in connection.recv(65536)
        time.sleep(0.5)  # longer than a head may take: between two requests there is no hurry
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 200") == 1
    assert data.count(b"HTTP/1.1 408") == 1


def test_a_refused_request_cannot_hold_its_connection_with_a_body(hasty):
    """Without the key the answer is 401 at once; a body that never ends is not waited for."""
    began = time.monotonic()
    with connect(hasty) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        data = read_all(connection)
    assert data.startswith(b"HTTP/1.1 401")
    assert data.count(b"HTTP/1.1") == 1, "one answer to one request"
    assert time.monotonic() - began < 3


def test_both_lengths_close_the_connection(hasty):
    both = HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer k\r\n\r\n0\r\n\r\n"
    with connect(hasty) as connection:
        connection.sendall(both + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = read_all(connection)
    assert refusal(data) == (400, "ambiguous_length", True)
    assert data.count(b"HTTP/1.1") == 1, "what followed was not taken for a request"


def test_nonsense_after_an_answer_has_begun(hasty, caplog):
    """Chunks that are none, once 401 is out: the connection ends, nobody is told twice, nothing is raised."""
    with connect(hasty) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        first = connection.recv(65536)
        connection.sendall(b"zz\r\nzz\r\n")
        rest = read_all(connection)
    assert first.startswith(b"HTTP/1.1 401")
    assert b"HTTP/1.1" not in rest
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_limit_of_connections(hasty):
    time.sleep(0.1)  # those of earlier tests are gone
    idle = [connect(hasty) for _ in range(20)]
    try:
        time.sleep(0.1)
        with connect(hasty) as one_more:
            assert refusal(read_all(one_more)) == (503, "too_many_connections", True)
        for connection in idle:  # they time out, and there is room again
            read_all(connection)
    finally:
        for connection in idle:
            connection.close()
    assert hasty.get("/health").status_code == 200


def test_a_client_that_leaves_while_sending_is_one_line(served_params, caplog):
    server = start_server(make_llm(served_params))
    logging.getLogger("dsv4").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        with connect(server) as connection:
            connection.sendall(HEAD + b"X-Request-Id: mine\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.2)
        time.sleep(0.3)
        lines = [record.getMessage() for record in caplog.records if "shutting down" not in record.getMessage()]
    server.stop()
    assert [line for line in lines if "mine" in line] == [f"mine {CHAT}: the client left while sending"]
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_long_conversation_is_refused_before_it_is_rendered(served_params):
    server = start_server(make_llm(served_params), max_messages=100)
    body = {**chat_body(), "messages": [{"role": "user", "content": "x"}] * 101}
    error = server.post(CHAT, body).json()["error"]
    assert error["message"] == "messages: at most 100 in one conversation, found 101"
    assert (error["param"], error["code"]) == ("messages", "too_many_messages")
    assert server.post(CHAT, {**body, "messages": body["messages"][:100]}).status_code == 200
    server.wait_until_free()
    server.stop()


def test_a_large_body_gives_its_memory_back(served_params, monkeypatch):
    given_back = []
    monkeypatch.setattr("dsv4.http.server.give_back_memory", lambda: given_back.append(1))
    server = start_server(make_llm(served_params))
    began = time.monotonic()
    for _ in range(3):
        error = server.chat("hello world " * 400_000).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "tokens or more; this model's maximum context length is 2048 (--context)" in error["message"]
    assert time.monotonic() - began < 5, "five million characters are not cut into tokens to be refused"
    assert len(given_back) == 3
    server.chat()
    assert len(given_back) == 3
    server.wait_until_free()
    server.stop()


# ---- names, ids, defaults ----


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        ({}, ["localhost", "127.0.0.1:99", "127.0.0.2", "[::1]:80"], ["api.example.org", "127.0.0.1.example.org"]),
        ({"host": "127.0.0.2"}, ["127.0.0.2", "127.0.0.2:8000", "localhost"], ["api.example.org"]),
        ({"allowed_hosts": ("API.example.org",)}, ["api.example.org", "api.example.org:443"], ["example.org"]),
        ({"allowed_hosts": ("*",)}, ["anything.example"], []),
        ({"host": "0.0.0.0"}, ["anything.example"], []),
        ({"host": "0.0.0.0", "allowed_hosts": ("api.example.org",)}, ["api.example.org", "127.0.0.1"], ["example.org"]),
    ],
)  # fmt: skip
def test_host_names(served_params, settings, good, bad):
    gate = Gate(None, ServerConfig(name="x", **settings), None)
    for host in good:
        gate._check_host(host)
    for host in bad:
        with pytest.raises(ApiError, match="--allowed-host"):
            gate._check_host(host)


def test_request_ids(live):
    assert live.get("/health", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    made = {
        live.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 129)
    }
    assert len(made) == 3
    assert all(len(one) == 24 and one.isalnum() for one in made)
    assert live.post(CHAT, {}).headers["x-request-id"], "errors have one too"
    assert live.get("/nowhere").headers["x-request-id"]


def test_defaults_of_the_checkpoint(served_params):
    server = start_server(make_llm(served_params), sampling_defaults={"temperature": 0.0, "top_k": 7}, root="x")
    card = server.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"]) == (NAME, "x")
    assert card["default_sampling_params"] == {"temperature": 0.0, "top_k": 7}
    greedy = [server.chat(seed=seed).json()["choices"][0]["message"]["content"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    drawn = [
        server.chat(seed=seed, temperature=1.0, top_k=0).json()["choices"][0]["message"]["content"] for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1]
    server.wait_until_free()
    server.stop()


def test_readiness_and_liveness(served_params):
    server = start_server(make_llm(served_params))
    assert (server.get("/health").status_code, server.get("/ready").status_code) == (200, 200)
    server.app.state.server.engine.drain()
    for path, status in (("/ready", 503), ("/health", 200)):
        response = server.get(path)
        assert (response.status_code, response.json()) == (status, {"status": "stopping"})
    server.stop()


def test_an_engine_whose_thread_has_died(served_params):
    server = start_server(make_llm(served_params))
    server.engine._call(sys.exit)  # ends the thread that carries it out
    server.engine_thread._thread.join(10)
    for path in ("/ready", "/health"):
        response = server.get(path)
        assert (response.status_code, response.json()) == (503, {"status": "failed"})
    answer = server.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
    assert server.get("/metrics").status_code == 200, "with the last numbers there are"
    server.stop()


def test_https(served_params, tmp_path):
    """With a certificate made for the occasion; needs the program openssl."""
    files = [tmp_path / "key.pem", tmp_path / "cert.pem"]
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files[0], "-out", files[1],
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    server = start_server(make_llm(served_params), tls=TlsFiles(certfile=str(files[1]), keyfile=str(files[0])))
    assert server.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=files[1])
    assert httpx.get(f"{server.url}/health", verify=context).json() == {"status": "ok"}
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url.replace('https', 'http')}/health")
    server.stop()
