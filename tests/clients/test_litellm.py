"""litellm, as three providers: conversations with tools and thoughts, whole and streamed."""

import json

import litellm
import pytest
from client_cases import THOUGHTFUL_CALL, TOOL
from server_cases import NAME

pytestmark = pytest.mark.client
HELLO = [{"role": "user", "content": "Hello"}]
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


THINKING = {
    "openai": {"extra_body": {"thinking": {"type": "enabled"}}},
    "hosted_vllm": {"reasoning_effort": "medium"},
    "anthropic": {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "allowed_openai_params": ["thinking"],  # a name it does not know must be said to think
    },
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_a_conversation_with_thoughts_and_tools(provider, says, is_stream):
    """Five requests: two calls with their results and an answer to each, then a last word without thinking."""
    url = says(THOUGHTFUL_CALL, "hm</think>Yes.", THOUGHTFUL_CALL, "hm</think>No.", "Hello there.")
    ask = {"model": f"{provider}/{NAME}", "api_key": "unused", "api_base": url + PROVIDERS[provider], "tools": [TOOL]}
    history = []

    def turn(**fields):
        answer = litellm.completion(messages=history, max_tokens=1500, stream=is_stream, **ask, **fields)
        if is_stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=history)
        history.append(answer.choices[0].message.model_dump())
        return answer.choices[0].message

    for word in ("Yes.", "No."):
        history.append({"role": "user", "content": "Is it cold?"})
        message = turn(**THINKING[provider])
        assert message.reasoning_content == "hm"
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        history.append({"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "cold"})
        message = turn(**THINKING[provider])
        assert (message.content, message.reasoning_content) == (word, "hm")
    history.append({"role": "user", "content": "Thanks"})
    assert turn().content == "Hello there."


def test_litellm_text_completion(talker):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{NAME}", api_key="unused", api_base=f"{talker}/v1", prompt="Hello", max_tokens=50
    )
    assert answer.choices[0].text == "Hello there."


def test_litellm_responses(talker):
    answer = litellm.responses(
        model=f"openai/{NAME}", api_key="unused", api_base=f"{talker}/v1", input="Hello", max_output_tokens=50
    )
    assert answer.output[-1].content[0].text == "Hello there."
