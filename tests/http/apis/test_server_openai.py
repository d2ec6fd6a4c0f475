"""OpenAI's own client against a live server: plain, streaming, asynchronous, tools, JSON schema, errors."""

import asyncio
import json

import openai
import pytest
from server_cases import NAME, TOKENIZER, let_it_say, make_llm, start_server

from dsv4.request import SamplingParams
from dsv4.text.chat import ChatOptions
from dsv4.text.tokenizer import encode_chat

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def client_of(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60, **options)


@pytest.fixture(scope="module")
def client(live):
    return client_of(live)


@pytest.fixture
def scripted(served_params):
    """`scripted(*answers)`: a client of a server whose model says them, by seed."""
    servers = []

    def start(*answers):
        servers.append(start_server(let_it_say(make_llm(served_params), *answers)))
        return client_of(servers[-1])

    yield start
    for server in servers:
        server.wait_until_free()
        server.stop()


@pytest.fixture(scope="module")
def solo(served_params):
    """The same model, without a server: what an answer must be."""
    llm = make_llm(served_params)

    def ask(messages, options=None, **params):
        prompt = encode_chat(TOKENIZER, messages, options or ChatOptions())
        return llm.generate([prompt], SamplingParams(**params))[0]

    return ask


# ---- plain and streaming ----


def test_a_chat_is_what_the_model_says(client, solo):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=12, seed=4, temperature=0.9)
    expected = solo(HELLO, max_tokens=12, seed=4, temperature=0.9)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.model == NAME
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_answer(client, solo):
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=HELLO, max_tokens=15, seed=2, stream=True, stream_options={"include_usage": True}
        )
    )
    expected = solo(HELLO, max_tokens=15, seed=2)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5, "it really streams"


def test_usage_comes_only_when_asked_for(client):
    chunks = list(client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=2, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_asynchronous_clients_side_by_side(live, solo):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:

            async def whole(seed):
                answer = await client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=10, seed=seed)
                return answer.choices[0].message.content

            async def streamed(seed):
                text = ""
                async for chunk in await client.chat.completions.create(
                    model=NAME, messages=HELLO, max_tokens=10, seed=seed, stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(ask(seed) for seed in range(5) for ask in (whole, streamed)))

    texts = asyncio.run(run())
    assert texts == [solo(HELLO, max_tokens=10, seed=seed).text for seed in range(5) for _ in range(2)]


def test_several_choices(client, solo):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=6, seed=10, n=3)
    expected = [solo(HELLO, max_tokens=6, seed=10 + i).text for i in range(3)]
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=6, seed=10, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_without_a_seed_answers_differ(client):
    texts = {
        client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=10).choices[0].message.content
        for _ in range(4)
    }
    assert len(texts) > 1


