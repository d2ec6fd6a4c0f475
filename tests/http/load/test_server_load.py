"""Many clients at once, some of which go, dawdle or send nonsense: the rest get what they would get alone."""

import asyncio

from server_cases import NAME, TOKENIZER, TWO_LAYERS, make_llm, start_server

from benchmarks.storm import NUM_KINDS, question
from benchmarks.storm_clients import Storm
from dsv4.request import SamplingParams
from dsv4.text.chat import ChatOptions
from dsv4.text.parse import parse_completion
from dsv4.text.tokenizer import encode_chat

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
