"""Connections that do not behave: requests that never come whole, too many of them, clients that leave or go on."""

from __future__ import annotations

import json
import logging
import socket
import time

import pytest
from server_cases import chat_body, make_llm, start_server

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
    assert b"408" not in data, "one answer to one request"
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
