"""Replicas behind one address: the answers of one engine, streams, conversations that stay where their cache is,
replicas that are killed, clients that leave."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from dsv4 import LLM, SamplingParams
from dsv4.config import ConfigError
from dsv4.http.ray_app import Options, build
from dsv4.request import RequestError

pytestmark = pytest.mark.ray
NAME = "flash-mini"
PROMPT = "SCENE II. A room in the castle."
SESSIONS = [f"session {idx}" for idx in range(8)]  # enough to meet both replicas


@pytest.fixture(scope="module")
def client(address):
    with httpx.Client(base_url=address, timeout=120) as made:
        yield made


def completion(client, session=None, seed=5, max_tokens=6, **fields):
    headers = {} if session is None else {"x-session-id": session}
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": max_tokens, "seed": seed, "logprobs": 1, **fields}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def metric(client, name, session):
    """A metric of the replica that a session belongs to."""
    text = client.get("/metrics", headers={"x-session-id": session}).text
    return sum(float(value) for value in re.findall(rf"^dsv4_{name}{{.*}} (\S+)$", text, re.MULTILINE))


def pids():
    """The processes of this Ray's replicas, by the titles that Ray gives them."""
    parents, replicas = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:default:Replica"):
                replicas.add(int(folder.name))
    return {one for one in replicas if os.getpid() in (parents.get(one), parents.get(parents.get(one)))}


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.25)


@pytest.fixture(scope="module")
def alone(client):
    """What an engine of its own says."""
    llm = LLM()
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=6, seed=5, logprobs=1, temperature=1.0))
    return result


def test_every_replica_says_what_one_engine_says(client, alone):
    answers = [completion(client, session, temperature=1.0) for session in (None, *SESSIONS)]
    assert {answer["text"] for answer in answers} == {alone.text}
    expected = [one.logprob for one in alone.logprobs]
    assert all(answer["logprobs"]["token_logprobs"] == expected for answer in answers)
    assert len({metric(client, "prompt_tokens_total", session) for session in SESSIONS}) > 1, "both were asked"


def test_a_stream_arrives_piece_by_piece(client):
    whole = completion(client, max_tokens=16)["text"]
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "seed": 5, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [(time.monotonic(), line) for line in response.iter_lines() if line.startswith("data: {")]
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for _, line in lines]
    assert "".join(texts) == whole
    assert len(texts) > 4
    assert lines[-1][0] > lines[0][0], "not all at once"


@pytest.mark.parametrize("idx", range(3))
def test_a_conversation_stays_where_its_cache_is(client, idx):
    """Without any header: the second turn of each finds the first one's prompt."""
    messages = [{"role": "user", "content": f"{idx}. " + "The sky was red and the sea was green. " * 12}]
    fields = {"model": NAME, "max_tokens": 4, "seed": 1}
    first = client.post("/v1/chat/completions", json={**fields, "messages": messages}).json()
    assert first["usage"]["prompt_tokens"] > 128
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = client.post("/v1/chat/completions", json={**fields, "messages": messages}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


def test_errors_are_the_servers_own(client):
    wrong = client.post("/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": -1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/models").json()["data"][0]["id"] == NAME
    assert client.get("/ready").json() == {"status": "ok"}
    large = client.post("/v1/completions", content=b" " * (9 << 20), headers={"content-type": "application/json"})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    given = client.get("/v1/models", headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"


def test_a_client_that_leaves_frees_its_place(client):
    session = SESSIONS[0]
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 1500, "seed": 5, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": session}) as response:
        next(response.iter_lines())
        assert metric(client, "num_requests_running", session) == 1
    wait_for(lambda: metric(client, "num_requests_running", session) == 0, 30)


def test_a_killed_replica_is_replaced(client, alone):
    """Whoever asks meanwhile gets the answer there always was; so does everybody after it."""
    before = pids()
    assert len(before) == 2
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    for session in SESSIONS[:4]:
        assert completion(client, session, temperature=1.0)["text"] == alone.text
    wait_for(lambda: len(pids()) == 2 and victim not in pids())
    for session in SESSIONS[4:]:
        assert completion(client, session, temperature=1.0)["text"] == alone.text


def test_a_stream_whose_replica_is_killed_ends(client, alone):
    """It does not wait for ever and is not taken for a whole one, and the service comes back."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 1500, "seed": 5, "ignore_eos": True, "stream": True}
    lines, victims = [], pids()
    start = time.monotonic()
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 3:
                    for victim in victims:
                        os.kill(victim, signal.SIGKILL)
    except httpx.HTTPError:
        pass
    assert time.monotonic() - start < 60
    assert "data: [DONE]" not in lines
    wait_for(lambda: len(pids()) == 2 and not victims & pids())
    assert completion(client, temperature=1.0)["text"] == alone.text


def test_mistakes_are_said_before_anything_starts():
    assert build({"replicas": "1", "thinking": "true"}), "as the command line gives them"
    for wrong in ({"replica": "3"}, {"replicas": "0"}, {"gpus": "some"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            build(wrong)
    with pytest.raises(ConfigError, match="no-such-folder"):
        build(Options(model="no-such-folder"))
    with pytest.raises(RequestError, match="--numerics"):
        build(Options(numerics="loose"))
    with pytest.raises(ConfigError, match="api_key"):
        build(Options(api_key=" "))
