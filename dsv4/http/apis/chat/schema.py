"""The answers of a chat, described: OpenAI's shapes, and `reasoning_content` beside the content. For the OpenAPI
document, and what tests hold answers against."""

from typing import Literal

from dsv4.http.apis.answer_reader import FinishWord
from dsv4.http.apis.schemas import Answer, PromptLogprobs, Usage


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


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord
    stop_reason: str | int | None = None
    seed: int | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    token_ids: list[int] | None = None


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
