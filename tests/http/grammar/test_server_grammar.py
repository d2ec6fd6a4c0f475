"""Grammars of answers: whatever a random writer makes within them is what was asked for, read by the real parser."""

import json
import random
from contextlib import suppress

import numpy as np
import pytest
from server_cases import SERVED, TOKENIZER, TWO_LAYERS

from dsv4.config import EngineConfig
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.grammar.compiler import GrammarCompiler
from dsv4.engine.grammar.errors import GrammarError
from dsv4.engine.step.constraint import ConstraintError, fill_allowed, has_bit
from dsv4.http.grammar.answer import AnswerRules, FunctionRule, answer_grammar, symbols_of
from dsv4.http.grammar.structured import JsonRule
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams
from dsv4.text.parse import parse_completion

EOS = SERVED.eos_token_id
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "note": {"type": "string", "description": "anything"},
        "level": {"$ref": "#/$defs/level"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "level"],
    "$defs": {"level": {"type": "integer", "minimum": 0, "maximum": 9}},
}
MAYBE = {"properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}
FUNCTIONS = [FunctionRule(name, schema, True) for name, schema in (("look", LOOK), ("now", {}), ("maybe", MAYBE))]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, vocab_size=SERVED.vocab_size, eos_token_id=EOS)


def allowed_ids(constraint):
    words = constraint.allowed()
    return [token_id for token_id in range(len(words) * 32) if has_bit(words, token_id)]


def hint(allowed, ids):
    """What brings a text nearer to a marker or to its end."""
    less, slash = 2 + ord("<"), 2 + ord("/")
    special = [one for one in allowed if one >= 258]
    if less in allowed and ids[-1:] != [less]:
        special.append(less)
    return special or [one for one in (slash, EOS) if one in allowed] or allowed


@pytest.fixture(scope="module")
def write(compiler):
    """`write(rules, seed)`: what a writer that draws at random, and takes a marker when it may, comes to."""

    def run(rules, seed, limit=6000):
        constraint = compiler.compile(answer_grammar(rules, symbols_of(TOKENIZER))).constraint()
        chance, ids = random.Random(seed), []
        while len(ids) < limit:
            allowed = allowed_ids(constraint)
            ids.append(chance.choice(hint(allowed, ids) if chance.random() < 0.4 else allowed))
            if ids[-1] == EOS:
                return TOKENIZER.decode(ids[:-1])
            constraint.accept(ids[-1])
        raise AssertionError(f"no end after {limit} tokens: {TOKENIZER.decode(ids)!r}")

    return run


def check_call(call):
    arguments = json.loads(call.arguments)
    assert call.is_complete
    if call.name == "look":
        assert {"city", "level"} <= set(arguments) <= set(LOOK["properties"])
        assert arguments["city"] in ("Paris", "Oslo")
        assert arguments["level"] in range(10)
        assert isinstance(arguments.get("note", ""), str)
        code = arguments.get("code", "ABC")
        assert len(code) == 3
        assert code.isascii()
        assert code.isupper()
        assert all(isinstance(one, bool) for one in arguments.get("deep", []))
    elif call.name == "maybe":
        assert set(arguments) <= {"a", "b"}
        assert arguments.get("a", True) in (True, False)
        assert arguments.get("b") is None
    else:
        assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_json(write, thinking, seed):
    parsed = parse_completion(write(AnswerRules(thinking=thinking, content=JsonRule(SCHEMA)), seed), thinking)
    value = json.loads(parsed.content)
    assert (set(value), value["a"] in ("x", "y"), value["n"] in range(10)) == ({"a", "n"}, True, True)
    assert parsed.tool_calls == ()


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_calls_that_must_come(write, thinking, seed):
    parsed = parse_completion(write(AnswerRules(thinking=thinking, calls="must", functions=FUNCTIONS), seed), thinking)
    assert parsed.content == ""
    assert parsed.tool_calls
    for call in parsed.tool_calls:
        check_call(call)


def test_one_call_is_one_call(write):
    several = AnswerRules(thinking=False, calls="must", functions=FUNCTIONS[1:2])
    one = AnswerRules(thinking=False, calls="must", functions=FUNCTIONS[1:2], one_call=True)
    counts = [len(parse_completion(write(several, seed), False).tool_calls) for seed in range(6)]
    assert max(counts) > 1, "without the rule there may be several"
    assert {len(parse_completion(write(one, seed), False).tool_calls) for seed in range(6)} == {1}


