"""Every field of OpenAI's, vLLM's and SGLang's requests is acted on, known to be harmless, or refused by name.

`tests/data/request_fields.json` lists them (vLLM and SGLang as of their main branches in November 2026) with a value
that is not their default, and what happens here: `engine`: what the engine is asked changes. `answer`: the shape of the
answer does. `harmless`: nothing changes, and nothing should. `refused`: an error that names it.
"""

import json
import re
from pathlib import Path

import pytest
from server_cases import NAME, SERVED, TOKENIZER, make_llm

from dsv4.engine.control import engine_info
from dsv4.engine.grammar.compiler import GrammarCompiler
from dsv4.engine.grammar.errors import GrammarError
from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.fields import HarmlessFields
from dsv4.http.apis.request_builder import RequestBuilder, unsupported
from dsv4.http.body import HINTS, validate
from dsv4.http.errors import ApiError
from dsv4.http.settings import ServerConfig

ROOT = Path(__file__).parents[3]
FIELDS = json.loads((ROOT / "tests" / "data" / "request_fields.json").read_text(encoding="utf-8"))
PLAIN = {
    "chat": {"model": NAME, "messages": [{"role": "user", "content": "x"}], "seed": 0},
    "completions": {"model": NAME, "prompt": "x", "seed": 0},
}
MODELS = {"chat": ChatRequest, "completions": CompletionRequest}


@pytest.fixture(scope="module")
def jobs(served_params):
    return RequestBuilder(engine_info(make_llm(served_params)), TOKENIZER, ServerConfig(name=NAME))


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, vocab_size=SERVED.vocab_size, eos_token_id=SERVED.eos_token_id)


@pytest.fixture
def asked_of_engine(jobs, compiler, monkeypatch):
    """`asked_of_engine(kind, body)`: prompts, parameters and whether a grammar binds, for every choice."""

    def run(kind, body):
        request = validate(MODELS[kind], body)
        job = (jobs.chat if kind == "chat" else jobs.completion)(request)
        if job.rule is not None:  # as the engine does
            try:
                compiler.compile(job.rule.lark, job.rule.opening)
            except GrammarError as error:
                raise unsupported(error, job.rule.field) from None
        found = [(list(one.prompt_ids), one.params, job.rule is not None) for one in job.outputs]
        return found, [] if job.rule is None else [job.rule.lark]

    return run


def what_is_wrong(asked_of_engine, kind, name):
    """How a field's treatment differs from what the list says; empty where it does not."""
    row = FIELDS[kind][name]
    around = {**PLAIN[kind], **row.get("with", {})}
    body = {**around, name: row["value"]}
    if row["here"] == "refused":
        return not_refused(asked_of_engine, kind, body, name)
    try:
        found = asked_of_engine(kind, body)
    except ApiError as error:
        return f"refused: {error.message}"
    around.pop(name, None)
    if name in ("messages", "prompt", "model"):
        around[name] = PLAIN[kind][name]
    if name == "continue_final_message":  # without it, a conversation that ends like this cannot be answered
        return "" if not_refused(asked_of_engine, kind, around, "") != "taken" else "changes nothing"
    without = asked_of_engine(kind, around)
    # add_generation_prompt says again what continue_final_message says
    if row["here"] == "engine" and name != "add_generation_prompt":
        return "" if found != without else "changes nothing"
    if row["here"] == "harmless" or name == "add_generation_prompt":
        return "" if found == without else "changes what the engine is asked"
    return ""


def not_refused(asked_of_engine, kind, body, name):
    try:
        asked_of_engine(kind, body)
    except ApiError as error:
        says_what_to_do = re.search(r"should be|must be|does not support it: .", error.message)
        is_named = (error.param or "").split("[")[0] == name and name in error.message
        return "" if error.status == 400 and is_named and says_what_to_do else f"{error.param}: {error.message}"
    return "taken"


@pytest.mark.parametrize("kind", FIELDS)
def test_no_field_is_ignored_in_silence(asked_of_engine, kind):
    wrong = {name: what_is_wrong(asked_of_engine, kind, name) for name in FIELDS[kind]}
    assert {name: text for name, text in wrong.items() if text} == {}


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_ours_is_listed(kind):
    """Those of one server or another; ours alone, by kind, have names nobody else has."""
    ours: dict[str, set[str]] = {"chat": {"thinking"}, "completions": set()}
    assert set(MODELS[kind].model_fields) - set(FIELDS["chat"]) - set(FIELDS["completions"]) == ours[kind]


def test_harmless_fields_are_harmless():
    listed = {name for rows in FIELDS.values() for name, row in rows.items() if row["here"] in ("harmless", "refused")}
    assert set(HarmlessFields.model_fields) <= listed


def test_hints_are_of_fields_that_exist():
    known = {name for rows in FIELDS.values() for name in rows}
    of_others = {
        "previous_response_id", "conversation", "background", "truncation", "mcp_servers", "encrypted_content",
    }  # fmt: skip
    assert set(HINTS) <= known | of_others


def test_the_table_in_the_documents():
    """docs/fields.md has one row per field, and says what this test found."""
    text = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \|(.*)\|$", text, re.MULTILINE))
    words = {"engine": "yes", "answer": "yes", "harmless": "taken, changes nothing", "refused": "refused"}
    names = {"openai": "OpenAI", "vllm": "vLLM", "sglang": "SGLang"}
    for name in {*FIELDS["chat"], *FIELDS["completions"]}:
        cells = [cell.strip() for cell in rows[name].split("|")]
        given = [FIELDS[kind].get(name) for kind in ("chat", "completions")]
        assert cells[1:3] == ["" if row is None else words[row["here"]] for row in given], name
        servers = {server for row in given if row for server in row["in"]}
        assert cells[0] == ", ".join(label for server, label in names.items() if server in servers), name
