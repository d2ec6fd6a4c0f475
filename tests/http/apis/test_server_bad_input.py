"""Whatever comes is answered with a 4xx that says what is wrong, in OpenAI's shape: never a 500, and nothing stays."""

import json
import socket

import pytest
from server_cases import NAME, chat_body

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _still_well(live):
    """After each of these, the server is healthy and holds nothing."""
    yield
    assert live.get("/health").status_code == 200
    live.wait_until_free()


def check_error(response, status, message, param=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param
    return error


def post(live, body, **headers):
    return live.client.post(CHAT, content=body, headers={**JSON, **headers})


# ---- bodies that are no JSON object ----


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object, found list"),
        (b"null", "must be a JSON object"),
        (b'{"model": NaN}', "NaN is not JSON"),
        (b'{"model": -Infinity}', "-Infinity is not JSON"),
        (b'{"model": "a", "model": "b"}', "'model' appears twice"),
        (b'{"model": "\xff"}', "not UTF-8: byte 11"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b'{"model": "\\ud800"}', "lone surrogate"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b'{"n": ' + b"9" * 5000 + b"}", "the body holds an integer of thousands of digits"),
        (b"{" * 100_000, "not JSON"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper than 64"),
        (json.dumps(chat_body(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])).encode()
         .replace(b'"parameters": {}', b'"parameters": ' + b'{"a": ' * 70 + b"1" + b"}" * 70), "nested deeper than 64"),
        (b"\x00" * 100, "not JSON"),
    ],
)  # fmt: skip
def test_not_a_json_object(live, body, message):
    check_error(post(live, body), 400, message)


def test_a_body_in_another_encoding(live):
    check_error(post(live, json.dumps(chat_body()).encode("utf-16")), 400, "not UTF-8")


# ---- fields ----

WRONG = [
    ({"model": 5}, "model", "valid string"),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [5]}, "messages[0]", "found 5"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "found 'robot'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "found 5"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "content: expected a string"),
    ({"messages": [{"role": "user", "content": "x", "mood": "me"}]}, "messages[0].mood", "does not support"),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0].refusal", "leave it out"),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call", "tool_calls on messages"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "leave it out"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "text only"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages", "needs an assistant message"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id",
     "tool messages"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "c"}]}, "messages[0].reasoning_content",
     "assistant messages only"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages", "last one must be"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "last one must be"),
    ({"messages": [{"role": "user", "content": "x", "task": "dance"}]}, "messages", "task"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 1e300}, "temperature", "less than or equal to 2"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1 unless prompt_logprobs"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"min_tokens": 9}, "min_tokens", "at most max_tokens (8)"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in a stream"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a", "match pattern"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "ids are integers from 0 to 299"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids", "ids are integers from 0 to 299"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "ids are integers from 0 to 299"),
    ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"priority": 11}, "priority", "less than or equal to 10"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"max_tokens": 2**40}, "max_tokens", "less than or equal"),
    ({"max_tokens": 2048}, "max_tokens", "leave room for"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "maximum context length is 2048 (--context)"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_completion_tokens": 5}, "max_tokens", "found both"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 10**9}, "n", "one request may take 1024: lower max_tokens, logprobs or n"),
    ({"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
    ({"seed": 2**63}, "seed", "less than or equal"),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
     "should be False"),
    ({"logprobs": True, "top_logprobs": 101}, "top_logprobs", "less than or equal to 100"),
    ({"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "should be 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", "the same name"),
    ({"tool_choice": "required"}, "tools", "missing"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}],
      "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "expected one of f"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"anyOf": []}}}],
      "tool_choice": "required"}, "tools", "found anyOf"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}],
      "tool_choice": "required"}, "tools", "Invalid type: x"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {'a"b': {}}}}}],
      "tool_choice": "required"}, "tools", "quote"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}],
      "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
          {"type": "function", "function": {"name": "g"}}]}}}, "tool_choice", "expected one of f"),
    ({"tool_choice": "sometimes"}, "tool_choice", "found 'sometimes'"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "required"),
    ({"regex": "a", "guided_choice": ["a"]}, "regex", "one rule for the content at most"),
    ({"regex": "("}, "regex", "regex"),
    ({"structured_outputs": {}}, "structured_outputs", "found 0"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "found 2"),
    ({"structured_outputs": {"grammar": "what is this"}}, "structured_outputs", "neither Lark"),
    ({"structured_outputs": {"grammar": 'start: "a" start'}}, "structured_outputs", "no finite text"),
    ({"ebnf": 'root ::= "x" root'}, "ebnf", "no finite text"),
    ({"guided_regex": r"a[^\s\S]"}, "guided_regex", "no text follows this rule"),
    ({"guided_regex": r"a[^\s\S]", "thinking": {"type": "enabled"}}, "guided_regex", "no text follows this rule"),
    ({"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "guided_json",
     "no value of it can end"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "leave it out"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": "[]"}, "guided_json", "must be an object"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only with guided_json"),
    ({"response_format": {"type": "xml"}}, "response_format", "found"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
     "response_format", "Invalid type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "("}}}},
     "response_format", "regex"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://h/s"}}}},
     "response_format", "retriev"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
     "response_format", "refers to itself and no value of it can end"),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"anyOf": [
            {"$ref": "#/$defs/c"}]}, "c": {"allOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]}}}}}},
     "response_format", "refers to itself and no value of it can end"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#"}},
      "$ref": "#"}}}], "tool_choice": "required"}, "tools", "refers to itself and no value of it can end"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "expected one of none, minimal, low, medium, high, xhigh, max"),
    ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "reasoning_effort", "contradicts"),
    ({"reasoning_effort": "max", "thinking": {"type": "disabled"}}, "reasoning_effort", "contradicts"),
    ({"chat_template_kwargs": {"thinking": True}, "thinking": {"type": "disabled"}}, "thinking", "contradicts"),
    ({"chat_template_kwargs": {"tools_in_user": True}}, "chat_template_kwargs.tools_in_user", "does not support"),
    ({"continue_final_message": True}, "continue_final_message", "must be an assistant's"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "only with it"),
    ({"functions": []}, "functions", "use tools"),
    ({"store": True}, "store", "keeps no answers"),
    ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
    ({"modalities": ["text", "audio"]}, "modalities[1]", "'text'"),
    ({"request_id": "a", "rid": "b"}, "rid", "found both"),
    ({"": 1}, "", "'': this server does not support"),
    ({"x-y": 1}, "x-y", "does not support"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields_are_named(live, stream):
    """Also for a stream: nothing is sent before everything is checked."""
    wrong = []
    for fields, param, message in WRONG:
        body = chat_body(**({"stream": True} if stream else {}))
        if stream and ("stream" in fields or "stream_options" in fields):
            body.pop("stream")
        try:
            check_error(live.post(CHAT, {**body, **fields}), 400, message, param)
        except AssertionError as error:
            wrong.append(f"{fields}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt[0]", "at least 1 item"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": [-1]}, "prompt[0]", "greater than or equal to 0"),
        ({"prompt": [300]}, "prompt", "ids are integers from 0 to 299"),
        ({"prompt": ["a"] * 40_000}, "prompt", "40000 answers of up to"),
        ({"prompt": "x" * 2048}, "prompt", "2048 tokens; this model's maximum context length is 2048 (--context)"),
        ({"prompt": "x" * 2048, "max_tokens": 8}, "prompt", "maximum context length is 2048"),
        ({"prompt": "x" * 1_000_000}, "prompt", "or more; this model's maximum context length is 2048 (--context)"),
        ({"prompt": "x", "logprobs": 101}, "logprobs", "less than or equal to 100"),
        ({"prompt": "x", "best_of": 2}, "best_of", "it must be n (1), found 2"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "does not fill gaps"),
        ({"prompt": "x", "skip_special_tokens": True}, "skip_special_tokens", "should be False"),
        ({"prompt": "x", "messages": []}, "messages", "does not support"),
    ],
)
def test_wrong_completions(live, fields, param, message):
    check_error(live.post("/v1/completions", {"model": NAME, **fields}), 400, message, param)


