"""`/tokenize`, `/detokenize` and `/version`, as vLLM has them: what a prompt becomes, and what ids say."""

from typing import Any, Self

from pydantic import Field, model_validator

from dsv4 import __version__
from dsv4.http.apis.chat.request import ChatRequest, Message, TemplateOptions, Tool
from dsv4.http.apis.fields import Name, Strict, TokenId
from dsv4.http.apis.request_builder import RequestBuilder, refusing
from dsv4.http.apis.schemas import Detokenized, Tokenized, Version
from dsv4.http.body import validate
from dsv4.request import check_token_ids


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text as `/v1/completions` reads it, or a conversation as `/v1/chat/completions` does."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: expected it or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: not allowed with messages; rendering adds special tokens")
        return self


class DetokenizeRequest(Strict):
    """`POST /detokenize`"""

    model: Name | None = None
    tokens: list[TokenId]


def tokenize(jobs: RequestBuilder, asked: TokenizeRequest) -> Tokenized:
    """`ApiError` for what could not be a prompt."""
    jobs.check_model(asked.model)
    if asked.prompt is not None:
        ids = jobs.encode(asked.prompt, bool(asked.add_special_tokens))
    else:
        ids = jobs.prompt(_chat(asked)).token_ids
    answer = Tokenized(count=len(ids), max_model_len=jobs.max_context_tokens, tokens=ids)
    if asked.return_token_strs:
        answer.token_strs = [jobs.tokenizer.decode([token_id]) for token_id in ids]
    return answer


def detokenize(jobs: RequestBuilder, asked: DetokenizeRequest) -> Detokenized:
    jobs.check_model(asked.model)
    ids = refusing(check_token_ids, asked.tokens, jobs.vocab_size, "token", field="tokens")
    return Detokenized(prompt=jobs.tokenizer.decode(ids))


def version() -> Version:
    return Version(version=__version__)


def _chat(asked: TokenizeRequest) -> ChatRequest:
    fields: dict[str, Any] = asked.model_dump(
        by_alias=True, exclude_none=True,
        include={"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"},
    )  # fmt: skip
    return validate(ChatRequest, fields)
