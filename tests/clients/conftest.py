"""Servers for other people's clients: very small models that say what a test wants them to say.

Run by `make client-test`, which installs the clients into environments of their own; left out everywhere else.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "http"), str(Path(__file__).parent)]
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look into the network

if not any(map(importlib.util.find_spec, ("anthropic", "trl"))):  # every one of those environments has one of them
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def params():
    import torch
    from server_cases import SERVED

    from dsv4.loader.write.synth import random_params

    return random_params(SERVED, dequantize_to=torch.float32)


@pytest.fixture(scope="session")
def says(params):
    """`says(text)`: the address of a server whose model answers with this text, whatever it is asked; with several
    texts, with one after the other."""
    from server_cases import let_it_say, make_llm, start_server

    servers = {}

    def start(*texts):
        key = texts if len(texts) == 1 else len(servers)  # those that count are for one test each
        if key not in servers:
            servers[key] = start_server(let_it_say(make_llm(params, max_context_tokens=4096), *texts, in_turn=True))
        return servers[key].url

    yield start
    for server in servers.values():
        server.wait_until_free()
        server.stop()


@pytest.fixture(scope="session")
def talker(says):
    """A server that greets."""
    return says("Hello there.")


@pytest.fixture(scope="session")
def caller(says):
    """A server that calls `get_weather` for Oslo."""
    from client_cases import CALL

    return says(CALL)


@pytest.fixture(scope="session")
def thinker(says):
    """A server that thinks `hm` and says `Yes.`, where it is asked to think."""
    return says("hm</think>Yes.")