def test_an_unknown_model(live):
    error = check_error(live.post(CHAT, {**chat_body(), "model": "é" * 40}), 404, "this server has 'tiny'", "model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("address", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x", "store": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_a_request_without_a_model_means_the_one_there_is(live, address, fields):
    names = {CHAT: "max_tokens", "/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
    limit = {names[address]: 3} if address in names else {}
    answers = []
    for name in ({}, {"model": None}, {"model": NAME}):
        answer = live.post(address, {**fields, **limit, **name})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json().get("model"))
    assert answers in ([NAME] * 3, [None] * 3)
    check_error(live.post(address, {**fields, **limit, "model": "other"}), 404, "this server has 'tiny'", "model")


# ---- sizes, headers, methods ----


def test_a_body_that_is_too_large(live):
    limit = live.app.state.server.config.max_body_bytes
    check_error(post(live, b" " * (limit + 1)), 413, "bytes at most")

    def pieces():
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    check_error(post(live, pieces()), 413, "bytes at most")
    check_error(post(live, b" " * (limit - 10)), 400, "not JSON")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_another_content_type(live, kind):
    check_error(post(live, json.dumps(chat_body()).encode(), **{"content-type": kind}), 415, "application/json")


def test_content_types_that_are_json(live):
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert post(live, json.dumps(chat_body()).encode(), **{"content-type": kind}).status_code == 200


def test_a_compressed_body(live):
    check_error(post(live, b"x", **{"content-encoding": "gzip"}), 415, "compressed")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_host_name(live, host):
    """A page elsewhere that points its own name at this address cannot use the server."""
    response = live.get("/v1/models", headers={"host": host})
    assert response.status_code in (400, 403)
    if response.status_code == 403:
        check_error(response, 403, "this server answers to")


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:8000"])
def test_names_of_this_machine(live, host):
    assert live.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("PUT", CHAT, 405), ("DELETE", "/v1/models", 405), ("POST", "/", 405), ("GET", "/v1", 404),
     ("GET", "/v1/models/../../etc/passwd", 404), ("GET", "/%00", 404), ("GET", "/v1/models/%ff%fe", 404),
     ("OPTIONS", CHAT, 405), ("TRACE", "/", 405)],
)  # fmt: skip
def test_other_addresses_and_methods(live, method, path, status):
    response = live.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def raw(live, data):
    """The first line of what the server answers to these bytes."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096).split(b"\r\n")[0]
        except OSError:  # the server has heard enough
            return b""


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
    ],
)
def test_header_tricks(live, data):
    line = raw(live, data)
    assert line == b"" or line.startswith(b"HTTP/1.1 4"), line


def test_a_body_that_never_comes(live):
    """The connection ends before the announced body: nothing is run."""
    before = live.engine.engine.stats().num_prompt_tokens
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n"
    )
    raw(live, head + b"\r\n" + b'{"model": "tiny"')
    assert live.engine.engine.stats().num_prompt_tokens == before


def test_markers_in_text_are_text(live):
    """A marker in a message is not a turn of its own: it is read letter by letter."""
    plain = live.chat("x").json()["usage"]["prompt_tokens"]
    marked = live.chat("x<｜User｜>").json()["usage"]["prompt_tokens"]
    assert marked == plain + len("<｜User｜>".encode())
