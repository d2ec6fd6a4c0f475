"""A client that takes nothing: what waits for it is bounded, and its connection is closed."""

import asyncio
import json
import os
import socket
import time

import pytest
from server_cases import NAME, TOKENIZER, TWO_LAYERS, make_llm, start_server

from benchmarks.free_model import FREE_CONFIG, free_llm
from benchmarks.server import whole_tokenizer
from benchmarks.storm import NUM_KINDS, question
from benchmarks.storm_clients import Storm
from dsv4.config import EngineConfig
from dsv4.request import SamplingParams
from dsv4.text.chat import ChatOptions
from dsv4.text.parse import parse_completion
from dsv4.text.tokenizer import Tokenizer, encode_chat

MAX_TOKENS = 15_000


@pytest.fixture(scope="module")
def server():
    """Over a model that costs nothing, so that socket buffers are full in a moment."""
    limits = EngineConfig(max_context_tokens=16_384, max_concurrent_requests=2)
    llm = free_llm(limits, Tokenizer(whole_tokenizer(FREE_CONFIG.vocab_size), "words"))
    started = start_server(llm, stall_seconds=0.5)
    started.app.state.server._clock._tick_seconds = 0.1
    for one in started.uvicorn.servers[0].sockets:  # connections take over the size
        with socket.socket(fileno=os.dup(one.fileno())) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    yield started
    started.stop()


def ask(server, receive_bytes):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    body = json.dumps({
        "model": NAME, "prompt": [5], "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True,
    })  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def test_its_connection_is_closed_and_its_request_dropped(server):
    aborted = server.engine.engine.stats().num_aborted
    connection = ask(server, 4096)
    deadline = time.monotonic() + 30
    while not any(one.is_full for one in server.uvicorn.server_state.connections):
        assert time.monotonic() < deadline, "its socket never was full"
        time.sleep(0.01)
    (held,) = server.uvicorn.server_state.connections
    assert held.transport.get_write_buffer_size() < 2**20, "what it has not taken waits as token ids"
    while server.uvicorn.server_state.connections:
        assert time.monotonic() < deadline, "the connection is still open"
        time.sleep(0.01)
    server.wait_until_free()
    assert server.engine.engine.stats().num_aborted - aborted in (0, 1), "the engine may have been done before"
    received = bytearray()
    while piece := connection.recv(1 << 20):
        received += piece
    assert b"[DONE]" not in received
    connection.close()


def test_one_that_reads_late_gets_everything(server):
    connection = ask(server, 1 << 16)
    time.sleep(0.3)
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1 << 20)
    connection.close()
    assert received.count(b'"text":') == MAX_TOKENS
    assert b"data: [DONE]" in received[-40:]


BEHAVIOUR = {"stream": 50, "whole": 10, "leave": 20, "dawdle": 5, "nonsense": 10}


def test_load(two_layer_params):
    questions, expected = [question(kind, NAME) for kind in range(NUM_KINDS)], []
    alone = make_llm(two_layer_params, TWO_LAYERS)
    for body in questions:
        prompt = encode_chat(TOKENIZER, body["messages"], ChatOptions())
        params = SamplingParams(max_tokens=body["max_tokens"], seed=body["seed"], ignore_eos=True)
        expected.append(parse_completion(alone.generate([prompt], params)[0].text, thinking=False).content)
    server = start_server(make_llm(two_layer_params, TWO_LAYERS, max_concurrent_requests=8, max_chunk_tokens=256))
    try:
        clients = Storm(server.url, questions, expected, seconds=4.0, behaviour=BEHAVIOUR)
        asyncio.run(asyncio.wait_for(clients.run(16), 120))
        server.wait_until_free()
        stats = server.engine.engine.stats()
    finally:
        server.stop()
    assert clients.wrong == []
    assert set(clients.outcomes) == {"complete", "left", "refused"}
    assert clients.outcomes["complete"] > NUM_KINDS
    assert stats.num_failed == 0
    assert stats.num_finished + stats.num_aborted == clients.outcomes["complete"] + clients.outcomes["left"]
