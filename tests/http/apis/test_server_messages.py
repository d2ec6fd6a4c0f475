"""`/v1/messages`, Anthropic's interface: texts, thoughts, tools, streams, counting, and what is refused."""

import json

import pytest
from server_cases import NAME, TOKENIZER, let_it_say, make_llm, start_server

from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.messages.request import MessagesRequest, chat_fields
from dsv4.http.body import validate
from dsv4.text.chat import ChatOptions
from dsv4.text.tokenizer import encode_chat

HELLO = [{"role": "user", "content": "Hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"name": "look", "description": "Look.", "input_schema": CITY}
TOOL_SHOWN = {"name": "look", "description": "Look.", "parameters": CITY}
CALL = (
    "So.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"look\">\n"
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)  # fmt: skip
SAYS, THINKS, CALLS = range(3)  # the seeds


def prompt_tokens(usage):
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.fixture(scope="module")
def server(served_params):
    with start_server(let_it_say(make_llm(served_params), "Hello there.", "hm</think>Yes.", CALL)) as running:
        yield running


def post(server, seed=SAYS, path="/v1/messages", **fields):
    body = {"model": NAME, "max_tokens": 300, "messages": HELLO, "seed": seed, **fields}
    if path != "/v1/messages":
        body = {name: value for name, value in body.items() if name not in ("max_tokens", "seed")}
    return server.post(path, body)


def said(server, seed=SAYS, **fields):
    answer = post(server, seed, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server, seed=SAYS, **fields):
    body = {"model": NAME, "max_tokens": 300, "messages": HELLO, "seed": seed, "stream": True, **fields}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    return events


def test_a_text(server):
    answer = said(server, system="Be brief.", metadata={"user_id": "u"}, service_tier="auto")
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["content"] == [{"type": "text", "text": "Hello there."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    prompt = encode_chat(TOKENIZER, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert answer["usage"] == {
        "input_tokens": len(prompt), "output_tokens": len("Hello there.") + 1,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip


def test_ways_to_end(server):
    cut = said(server, max_tokens=5)
    assert (cut["content"][0]["text"], cut["stop_reason"]) == ("Hello", "max_tokens")
    stopped = said(server, stop_sequences=["there", "zz"])
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        "Hello ", "stop_sequence", "there",
    )  # fmt: skip


def test_thoughts_are_a_block(server):
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        answer = said(server, THINKS, thinking=thinking)
        assert answer["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes."},
        ]  # fmt: skip
    hidden = said(server, THINKS, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"][0]["thinking"] == ""


def test_an_effort_reaches_the_prompt(server):
    options = ChatOptions(thinking=True, reasoning_effort="max")
    answer = said(server, THINKS, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert answer["usage"]["input_tokens"] == len(encode_chat(TOKENIZER, HELLO, options))


@pytest.fixture(scope="module")
def called(server):
    """An answer with a call."""
    return said(server, CALLS, tools=[TOOL])


def test_a_tool_round_trip(server, called):
    """What comes back, thoughts included, is the conversation the protocol would have written."""
    assert called["stop_reason"] == "tool_use"
    text, call = called["content"]
    assert (text["text"], call["name"], call["input"]) == ("So.", "look", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "cold"}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thought, text, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    second = said(server, THINKS, messages=messages, tools=[TOOL], thinking=thinking)
    function = {"id": call["id"], "function": {"name": "look", "arguments": json.dumps(call["input"])}}
    plain = [
        *HELLO,
        {"role": "assistant", "reasoning_content": "hm", "content": "So.", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": call["id"], "content": "cold"},
        {"role": "user", "content": "So?"},
    ]
    expected = encode_chat(TOKENIZER, plain, ChatOptions(tools=[TOOL_SHOWN], thinking=True))
    assert prompt_tokens(second["usage"]) == len(expected)
    counted = post(server, path="/v1/messages/count_tokens", messages=messages, tools=[TOOL], thinking=thinking)
    assert counted.json() == {"input_tokens": len(expected)}


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}, None),
        ({"type": "none"}, "none", None),
    ],
)
def test_tool_choices(choice, expected, parallel):
    body = {"model": NAME, "max_tokens": 9, "messages": HELLO, "tools": [TOOL], "tool_choice": choice}
    fields = chat_fields(validate(MessagesRequest, body))
    assert fields["tool_choice" if choice else "messages"] == (expected if choice else HELLO)
    assert fields.get("parallel_tool_calls") is parallel
    assert validate(ChatRequest, fields).tools[0].function.parameters == CITY


def test_a_last_message_of_the_assistants_is_continued(server):
    begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    answer = said(server, messages=begun)
    assert answer["content"] == [{"type": "text", "text": "Hello there."}]
    expected = encode_chat(TOKENIZER, [*HELLO, {"role": "assistant", "content": "Well, ", "wo_eos": True}])
    assert answer["usage"]["input_tokens"] == len(expected)


def test_a_system_message_in_a_conversation_is_a_reminder(server):
    """Claude Code ends its list with one (`mid-conversation-system`). It joins the user's turn, wherever it stands;
    before the conversation it is the system's text."""
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "cold"}
    late = [{"type": "text", "text": "Stay calm."}, {"type": "text", "text": "Be kind."}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "system", "content": "Use look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": late},
    ]
    function = {"id": "t", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\n\n<system-reminder>\nUse look.\n</system-reminder>"},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "t", "content": "cold"},
        *({"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"}
          for text in ("Stay calm.", "Be kind.")),
    ]  # fmt: skip
    expected = encode_chat(TOKENIZER, plain, ChatOptions(tools=[TOOL_SHOWN]))
    counted = post(server, path="/v1/messages/count_tokens", messages=messages, tools=[TOOL])
    assert counted.json() == {"input_tokens": len(expected)}
    assert said(server, messages=messages, tools=[TOOL])["content"] == [{"type": "text", "text": "Hello there."}]
    alone = [{"role": "assistant", "content": "Hi."}, {"role": "system", "content": "Go on."}]
    assert said(server, messages=alone)["stop_reason"] == "end_turn"


def test_json_follows_its_schema(server):
    answer = said(server, output_config={"format": {"type": "json_schema", "schema": CITY}})
    assert json.loads(answer["content"][0]["text"])["city"] in ("Oslo", "Rome")


def test_a_stream_adds_up(server, called):
    """Every block starts, grows and stops, one after the other, and what they add up to is the whole answer."""
    for seed, fields in ((SAYS, {}), (THINKS, {"thinking": {"type": "adaptive"}}), (CALLS, {"tools": [TOOL]})):
        events = events_of(server, seed, **fields)
        whole = called if seed == CALLS else said(server, seed, **fields)
        assert events[0]["type"] == "message_start"
        assert events[0]["message"]["content"] == []
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
        blocks, is_open = [], False
        for event in events[1:-2]:
            if event["type"] == "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"json": ""})
            delta = event.get("delta", {})
            for field in ("text", "thinking"):
                if delta.get("type") == f"{field}_delta":
                    blocks[-1][field] += delta[field]
            blocks[-1]["json"] += delta.get("partial_json", "")
            is_open = event["type"] != "content_block_stop"
        assert not is_open
        for block in blocks:
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
                block["id"] = whole["content"][-1]["id"]
        assert blocks == whole["content"]
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
        assert prompt_tokens(events[-2]["usage"]) == prompt_tokens(whole["usage"]), "read, or known from before"
        assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type", "text only"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "messages[0].content[0].type", "leave it out"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages",
         "belongs into an assistant"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages",
         "belongs into a user"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages",
         "belongs into a user"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]}, "tools[0].type",
         "offer functions"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice", "expected one of look"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type",
         "clear_thinking"),
        ({"mcp_servers": []}, "mcp_servers", "offer functions"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "at least 1 character"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(server, fields, param, message):
    answer = post(server, **fields)
    body = answer.json()
    assert answer.status_code == 400, answer.text
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]
    assert body["error"]["param"] == param


