"""`POST /v1/chat/completions`: what a request may hold.

Fields that clients keep in a conversation and that never reach the model (`name`, `index`, `parsed`, ...) are taken and
dropped; anything that would have to reach it and cannot is refused. What the texts of a conversation may be is checked
by `dsv4.text.messages`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from dsv4.http.apis.fields import MAX_FUNCTION_NAME, MAX_INT, MAX_LOGPROBS, SamplingFields, Strict

_MAX_TOOLS = 128

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
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=MAX_FUNCTION_NAME)
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


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedToolChoice, Tag("<named>")]
    | Annotated[AllowedToolChoice, Tag("<allowed>")],
    Discriminator(tool_choice_kind),
]


# ---- the request ----


class Thinking(Strict):
    type: Literal["enabled", "disabled"]


class TemplateOptions(Strict):
    """`chat_template_kwargs`: the names that vLLM's and SGLang's users switch thinking with."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_prompt_token_ids: bool | None = None
    task: str | None = None
    # harmless, with these values
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, JsonValue] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    skip_special_tokens: bool | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    return_prompt_text: Literal[False] | None = None
    return_meta_info: Literal[False] | None = None
    use_audio_in_video: Literal[False] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: expected it or max_completion_tokens, found both")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: allowed only with logprobs true")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(self.continue_final_message):
            raise ValueError("add_generation_prompt: false goes with continue_final_message true, and only with it")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("tools: two functions have the same name")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tools: required by tool_choice, and missing")
        unknown = [name for name in self.chosen_names or () if name not in names]
        if unknown:
            raise ValueError(f"tool_choice: expected one of {', '.join(names)}, found another name")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The functions `tool_choice` names; None where it names none."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedToolChoice):
            return [one.function.name for one in self.tool_choice.allowed_tools.tools]
        return None
