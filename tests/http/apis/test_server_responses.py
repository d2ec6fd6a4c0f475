"""`/v1/responses` through OpenAI's own client: texts, thoughts, tools, schemas, streams, and what is refused."""

import json

import openai
import pytest
from server_cases import NAME, TOKENIZER, let_it_say, make_llm, start_server

from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.responses.request import ResponsesRequest, chat_fields
from dsv4.http.body import validate
from dsv4.text.chat import ChatOptions
from dsv4.text.tokenizer import encode_chat

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "look", "description": "Look.", "parameters": CITY, "strict": False}
CALL = (
    "So.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"look\">\n"
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)  # fmt: skip
SPACE_CALL = CALL.replace('"look"', '"near.look"')
SAYS, THINKS, CALLS, JSON, SPACED = range(5)  # the seeds


@pytest.fixture(scope="module")
def server(served_params):
    llm = let_it_say(make_llm(served_params), "Hello there.", "hm</think>Yes.", CALL, '{"city": "Oslo"}', SPACE_CALL)
    with start_server(llm) as running:
        yield running


@pytest.fixture(scope="module")
def ask(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def create(seed, given="Hello", **fields):
        return client.responses.create(model=NAME, input=given, extra_body={"seed": seed}, **fields)

    return create


def test_a_text(ask):
    answer = ask(SAYS, instructions="Be brief.", metadata={"a": "b"})
    assert (answer.status, answer.output_text, answer.metadata) == ("completed", "Hello there.", {"a": "b"})
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert answer.usage.input_tokens == len(encode_chat(TOKENIZER, prompt))
    assert answer.usage.output_tokens == len("Hello there.") + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_an_answer_that_is_cut(ask):
    answer = ask(SAYS, max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == (
        "incomplete", "max_output_tokens", "Hello",
    )  # fmt: skip
    assert answer.output[0].status == "incomplete"


def test_thoughts_are_an_item(ask):
    answer = ask(THINKS, reasoning={"effort": "high"})
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hm"
    assert answer.output_text == "Yes."
    assert answer.usage.output_tokens_details.reasoning_tokens == 3


def test_a_tool_round_trip(ask):
    """What comes back is the conversation the protocol would have written."""
    first = ask(CALLS, tools=[TOOL])
    assert [item.type for item in first.output] == ["message", "function_call"]
    call = first.output[1]
    assert (call.name, json.loads(call.arguments)) == ("look", {"city": "Oslo"})
    items = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "cold"})
    second = ask(SAYS, items, tools=[TOOL])
    assert second.output_text == "Hello there."
    function = {"id": call.call_id, "type": "function", "function": {"name": "look", "arguments": call.arguments}}
    plain = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "So.", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "cold"},
    ]
    shown = {"name": "look", "description": "Look.", "parameters": CITY}
    expected = encode_chat(TOKENIZER, plain, ChatOptions(tools=[shown]))
    assert second.usage.input_tokens == len(expected)


