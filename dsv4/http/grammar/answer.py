"""The grammar an answer must follow: a rule of its content, a tool call that must (or must not) come, reasoning first.

Tool calls are written exactly as the protocol writes them (`dsv4.text.chat`), their arguments following each function's
schema. A string without further rules is written raw, as the model was trained to; one with rules (pattern, length,
format) is written as JSON, where the rules can be enforced. A function that is not strict is bound as far as its schema
can be enforced: clients pass on whatever schemas their tools came with.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsv4.engine.grammar.errors import GrammarError
from dsv4.http.grammar.schema_refs import find_empty_reference
from dsv4.http.grammar.structured import ContentRule, JsonRule
from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import Tokenizer

_RAW_STRING_KEYS = {"type", "description", "title", "default", "examples", "enum", "const"}
_NOT_AN_OBJECT = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "minProperties", "maxProperties")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")

Calls = Literal["never", "may", "must"]


@dataclass(frozen=True)
class FunctionRule:
    """A function that may be called. is_strict: what cannot be enforced of `parameters` is an error, not left out."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """thinking: the answer begins inside an open think block. content: the rule of the content, None for any
    text. calls: whether tools are called. functions: the tools that may be called. one_call: at most one call."""

    thinking: bool
    content: ContentRule | None = None
    calls: Calls = "never"
    functions: Sequence[FunctionRule] = ()
    one_call: bool = False


def symbols_of(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Gives a marker of the protocol as a grammar symbol."""
    return lambda marker: f"<[{tokenizer.special_id(marker)}]>"


def answer_grammar(rules: AnswerRules, special: Callable[[str], str]) -> str:
    """Lark text of an answer. `special` gives a marker's grammar symbol. `GrammarError` for what cannot be enforced."""
    if rules.calls == "must" and not rules.functions:
        raise GrammarError("a tool must be called, and there is none")
    of_content = rules.content.schema if isinstance(rules.content, JsonRule) else None
    for schema in (of_content, *(one.parameters for one in rules.functions)):
        reference = find_empty_reference(schema)
        if reference is not None:
            raise GrammarError(f"the schema's $ref {reference[:80]!r} refers to itself and no value of it can end")
    dsml = special(PROTOCOL.dsml)
    plain = f"& ~/(?s:.*){PROTOCOL.dsml}(?s:.*)/"
    lines = []
    if rules.thinking:
        lines += [f"start: THOUGHT? {special(PROTOCOL.think_close)} answer"]
        lines += [r"THOUGHT: /(?s:.*)/ & ~/(?s:.*)<\/think>(?s:.*)/"]
    else:
        lines += ["start: answer"]
    if rules.calls == "must":
        lines += ['answer: "\\n\\n<" block']
    elif rules.content is not None:
        lines += ["answer: content" + (' | "\\n\\n<" block' if rules.calls == "may" else "")]
    else:
        # The text before a block and the "<" that opens it are one terminal: a lexer takes the longest match.
        lines += ["answer: TEXT?" + (" | OPENING block" if rules.calls == "may" else "")]
        lines += [f"TEXT: /(?s:.*)/ {plain}", f"OPENING: /(?s:.*)</ {plain}"]
    if rules.content is not None and rules.calls != "must":
        lines += [f"content: {rules.content.lark()}"]
    if rules.calls != "never":
        lines += _block(rules, dsml)
        lines += [f"RAW: /(?s:.*)<\\// {plain}"]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _block(rules: AnswerRules, dsml: str) -> list[str]:
    """The block of calls, from the marker after its first `<` on.

    The lexer takes the longest match, so a `<` is always written together with the line break before it: what follows
    (a marker or `/`) then decides between the next call and the end. The same holds for parameters.
    """
    name = PROTOCOL.tool_calls_block_name
    more = "" if rules.one_call else r' ("\n<" call)*'
    lines = [f'block: {dsml} {_text(f"{name}>{chr(10)}<")} call{more} "\\n</" {dsml} {_text(f"{name}>")}']
    lines += ["call: " + " | ".join(f"call_{idx}" for idx in range(len(rules.functions)))]
    for idx, function in enumerate(rules.functions):
        opening = _text(f'invoke name="{function.name}">\n')
        lines += [f'call_{idx}: {dsml} {opening} arguments_{idx} "\\n</" {dsml} "invoke>"']
        lines += _arguments(idx, function, dsml)
    return lines