def test_stop_strings(scripted):
    client = scripted("one two END three")
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=30, seed=0, stop=["END"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two ", "stop")


def test_logprobs(client, solo):
    options = {"model": NAME, "messages": HELLO, "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 3}
    expected = solo(HELLO, max_tokens=4, seed=1, logprobs=3)
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = [
        one
        for chunk in client.chat.completions.create(stream=True, **options)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert whole == streamed
    assert [one.logprob for one in whole] == [one.logprob for one in expected.logprobs]
    assert [bytes(one.bytes) for one in whole] == [TOKENIZER.token_bytes(token_id) for token_id in expected.token_ids]
    assert [[top.logprob for top in one.top_logprobs] for one in whole] == [
        [logprob for _, logprob in one.top] for one in expected.logprobs
    ]


def test_completions(client, served_params):
    llm = make_llm(served_params)
    answer = client.completions.create(model=NAME, prompt=["ab", "cd"], max_tokens=5, seed=3, n=2, logprobs=2)
    expected = [
        llm.generate(prompt, SamplingParams(max_tokens=5, seed=3 + place, logprobs=2))[0]
        for place, prompt in enumerate(("ab", "ab", "cd", "cd"))
    ]
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert answer.choices[2].logprobs.token_logprobs == [one.logprob for one in expected[2].logprobs]
    assert answer.usage.prompt_tokens == 4
    ids = client.completions.create(model=NAME, prompt=llm.encode("ab"), max_tokens=5, seed=3)
    assert ids.choices[0].text == expected[0].text
    text = ""
    for chunk in client.completions.create(model=NAME, prompt="cd", max_tokens=5, seed=5, stream=True):
        text += chunk.choices[0].text
    assert text == expected[2].text


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("other")


# ---- thinking ----


def test_reasoning_has_its_own_field(scripted):
    client = scripted("hm, let me see</think>The answer.")
    ask = {"model": NAME, "messages": HELLO, "seed": 0, "extra_body": {"thinking": {"type": "enabled"}}}
    message = client.chat.completions.create(**ask).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm, let me see", "The answer.")
    reasoning, content = "", ""
    for chunk in client.chat.completions.create(stream=True, **ask):
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        content += chunk.choices[0].delta.content or ""
    assert (reasoning, content) == ("hm, let me see", "The answer.")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ChatOptions()),
        ({"extra_body": {"thinking": {"type": "enabled"}}}, ChatOptions(thinking=True)),
        ({"reasoning_effort": "max"}, ChatOptions(thinking=True, reasoning_effort="max")),
        ({"reasoning_effort": "none"}, ChatOptions()),
    ],
)
def test_reasoning_effort_reaches_the_prompt(client, fields, options):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=1, **fields)
    assert answer.usage.prompt_tokens == len(encode_chat(TOKENIZER, HELLO, options))


# ---- tools ----

CALL = (
    "Let me look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n"
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)  # fmt: skip


def test_a_tool_round_trip(scripted):
    """The model calls, the caller answers, the model reads the answer: the prompt is what the protocol says."""
    client = scripted(CALL, "It is cold.")
    messages = list(HELLO)
    first = client.chat.completions.create(model=NAME, messages=messages, tools=[WEATHER], seed=0).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me look."
    call = first.message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": -3}'}]
    second = client.chat.completions.create(model=NAME, messages=messages, tools=[WEATHER], seed=1)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is cold.", "stop")
    plain = [
        HELLO[0],
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": -3}'},
    ]
    expected = encode_chat(TOKENIZER, plain, ChatOptions(tools=[WEATHER]))
    assert second.usage.prompt_tokens == len(expected)


def test_tool_calls_stream(scripted):
    client = scripted(CALL)
    content, name, arguments, ids, finish = "", "", "", set(), None
    for chunk in client.chat.completions.create(model=NAME, messages=HELLO, tools=[WEATHER], seed=0, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            assert call.index == 0
            ids |= {call.id} - {None}
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (content, name, json.loads(arguments), finish) == (
        "Let me look.", "get_weather", {"city": "Oslo", "days": 3}, "tool_calls",
    )  # fmt: skip
    assert len(ids) == 1


NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([WEATHER], {"type": "function", "function": {"name": "get_weather"}}),
        ([WEATHER, NOW], "required"),
    ],
)
def test_a_tool_that_must_be_called_is(client, tools, choice):
    """A model of random weights: only the constraint can make a call of its noise."""
    answer = client.chat.completions.create(
        model=NAME, messages=HELLO, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=5,
        max_tokens=600,
    ).choices[0]  # fmt: skip
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert arguments["city"] in ("Paris", "Oslo")
        assert arguments["days"] in range(1, 8)
    else:
        assert (call.function.name, arguments) == ("now", {})


def test_a_tool_that_must_be_called_is_called_after_thinking(scripted):
    """The script thinks, then wants to end without a call."""
    answer = scripted("I will not.</think>").chat.completions.create(
        model=NAME, messages=HELLO, tools=[NOW], tool_choice="required", parallel_tool_calls=False, seed=0,
        extra_body={"thinking": {"type": "enabled"}},
    ).choices[0]  # fmt: skip
    assert answer.message.reasoning_content == "I will not."
    assert [call.function.name for call in answer.message.tool_calls] == ["now"]