def test_thoughts_before_a_call_are_kept(ask):
    """Reasoning, text and calls of one turn become one message; without tools it would be forgotten."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "cold"}]},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    plain = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]
    options = ChatOptions(tools=[{"name": "look", "parameters": CITY}], thinking=True, reasoning_effort="high")
    tool = {"type": "function", "name": "look", "parameters": CITY}
    answer = ask(THINKS, items, tools=[tool], reasoning={"effort": "medium"})
    assert answer.usage.input_tokens == len(encode_chat(TOKENIZER, plain, options))


def test_json_follows_its_schema(ask):
    text = {"format": {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}}
    assert json.loads(ask(JSON, text=text).output_text) == {"city": "Oslo"}


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("required", "required"),
        ({"type": "function", "name": "look"}, NAMED),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
         {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}),
    ],
)  # fmt: skip
def test_tool_choices(choice, expected):
    body = {"model": NAME, "input": "x", "tools": [TOOL], "tool_choice": choice}
    fields = chat_fields(validate(ResponsesRequest, body))
    assert fields["tool_choice"] == expected
    assert validate(ChatRequest, fields).tools[0].function.name == "look"


def test_a_stream_adds_up(ask):
    """Every item opens, grows and closes, in order, and the last event holds the whole answer."""
    for seed, fields in ((SAYS, {}), (THINKS, {"reasoning": {"effort": "high"}}), (CALLS, {"tools": [TOOL]})):
        events = list(ask(seed, stream=True, **fields))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        final = events[-1].response
        assert (events[-1].type, final.status) == ("response.completed", "completed")
        grown = [""] * len(final.output)
        for event in events[2:-1]:
            if event.type.endswith(".delta"):
                grown[event.output_index] += event.delta
        texts = [item.arguments if item.type == "function_call" else item.content[0].text for item in final.output]
        assert grown == texts
        done = [event.item.model_dump() for event in events if event.type == "response.output_item.done"]
        assert done == [item.model_dump() for item in final.output]
        if seed != CALLS:
            whole = ask(seed, **fields)
            assert [item.type for item in whole.output] == [item.type for item in final.output]
            assert whole.usage == final.usage


def test_log_probabilities(ask):
    answer = ask(SAYS, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    shown = answer.output[0].content[0].logprobs
    assert [one.token for one in shown] == list("Hell")
    assert all(len(one.top_logprobs) == 2 for one in shown)


def test_a_turn_of_codex(ask):
    """Its request as it is, tools that only OpenAI runs among the functions, and what it sends back the turn after."""
    odd = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}, "propertyNames": {}}
    hosted = [
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ]
    mcp = {"type": "function", "name": "mcp__x", "description": "X.", "parameters": odd, "strict": False}
    said = [("developer", "Rules."), ("user", "<environment_context>"), ("user", "Hello")]
    items = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]} for role, text in said
    ]
    fields = {
        "instructions": "You are an agent.", "tools": [TOOL, *hosted, mcp], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a-session", "stream": True,
    }  # fmt: skip
    first = list(ask(CALLS, items, **fields | {"reasoning": None}))[-1].response
    assert [item.type for item in first.output] == ["message", "function_call"]
    assert [tool.type for tool in first.tools] == ["function", "web_search", "image_generation", "function"]
    kept = [item.model_dump(exclude={"id", "status"}, exclude_none=True) for item in first.output]
    kept.insert(0, {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None})
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "cold"}
    second = list(ask(THINKS, [*items, *kept, output], **fields))[-1].response
    assert second.output_text == "Yes."
    shown = [{key: tool[key] for key in ("name", "description", "parameters")} for tool in (TOOL, mcp)]
    plain = [
        {"role": "system", "content": "You are an agent."},
        *({"role": "system" if role == "developer" else role, "content": text} for role, text in said),
        {"role": "assistant", "content": "So.", "reasoning_content": "", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": first.output[1].arguments}}]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]  # fmt: skip
    options = ChatOptions(tools=shown, thinking=True, reasoning_effort="high")
    assert second.usage.input_tokens == len(encode_chat(TOKENIZER, plain, options))


def test_functions_of_a_namespace_can_be_called(ask):
    """Codex offers such tools. A call says name and namespace apart, streamed and whole, and is sent back so."""
    far = {**TOOL, "name": "gaze", "description": None}
    space = {"type": "namespace", "name": "near", "description": "What is near.", "tools": [TOOL, far]}
    fields = {"tools": [TOOL, space], "tool_choice": {"type": "function", "name": "look", "namespace": "near"}}
    first = ask(SPACED, **fields)
    call = first.output[-1]
    assert (call.type, call.name, call.namespace) == ("function_call", "look", "near")
    assert first.tools[1].model_dump()["tools"][1]["name"] == "gaze"
    added, done = (
        [event for event in ask(SPACED, stream=True, **fields) if event.type == f"response.{kind}"][-1]
        for kind in ("output_item.added", "output_item.done")
    )
    assert added.item.namespace == done.item.namespace == "near"
    items = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "cold"})
    second = ask(SAYS, items, tools=fields["tools"])
    look = {"description": "Look.", "parameters": CITY}
    shown = [
        {"name": "look", **look},
        {"name": "near.look", **look, "description": "What is near.\n\nLook."},
        {"name": "near.gaze", "parameters": CITY},
    ]
    plain = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "near.look", "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]  # fmt: skip
    assert second.usage.input_tokens == len(encode_chat(TOKENIZER, plain, ChatOptions(tools=shown)))
    plain_call = ask(CALLS, **fields | {"tool_choice": "auto"}).output[-1]
    assert (plain_call.name, plain_call.namespace) == ("look", None)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"store": True}, "store", "keeps no answers"),
        ({"background": True}, "background", "keeps no answers"),
        ({"truncation": "auto"}, "truncation", "never cut"),
        ({"tools": [{"type": "web_search_preview", "x": 1}]}, "tools[0].type", "offer functions"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools", "missing"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type",
         "offer functions"),
        ({"tools": [{"type": "custom", "name": "patch", "format": {}}]}, "tools[0].type", "offer functions"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type",
         "offer functions"),
        ({"tools": [{"type": "strange"}]}, "tools[0].type", "'function'"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gA"}]}, "input[0].encrypted_content",
         "leave it out"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "found 'item_reference'"),
        ({"input": []}, "input", "at least 1 item"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, "response_format",
         "Invalid type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"reasoning": {"effort": "huge"}}, "reasoning_effort", "expected one of none"),
        ({"tool_choice": "required"}, "tools", "missing"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(server, fields, param, message):
    answer = server.post("/v1/responses", {"model": NAME, "input": "x", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert message in error["message"]
    assert error["param"] == param
