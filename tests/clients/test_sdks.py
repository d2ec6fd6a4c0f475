"""OpenAI's and Anthropic's own clients, litellm as three providers, and `llm`: turns, tools, thoughts, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import anthropic
import litellm
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


# ---- litellm ----

PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_in_turns(provider, talker, caller):
    """Its second turn carries `provider_specific_fields`, `function_call: null` and more."""
    ask = {"model": f"{provider}/{NAME}", "api_key": "unused", "max_tokens": 400}
    first = litellm.completion(messages=HELLO, tools=[TOOL], api_base=caller + PROVIDERS[provider], **ask)
    message = first.choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    history = [*HELLO, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "name": "f", "content": "cold"}]
    second = litellm.completion(messages=history, tools=[TOOL], api_base=talker + PROVIDERS[provider], **ask)
    assert second.choices[0].message.content == "Hello there."


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_streams(provider, talker):
    chunks = litellm.completion(
        model=f"{provider}/{NAME}", api_key="unused", api_base=talker + PROVIDERS[provider], messages=HELLO,
        max_tokens=50, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    whole = litellm.stream_chunk_builder(list(chunks), messages=HELLO)
    assert whole.choices[0].message.content == "Hello there."
    assert whole.usage.completion_tokens == 13


# ---- llm ----


def test_llm_on_the_command_line(talker, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {NAME}\n  api_base: {talker}/v1\n  api_key_name: none\n", encoding="utf-8"
    )
    (tmp_path / "keys.json").write_text('{"none": "unused"}', encoding="utf-8")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "llm", "-m", "here"]
    for more in ([], ["--no-stream"], ["-c"]):
        ran = subprocess.run(
            [*command, *more, "Hello"], env=environment, capture_output=True, timeout=120, check=False
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr.decode()
        assert ran.stdout.decode().strip() == "Hello there."
