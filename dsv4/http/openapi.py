"""The OpenAPI document: the request and answer models, and every status a route can give."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dsv4.http.apis.chat.schema import ChatCompletionChunk
from dsv4.http.apis.registry import GENERATING, QUESTIONS
from dsv4.http.apis.schemas import ErrorBody, Health, Live, ModelCard, ModelList, Version

API_VERSION = "1.0"  # of the interface, not of the package
_REFERENCE = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = tuple(api.request for api in (*GENERATING, *QUESTIONS))
_ANSWERS: tuple[type[BaseModel], ...] = (
    *(api.answer for api in (*GENERATING, *QUESTIONS)),
    ChatCompletionChunk, ModelCard, ModelList, Health, Live, Version, ErrorBody,
)  # fmt: skip
_STATUS = {
    400: "A field is wrong, missing or not supported; the message names it.",
    401: "No valid API key.",
    403: "A host name this server does not answer to.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body is not application/json, or is compressed.",
    500: "This request could not be continued; others go on.",
    503: "The queue is full, or the server is shutting down.",
}


def openapi_document(*, has_key: bool) -> dict[str, Any]:
    """The whole document; `has_key`: the server wants an API key."""
    requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REFERENCE)[1]
    answers = models_json_schema([(model, "serialization") for model in _ANSWERS], ref_template=_REFERENCE)[1]
    components: dict[str, Any] = {"schemas": {**requests["$defs"], **answers["$defs"]}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "dsv4",
            "version": API_VERSION,
            "description": "DeepSeek-V4 behind OpenAI's and Anthropic's interfaces.",
        },
        "paths": _paths(),
        "components": components,
    }
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            if path.startswith(("/v1/", "/live", "/tokenize", "/detokenize")):
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    return document


def _paths() -> dict[str, Any]:
    posting = (400, 401, 403, 404, 413, 415, 500, 503)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    page = {"description": "The chat page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    metrics = {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    health = {"responses": {**_answers(Health, (403,)), "503": _content(Health, "The engine has failed.")}}
    ready = {"responses": {**_answers(Health, (403,)), "503": _content(Health, "Shutting down, or failed.")}}
    asking = (400, 401, 403, 404, 413, 415)
    return {
        **{api.path: {"post": _posting(api.summary, api.request, api.answer, posting)} for api in GENERATING},
        **{one.path: {"post": _asking(one.summary, one.request, one.answer, asking)} for one in QUESTIONS},
        "/version": {"get": {"summary": "The version", "responses": _answers(Version, (403,))}},
        "/v1/models": {"get": {"summary": "The model", "responses": _answers(ModelList, (401, 403))}},
        "/v1/models/{name}": {
            "get": {"summary": "The model", "parameters": [name], "responses": _answers(ModelCard, (401, 403, 404))}
        },
        "/live": {"get": {"summary": "The engine now", "responses": _answers(Live, (401, 403))}},
        "/health": {"get": {"summary": "Whether the process can go on", **health}},
        "/ready": {"get": {"summary": "Whether requests are taken", **ready}},
        "/metrics": {"get": {"summary": "Metrics", "responses": {"200": metrics, **_errors((403,))}}},
        "/": {"get": {"summary": "A page to talk to", "responses": {"200": page, **_errors((403,))}}},
    }


def _posting(
    summary: str, request: type[BaseModel], answer: type[BaseModel], statuses: tuple[int, ...]
) -> dict[str, Any]:  # fmt: skip
    operation = _asking(summary, request, answer, statuses)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return operation


def _asking(
    summary: str, request: type[BaseModel], answer: type[BaseModel], statuses: tuple[int, ...]
) -> dict[str, Any]:  # fmt: skip
    body = {"required": True, "content": {"application/json": {"schema": _schema(request)}}}
    return {"summary": summary, "requestBody": body, "responses": _answers(answer, statuses)}


def _schema(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _content(model: type[BaseModel], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _schema(model)}}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {str(status): _content(ErrorBody, _STATUS[status]) for status in statuses}


def _answers(model: type[BaseModel], statuses: tuple[int, ...]) -> dict[str, Any]:
    return {"200": _content(model, "Done."), **_errors(statuses)}
