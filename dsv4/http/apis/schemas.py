"""What the server answers, field by field: OpenAI's shapes, and `reasoning_content` beside the content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Built by this package, so only described: fields left out stay out of the JSON."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def to_event(self) -> bytes:
        """As a server-sent event."""
        return f"data: {self.to_json()}\n\n".encode()


class Sent(Protocol):
    """What a stream is made of."""

    def to_event(self) -> bytes: ...


@dataclass(frozen=True)
class NamedEvent:
    """An event that says its kind twice, beside its data and in it, as the newer interfaces want it."""

    data: dict[str, Any]

    def to_event(self) -> bytes:
        return f"event: {self.data['type']}\ndata: {json.dumps(self.data, ensure_ascii=False)}\n\n".encode()


@dataclass(frozen=True)
class PlainEvent:
    """An event without a name: an error, or the word that ends a stream."""

    text: str

    def to_event(self) -> bytes:
        return f"data: {self.text}\n\n".encode()


class PromptDetails(Answer):
    cached_tokens: int


class CompletionDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


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
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class PromptLogprob(Answer):
    """A token at one place of a prompt; rank 1 is the likeliest, None one that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(Answer):
    """The answer to `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    default_sampling_params: dict[str, float] | None = None


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    prompt: str


class Version(Answer):
    version: str


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
    type: Literal["error"]
    error: ErrorDetail


class CacheKind(Answer):
    """Bytes of one kind of cache row, in all layers: what requests hold now, and what there is."""

    name: str
    unit: Literal["block", "request"]
    used_bytes: int
    total_bytes: int


class Live(Answer):
    """The engine at this moment. `experts` is one string of digits per layer, 0 (idle) to 9 (the busiest expert).
    With drafts, `accepted` is the share that came true by place, `step_tokens` the mean of a request's tokens a step.
    """

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
    step_tokens: float | None
    accepted: list[float]
