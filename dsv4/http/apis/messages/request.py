"""`POST /v1/messages`: Anthropic's interface, as a translation to a chat. What is answered: `answer.py`.

Blocks of text, thinking, tool use and tool results are taken; the model reads no others. `cache_control` is taken and
has nothing to do: prefixes need no marks here. Claude Code's line for Anthropic's accounts is left out of the prompt.
A system message after the conversation has begun joins the user's turn, as a reminder: the model's protocol has system
text at the beginning only.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from dsv4.http.apis.fields import MAX_INT, Name, PassedOn, StopText, Strict

# ---- blocks ----


class Block(Strict):
    cache_control: dict[str, JsonValue] | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[JsonValue] | None = None
    parsed_output: JsonValue = None


class ThinkingBlock(Block):
    """Thinking that went before. Whatever signed it, it is read as it is."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: Name
    input: dict[str, Any]
    caller: dict[str, JsonValue] | None = None
    toolset_name: str | None = None


class ToolResultBlock(Block):
    """`is_error` does not reach the model: the text of a result says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | list[TextBlock] = ""
    is_error: bool | None = None


def _block_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("thinking", "tool_use", "tool_result") else "<text>"


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_block_kind),
]


class ClaudeMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


# ---- options ----


class ClaudeTool(Block):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[JsonValue] | None = Field(default=None, max_length=0)


class ClaudeToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ClaudeThinking(Strict):
    """Thinking is bounded by `max_tokens`; a smaller `budget_tokens` is a wish that is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    display: Literal["summarized", "omitted"] | None = None


class ClaudeFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputOptions(Strict):
    effort: str | None = Field(default=None, max_length=32)
    format: ClaudeFormat | None = None


class KeptThinking(Strict):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextOptions(Strict):
    edits: list[KeptThinking] | None = None


class ClaudeMetadata(Strict):
    user_id: str | None = None


class CountRequest(Strict):
    """`POST /v1/messages/count_tokens`"""

    model: str | None = Field(default=None, max_length=256)
    messages: list[ClaudeMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: ClaudeToolChoice | None = None
    thinking: ClaudeThinking | None = None
    output_config: OutputOptions | None = None
    context_management: ContextOptions | None = None
    cache_control: dict[str, JsonValue] | None = None


class MessagesRequest(CountRequest, PassedOn):
    """`POST /v1/messages`"""

    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: list[StopText] | None = None
    # harmless, with these values
    metadata: ClaudeMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_SAME_NAMES = ("model", "max_tokens", *PassedOn.model_fields)
# What Claude Code writes in front of its system prompt for Anthropic's accounts. It differs in every request: a prompt
# that began with it would have no beginning in common with the one before.
_BILLING = "x-anthropic-billing-header:"
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # as Claude Code writes one into a user's text
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(asked: CountRequest) -> dict[str, Any]:
    """The same request as the fields of a `ChatRequest`."""
    fields: dict[str, Any] = {name: getattr(asked, name, None) for name in _SAME_NAMES}
    fields["messages"] = _messages(asked)
    if asked.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    fields["stop"] = getattr(asked, "stop_sequences", None) or None
    fields["tools"] = [_function(tool) for tool in asked.tools or ()] or None
    choice = asked.tool_choice
    if choice is not None:
        is_named = choice.type == "tool"
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = named if is_named else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    thinks = None if asked.thinking is None else asked.thinking.type != "disabled"
    if thinks is not None:
        fields["thinking"] = {"type": "enabled" if thinks else "disabled"}
    if asked.output_config is not None:
        # an effort also shapes answers without thinking; there it has no effect here
        fields["reasoning_effort"] = asked.output_config.effort if thinks else None
        if asked.output_config.format is not None:
            schema = {"name": "answer", "schema": asked.output_config.format.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _function(tool: ClaudeTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _messages(asked: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = asked.system
    if isinstance(system, list):
        system = [block for block in system if not block.text.startswith(_BILLING)]
    if system is not None:
        messages.append({"role": "system", "content": _text(system)})
    has_begun = False
    for message in asked.messages:
        has_begun = has_begun or message.role != "system"
        if message.role == "assistant" and not isinstance(message.content, str):
            messages.append(_assistant(message.content))
            continue
        content = message.content
        if isinstance(content, str):
            given = [{"role": message.role, "content": content}]
        else:
            given = _inputs(message.role, content)
        if message.role == "system" and has_begun:
            given = [{"role": "user", "content": _REMINDER.format(one["content"])} for one in given]
        messages += given
    return messages


def _assistant(blocks: list[AnyBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise ValueError("messages: a tool_result belongs into a user message")
    message["content"] = "\n\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}}
            for call in calls
        ]
    return message


def _inputs(role: str, blocks: list[AnyBlock]) -> list[dict[str, Any]]:
    """The blocks of a user or of the system: every tool result a message of its own, text as it stands."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock) and role == "user":
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif isinstance(block, TextBlock):
            messages.append({"role": role, "content": block.text})
        else:
            owner = "a user" if isinstance(block, ToolResultBlock) else "an assistant"
            raise ValueError(f"messages: a {block.type} block belongs into {owner} message")
    return messages


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)