def _arguments(idx: int, function: FunctionRule, dsml: str) -> list[str]:
    """Rules `arguments_<idx>`: the required parameters, then any of the others, in the schema's order."""
    where, schema = f"the parameters of {function.name}", function.parameters
    unsupported = [key for key in _NOT_AN_OBJECT if key in schema]
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if unsupported and not function.is_strict:
        if not properties:
            return _any_arguments(idx, dsml)
        unsupported = []  # what they add to the properties is left out
    if unsupported or schema.get("type", "object") != "object" or not isinstance(properties, dict):
        found = ", ".join(unsupported) or "another type"
        raise GrammarError(f"{where}: a call can be enforced for an object with properties, found {found}")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"{where}: required must be a list of names")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    named = {**properties, **{name: {} for name in required if name not in properties}}
    lines: list[str] = []
    needed: list[str] = []
    optional: list[str] = []
    for place, (name, parameter) in enumerate(named.items()):
        rule = f"parameter_{idx}_{place}"
        if '"' in name or "\n" in name:
            raise GrammarError(f"{where}: a name with a quote or a line break cannot be written: {name[:40]!r}")
        lines += [f"{rule}: {_parameter(name, parameter, shared, dsml, function.is_strict)}"]
        (needed if name in required else optional).append(rule)
    # `rest_k`: any of the optional parameters from the k-th on, each after a line break
    for place in reversed(range(len(optional))):
        tail = f" rest_{idx}_{place + 1}" if place + 1 < len(optional) else ""
        lines += [f'rest_{idx}_{place}: ("\\n<" {optional[place]})?{tail}']
    if needed:
        tail = f" rest_{idx}_0" if optional else ""
        return [f'arguments_{idx}: "<" ' + ' "\\n<" '.join(needed) + tail, *lines]
    starts = [
        f'"<" {rule}' + (f" rest_{idx}_{k + 1}" if k + 1 < len(optional) else "") for k, rule in enumerate(optional)
    ]
    return [f"arguments_{idx}: " + " | ".join([*starts, '""']), *lines]


def _any_arguments(idx: int, dsml: str) -> list[str]:
    """Rules `arguments_<idx>`: any parameters of any value."""
    head, closing = f'{dsml} "parameter name=\\"" NAME_{idx}', f'{dsml} "parameter>"'
    return [
        f'arguments_{idx}: "<" any_{idx} ("\\n<" any_{idx})* | ""',
        f'any_{idx}: {head} "\\" string=\\"true\\">" RAW {closing}'
        f' | {head} "\\" string=\\"false\\">" {JsonRule({}).lark()} "</" {closing}',
        f"NAME_{idx}: /[A-Za-z0-9_.$-]{{1,64}}/",
    ]


def _parameter(name: str, schema: Any, shared: Mapping[str, Any], dsml: str, is_strict: bool) -> str:
    """One parameter, from the marker after its `<` to the end of its closing tag."""
    closing = f'{dsml} "parameter>"'
    head = f'parameter name="{name}" string='
    choices = _string_choices(schema)
    if choices is not None:
        values = " | ".join(_text(f"{choice}</") for choice in choices) if choices else "RAW"
        opening = _text(f'{head}"true">')
        return f"{dsml} {opening} ({values}) {closing}"
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(f"the schema of {name[:40]!r} must be an object, found {type(schema).__name__}")
    inner = {**({} if schema is True else {"not": {}} if schema is False else schema), **shared}
    opening = _text(f'{head}"false">')
    inner = inner if is_strict else _without_lookaround(inner)
    return f'{dsml} {opening} {JsonRule(inner, is_strict=is_strict).lark()} "</" {closing}'


def _without_lookaround(schema: Any) -> Any:
    """A schema without the patterns that look ahead or back, which no grammar can follow."""
    if isinstance(schema, list):
        return [_without_lookaround(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_lookaround(value)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str) and _LOOKAROUND.search(value))
    }


def _string_choices(schema: Any) -> list[str] | None:
    """For a string to be written raw: its values, or none if any will do. None for everything else."""
    if not isinstance(schema, dict) or schema.get("type") != "string" or set(schema) - _RAW_STRING_KEYS:
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    if "enum" in schema and ("const" in schema or not values):
        return None  # a contradiction, or nothing at all: the JSON form says so
    return None if any(PROTOCOL.dsml in value for value in values) else values
