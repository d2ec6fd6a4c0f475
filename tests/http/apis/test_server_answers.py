"""What the server writes as text is, parsed, what models and dictionaries say: field for field and in the same order.

Random answers of every interface, an event at a time and whole: reasoning, calls that are cut off, characters of
several tokens, quotes and control characters, stop strings, log-probabilities, several choices.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
from answer_oracle import ChatOracle, TextOracle
from item_oracle import MessagesOracle, ResponsesOracle
from server_cases import NAME, TOKENIZER

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.registry import GENERATING
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.body import validate
from dsv4.http.errors import ApiError
from dsv4.request import FinishReason, SamplingParams, TokenLogprobs
from dsv4.text.output import TextOutput
from dsv4.text.protocol import PROTOCOL

EOS = 1
SERVED = ModelInfo(NAME, TOKENIZER, 'a "fingerprint"')
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="lo\\ok">\n'
    '<｜DSML｜parameter name="a" string="true">O"s\nlo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">[3]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
PIECES = (
    "Hi", " the", "é", "漢字", "🙂", '"', "\\", "\n", "\n\n", "<", "</", "\t", "\x00\x1f\x7f", " ", "e\u0301", "END",
    CALL,
)  # fmt: skip
ORACLES = {"chat": ChatOracle, "text": TextOracle, "responses": ResponsesOracle, "messages": MessagesOracle}


@pytest.fixture
def fixed(monkeypatch):
    """`fixed()`: from now on ids are drawn anew, and time stands still."""
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.5)

    def start(same=False):
        numbers = itertools.repeat(7) if same else itertools.count()
        monkeypatch.setattr("secrets.token_hex", lambda length: f"{next(numbers):024x}")

    return start


def scored(chance, token_id, num_top):
    values = [chance.choice([-1e-7, -0.5, -3.25, float("-inf"), -chance.random()]) for _ in range(num_top + 1)]
    top = tuple((chance.randrange(300), value) for value in values[1:])
    return TokenLogprobs(token_id, values[0], top)


def events_of(chance, output, choice, num_top, thinking):
    """A random answer, and what its tokens become."""
    text = "".join(chance.choices(PIECES, weights=[4] * (len(PIECES) - 1) + [1], k=chance.randrange(14)))
    if thinking and chance.random() < 0.8:
        text = chance.choice(["hm", "h<m\n", ""]) + "</think>" + text
    ids = TOKENIZER.encode(text) + ([TOKENIZER.special_id(PROTOCOL.eos)] if chance.random() < 0.6 else [])
    ids = ids[: chance.randrange(1, len(ids) + 1)] if ids and chance.random() < 0.4 else ids
    events = []
    for token_id in ids or [EOS]:
        is_last = len(events) + 1 == len(ids or [EOS])
        reason = (FinishReason.STOP if token_id == EOS else FinishReason.LENGTH) if is_last else None
        logprobs = None if num_top is None else scored(chance, token_id, num_top)
        piece = output.take(token_id, logprobs, reason)
        events.append(TokenEvent(choice, token_id, piece, logprobs, output.finish_reason, 0.0))
        if output.finish_reason is not None:
            break
    return events


def case_of(kind, seed, is_stream):
    """A request, its job and its events."""
    chance = random.Random(seed)
    wants_scores, flag = chance.random() < 0.4, lambda: chance.random() < 0.3
    num_top = chance.randrange(4) if wants_scores else None
    body = {"model": NAME}
    if kind in ("chat", "text"):
        body |= {"stream": is_stream, "return_token_ids": flag(), "return_tokens_as_token_ids": flag()}
        if is_stream:
            body["stream_options"] = {"include_usage": flag(), "continuous_usage_stats": flag()}
        elif flag():
            body["prompt_logprobs"] = 1
    messages = [{"role": "user", "content": "x"}]
    if kind == "chat":
        body |= {"messages": messages, "include_reasoning": not flag(), "return_prompt_token_ids": flag()}
    elif kind == "text":
        body |= {"prompt": "x", "logprobs": num_top, "echo": flag()}
    elif kind == "responses":
        body |= {"input": "x", "metadata": {"a": "é"}, "instructions": 'Be "brief".'}
    else:
        display = {"type": "adaptive", "display": chance.choice([None, "omitted"])}
        body |= {"messages": messages, "max_tokens": 9, "thinking": display}
    api = GENERATING[("chat", "text", "responses", "messages").index(kind)]
    asked = validate(api.request, body)
    thinking = kind != "text" and flag()
    outputs, queues = [], []
    for choice in range(chance.choice([1, 1, 3]) if kind in ("chat", "text") else 1):
        params = SamplingParams(
            max_tokens=999,
            stop=("END",) if flag() else (),
            stop_token_ids=(5,),
            prompt_logprobs=0,
            temperature=0.7,
            seed=choice - 1,
        )
        output = TextOutput([7, 8, 9], params, eos_token_id=EOS, tokenizer=TOKENIZER)
        output.prompt_logprobs = [None, *(scored(chance, one, 2) for one in (8, 9))]
        output.num_cached_tokens = 2
        outputs.append(output)
        recorded = num_top if wants_scores else (0 if flag() else None)  # recorded, though nobody asked
        queues.append(events_of(chance, output, choice, recorded, thinking))
    if kind == "text" and not is_stream and flag():  # a score alone
        outputs[0] = TextOutput([7, 8, 9], outputs[0].params, eos_token_id=EOS, tokenizer=TOKENIZER)
        outputs[0].prompt_logprobs, outputs[0].finish_reason = outputs[-1].prompt_logprobs, FinishReason.LENGTH
        queues[0] = [TokenEvent(0, None, "", None, FinishReason.LENGTH, 0.0)]
    events = []
    while any(queues):
        events.append(chance.choice([queue for queue in queues if queue]).pop(0))
    return api, asked, Job(tuple(outputs), 3, len(outputs), thinking, wants_scores), events


def parsed(text):
    """The objects of a stream's text, which must be whole events; the name of an event is its type."""
    found = []
    assert text == "" or text.endswith("\n\n")
    for event in text.split("\n\n")[:-1]:
        lines = event.split("\n")
        assert lines[-1].startswith("data: ")
        if lines[-1] == "data: [DONE]":
            continue
        found.append(json.loads(lines[-1].removeprefix("data: ")))
        assert len(lines) == 1 or lines[0] == f"event: {found[-1]['type']}"
    return found


