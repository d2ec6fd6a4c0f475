"""Rules of the content: regular expressions, choices, grammars and JSON, in every spelling, on both interfaces.

The model's weights are random: only the constraint can make what was asked for out of its noise.
"""

import json
import re

import pytest
from server_cases import NAME, SERVED, TOKENIZER, let_it_say, make_llm, start_server

from dsv4.engine.grammar.compiler import GrammarCompiler
from dsv4.engine.grammar.errors import GrammarError
from dsv4.engine.step.constraint import has_bit
from dsv4.http.grammar.answer import AnswerRules, answer_grammar, symbols_of
from dsv4.http.grammar.structured import ChoiceRule, GrammarRule, JsonRule, RegexRule

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WEATHER = ["sunny", "rain/snow", 'a "fog"\n']
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["mood", "stars"],
    "additionalProperties": False,
}
LARK = 'start: "<" NUMBER ("," NUMBER)* ">"\nNUMBER: /[0-9]{1,2}/'
GBNF = 'root ::= "<" number ("," number)* ">"\nnumber ::= [0-9] [0-9]?'


def said(live, path, **fields):
    body = {"model": NAME, "seed": 3, "max_tokens": 300, **fields}
    body |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"] if path == TEXT else choice["message"]["content"]


def is_rating(text):
    value = json.loads(text)
    return set(value) == {"mood", "stars"} and value["mood"] in ("good", "bad") and value["stars"] in range(1, 6)


RULES = {
    "regex": ([{"structured_outputs": {"regex": r"^[0-9]{3}/[a-c]$"}}, {"guided_regex": r"[0-9]{3}\/[a-c]"},
               {"regex": r"\d{3}/[a-c]"}], lambda text: re.fullmatch("[0-9]{3}/[a-c]", text)),
    "choice": ([{"structured_outputs": {"choice": WEATHER}}, {"guided_choice": WEATHER}], WEATHER.__contains__),
    "grammar": ([{"structured_outputs": {"grammar": LARK}}, {"guided_grammar": GBNF}, {"ebnf": GBNF}],
                lambda text: re.fullmatch("<[0-9]{1,2}(,[0-9]{1,2})*>", text)),
    "json": ([{"structured_outputs": {"json": SCHEMA}}, {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
              {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}}], is_rating),
}  # fmt: skip
CASES = [
    pytest.param(path, fields, holds, id=f"{path[4:8]}-{next(iter(fields))}-{kind}-{place}")
    for kind, (spellings, holds) in RULES.items()
    for place, fields in enumerate(spellings)
    for path in (CHAT, TEXT)
]


@pytest.mark.parametrize(("path", "fields", "holds"), CASES)
def test_a_rule_is_kept(live, path, fields, holds):
    assert holds(said(live, path, **fields))


def test_json_schemas_of_completions(live):
    assert is_rating(said(live, TEXT, json_schema=json.dumps(SCHEMA)))


def test_a_rule_holds_after_thinking(served_params):
    with start_server(let_it_say(make_llm(served_params), "let me see</think>perhaps")) as server:
        fields = {"guided_choice": ["yes", "no"], "thinking": {"type": "enabled"}, "seed": 0}
        answer = server.chat(**{**fields, "max_tokens": 60}).json()["choices"][0]["message"]
        assert answer["reasoning_content"] == "let me see"
        assert answer["content"] in ("yes", "no")


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("look", "now", "wait")]


@pytest.mark.parametrize("names", [("now",), ("look", "wait")])
def test_only_allowed_tools_are_called(live, names):
    allowed = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    for seed in range(2):
        answer = live.chat(
            tools=FUNCTIONS, tool_choice=choice, parallel_tool_calls=False, seed=seed, max_tokens=300
        ).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names


# ---- the grammars themselves ----


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, vocab_size=SERVED.vocab_size, eos_token_id=SERVED.eos_token_id)


def accepts(compiler, rule, text):
    """Whether a text may be written from its first to its last character, and may end there."""
    constraint = compiler.compile(answer_grammar(AnswerRules(thinking=False, content=rule), symbols_of(TOKENIZER)))
    state = constraint.constraint()
    for token_id in TOKENIZER.encode(text):
        if not has_bit(state.allowed(), token_id):
            return False
        state.accept(token_id)
    return has_bit(state.allowed(), SERVED.eos_token_id)


@pytest.mark.parametrize(
    ("text", "is_written"),
    [
        ('{"mood": "good", "stars": 3}', True),
        ('{"mood":"good","stars":3}', True),
        ('{\n  "mood": "good",\n  "stars": 3\n}', True),
        ('{\r\n\t"mood": "good",\r\n\t"stars": 3\r\n}', True),
        ('{ "mood" : "good" , "stars" : 3 }', True),
        ('{  "mood": "good", "stars": 3}', False),
        ('{\n\n"mood": "good", "stars": 3}', False),
        ('{"mood":\t"good", "stars": 3}', False),
        ('{"mood": "good",\n' + " " * 65 + '"stars": 3}', False),
    ],
)
def test_white_space_is_what_people_write(compiler, text, is_written):
    assert accepts(compiler, JsonRule(SCHEMA), text) is is_written


def test_white_space_of_the_callers(compiler):
    compact, wide = '{"mood":"good","stars":3}', '{  "mood":  "good",  "stars":  3}'
    assert accepts(compiler, JsonRule(SCHEMA, ""), compact)
    assert not accepts(compiler, JsonRule(SCHEMA, ""), wide)
    assert accepts(compiler, JsonRule(SCHEMA, "[ ]{0,2}"), wide)


@pytest.mark.parametrize(
    ("rule", "texts", "others"),
    [
        (RegexRule("^a|b$"), ["a", "b"], ["ab", ""]),
        (RegexRule(r"a\$"), ["a$"], ["a"]),
        (RegexRule(r"\\/"), ["\\/"], ["/"]),
        (RegexRule("a\nb"), ["a\nb"], ["ab"]),
        (RegexRule("(?s).{2}"), ["é\n"], ["abc"]),
        (ChoiceRule(["a", "a/b", 'c"']), ["a", "a/b", 'c"'], ["b", "a/", ""]),
        (GrammarRule('start: "}" | "{" start'), ["}", "{{}"], ["{"]),
    ],
)
def test_edges_of_rules(compiler, rule, texts, others):
    assert all(accepts(compiler, rule, text) for text in texts)
    assert not any(accepts(compiler, rule, text) for text in others)


@pytest.mark.parametrize("rule", [RegexRule("^$"), RegexRule("("), GrammarRule("root ::= ("), GrammarRule("start: x")])
def test_rules_that_are_none(compiler, rule):
    with pytest.raises(GrammarError):
        accepts(compiler, rule, "")
