"""`POST /v1/responses`: OpenAI's newer interface, as a translation to a chat. What is answered: `answer.py`.

Nothing is kept between requests: a conversation is sent whole, as `input` items. Of its items those that the model's
protocol has are taken: messages, function calls and their outputs, reasoning.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

from dsv4.http.apis.chat.request import TemplateOptions
from dsv4.http.apis.fields import (
    MAX_INT,
    MAX_LOGPROBS,
    AccountFields,
    Name,
    PassedOn,
    StopText,
    Strict,
    StructuredOutputs,
    TokenId,
)

# ---- input ----


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[JsonValue] | None = None
    parsed: JsonValue = None
    logprobs: list[JsonValue] | None = None


class Item(Strict):
    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    phase: str | None = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: Name
    namespace: Name | None = None
    arguments: str
    parsed_arguments: JsonValue = None


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: str | list[InputText]


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Item):
    """Reasoning that went before. `encrypted_content` of other servers says nothing here."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: Literal[""] | None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return f"<{kind}>" if kind in ("function_call", "function_call_output", "reasoning") else "<message>"


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_kind),
]

# ---- options ----


class FlatFunction(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class NamespaceTool(Strict):
    """Functions under a common name. The model knows each as `namespace.name`."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[FlatFunction] = Field(min_length=1)


class HostedTool(Strict):
    """A tool that OpenAI's servers run and Codex always offers. It is left out of the prompt, and so never called."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: Literal["web_search", "image_generation"]


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = {"web_search": "<hosted>", "image_generation": "<hosted>", "namespace": "<namespace>"}
    return known.get(kind, "<function>") if isinstance(kind, str) else "<function>"


AnyTool = Annotated[
    Annotated[FlatFunction, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_tool_kind),
]


class FlatChoice(Strict):
    type: Literal["function"]
    name: Name
    namespace: Name | None = None


class FlatAllowed(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatChoice] = Field(min_length=1)


class FlatText(Strict):
    type: Literal["text", "json_object"]


class FlatSchema(Strict):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: Annotated[FlatText | FlatSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """An effort turns thinking on. Reasoning is given whole; a summary of it would be another text."""

    effort: str | None = Field(default=None, max_length=32)
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ResponsesRequest(PassedOn, AccountFields):
    """`POST /v1/responses`"""

    model: str | None = Field(default=None, max_length=256)
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | FlatAllowed | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Include] | None = None
    stream_options: ResponsesStreamOptions | None = None
    # beyond OpenAI's
    stop: StopText | list[StopText] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    chat_template_kwargs: TemplateOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    # harmless, with these values
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    client_metadata: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.text is not None and isinstance(self.text.format, FlatSchema) and self.structured_outputs is not None:
            raise ValueError("structured_outputs: one rule for the content at most, found it and text.format")
        return self

    @property
    def functions(self) -> list[tuple[str | None, FlatFunction]]:
        """All functions, each with the namespace it is in. The first of a namespace tells what that is for."""
        found: list[tuple[str | None, FlatFunction]] = []
        for tool in self.tools or ():
            if isinstance(tool, FlatFunction):
                found.append((None, tool))
            elif isinstance(tool, NamespaceTool):
                first, *others = tool.tools
                about = "\n\n".join(text for text in (tool.description, first.description) if text) or None
                found += [(tool.name, one) for one in (first.model_copy(update={"description": about}), *others)]
        return found

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


_SAME_NAMES = (
    "model", "parallel_tool_calls", "stop", "stop_token_ids", "ignore_eos", "min_tokens", *PassedOn.model_fields
)  # fmt: skip


def chat_fields(asked: ResponsesRequest) -> dict[str, Any]:
    """The same request as the fields of a `ChatRequest`."""
    fields: dict[str, Any] = {name: getattr(asked, name) for name in _SAME_NAMES}
    fields["messages"] = _messages(asked)
    fields["max_completion_tokens"] = asked.max_output_tokens
    if asked.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    fields["tools"] = [
        {"type": "function", "function": {
            **tool.model_dump(exclude={"type", "defer_loading"}, exclude_none=True),
            "name": model_name(namespace, tool.name),
        }}
        for namespace, tool in asked.functions
    ] or None  # fmt: skip
    fields["tool_choice"] = _tool_choice(asked)
    fields["reasoning_effort"] = None if asked.reasoning is None else asked.reasoning.effort
    for name in ("chat_template_kwargs", "structured_outputs"):
        given = getattr(asked, name)
        fields[name] = None if given is None else given.model_dump(by_alias=True, exclude_none=True)
    wanted = None if asked.text is None else asked.text.format
    if isinstance(wanted, FlatSchema):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted is not None:
        fields["response_format"] = {"type": wanted.type}
    return fields


def model_name(namespace: str | None, name: str) -> str:
    """A function's name as the model reads and writes it."""
    return name if namespace is None else f"{namespace}.{name}"


def _tool_choice(asked: ResponsesRequest) -> Any:
    choice = asked.tool_choice
    if isinstance(choice, FlatChoice):
        return _named(choice)
    if isinstance(choice, FlatAllowed):
        allowed = {"mode": choice.mode, "tools": [_named(one) for one in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(choice: FlatChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": model_name(choice.namespace, choice.name)}}


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """Items that belong to one turn of the assistant (reasoning, text, calls) become one message."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    turn: dict[str, Any] | None = None  # the assistant's, while its items come
    for item in asked.input:
        is_answer = isinstance(item, (FunctionCallItem, ReasoningItem))
        if is_answer or (isinstance(item, InputMessage) and item.role == "assistant"):
            if turn is None or (isinstance(item, ReasoningItem) and len(turn) > 1):
                turn = {"role": "assistant"}
                messages.append(turn)
            _add_to_turn(turn, item)
            continue
        turn = None
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _add_to_turn(turn: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        parts = item.content or item.summary or []
        turn["reasoning_content"] = "\n\n".join(part.text for part in parts)
    elif isinstance(item, FunctionCallItem):
        function = {"name": model_name(item.namespace, item.name), "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, InputMessage):
        earlier = [turn["content"]] if "content" in turn else []
        turn["content"] = "\n\n".join([*earlier, _text(item.content)])


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n\n".join(part.text for part in content)
