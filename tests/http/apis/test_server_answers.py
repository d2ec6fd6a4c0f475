"""What the server writes as text: objects that their schemas describe, with no field more, and streams that add up to
the whole answer.

Random answers of every interface, an event at a time and whole: reasoning, calls that are cut off, characters of
several tokens, quotes and control characters, stop strings, log-probabilities, several choices. Some of them stand in
`golden_answers.json` as they were written once; RENEW=1 in the environment writes them anew.
"""

import itertools
import json
import os
import random
from functools import reduce
from operator import add
from pathlib import Path

import pytest
from server_cases import NAME, TOKENIZER

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.chat.answer import ChatCompletionChunk
from dsv4.http.apis.completions.answer import TextCompletion
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
KINDS = ("chat", "text", "responses", "messages")
GOLDEN = Path(__file__).with_name("golden_answers.json")


@pytest.fixture
def fixed(monkeypatch):
    """`fixed()`: from now on ids are drawn anew, and time stands still."""
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.5)

    def start():
        numbers = itertools.count()
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
    api = GENERATING[KINDS.index(kind)]
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


# ---- streams added up ----


def joined(parts):
    """Lists or texts side by side; None if there is none."""
    found = [part for part in parts if part is not None]
    return reduce(add, found) if found else None


def endings(choice):
    return {name: choice[name] for name in ("finish_reason", "stop_reason", "seed") if choice.get(name) is not None}


def fold_chat(chunks):
    """By choice, what its chunks add up to; usage, where it was asked for."""
    choices, usage = {}, None
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk))
        usage = chunk.get("usage", usage)
        for one in chunk["choices"]:
            delta, is_first = one["delta"], one["index"] not in choices
            assert ("role" in delta) is is_first
            empty = {"text": "", "reasoning": "", "calls": [], "scores": [], "ids": [], "end": {}}
            found = choices.setdefault(one["index"], empty)
            assert not found["end"], "nothing follows the end"
            found["text"] += delta.get("content", "")
            found["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["calls"].append([call["function"]["name"], ""])
                assert call["index"] == len(found["calls"]) - 1
                found["calls"][-1][1] += call["function"]["arguments"]
            found["scores"] += (one.get("logprobs") or {"content": []})["content"]
            found["ids"] += one.get("token_ids", [])
            found["end"] = endings(one)
    return choices, usage


def parts_of_chat(answer):
    return {
        one["index"]: {
            "text": one["message"]["content"] or "", "reasoning": one["message"].get("reasoning_content", ""),
            "calls": [list(call["function"].values()) for call in one["message"].get("tool_calls", ())],
            "scores": (one["logprobs"] or {"content": []})["content"], "ids": one.get("token_ids", []),
            "end": endings(one),
        }
        for one in answer["choices"]
    }, answer["usage"]  # fmt: skip


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def fold_text(chunks):
    found, usage = {}, None
    for chunk in chunks:
        if chunk["choices"]:  # the last one, of usage, has none
            TextCompletion.model_validate_json(json.dumps({"usage": NO_USAGE, **filled(chunk)}))
        usage = chunk.get("usage", usage)
        for one in chunk["choices"]:
            found.setdefault(one["index"], []).append(one)
    return {index: parts_of_text(choices) for index, choices in found.items()}, usage


NO_USAGE = {
    "prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip


def filled(chunk):
    """A chunk whose end, where it has none yet, is any."""
    return {**chunk, "choices": [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]}


def parts_of_text(choices):
    """Of one choice: its chunks, or itself."""
    assert all(one["finish_reason"] is None for one in choices[:-1])
    scores = [one["logprobs"] for one in choices if one.get("logprobs")]
    return {
        "text": joined([one["text"] for one in choices]), "ids": joined([one.get("token_ids") for one in choices]),
        "scores": [joined([one[name] for one in scores]) for name in _LISTS],
        "prompt": choices[0].get("prompt_token_ids"), "end": endings(choices[-1]),
    }  # fmt: skip


def fold_responses(events):
    """Each item as its events say, which is what the last event says."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items, texts, scores = [], {}, {}
    for event in events[2:-1]:
        kind, place = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert place == len(items)
            items.append(None)
        elif kind.endswith(".delta"):
            texts[place] = texts.get(place, "") + event["delta"]
            scores[place] = scores.get(place, []) + event.get("logprobs", [])
        elif kind == "response.output_item.done":
            items[place] = item = event["item"]
            part = item if item["type"] == "function_call" else item["content"][0]
            assert part.get("text", part.get("arguments")) == texts.get(place, "")
            assert part.get("logprobs", []) == scores.get(place, [])
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    return last


def fold_messages(events):
    """The message that its events add up to."""
    (start, *middle, last, stop) = events
    assert (start["type"], last["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    answer, text, is_open = start["message"], "", False
    blocks = answer["content"] = []
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
            text, is_open = "", True
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            text += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
        if event["type"] == "content_block_stop":
            name = {"tool_use": "input"}.get(blocks[-1]["type"], blocks[-1]["type"])
            blocks[-1][name] = json.loads(text or "{}") if name == "input" else text
            is_open = False
    assert not is_open
    return {**answer, **last["delta"], "usage": last["usage"]}


FOLDS = {
    "chat": (fold_chat, parts_of_chat),
    "text": (
        fold_text, lambda answer: ({one["index"]: parts_of_text([one]) for one in answer["choices"]}, answer["usage"]),
    ),
    "responses": (fold_responses, lambda answer: answer),
    "messages": (fold_messages, lambda answer: answer),
}  # fmt: skip


def written(case, fixed, is_stream):
    """The text of an answer to a case."""
    api, asked, job, events = case
    fixed()
    assembler = api.assembler(job, asked, SERVED)
    if is_stream:
        return assembler.opening() + "".join(map(assembler.take, events)) + assembler.closing()
    for event in events:
        assembler.keep(event)
    return assembler.whole()


@pytest.mark.parametrize("kind", KINDS)
def test_streams_add_up_to_the_whole_answer(kind, fixed):
    fold, parts = FOLDS[kind]
    for seed in range(80):
        case = case_of(kind, seed, is_stream=True)
        found, whole = fold(parsed(written(case, fixed, True))), written(case, fixed, False)
        case[0].answer.model_validate_json(whole)
        expected = parts(json.loads(whole))
        if kind in ("chat", "text"):
            assert found[1] in (None, expected[1]), seed
            found, expected = found[0], expected[0]
        assert found == expected, seed


@pytest.mark.parametrize("kind", KINDS)
def test_whole_answers(kind, fixed):
    for seed in range(80):
        case = case_of(kind, seed, is_stream=False)
        case[0].answer.model_validate_json(written(case, fixed, False))


def test_golden_answers(fixed):
    """Byte for byte, as they were when every field was compared with models of its own."""
    found = {
        f"{kind} {seed} {'stream' if is_stream else 'whole'}": written(
            case_of(kind, seed, is_stream=is_stream), fixed, is_stream
        )
        for kind in KINDS for seed in (0, 3, 7) for is_stream in (False, True)
    }  # fmt: skip
    if os.environ.get("RENEW"):
        GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
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
