"""What clients keep of a conversation and send back is taken; the prompt is that of the plain messages."""

import json

import pytest
from server_cases import NAME, TOKENIZER, let_it_say, make_llm, start_server

from dsv4.text.chat import ChatOptions
from dsv4.text.tokenizer import encode_chat

CHAT = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Looking.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


@pytest.fixture(scope="module")
def server(served_params):
    """Its model says, by seed: a greeting, and a thought with an answer."""
    with start_server(let_it_say(make_llm(served_params), "Hello there.", "hm, well</think>Yes.")) as running:
        yield running


def ask(server, messages=None, **fields):
    body = {"model": NAME, "messages": messages or PLAIN[:2], "seed": 0, "max_tokens": 30, **fields}
    return server.post(CHAT, body)


def num_tokens(messages, **options):
    return len(encode_chat(TOKENIZER, messages, ChatOptions(**options)))


def changed(place, **fields):
    """The plain conversation with fields added to one message."""
    messages = [dict(message) for message in PLAIN]
    messages[place] |= fields
    return messages


NULLS = dict.fromkeys(("refusal", "function_call", "audio", "name", "annotations", "reasoning_content", "anything"))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(changed(2, **NULLS), id="an OpenAI message dumped"),
        pytest.param(changed(2, tool_calls=[{**CALL, "index": 0}]), id="what accumulators of streams keep"),
        pytest.param(changed(3, name="f"), id="a tool's name"),
        pytest.param(changed(1, name="ada", tool_calls=None, tool_call_id=None), id="a user's name"),
        pytest.param(
            changed(2, provider_specific_fields={"refusal": None},
                    tool_calls=[{**CALL, "provider_specific_fields": {"a": 1}}]), id="litellm's fields",
        ),
        pytest.param(changed(0, role="developer"), id="developer is system"),
        pytest.param(changed(2, annotations=[], parsed={"a": 1}), id="a parsed message"),
        pytest.param(
            changed(1, content=[{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]),
            id="a marked part",
        ),
    ],
)  # fmt: skip
def test_ordinary_history(server, messages):
    answer = ask(server, messages)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens(PLAIN)


def test_reasoning_has_two_names(server):
    history = [PLAIN[1], {"role": "assistant", "content": "Yes."}, PLAIN[1]]
    kept = [history[0], {**history[1], "reasoning": "hm"}, history[2]]
    assert ask(server, kept).json()["usage"]["prompt_tokens"] == num_tokens(history)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"logit_bias": None},
        {"functions": None, "unheard_of": None}, {"parallel_tool_calls": True}, {"logprobs": False, "top_logprobs": 0},
        {"modalities": ["text"]}, {"max_completion_tokens": 30}, {"top_k": -1}, {"n": 1, "echo": False},
        {"use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False},
    ],
)  # fmt: skip
def test_fields_that_change_nothing(server, fields):
    answer = ask(server, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there."


def test_a_best_of_one(server):
    body = {"model": NAME, "prompt": "a", "seed": 0, "max_tokens": 30}
    plain = server.post("/v1/completions", body).json()["choices"]
    assert server.post("/v1/completions", {**body, "best_of": 1}).json()["choices"] == plain
    assert server.post("/v1/completions", {**body, "n": 2, "best_of": 2}).status_code == 200


# ---- streams ----


def chunks_of(server, path=CHAT, **fields):
    if path == CHAT:
        fields = {"messages": PLAIN[:2], **fields}
    body = {"model": NAME, "seed": 0, "max_tokens": 30, "stream": True, **fields}
    with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_first_chunk_is_the_first_token(server):
    """Whoever measures the time to the first chunk measures a token, not a greeting of the server's."""
    chunks = chunks_of(server, n=2, seed=0)
    first = [next(one for one in chunks if one["choices"][0]["index"] == index) for index in (0, 1)]
    assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": "H"}
    assert all(one["choices"][0]["delta"]["role"] == "assistant" for one in first)
    assert sum("role" in one["choices"][0]["delta"] for one in chunks) == 2


def test_an_answer_without_text_still_has_a_role(server):
    (chunk,) = chunks_of(server, stop=["H"])
    choice = chunk["choices"][0]
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "H")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_usage_with_every_chunk(server, path):
    """As guidellm asks for it: the count grows with the tokens and ends where the last chunk says."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {} if path == CHAT else {"prompt": "a"}
    chunks = chunks_of(server, path, stream_options=options, **prompt)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == counts[-2] == len("Hello there.") + 1
    assert chunks[-1]["choices"] == []
    totals = [chunk["usage"]["total_tokens"] - chunk["usage"]["prompt_tokens"] for chunk in chunks]
    assert totals == counts
    only = chunks_of(server, path, stream_options={"include_usage": True}, **prompt)
    assert ["usage" in chunk for chunk in only] == [False] * (len(only) - 1) + [True]


# ---- thinking ----


def test_reasoning_tokens_are_counted(server):
    answer = ask(server, seed=1, thinking={"type": "enabled"}).json()
    assert answer["usage"]["completion_tokens"] == len("hm, well") + 1 + len("Yes.") + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("hm, well") + 1}
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    hidden = ask(server, seed=1, thinking={"type": "enabled"}, include_reasoning=False).json()
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, {"thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"thinking": True}),
        ({"chat_template_kwargs": {"thinking": False}}, {}),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}},
         {"thinking": True, "reasoning_effort": "max"}),
        ({"reasoning_effort": "none"}, {}),
        *(({"reasoning_effort": word}, {"thinking": True, "reasoning_effort": "high"})
          for word in ("minimal", "low", "medium", "high")),
        *(({"reasoning_effort": word}, {"thinking": True, "reasoning_effort": "max"}) for word in ("xhigh", "max")),
    ],
)  # fmt: skip
def test_ways_to_ask_for_thinking(server, fields, options):
    answer = ask(server, seed=1, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens(PLAIN[:2], **options)


def test_the_last_message_is_continued(server):
    begun = [*PLAIN[:2], {"role": "assistant", "content": "Well, "}]
    assert "continue_final_message" in ask(server, begun).json()["error"]["message"]
    answer = ask(server, begun, continue_final_message=True, add_generation_prompt=False).json()
    assert answer["choices"][0]["message"]["content"] == "Hello there."
    assert answer["usage"]["prompt_tokens"] == num_tokens([*begun[:2], {**begun[2], "wo_eos": True}])


# ---- tokens ----


def test_token_ids_come_back(server):
    answer = ask(server, return_token_ids=True).json()
    prompt = encode_chat(TOKENIZER, PLAIN[:2])
    assert answer["prompt_token_ids"] == prompt
    assert TOKENIZER.decode(answer["choices"][0]["token_ids"][:-1]) == "Hello there."
    chunks = chunks_of(server, return_token_ids=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    ids = [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]
    assert "token_ids" not in ask(server, return_prompt_token_ids=True).json()["choices"][0]


def test_tokens_by_their_ids(server):
    answer = ask(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, max_tokens=2).json()
    names = [one["token"] for one in answer["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in TOKENIZER.encode("He")]


def test_a_request_may_name_itself(server):
    assert ask(server, request_id="mine-1").json()["id"] == "chatcmpl-mine-1"
    assert ask(server, rid="mine-2").json()["id"] == "chatcmpl-mine-2"
