"""What the server answers, field by field: OpenAI's shapes, and `reasoning_content` beside the content."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Built by this package, so only described: fields left out stay out of the JSON."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per generated token, those of the reasoning and of markers included."""

    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str | None = None
    arguments: str


class CalledTool(Answer):
    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Answer):
    """A whole message, or in a stream the next piece of one."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


FinishWord = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord


class ChatChunkChoice(Answer):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class TextCompletion(Answer):
    """The answer to `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    default_sampling_params: dict[str, float] | None = None


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    status: Literal["ok", "stopping", "failed"]


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    error: ErrorDetail


class CacheKind(Answer):
    """Bytes of one kind of cache row, in all layers: what requests hold now, and what there is."""

    name: str
    unit: Literal["block", "request"]
    used_bytes: int
    total_bytes: int


class Live(Answer):
    """The engine at this moment. `experts` is one string of digits per layer, 0 (idle) to 9 (the busiest expert)."""

    model: str
    seconds: float
    waiting: int
    running: int
    slots: int
    blocks_used: int
    blocks: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    cache: list[CacheKind]
    experts: list[str]
