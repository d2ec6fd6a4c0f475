"""The interfaces that generate, each as one record: its address, its request, how that becomes a job, how the job is
answered. The server knows them by this list alone; so do the gate's counters and the OpenAPI document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsv4.http.apis.chat.answer import ChatAssembler, ChatCompletion
from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.completions.answer import TextAssembler, TextCompletion
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.fields import Strict
from dsv4.http.apis.messages import request as messages_api
from dsv4.http.apis.messages.answer import MessageAnswer, MessagesAssembler, TokenCount
from dsv4.http.apis.request_builder import Job, ModelInfo, RequestBuilder
from dsv4.http.apis.responses import request as responses_api
from dsv4.http.apis.responses.answer import ResponseAnswer, ResponsesAssembler
from dsv4.http.apis.schemas import Answer, Detokenized, Tokenized
from dsv4.http.apis.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from dsv4.http.body import validate
from dsv4.http.errors import ApiError
from dsv4.http.streaming import Assembler


@dataclass(frozen=True)
class Endpoint:
    path: str
    summary: str
    request: type[Strict]
    answer: type[Answer]


@dataclass(frozen=True)
class Api(Endpoint):
    """An interface that generates. `prepare` refuses (`ApiError`) whatever cannot be served."""

    prepare: Callable[[RequestBuilder, Any], Job]
    assembler: Callable[[Job, Any, ModelInfo], Assembler]


@dataclass(frozen=True)
class SyncEndpoint(Endpoint):
    """An interface that answers at once, without the engine."""

    reply: Callable[[RequestBuilder, Any], Answer]


def _from_responses(jobs: RequestBuilder, asked: responses_api.ResponsesRequest) -> Job:
    return jobs.chat(validate(ChatRequest, responses_api.chat_fields(asked)))


def _to_chat(asked: messages_api.CountRequest) -> ChatRequest:
    try:
        fields = messages_api.chat_fields(asked)
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value", param="messages") from None
    return validate(ChatRequest, fields)


def _from_messages(jobs: RequestBuilder, asked: messages_api.MessagesRequest) -> Job:
    return jobs.chat(_to_chat(asked))


def _count(jobs: RequestBuilder, asked: messages_api.CountRequest) -> TokenCount:
    jobs.check_model(asked.model)
    return TokenCount(input_tokens=len(jobs.prompt(_to_chat(asked)).token_ids))


GENERATING = (
    Api(
        "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion,
        RequestBuilder.chat, ChatAssembler,
    ),
    Api(
        "/v1/completions", "Continue a text", CompletionRequest, TextCompletion,
        RequestBuilder.completion, TextAssembler,
    ),
    Api(
        "/v1/responses", "Answer a conversation, as OpenAI's newer interface", responses_api.ResponsesRequest,
        ResponseAnswer, _from_responses, ResponsesAssembler,
    ),
    Api(
        "/v1/messages", "Answer a conversation, as Anthropic's interface", messages_api.MessagesRequest,
        MessageAnswer, _from_messages, MessagesAssembler,
    ),
)  # fmt: skip
QUESTIONS = (
    SyncEndpoint(
        "/v1/messages/count_tokens", "How many tokens a conversation has", messages_api.CountRequest, TokenCount, _count
    ),
    SyncEndpoint("/tokenize", "The tokens of a text or a conversation", TokenizeRequest, Tokenized, tokenize),
    SyncEndpoint("/detokenize", "The text of tokens", DetokenizeRequest, Detokenized, detokenize),
)