def test_calls_that_may_come(write):
    rules = AnswerRules(thinking=False, calls="may", functions=FUNCTIONS)
    answers = [parse_completion(write(rules, seed), False) for seed in range(12)]
    assert any(one.tool_calls for one in answers)
    assert any(one.content for one in answers)
    for one in answers:
        for call in one.tool_calls:
            check_call(call)


def test_json_or_a_call(write):
    rules = AnswerRules(thinking=False, calls="may", functions=FUNCTIONS, content=JsonRule(SCHEMA))
    answers = [parse_completion(write(rules, seed), False) for seed in range(12)]
    assert {bool(one.tool_calls) for one in answers} == {True, False}
    for one in answers:
        assert bool(one.content) != bool(one.tool_calls)
        assert not one.content or set(json.loads(one.content)) == {"a", "n"}


def test_no_call_at_all(write, compiler):
    for seed in range(5):
        assert parse_completion(write(AnswerRules(thinking=False), seed), False).tool_calls == ()
    constraint = compiler.compile(answer_grammar(AnswerRules(thinking=False), symbols_of(TOKENIZER))).constraint()
    for token_id in TOKENIZER.encode("｜DSML")[:-1]:
        constraint.accept(token_id)
    spelled = TOKENIZER.encode("｜DSML｜")
    for token_id in spelled[len(TOKENIZER.encode("｜DSML")) - 1 : -1]:
        constraint.accept(token_id)
    assert spelled[-1] not in allowed_ids(constraint), "the marker cannot be spelled out either"


def test_ids_without_text_are_never_allowed(compiler):
    constraint = compiler.compile("start: /(?s:.*)/").constraint()
    without = [one for one in range(SERVED.vocab_size) if not TOKENIZER.token_bytes(one)]
    assert without, "the vocabulary is larger than the tokenizer"
    assert not set(without) & set(allowed_ids(constraint))


def test_a_token_that_is_not_allowed(compiler):
    constraint = compiler.compile('start: "abc"').constraint()
    with pytest.raises(ConstraintError, match="does not allow token"):
        constraint.accept(2 + ord("x"))


def test_copies_do_not_share_their_place(compiler):
    grammar = compiler.compile('start: "ab"')
    first, second = grammar.constraint(), grammar.constraint()
    first.accept(2 + ord("a"))
    assert allowed_ids(first) == [2 + ord("b")]
    assert allowed_ids(second) == [2 + ord("a")]


def test_many_grammars_at_once(compiler):
    """A group fills what each of its constraints gives alone; one that has failed says so, and no other."""
    grammars = [compiler.compile(f'start: "a" /{text}/') for text in ("x+", "[0-9]+", "(?s:.*)")]
    rules = [grammar.constraint() for grammar in grammars for _ in range(3)]
    for rule in rules[1::3]:
        rule.accept(2 + ord("a"))
    with pytest.raises(ConstraintError):
        rules[3].accept(2 + ord("z"))
    words = np.full((len(rules), rules[0].group.num_words), 5, dtype=np.int32)
    failed = fill_allowed(rules, words, SERVED.vocab_size)
    assert list(failed) == [3]
    assert isinstance(failed[3], ConstraintError)
    alone = [grammar.constraint() for grammar in grammars for _ in range(3)]
    for rule in alone[1::3]:
        rule.accept(2 + ord("a"))
    assert all(np.array_equal(words[place], alone[place].allowed()) for place in range(len(rules)) if place != 3)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_taken_back(compiler, seed):
    """Random walks: at every place some tokens are tried, the end and refused ones among them, and taken back. The rule
    then allows what one allows that was told of the walk alone."""
    rules = AnswerRules(thinking=False, calls="may", functions=FUNCTIONS, content=JsonRule(SCHEMA))
    grammar = compiler.compile(answer_grammar(rules, symbols_of(TOKENIZER)))
    chance, ids, tried = random.Random(seed), [], grammar.constraint()
    for _ in range(40):
        count, is_refused = 0, False
        while count < chance.randint(0, 5) and not is_refused:
            allowed = allowed_ids(tried)
            draft = chance.choice(hint(allowed, ids)) if allowed and chance.random() < 0.8 else 2 + ord("#")
            is_refused, count = draft not in allowed, count + 1
            with suppress(ConstraintError):
                tried.accept(draft)
        if count:
            tried.rollback(count)
        fresh = grammar.constraint()
        for token_id in ids:
            fresh.accept(token_id)
        assert np.array_equal(tried.allowed(), fresh.allowed())
        ids.append(chance.choice(hint(allowed_ids(fresh), ids)))
        if ids[-1] == EOS:
            return
        tried.accept(ids[-1])


