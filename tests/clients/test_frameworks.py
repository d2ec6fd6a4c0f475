"""langchain-openai and pydantic-ai: what they make of the interfaces, turn by turn."""

import anthropic
import openai
import pytest
from client_cases import CALL, THOUGHTFUL_CALL, TOOL, Place
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from server_cases import NAME

pytestmark = pytest.mark.client


def chat(url, **options):
    return ChatOpenAI(
        model=NAME, base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120, **options
    )  # fmt: skip


def test_langchain_in_turns(talker, caller):
    asked = HumanMessage("Hello")
    called = chat(caller).bind_tools([TOOL]).invoke([asked])
    (call,) = called.tool_calls
    assert call["args"] == {"city": "Oslo"}
    result = ToolMessage("cold", tool_call_id=call["id"], name="get_weather")
    assert chat(talker).bind_tools([TOOL]).invoke([asked, called, result]).content == "Hello there."


def test_langchain_streams_and_its_messages_add_up(talker, caller):
    assert "".join(piece.content for piece in chat(talker).stream("Hello")) == "Hello there."
    whole = None
    for piece in chat(caller).bind_tools([TOOL]).stream("Hello"):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == {"city": "Oslo"}
    result = ToolMessage("cold", tool_call_id=whole.tool_calls[0]["id"])
    assert chat(talker).bind_tools([TOOL]).invoke([HumanMessage("Hello"), whole, result]).content == "Hello there."


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(says, method):
    url = says('{"city": "Oslo"}')
    model = chat(url, max_tokens=400).with_structured_output(Place, method=method)
    assert isinstance(model.invoke("Where?"), Place)


def test_langchain_over_responses(says):
    """With a tool, whose call and result go back as items."""
    model = chat(says(CALL, "Hello there."), use_responses_api=True, store=False).bind_tools([TOOL])
    asked = HumanMessage("Hello")
    called = model.invoke([asked])
    (call,) = called.tool_calls
    assert call["args"] == {"city": "Oslo"}
    assert model.invoke([asked, called, ToolMessage("cold", tool_call_id=call["id"])]).text == "Hello there."


def models(url):
    provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused"))
    claude = AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(base_url=url, api_key="unused"))
    return {
        "chat": OpenAIChatModel(NAME, provider=provider),
        "responses": OpenAIResponsesModel(NAME, provider=provider),
        "messages": AnthropicModel(NAME, provider=claude),
    }


INTERFACES = ["chat", "responses", "messages"]


@pytest.mark.parametrize("interface", INTERFACES)
def test_pydantic_ai(talker, interface):
    agent = Agent(models(talker)[interface], instructions="Be brief.", model_settings={"max_tokens": 400})
    first = agent.run_sync("Hello")
    assert first.output == "Hello there."
    second = agent.run_sync("And again", message_history=first.all_messages())
    assert second.output == "Hello there."
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("interface", INTERFACES)
def test_pydantic_ai_calls_a_tool_and_goes_on(says, interface):
    """Its own loop: a call, the tool, the result sent back, an answer; then the same again with all that behind it."""
    thinking = {
        "chat": {"extra_body": {"thinking": {"type": "enabled"}}},
        "responses": {"openai_reasoning_effort": "medium"},
        "messages": {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}},
    }[interface]
    url = says(THOUGHTFUL_CALL, "hm</think>Yes.", THOUGHTFUL_CALL, "hm</think>No.")
    agent = Agent(models(url)[interface], model_settings={"max_tokens": 1500, **thinking})
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        asked.append(city)
        return "cold"

    first = agent.run_sync("Hello")
    assert (first.output, asked) == ("Yes.", ["Oslo"])
    second = agent.run_sync("Sure?", message_history=first.all_messages())
    assert (second.output, asked) == ("No.", ["Oslo", "Oslo"])
    parts = [part for message in first.all_messages() for part in message.parts if part.part_kind == "thinking"]
    # of a response, `content` is a summary; reasoning itself is beside it
    thoughts = [part.provider_details["raw_content"][0] if interface == "responses" else part.content for part in parts]
    assert thoughts == ["hm", "hm"]


@pytest.mark.parametrize("interface", INTERFACES)
def test_pydantic_ai_structured_output(says, interface):
    """Its output is a call that must come; the constraint makes it one."""
    agent = Agent(models(says("{}"))[interface], output_type=Place, retries=0)
    assert isinstance(agent.run_sync("Where?", model_settings={"max_tokens": 400}).output, Place)
