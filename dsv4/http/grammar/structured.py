"""What the content of an answer must look like: one rule, from any of the spellings a request may use.

OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, SGLang's `regex`, `ebnf` and `json_schema`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import gbnf_to_lark, regex_to_lark

from dsv4.engine.grammar.errors import GrammarError
from dsv4.http.apis.fields import JsonObjectFormat, JsonSchemaFormat, SamplingFields
from dsv4.http.grammar.empty import is_empty_grammar

# Where JSON may have white space, people write one space, or a new line and its indentation. A model left to itself
# can otherwise fill an answer with it.
_WHITESPACE = r"( |\r?\n[ ]{0,64}|\r?\n\t{0,16})"


@dataclass(frozen=True)
class JsonRule:
    """JSON that follows a schema. whitespace: a pattern of the white space between tokens; empty for none at all.
    is_strict: a keyword that cannot be enforced is an error; otherwise it is left out."""

    schema: Mapping[str, Any]
    whitespace: str = _WHITESPACE
    is_strict: bool = True

    def lark(self) -> str:
        # The library's own options travel in the schema; the caller's are replaced.
        options: dict[str, Any] = {"whitespace_flexible": False}
        if self.whitespace:
            options = {"whitespace_pattern": self.whitespace}
        if not self.is_strict:
            options |= {"lenient": True, "coerce_one_of": True}
        return f"%json {json.dumps({**self.schema, 'x-guidance': options}, ensure_ascii=False)}"


@dataclass(frozen=True)
class RegexRule:
    """Text that matches a pattern from its first to its last character; `\\d`, `\\w` and `\\s` are ASCII's."""

    pattern: str

    def lark(self) -> str:
        pattern = self.pattern.removeprefix("^")
        if pattern.endswith("$") and not pattern.endswith("\\$"):
            pattern = pattern[:-1]
        if not pattern:
            raise GrammarError("the pattern matches the empty text only")
        return f"/{regex_to_lark(pattern, 'dws')}/"


@dataclass(frozen=True)
class ChoiceRule:
    """One of these texts."""

    choices: Sequence[str]

    def lark(self) -> str:
        return "(" + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in self.choices) + ")"


@dataclass(frozen=True)
class GrammarRule:
    """A grammar of the caller's, in Lark, or in the EBNF of llama.cpp and xgrammar."""

    text: str

    def lark(self) -> str:
        try:
            text = gbnf_to_lark.any_to_lark(self.text)
        except (gbnf_to_lark.GbnfToLarkError, RecursionError, ValueError, IndexError) as error:
            raise GrammarError(f"neither Lark (with a rule `start`) nor EBNF (with a rule `root`): {error}") from None
        if is_empty_grammar(text):
            raise GrammarError("no finite text matches this grammar: every expansion of its first rule is infinite")
        return f"%lark {{\n{text}\n}}"


ContentRule = JsonRule | RegexRule | ChoiceRule | GrammarRule


def content_rule(request: SamplingFields) -> tuple[ContentRule, str] | None:
    """The rule a request gives and the field it is in; None where anything goes. `GrammarError` begins with a field."""
    whitespace = request.guided_whitespace_pattern or _WHITESPACE
    rules: list[tuple[ContentRule, str]] = []
    schema = shown_schema(request)
    if schema is not None:
        rules.append((JsonRule(schema), "response_format"))
    if request.structured_outputs is not None:
        rules.append((_structured(request), "structured_outputs"))
    if request.guided_json is not None:
        rules.append((JsonRule(_schema(request.guided_json, "guided_json"), whitespace), "guided_json"))
    elif request.guided_whitespace_pattern is not None:
        raise GrammarError("guided_whitespace_pattern: allowed only with guided_json")
    json_schema = getattr(request, "json_schema", None)
    if json_schema is not None:
        rules.append((JsonRule(_schema(json_schema, "json_schema")), "json_schema"))
    if request.guided_choice is not None:
        rules.append((ChoiceRule(request.guided_choice), "guided_choice"))
    for name in ("guided_regex", "regex"):
        if getattr(request, name) is not None:
            rules.append((RegexRule(getattr(request, name)), name))
    for name in ("guided_grammar", "ebnf"):
        if getattr(request, name) is not None:
            rules.append((GrammarRule(getattr(request, name)), name))
    if len(rules) > 1:
        raise GrammarError(f"{rules[1][1]}: one rule for the content at most, found it and {rules[0][1]}")
    return rules[0] if rules else None


def shown_schema(request: SamplingFields) -> dict[str, Any] | None:
    """The JSON schema of `response_format`, which a chat also shows to the model."""
    if isinstance(request.response_format, JsonSchemaFormat):
        return request.response_format.json_schema.json_schema
    return {"type": "object"} if isinstance(request.response_format, JsonObjectFormat) else None


def _structured(request: SamplingFields) -> ContentRule:
    given = request.structured_outputs
    assert given is not None
    if given.regex is not None:
        return RegexRule(given.regex)
    if given.choice is not None:
        return ChoiceRule(given.choice)
    if given.grammar is not None:
        return GrammarRule(given.grammar)
    whitespace = "" if given.disable_any_whitespace else given.whitespace_pattern or _WHITESPACE
    if given.json_rule is None:
        return JsonRule({"type": "object"}, whitespace)
    return JsonRule(_schema(given.json_rule, "structured_outputs"), whitespace)


def _schema(given: dict[str, Any] | str, field: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{field}: the schema is not JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise GrammarError(f"{field}: the schema must be an object, found {type(value).__name__}")
    return value
