"""Echoed and scored prompts in OpenAI's and vLLM's shapes, and texts as tokens.

The first scores are made up, those of a live server are `LLM.score`'s; that these equal generation's is for the
engine's tests.
"""

import json
import re

import pytest
from server_cases import NAME, TOKENIZER, make_llm

from dsv4 import __version__
from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.completions.answer import TextAssembler
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.body import validate
from dsv4.request import FinishReason, SamplingParams, TokenLogprobs
from dsv4.text.output import TextOutput


def scored(token_id, logprob, *top):
    return TokenLogprobs(token_id, logprob, top)


def answer(prompt, tokens, **fields):
    """The answer to a completion whose prompt is scored and whose tokens are these; as a stream and whole."""
    asked = validate(CompletionRequest, {"model": NAME, "prompt": prompt, **fields})
    ids = TOKENIZER.encode(prompt)
    params = SamplingParams(max_tokens=len(tokens), prompt_logprobs=0, seed=0)
    output = TextOutput(ids, params, eos_token_id=1, tokenizer=TOKENIZER)
    best = [*ids[1:], 5]
    output.prompt_logprobs = [
        None if place == 0 else scored(one, -place / 8, (best[place - 1], -place / 8), (9, -3.0))
        for place, one in enumerate(ids)
    ]
    assembler = TextAssembler(Job((output,), len(ids)), asked, ModelInfo(NAME, TOKENIZER, "f"))
    events = []
    for token_id in tokens:
        reason = FinishReason.LENGTH if output.num_output + 1 == len(tokens) else None
        text = output.take(token_id, scored(token_id, -0.5, (token_id, -0.5)), reason)
        logprobs = output.logprobs[-1] if fields.get("logprobs") is not None else None
        events.append(TokenEvent(0, token_id, text, logprobs, output.finish_reason, 0.0))
    if not tokens:
        output.finish_reason = FinishReason.LENGTH
        events.append(TokenEvent(0, None, "", None, output.finish_reason, 0.0))
    for event in events:
        assembler.keep(event)
    return json.loads(assembler.whole())


def test_echo_as_lm_eval_reads_it():
    """Prompt and one new token; the sum over [context:-1] is that of the continuation."""
    ids = TOKENIZER.encode("abc")
    choice = answer("abc", TOKENIZER.encode("d"), echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert choice["text"] == "abcd"
    shown = choice["logprobs"]
    assert shown["tokens"] == ["a", "b", "c", "d"]
    assert shown["token_logprobs"] == [None, -1 / 8, -2 / 8, -0.5]
    assert shown["text_offset"] == [0, 1, 2, 3]
    assert shown["top_logprobs"][0] is None
    assert [len(top) for top in shown["top_logprobs"][1:]] == [1, 1, 1]
    assert shown["top_logprobs"][1] == {TOKENIZER.decode([ids[1]]): -1 / 8}


def test_a_score_alone():
    whole = answer("abc", [], echo=True, logprobs=0, max_tokens=0)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1 / 8, -2 / 8]
    assert whole["usage"]["completion_tokens"] == 0
    assert answer("abc", [], echo=True, max_tokens=0)["choices"][0] == {
        "index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "seed": 0,
    }  # fmt: skip


def test_prompt_logprobs_as_vllm_has_them():
    ids = TOKENIZER.encode("abc")
    choice = answer("abc", [], prompt_logprobs=1, max_tokens=0, return_token_ids=True)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    first = choice["prompt_logprobs"][1]
    assert first[str(ids[1])] == {"logprob": -1 / 8, "rank": 1, "decoded_token": "b"}
    assert len(first) == 1
    last = answer("abc", [], prompt_logprobs=2, max_tokens=0)["choices"][0]["prompt_logprobs"][2]
    assert set(last) == {str(ids[2]), "9"}
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == []
    assert choice["text"] == ""


def test_where_a_character_of_several_tokens_begins():
    """The offset of a token is that of the text before it, also inside a character."""
    shown = answer("aé", TOKENIZER.encode("b"), echo=True, logprobs=0)["choices"][0]
    assert shown["text"] == "aéb"
    assert shown["logprobs"]["text_offset"] == [0, 1, 1, 2]


# ---- the engine's scores ----


@pytest.fixture(scope="module")
def solo(served_params):
    return make_llm(served_params)


LONG = "The sky was red, and nobody in the village had an answer. " * 8


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_scores_are_those_of_the_library(live, solo, max_tokens):
    texts = [LONG, "ab", "é?"]
    asked = {"model": NAME, "prompt": texts, "max_tokens": max_tokens, "temperature": 0}
    whole = live.post("/v1/completions", {**asked, "echo": True, "logprobs": 2}).json()
    named = live.post("/v1/completions", {**asked, "prompt_logprobs": 2}).json()
    for text, echoed, choice, expected in zip(
        texts, whole["choices"], named["choices"], solo.score(texts, 2), strict=True
    ):
        shown = echoed["logprobs"]["token_logprobs"]
        assert shown[: len(expected)] == [None if one is None else one.logprob for one in expected]
        assert len(shown) == len(expected) + max_tokens
        assert echoed["text"].startswith(text)
        assert choice["prompt_logprobs"][0] is None
        for found, one in zip(choice["prompt_logprobs"][1:], expected[1:], strict=True):
            listed = {str(token_id): logprob for token_id, logprob in (*one.top, (one.token_id, one.logprob))}
            assert {token_id: entry["logprob"] for token_id, entry in found.items()} == listed
    assert whole["usage"]["completion_tokens"] == max_tokens * len(texts)


def test_a_score_alone_ends_a_stream_and_is_counted(live):
    def finished():
        samples = re.findall(r'^dsv4_request_success_total\{.*"length".*\} (.*)$', live.get("/metrics").text, re.M)
        return sum(map(float, samples))

    before = finished()
    asked = {"model": NAME, "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0, "stream": True}
    lines = [line for line in live.post("/v1/completions", asked).text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "length"
    assert finished() == before + 1
    live.wait_until_free()


# ---- texts as tokens ----


def test_tokenize(live, solo):
    text = "Hé<｜User｜>"
    answer = live.post("/tokenize", {"model": NAME, "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == solo.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048 == live.get("/v1/models").json()["data"][0]["max_model_len"]
    assert answer["token_strs"][0] == "H"
    marked = live.post("/tokenize", {"prompt": "H", "add_special_tokens": True}).json()["tokens"]
    assert marked == [0, *solo.encode("H")]
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokenize_a_conversation(live):
    messages = [{"role": "user", "content": "Hello"}]
    for options in ({}, {"chat_template_kwargs": {"thinking": True}}):
        asked = {"model": NAME, "messages": messages, **options}
        usage = live.post("/v1/chat/completions", {**asked, "max_tokens": 1}).json()["usage"]
        assert live.post("/tokenize", asked).json()["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {"tokens": [300]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
def test_what_cannot_be_tokenized(live, path, body, status):
    answer = live.post(path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_version(live):
    assert live.get("/version").json() == {"version": __version__}
