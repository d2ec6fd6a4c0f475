"""The answers of a completion, described: for the OpenAPI document, and what tests hold answers against."""

from typing import Literal

from dsv4.http.apis.schemas import Answer, PromptLogprobs, Usage


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
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
