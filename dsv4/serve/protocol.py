"""What a request may hold, field by field. A field that is not here is refused with its name, never ignored.

The names are OpenAI's. Beyond them: `thinking`, `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `cache_salt`,
`reasoning_content` (and `task`) on messages, and the roles `latest_reminder` and `developer` of the model's protocol.
What the texts of a conversation may be is checked by `dsv4.text.messages`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MAX_INT = 2**31 - 1
_MAX_STOPS = 16
_MAX_TOOLS = 128
_MAX_NAME = 64


class Strict(BaseModel):
    """No unknown field, no guessing of types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


# ---- messages ----


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallPart(Strict):
    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


Role = Literal["system", "user", "assistant", "tool", "developer", "latest_reminder"]


class Message(Strict):
    """One message. `content` may be a list of text parts; they are joined by a blank line."""

    role: Role
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)
    task: str | None = None

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id: allowed on tool messages only, found on {self.role}")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError(f"reasoning_content: allowed on assistant messages only, found on {self.role}")
        return self


# ---- tools and formats ----


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


class StreamOptions(Strict):
    include_usage: bool = False


class Thinking(Strict):
    type: Literal["enabled", "disabled"]


# ---- requests ----

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class SamplingFields(Strict):
    """What both kinds of request share. None means the default."""

    model: str = Field(max_length=256)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=_MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: StopText | Annotated[list[StopText], Field(max_length=_MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    n: int | None = Field(default=None, ge=1, le=_MAX_INT)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream true")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: expected it or max_completion_tokens, found both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: allowed only with logprobs true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("tools: two functions have the same name")
        if not names and (self.tool_choice not in (None, "none", "auto") or self.parallel_tool_calls is not None):
            raise ValueError("tools: required by tool_choice and parallel_tool_calls, and missing")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: expected one of {', '.join(names)}, found another name")
        return self


TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. Nothing is added to a prompt, and markers in its text are ordinary text."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)] | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)
    ]  # fmt: skip
    logprobs: int | None = Field(default=None, ge=0, le=20)