def test_a_tool_that_must_not_be_called_is_not(scripted):
    """The script wants to call; the constraint does not let it write the marker."""
    client = scripted(CALL)
    answer = client.chat.completions.create(
        model=NAME, messages=HELLO, tools=[WEATHER], tool_choice="none", seed=0, max_tokens=40
    ).choices[0]
    assert answer.message.tool_calls is None
    assert "｜DSML｜" not in answer.message.content
    assert answer.message.content.startswith("Let me look.\n\n<")


def test_strict_tools_bind_a_model_that_may_call(scripted):
    """The script writes a city that is not allowed; under `strict` what is called follows the schema."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    client = scripted(CALL.replace("Oslo", "Rome"))
    ask = {"model": NAME, "messages": HELLO, "seed": 0, "max_tokens": 400}
    free = client.chat.completions.create(tools=[WEATHER], **ask).choices[0].message
    assert json.loads(free.tool_calls[0].function.arguments)["city"] == "Rome"
    bound = client.chat.completions.create(tools=[strict], **ask).choices[0].message
    assert bound.content == "Let me look."
    assert json.loads(bound.tool_calls[0].function.arguments)["city"] in ("Paris", "Oslo")


# ---- formats ----


def test_a_json_schema_is_enforced(client):
    for seed in range(2):
        answer = client.chat.completions.create(
            model=NAME, messages=HELLO, seed=seed, max_tokens=300,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        ).choices[0]  # fmt: skip
        person = json.loads(answer.message.content)
        assert answer.finish_reason == "stop"
        assert set(person) == {"name", "age"}
        assert person["name"] in ("Ada", "Alan")
        assert person["age"] in range(1, 100)


def test_json_after_thinking(scripted):
    client = scripted('so it is</think>{"name": "Ada", "age": 36}')
    message = client.chat.completions.create(
        model=NAME, messages=HELLO, seed=0, extra_body={"thinking": {"type": "enabled"}},
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    ).choices[0].message  # fmt: skip
    assert message.reasoning_content == "so it is"
    assert json.loads(message.content) == {"name": "Ada", "age": 36}


def test_json_object(scripted):
    client = scripted('Sure: {"a": [1, 2]}', '{"a": [1, 2]}')
    for seed in (0, 1):
        answer = client.chat.completions.create(
            model=NAME, messages=HELLO, seed=seed, max_tokens=60, response_format={"type": "json_object"}
        ).choices[0]
        assert answer.message.content.lstrip().startswith("{")
    assert json.loads(answer.message.content) == {"a": [1, 2]}


# ---- errors ----


@pytest.mark.parametrize(
    ("fields", "kind", "param", "message"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "this server has 'tiny'"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "less than or equal to 2, found 3"),
        ({"store": True}, openai.BadRequestError, "store", "store: this server does not support it"),
        ({"functions": []}, openai.BadRequestError, "functions", "does not support it: use tools"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "leave room for"),
        ({"n": 40_000}, openai.BadRequestError, "n", "40000 answers of up to"),
        ({"reasoning_effort": "huge"}, openai.BadRequestError, "reasoning_effort", "expected one of none, minimal"),
        ({"messages": []}, openai.BadRequestError, "messages", "at least 1 item"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         openai.BadRequestError, "response_format", "Unimplemented keys"),
    ],
)  # fmt: skip
def test_errors_have_their_class_and_name_the_field(client, fields, kind, param, message):
    with pytest.raises(kind, match=message) as raised:
        client.chat.completions.create(**{"model": NAME, "messages": HELLO, **fields})
    assert raised.value.body["param"] == param
    assert raised.value.body["type"]


def test_a_prompt_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError, match="3000 tokens; this model's maximum context length") as raised:
        client.completions.create(model=NAME, prompt="x" * 3000)
    assert raised.value.code == "context_length_exceeded"
