"""Many streams at once, some of which go, some of which were nonsense: the rest get what they would get alone."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest
from server_cases import TOKENIZER, TWO_LAYERS, chat_body, make_llm, start_server

from dsv4.request import SamplingParams
from dsv4.text.chat import ChatOptions
from dsv4.text.parse import parse_completion
from dsv4.text.tokenizer import encode_chat

NUM_STREAMS = 16
NUM_REQUESTS = 48
NUM_KINDS = 8  # different requests; each is asked several times, beside others every time
CHAT = "/v1/chat/completions"
MALFORMED = [b"{", b'{"model": "tiny"}', b"\xff", json.dumps(chat_body(temperature=9)).encode()]


def plan_of(place):
    """What client number `place` asks, and after how many events it goes (None: it stays)."""
    chance = random.Random(place % NUM_KINDS)
    text = "".join(chance.choice("abcdefgh ") for _ in range(chance.choice([3, 20, 130])))
    fields = {
        "seed": chance.randrange(1000),
        "max_tokens": chance.choice([4, 10, 20]),
        "ignore_eos": True,
        "stream": True,
    }
    chance = random.Random(place)
    leaves_after = chance.randrange(8) if chance.random() < 0.3 else None
    return chat_body(text, **fields), leaves_after


@pytest.fixture(scope="module")
def solo(two_layer_params):
    """What each request must give."""
    llm = make_llm(two_layer_params, TWO_LAYERS)
    texts = []
    for place in range(NUM_KINDS):
        body, _ = plan_of(place)
        prompt = encode_chat(TOKENIZER, body["messages"], ChatOptions())
        params = SamplingParams(max_tokens=body["max_tokens"], seed=body["seed"], ignore_eos=True)
        texts.append(parse_completion(llm.generate([prompt], params)[0].text, thinking=False).content)
    return texts


async def one_client(client, place):
    """The text of a stream that was read to its end, None for one that was left."""
    body, leaves_after = plan_of(place)
    text, num_events = "", 0
    async with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["delta"].get("content", "")
                num_events += 1
            if leaves_after is not None and num_events > leaves_after:
                return None
    raise AssertionError("the stream ended without [DONE]")


async def malformed_client(client, place):
    body = MALFORMED[place % len(MALFORMED)]
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


async def run_load(url):
    gate = asyncio.Semaphore(NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=64)) as client:

        async def guarded(place):
            async with gate:
                if place % 8 == 0:
                    await malformed_client(client, place // 8)
                return await one_client(client, place)

        return await asyncio.gather(*(guarded(place) for place in range(NUM_REQUESTS)))


def test_load(two_layer_params, solo):
    llm = make_llm(two_layer_params, TWO_LAYERS, max_concurrent_requests=8, max_chunk_tokens=256)
    server = start_server(llm)
    try:
        texts = asyncio.run(asyncio.wait_for(run_load(server.url), 120))
        server.wait_until_free()
        stats = server.engine.engine.stats()
        assert server.get("/health").status_code == 200
    finally:
        server.stop()
    survived = [place for place, text in enumerate(texts) if text is not None]
    assert NUM_REQUESTS // 2 < len(survived) < NUM_REQUESTS, "some stayed and some went"
    for place in survived:
        assert texts[place] == solo[place % NUM_KINDS], place
    assert stats.num_failed == 0
    assert stats.num_finished + stats.num_aborted == NUM_REQUESTS
    assert stats.num_aborted > 0
