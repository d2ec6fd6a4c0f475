"""Servers with `--rl`, checkpoints for them, and the shape of their answers."""

import threading
from copy import deepcopy

import httpx
from server_cases import NAME, make_llm, start_server

from dsv4.http.address import address_url, take_address
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.lifecycle import make_uvicorn
from dsv4.http.server import create_app
from dsv4.http.settings import ServerConfig

PROMPT = [0, 261, 106, 107]


def start_rl(params, root=None, **settings):
    """New weights are written in place, and other tests share `params`."""
    roots = () if root is None else (str(root),)
    return start_server(make_llm(deepcopy(params)), rl=True, rl_roots=roots, **settings)


def greedy(server, prompt=PROMPT, **fields):
    """(ids, log-probabilities) that a server draws."""
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 8, "temperature": 0, "logprobs": 0, **fields}}
    choice = answer_of(server.post("/inference/v1/generate", body))["choices"][0]
    return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


def answer_of(response):
    assert response.status_code == 200, response.text
    return response.json()


def another_front_end(server, **settings):
    """(client, stop) of a second HTTP server over the same engine."""
    config = ServerConfig(name=NAME, port=0, rl=True, **settings)
    app = create_app(EngineConnection(server.engine_thread.connect), server.llm.tokenizer, config)
    uvicorn, listener = make_uvicorn(app, config, log_level="ERROR"), take_address(config)
    thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not uvicorn.started:
        assert thread.is_alive()
    client = httpx.Client(base_url=address_url(config, listener), timeout=60)

    def stop():
        client.close()
        uvicorn.should_exit = True
        thread.join(20)

    return client, stop


def differing(expected, found, place="answer"):
    """Where an answer lacks what is expected: fields of objects, first items of lists (by type), values elsewhere."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return [f"{place}: {found!r}"]
        missing = [f"{place}.{name} is missing" for name in expected if name not in found]
        return missing + [
            one
            for name in expected
            if name in found
            for one in differing(expected[name], found[name], f"{place}.{name}")
        ]
    if isinstance(expected, list):
        if not isinstance(found, list) or not found:
            return [f"{place}: {found!r}"]
        return differing(expected[0], found[0], f"{place}[0]") if expected else []
    return [] if expected == found else [f"{place}: {found!r}, expected {expected!r}"]
