"""While a long prompt is read a stream sends signs of life: a proxy that ends idle connections lets it through."""

import select
import socket
import threading
import time

import httpx
import pytest
from server_cases import NAME, make_llm, start_server

from dsv4.http.streaming import StreamClock

IDLE_SECONDS, READ_SECONDS = 1.0, 3.0
USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 4}, "data: [DONE]"),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 4}, "data: [DONE]"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 4}, "event: response."),
    "/v1/messages": ({"messages": USER, "max_tokens": 4}, "event: message_stop"),
}


class IdleProxy(threading.Thread):
    """Hands on what two sockets say; where neither says anything for a second, it hangs up."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_hung_up = 0
        self.start()

    def run(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client):
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            ways = {client: server, server: client}
            while True:
                ready = select.select([*ways], [], [], IDLE_SECONDS)[0]
                if not ready:
                    self.num_hung_up += 1
                    return
                for source in ready:
                    piece = source.recv(65536)
                    if not piece:
                        return
                    ways[source].sendall(piece)

    def close(self):
        self._listener.close()


@pytest.fixture(scope="module")
def proxy(served_params):
    """A server behind a proxy. It reads every prompt for three seconds and pings after 0.3 (5, as it is served)."""
    llm = make_llm(served_params)
    step = llm.engine.step

    def slow_step():
        if llm.engine.scheduler.num_waiting:
            time.sleep(READ_SECONDS)
        return step()

    llm.engine.step = slow_step
    server = start_server(llm)
    server.app.state.server._clock = StreamClock(60.0, ping_seconds=0.3, tick_seconds=0.1)
    proxy = IdleProxy(int(server.url.rpartition(":")[2]))
    yield proxy
    proxy.close()
    server.wait_until_free()
    server.stop()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_lives_through_a_proxy_with_an_idle_limit(proxy, path):
    fields, end = BODIES[path]
    before = proxy.num_hung_up
    with httpx.Client(base_url=proxy.url, timeout=30) as client:
        start = time.monotonic()
        answer = client.post(path, json={"model": NAME, "stream": True, **fields})
        seconds = time.monotonic() - start
        assert seconds > READ_SECONDS, "it was silent long enough"
        ping = 'event: ping\ndata: {"type":"ping"}' if path == "/v1/messages" else ": ping"
        assert answer.text.count(ping) >= 5
        assert end in answer.text.strip().rpartition("\n\n")[2]
        assert proxy.num_hung_up == before


def test_without_a_stream_the_same_proxy_hangs_up(proxy):
    """So the limit is one that is felt."""
    with httpx.Client(base_url=proxy.url, timeout=30) as client, pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/completions", json={"model": NAME, "prompt": "hi", "max_tokens": 4})
    assert proxy.num_hung_up > 0
