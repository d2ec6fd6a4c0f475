"""Answers, described: what several interfaces have in common, and what the server says about itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Built by this package, so only described: fields left out stay out of the JSON. Answers that hold tokens are
    written as text (`sse.py`); their descriptions serve the OpenAPI document, and tests hold the text against them."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


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


class PromptLogprob(Answer):
    """A token at one place of a prompt; rank 1 is the likeliest. One that is not among those asked for ranks behind."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
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