class PartlyRight(FixedDrafts):
    """Offers the first so many tokens that `texts` go on with, then others; texts by seed."""

    must_read = True

    def __init__(self, texts):
        super().__init__(3)
        self.texts, self.num_right = texts, 0

    def offer(self, request, drafts, confidences):
        self.num_right = (self.num_right + 1) % 4
        coming = self.texts[request.params.seed][request.num_output :][: self.num_right]
        super().offer(request, [*coming, *drafts][:3], confidences)


def test_structured_answers_with_drafts(compiler):
    """Grammars of an answer's content and of calls, beside one another: the same tokens with drafts as without."""
    params = random_params(TWO_LAYERS)
    limits = EngineConfig(max_context_tokens=512, max_concurrent_requests=4)
    grammars = [
        compiler.compile(answer_grammar(rules, symbols_of(TOKENIZER)))
        for rules in (
            AnswerRules(thinking=False, content=JsonRule(SCHEMA)),
            AnswerRules(thinking=False, calls="must", functions=FUNCTIONS[2:]),
        )
    ]
    found = []
    for drafts in ("off", 3):
        llm = LLM.from_params(TWO_LAYERS, params, engine=limits, tokenizer=TOKENIZER, drafts=drafts)
        if found:
            llm.engine._drafts = PartlyRight([one.output_ids for one in found])
        requests = [
            llm.engine.prepare([5, 6, 7], SamplingParams(max_tokens=60, seed=seed, logprobs=1), grammar.constraint())
            for seed, grammar in enumerate(grammars)
        ]
        for request in requests:
            llm.engine.submit(request)
        while llm.engine.has_work:
            llm.engine.step()
        found += requests
    assert [one.completion() for one in found[:2]] == [one.completion() for one in found[2:]]
    assert llm.engine.stats().drafts.num_accepted > 10
    assert set(json.loads(TOKENIZER.decode(found[2].output_ids[:-1]))) == {"a", "n"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "another type"),
        ({"oneOf": []}, "oneOf"),
        ({"properties": []}, "another type"),
        ({"properties": {}, "required": "a"}, "list of names"),
        ({"properties": {"a": 5}}, "must be an object, found int"),
        ({"properties": {"a\nb": {}}}, "line break"),
    ],
)
def test_parameters_that_cannot_be_enforced(compiler, parameters, message):
    rules = AnswerRules(thinking=False, calls="must", functions=[FunctionRule("f", parameters, True)])
    with pytest.raises(GrammarError, match=message):
        answer_grammar(rules, symbols_of(TOKENIZER))


ODD = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "boolean"}},
        "mail": {"type": ["string", "null"], "pattern": "^(?!x)a", "maxLength": 3},
        "one": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 7}, {"type": "integer", "minimum": 5}]},
    },
    "required": ["tags"],
    "anyOf": [{"required": ["tags"]}, {"required": ["one"]}],
}


def test_a_function_that_is_not_strict_is_bound_as_far_as_can_be(write, compiler):
    """Keywords nobody can enforce are left out; the rest of its schema holds, and so does a strict one's beside it."""
    strict, loose = FunctionRule("odd", ODD, True), FunctionRule("odd", ODD, False)
    with pytest.raises(GrammarError, match="anyOf"):
        answer_grammar(AnswerRules(thinking=False, calls="must", functions=[strict]), symbols_of(TOKENIZER))
    rules = AnswerRules(thinking=False, calls="must", functions=[loose, FUNCTIONS[2]])
    names = set()
    for seed in range(5):
        for call in parse_completion(write(rules, seed), False).tool_calls:
            names.add(call.name)
            if call.name == "odd":
                arguments = json.loads(call.arguments)
                assert {"tags"} <= set(arguments) <= {"tags", "mail", "one"}
                assert all(isinstance(one, bool) for one in arguments["tags"])
                assert isinstance(arguments.get("one", 0), int)
                assert len(arguments.get("mail") or "") <= 3
            else:
                check_call(call)
    assert names == {"odd", "maybe"}


def test_a_function_without_properties_of_its_own_takes_any_arguments(write, compiler):
    """Only if it is not strict."""
    rules = [
        AnswerRules(
            thinking=False, calls="must", functions=[FunctionRule("f", {"anyOf": [{}]}, is_strict)], one_call=True
        )
        for is_strict in (True, False)
    ]
    with pytest.raises(GrammarError, match="anyOf"):
        answer_grammar(rules[0], symbols_of(TOKENIZER))
    seen = {}
    for seed in range(6):
        (call,) = parse_completion(write(rules[1], seed), False).tool_calls
        assert call.is_complete
        seen |= json.loads(call.arguments)
    assert any(isinstance(value, str) for value in seen.values())
    assert any(not isinstance(value, str) for value in seen.values())
