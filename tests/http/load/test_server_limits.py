"""Limits of a request that memory sets, and the seed that an answer was drawn with."""

import json
import socket
import threading
import time

import pytest
from server_cases import NAME

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_as_many_answers_as_other_servers_give(live):
    """A batch of lm_eval's (32 prompts), of TRL's (8 prompts times 8 answers), with TRL's log-probabilities."""
    batch = live.post(TEXT, {"model": NAME, "prompt": ["ab"] * 32, "max_tokens": 2, "logprobs": 100, "seed": 1})
    assert batch.status_code == 200, batch.text
    choices = batch.json()["choices"]
    assert [one["index"] for one in choices] == list(range(32))
    assert all(50 < len(top) <= 100 for top in choices[0]["logprobs"]["top_logprobs"]), "some print alike"
    many = live.post(TEXT, {"model": NAME, "prompt": ["ab"] * 8, "n": 8, "max_tokens": 2, "seed": 1})
    assert len(many.json()["choices"]) == 64
    read = live.post(TEXT, {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 100})
    assert all(len(place) in (100, 101) for place in read.json()["choices"][0]["prompt_logprobs"][1:])
    chat = live.chat(logprobs=True, top_logprobs=100, n=20, max_tokens=1)
    assert [len(one["logprobs"]["content"][0]["top_logprobs"]) for one in chat.json()["choices"]] == [100] * 20


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": "ab", "n": 2**31 - 1}, "n"),
        (TEXT, {"prompt": ["ab"] * 40_000}, "prompt"),
        (TEXT, {"prompt": [[5] * 1900] * 60, "prompt_logprobs": 100, "max_tokens": 0}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 60, "logprobs": True, "top_logprobs": 100}, "n"),
    ],
)
def test_more_than_memory_has_is_refused(live, path, fields, param):
    answer = live.post(path, {"model": NAME, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "one request may take 1024: lower max_tokens, logprobs or n, or send several requests" in error["message"]


def test_connections_that_come_at_once_wait_to_be_accepted(live):
    """The kernel keeps them while the loop is busy; without room it would drop some, to be tried again in a second."""
    is_busy, may_go_on = threading.Event(), threading.Event()
    live.uvicorn.servers[0].get_loop().call_soon_threadsafe(lambda: (is_busy.set(), may_go_on.wait(20)))
    assert is_busy.wait(10)
    clients = [socket.socket() for _ in range(400)]
    try:
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", int(live.url.rpartition(":")[2])))
        time.sleep(0.2)
        connected = []
        for client in clients:
            try:
                connected.append(client.getpeername())
            except OSError:  # its handshake was dropped
                continue
        assert len(connected) == len(clients)
    finally:
        for client in clients:
            client.close()
        may_go_on.set()
    assert live.get("/health").status_code == 200


BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6},
    TEXT: {"prompt": "x", "max_tokens": 6},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_seed_of_an_answer_repeats_it(live, path):
    """Whole and streamed; in a header, and in each choice where there are choices."""

    def texts(answer):
        kept = ("choices", "output", "content")
        found = next(answer.json()[name] for name in kept if name in answer.json())
        return json.dumps([{name: one for name, one in part.items() if name not in ("id", "seed")} for part in found])

    body = {"model": NAME, **BODIES[path]}
    first, second = live.post(path, body), live.post(path, body)
    seeds = [int(one.headers["x-seed"]) for one in (first, second)]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert texts(live.post(path, {**body, "seed": seeds[0]})) == texts(first)
    streamed = live.post(path, {**body, "seed": seeds[0], "stream": True})
    assert streamed.headers["x-seed"] == str(seeds[0])
    if path in (CHAT, TEXT):
        assert first.json()["choices"][0]["seed"] == seeds[0]
        assert f'"seed":{seeds[0]}' in streamed.text.split("\n\n")[-3]
        several = live.post(path, {**body, "n": 3})
        first_seed = int(several.headers["x-seed"])
        assert [one["seed"] for one in several.json()["choices"]] == [first_seed, first_seed + 1, first_seed + 2]
