"""Requests of every kind, for a server that records; asked by several clients at once."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
from server_cases import TWO_LAYERS

from dsv4.loader.write.synth import write_checkpoint
from dsv4.text.byte_tokenizer import byte_tokenizer

WORDS = ["the", "sun", "rose", "over", "a", "quiet", "harbour", "and", "nobody", "saw", "small", "grey", "boats"]
RULES = [
    {"guided_choice": ["yes", "no", "perhaps not today"]},
    {"guided_regex": "[a-c]{3,9}"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False,
    }}}},
    {"guided_grammar": 'start: "(" start ")" | "x"'},
]  # fmt: skip


def small_checkpoint(folder):
    """Every kind of cache row, and steps of a few milliseconds."""
    config = replace(TWO_LAYERS, num_nextn_predict_layers=0, compress_ratios=(4, 128))
    words = json.dumps(byte_tokenizer(config.vocab_size))
    return write_checkpoint(folder, config, extra_files={"tokenizer.json": words})


def mixed_requests(count, model, *, most_tokens=8, seed=0):
    """(route, body) pairs: every interface; greedy and sampled; penalties, biases, stops, rules, several answers,
    log-probabilities, scores; streamed and whole; prompts that begin alike."""
    chance = random.Random(seed)
    shared = " ".join(chance.choices(WORDS, k=32))  # more than a block of 128 bytes
    return [_request(chance, model, shared, most_tokens, number) for number in range(count)]


def _request(chance, model, shared, most_tokens, number):
    words = " ".join(chance.choices(WORDS, k=chance.randint(1, 15)))
    text = f"{shared} {words}" if chance.random() < 0.3 else words
    tokens = chance.randint(1, most_tokens)
    kind = number % 8
    if kind == 7:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        return "/v1/messages", {"model": model, "stream": chance.random() < 0.5, **body}
    if kind == 6:
        return "/v1/responses", {"model": model, "input": text, "max_output_tokens": tokens, "store": False}
    body = {"model": model, "max_tokens": tokens, "stream": chance.random() < 0.5}
    if chance.random() < 0.7:
        body["seed"] = chance.randint(-(2**63), 2**63 - 1)
    body["temperature"] = chance.choice([0, 0.3, 1, 1.5])
    extras = [
        {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"presence_penalty": 0.7, "frequency_penalty": -0.4},
        {"repetition_penalty": 1.3}, {"logit_bias": {"97": 5, "98": -100}}, {"allowed_token_ids": [97, 98, 99, 100]},
        {"bad_words": ["sun", "ab"]}, {"stop": ["a", "e "]}, {"min_tokens": min(3, tokens)}, {"ignore_eos": True},
        {"stop_token_ids": [101, 102]}, {"n": chance.randint(2, 3)}, {"cache_salt": "tenant"}, {"priority": 2},
    ]  # fmt: skip
    for extra in chance.sample(extras, k=chance.randint(0, 3)):
        body |= extra
    if chance.random() < 0.15:
        for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "stop", "stop_token_ids"):
            body.pop(name, None)
        body |= chance.choice(RULES)
    if kind in (0, 1, 2):
        if chance.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": chance.choice([0, 3, 20])}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    if chance.random() < 0.4:
        body["logprobs"] = chance.choice([0, 2])
    if chance.random() < 0.3:
        body |= {"prompt_logprobs": 1, "stream": False, "max_tokens": chance.choice([0, tokens]), "min_tokens": 0}
    prompt = [text, text[::-1]] if chance.random() < 0.1 else text
    return "/v1/completions", {**body, "prompt": prompt}


def ask_all(url, requests, *, num_clients=12, headers=None):
    """Every request, as that many clients; the statuses in order."""
    with (
        httpx.Client(base_url=url, timeout=300, headers=headers) as client,
        ThreadPoolExecutor(num_clients) as threads,
    ):
        return list(threads.map(lambda one: client.post(one[0], json=one[1]).status_code, requests))
