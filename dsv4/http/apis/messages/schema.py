"""The answers of Anthropic's interface, described: for the OpenAPI document, and what tests hold answers against."""

from typing import Any

from dsv4.http.apis.schemas import Answer


class ClaudeUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    """The answer to `/v1/messages`."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: ClaudeUsage


class TokenCount(Answer):
    """The answer to `/v1/messages/count_tokens`."""

    input_tokens: int