def test_a_turn_of_claude_code(server):
    """Its request as it is, and the turn after: tools with schemas nobody can enforce, marks that move, a line for
    Anthropic's accounts that differs in every request and must not keep the prompt from being known."""
    tags = {"type": "array", "uniqueItems": True}
    odd = {"type": "object", "properties": {"tags": tags}, "propertyNames": {"pattern": "^a"}, "$schema": "http://x#"}
    tools = [TOOL, {"name": "mcp__x", "description": "X.", "input_schema": odd}]
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

    def ask(messages, nonce, seed):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"},
            {"type": "text", "text": "Be brief. " * 20, **mark},
        ]
        events = events_of(
            server, seed, messages=messages, system=system, tools=tools, metadata={"user_id": "u"}, temperature=1,
            max_tokens=200, thinking={"type": "enabled", "budget_tokens": 199}, output_config={"effort": "high"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )  # fmt: skip
        usage = events[-2]["usage"]
        assert usage["cache_creation_input_tokens"] == 0
        return events, usage["cache_read_input_tokens"]

    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello", **mark}]}]
    events, _ = ask(messages, "36ee5", THINKS)
    assert "".join(one["delta"].get("text", "") for one in events if "delta" in one) == "Yes."
    answer = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes."}]
    messages = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "[Interrupted]"}]
    _, num_cached = ask([*messages, {"role": "user", "content": "Go on"}], "0aaa9", THINKS)
    assert num_cached >= 128


def test_the_key_may_come_as_anthropics_clients_send_it(served_params):
    server = start_server(make_llm(served_params), api_key="secret")
    try:
        body = {"model": NAME, "max_tokens": 2, "messages": HELLO}
        for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
            assert server.post("/v1/messages", body, headers=headers).status_code == status
        both = {"x-api-key": "secret", "authorization": "Bearer wrong"}
        assert server.post("/v1/messages", body, headers=both).status_code == 401
        for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert server.post(path, asked).status_code == 401
            assert server.post(path, asked, headers={"authorization": "Bearer secret"}).status_code == 200
    finally:
        server.stop()
