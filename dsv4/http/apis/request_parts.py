"""The pieces requests are made of: messages, tools, formats. `protocol.py` has the requests themselves.

`null` means that a field is absent, everywhere. Fields that clients keep in a conversation and that never reach the
model (`name`, `index`, `parsed`, ...) are taken and dropped; anything that would have to reach it and cannot is
refused. What the texts of a conversation may be is checked by `dsv4.text.messages`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

MAX_INT = 2**31 - 1
_MAX_NAME = 64


class Strict(BaseModel):
    """No unknown field, no guessing of types, no NaN or infinity. A field that is null is a field that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


# ---- messages ----


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: dict[str, JsonValue] | None = None  # caching needs no marks here
    annotations: list[JsonValue] | None = None


class FunctionCall(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    parsed_arguments: JsonValue = None
    provider_specific_fields: dict[str, JsonValue] | None = None


class ToolCallPart(Strict):
    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # what accumulators of streams keep
    provider_specific_fields: dict[str, JsonValue] | None = None


Role = Literal["system", "user", "assistant", "tool", "developer", "latest_reminder"]


class Message(Strict):
    """One message. `content` may be a list of text parts; they are joined by a blank line. `reasoning` is another name
    of `reasoning_content`, `developer` another name of `system`."""

    role: Role
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)
    task: str | None = None
    name: str | None = Field(default=None, max_length=256)
    annotations: list[JsonValue] | None = None
    parsed: JsonValue = None
    provider_specific_fields: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id: allowed on tool messages only, found on {self.role}")
        for name in ("reasoning_content", "reasoning"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise ValueError(f"{name}: allowed on assistant messages only, found on {self.role}")
        return self

    def rendered(self) -> dict[str, Any]:
        """What reaches the prompt, as `dsv4.text.chat` takes it."""
        read = {"role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "task"}
        message = self.model_dump(include=read, exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        return message


# ---- tools ----


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=_MAX_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1)


class AllowedToolChoice(Strict):
    """All tools are shown to the model, and only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def tool_choice_kind(value: Any) -> str:
    """Which member of `ToolChoice` a value means to be: errors are then about that one alone."""
    if isinstance(value, (AllowedToolChoice, NamedToolChoice)):
        return "<allowed>" if isinstance(value, AllowedToolChoice) else "<named>"
    if isinstance(value, dict):
        return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"
    return "<word>"


# ---- formats ----


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]+$", max_length=_MAX_NAME)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


Pattern = Annotated[str, Field(min_length=1, max_length=65536)]


class StructuredOutputs(Strict):
    """One rule of `json`, `json_object`, `regex`, `choice`, `grammar`, in vLLM's spelling.

    grammar: Lark, or the EBNF of llama.cpp and xgrammar (GBNF).
    """

    json_rule: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)
    grammar: Pattern | None = None
    whitespace_pattern: Pattern | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None  # nothing ever falls back here

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        rules = (self.json_rule, self.json_object or None, self.regex, self.choice, self.grammar)
        found = sum(rule is not None for rule in rules)
        if found != 1:
            raise ValueError(f"expected one of json, json_object, regex, choice, grammar, found {found}")
        return self


class StreamOptions(Strict):
    """continuous_usage_stats: usage so far with every chunk, not with the last alone."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled"]


class TemplateOptions(Strict):
    """`chat_template_kwargs`: the names that vLLM's and SGLang's users switch thinking with."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
