"""langchain-openai, instructor, pydantic-ai and lm-eval: what they make of the interface, turn by turn."""

from __future__ import annotations

import json
from typing import Literal

import instructor
import openai
import pytest
from client_cases import TOOL
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from server_cases import NAME, SERVED, make_llm

from dsv4.text.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.client


class Place(BaseModel):
    city: Literal["Oslo", "Rome"]  # a model of random weights would not end a free text


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


def test_langchain_over_responses(talker):
    answer = chat(talker, use_responses_api=True).invoke("Hello")
    assert answer.text == "Hello there."


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON])
def test_instructor(says, mode):
    url = says('{"city": "Oslo"}')
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=120)
    client = instructor.from_openai(plain, mode=mode)
    place = client.chat.completions.create(
        model=NAME,
        response_model=Place,
        max_retries=0,
        max_tokens=400,
        messages=[{"role": "user", "content": "Where?"}],
    )
    assert place.city is not None


def models(url):
    provider = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused"))
    return {
        "chat": OpenAIChatModel(NAME, provider=provider),
        "responses": OpenAIResponsesModel(NAME, provider=provider),
    }


@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_pydantic_ai(talker, interface):
    agent = Agent(models(talker)[interface], instructions="Be brief.")
    first = agent.run_sync("Hello")
    assert first.output == "Hello there."
    second = agent.run_sync("And again", message_history=first.all_messages())
    assert second.output == "Hello there."
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("interface", ["chat", "responses"])
def test_pydantic_ai_structured_output(says, interface):
    """Its output is a call that must come; the constraint makes it one."""
    agent = Agent(models(says("{}"))[interface], output_type=Place, retries=0)
    assert isinstance(agent.run_sync("Where?", model_settings={"max_tokens": 400}).output, Place)


def test_lm_eval_scores_as_the_library_does(talker, params, tmp_path):
    """Its log-likelihood of a continuation is `LLM.score`'s, number for number, in a batch and alone."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(SERVED.vocab_size)))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    pairs = [("The sky was", " red and green"), ("a", "b"), ("One, two,", " three"), ("The sky was", " red")]
    library = make_llm(params)
    expected = []
    for context, continuation in pairs:
        (scores,) = library.score(context + continuation, 1)
        tail = scores[len(library.encode(context)) :]
        is_greedy = all(one.token_id == one.top[0][0] for one in tail)
        expected.append((sum(one.logprob for one in tail), is_greedy))
    asked = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
    for batch_size in (1, 4):
        model = LocalCompletionsAPI(
            base_url=f"{talker}/v1/completions", model=NAME, tokenizer=str(tmp_path), batch_size=batch_size,
            max_retries=1,
        )  # fmt: skip
        assert model.loglikelihood(asked, disable_tqdm=True) == expected
