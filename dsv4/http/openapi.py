"""The OpenAPI document: the request and answer models, and every status a route can give."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from dsv4.http.apis.chat.answer import ChatCompletionChunk
from dsv4.http.apis.registry import GENERATING, QUESTIONS, Api, Endpoint, SyncEndpoint
from dsv4.http.apis.rl.calls import Call
from dsv4.http.apis.rl.generation import RENDER, ROLLOUTS
from dsv4.http.apis.rl.routes import calls_of
from dsv4.http.apis.schemas import ErrorBody, Health, Live, ModelCard, ModelList, Version
from dsv4.http.gate import guarded_paths
from dsv4.http.settings import ServerConfig

API_VERSION = "1.0"  # of the interface, not of the package
_REFERENCE = "#/components/schemas/{model}"
_ANSWERS = (ChatCompletionChunk, ModelCard, ModelList, Health, Live, Version, ErrorBody)
_STATUS = {
    400: "A field is wrong, missing or not supported; the message names it.",
    401: "No valid API key.",
    403: "A host name this server does not answer to, or a folder that weights may not be read from.",
    404: "No such model.",
    409: "The weights are not whole: an update failed half way.",
    413: "The body is too large.",
    415: "The body is not application/json, or is compressed.",
    500: "This request could not be continued; others go on.",
    503: "The queue is full, or the server is shutting down.",
}


def openapi_document(config: ServerConfig) -> dict[str, Any]:
    """The whole document, of the routes that this server has."""
    generating = (*GENERATING, *ROLLOUTS) if config.rl else GENERATING
    questions = (*QUESTIONS, RENDER) if config.rl else QUESTIONS
    calls = calls_of(config)
    requests = _schemas((one.request for one in (*generating, *questions, *calls)), "validation")
    answers = _schemas((*(one.answer for one in (*generating, *questions)), *_ANSWERS), "serialization")
    components: dict[str, Any] = {"schemas": {**requests["$defs"], **answers["$defs"]}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "dsv4",
            "version": API_VERSION,
            "description": "DeepSeek-V4 behind OpenAI's and Anthropic's interfaces.",
        },
        "paths": _paths(generating, questions, calls),
        "components": components,
    }
    if config.api_key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            if path.startswith(guarded_paths(config)):
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    return document


def _schemas(models: Iterable[type[BaseModel]], mode: JsonSchemaMode) -> dict[str, Any]:
    return models_json_schema([(one, mode) for one in dict.fromkeys(models)], ref_template=_REFERENCE)[1]


def _paths(
    generating: Sequence[Api], questions: Sequence[SyncEndpoint], calls: Sequence[Call]
) -> dict[str, Any]:  # fmt: skip
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    page = {"description": "The chat page.", "content": {"text/html": {"schema": {"type": "string"}}}}
    metrics = {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    health = {"responses": {**_answers(Health, (403,)), "503": _content(Health, "The engine has failed.")}}
    ready = {"responses": {**_answers(Health, (403,)), "503": _content(Health, "Shutting down, or failed.")}}
    return {
        **{one.path: {"post": _posting(one)} for one in (*generating, *questions)},
        **{one.path: {name.lower(): _calling(one, name) for name in one.methods} for one in calls},
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


def _posting(one: Endpoint) -> dict[str, Any]:
    generates = isinstance(one, Api)
    responses = _answers(one.answer, (400, 401, 403, 404, 413, 415, *((500, 503) if generates else ())))
    if generates:
        responses["200"]["content"]["text/event-stream"] = {}
    return {"summary": one.summary, "requestBody": _body(one.request, True), "responses": responses}


def _body(request: type[BaseModel], is_required: bool) -> dict[str, Any]:
    return {"required": is_required, "content": {"application/json": {"schema": _schema(request)}}}


def _calling(call: Call, method: str) -> dict[str, Any]:
    """Its fields may also stand in the query."""
    done = {"description": "Done.", "content": {"application/json": {"schema": {"type": "object"}}}}
    responses = {"200": done, **_errors((400, 401, 403, 409, 413, 415, 500, 503))}
    if method == "GET":
        return {"summary": call.summary, "responses": responses}
    return {"summary": call.summary, "requestBody": _body(call.request, False), "responses": responses}


def _schema(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def _content(model: type[BaseModel], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _schema(model)}}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {str(status): _content(ErrorBody, _STATUS[status]) for status in statuses}


def _answers(model: type[BaseModel], statuses: tuple[int, ...]) -> dict[str, Any]:
    return {"200": _content(model, "Done."), **_errors(statuses)}
