"""OpenAI's and Anthropic's own clients: turns, tools, thoughts, streams."""

import json

import anthropic
import openai
import pytest
from client_cases import CITY, TOOL
from server_cases import NAME

pytestmark = pytest.mark.client
HELLO = [{"role": "user", "content": "Hello"}]


# ---- openai ----


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_openai_chat_in_turns(talker, caller):
    """The whole message a client keeps, every null of it, goes back with the next turn."""
    message = client_of(caller).chat.completions.create(model=NAME, messages=HELLO, tools=[TOOL]).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    history = [*HELLO, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "cold"}]
    answer = client_of(talker).chat.completions.create(model=NAME, messages=history, tools=[TOOL], user="me")
    assert answer.choices[0].message.content == "Hello there."


def test_openai_responses_in_turns(talker, caller):
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    with client_of(caller).responses.stream(model=NAME, input="Hello", tools=[tool]) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    assert json.loads(call.arguments) == {"city": "Oslo"}
    history = [*HELLO, *(item.model_dump() for item in first.output)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "cold"})
    assert client_of(talker).responses.create(model=NAME, input=history, tools=[tool]).output_text == "Hello there."


def test_openai_responses_think(thinker):
    answer = client_of(thinker).responses.create(model=NAME, input="Hello", reasoning={"effort": "medium"})
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "Yes."


# ---- anthropic ----


def claude(url):
    return anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=120)


def test_anthropic_in_turns(talker, caller):
    tools = [{"name": "get_weather", "description": "The weather", "input_schema": CITY}]
    ask = {"model": NAME, "max_tokens": 400, "tools": tools}
    with claude(caller).messages.stream(messages=HELLO, **ask) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "cold", "is_error": False}
    turns = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert claude(talker).messages.create(messages=turns, **ask).content[0].text == "Hello there."
    dumped = [*HELLO, {"role": "assistant", "content": [block.model_dump() for block in first.content]}, turns[2]]
    counted = claude(talker).messages.count_tokens(model=NAME, messages=dumped, tools=tools)
    assert counted.input_tokens > 100


def test_anthropic_thinks(thinker):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = claude(thinker).messages.create(model=NAME, max_tokens=2000, messages=HELLO, thinking=thinking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "hm"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude(thinker).messages.create(model=NAME, max_tokens=9, messages=HELLO, extra_body={"temperature": -1})
