"""The answer of OpenAI's newer interface, described: for the OpenAPI document, and what tests hold answers against."""

from typing import Any

from dsv4.http.apis.schemas import Answer


class ResponseAnswer(Answer):
    """The answer to `/v1/responses`. What the request did not say has its default here."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: str
    usage: dict[str, Any] | None
    user: str | None