def as_json(one):
    """A model or a dictionary as JSON, whose fields are in order."""
    return json.dumps(one if isinstance(one, dict) else one.model_dump(exclude_unset=True))


@pytest.mark.parametrize("kind", ORACLES)
def test_streams(kind, fixed):
    for seed in range(80):
        api, asked, job, events = case_of(kind, seed, is_stream=True)
        fixed()
        oracle = ORACLES[kind](job, asked, SERVED)
        expected = [*getattr(oracle, "opening", list)()]
        expected += [made for event in events for made in oracle.take(event)] + oracle.closing()
        fixed()
        assembler = api.assembler(job, asked, SERVED)
        found = assembler.opening() + "".join(map(assembler.take, events)) + assembler.closing()
        assert [json.dumps(one) for one in parsed(found)] == list(map(as_json, expected)), seed


@pytest.mark.parametrize("kind", ORACLES)
def test_whole_answers(kind, fixed):
    for seed in range(80):
        api, asked, job, events = case_of(kind, seed, is_stream=False)
        fixed(same=True)
        oracle = ORACLES[kind](job, asked, SERVED)
        expected = oracle.whole([made for event in events for made in oracle.take(event)])
        assembler = api.assembler(job, asked, SERVED)
        for event in events:
            assembler.keep(event)
        found = assembler.whole()
        assert json.dumps(json.loads(found)) == as_json(expected), seed
        api.answer.model_validate_json(found)


@pytest.mark.parametrize("kind", ORACLES)
def test_a_stream_that_fails_says_so(kind, fixed):
    """In the middle of an answer, and with what has come of it."""
    api, asked, job, events = case_of(kind, 1, is_stream=True)
    fixed()
    assembler = api.assembler(job, asked, SERVED)
    for event in events[: len(events) // 2]:
        assembler.take(event)
    (last,) = parsed(assembler.failure(ApiError(500, 'it "broke"', code="request_failed")))
    error = last["response"]["error"] if kind == "responses" else last["error"]
    assert error["message"] == 'it "broke"'
