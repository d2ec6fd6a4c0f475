"""Every call that drives the engine or asks about it, and how its fields arrive: in the query, or as JSON."""

from typing import Any

from starlette.requests import Request

from dsv4.http.apis.operations import INFO, PROFILE
from dsv4.http.apis.rl import sglang, vllm
from dsv4.http.apis.rl.calls import Call
from dsv4.http.apis.rl.generation import RENDER, ROLLOUTS
from dsv4.http.body import parse_json
from dsv4.http.errors import ApiError
from dsv4.http.settings import ServerConfig

CALLS: tuple[Call, ...] = (*vllm.CALLS, *sglang.CALLS)
PATHS = (*(call.path for call in CALLS), *(api.path for api in ROLLOUTS), RENDER.path)
_LISTS = ("tags",)  # may be there several times
_WORDS = {"true": True, "false": False}


def calls_of(config: ServerConfig) -> tuple[Call, ...]:
    """Those that a server has."""
    return (*INFO, *(PROFILE if config.profile_dir is not None else ()), *(CALLS if config.rl else ()))


def guarded_of(config: ServerConfig) -> tuple[str, ...]:
    """Paths of its calls and rollouts, which need the key."""
    return (*(call.path for call in calls_of(config)), *(PATHS if config.rl else ()))


async def fields_of(request: Request, max_depth: int) -> dict[str, Any]:
    """What the call says. A page of another site can send a request without a body, but not in secret."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise ApiError(415, "content-type: expected application/json", code="unsupported_media_type")
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "origin: no web page may drive the engine", code="wrong_origin")
    fields = parse_json(body, max_depth=max_depth) if body else {}
    for name in request.query_params:
        if name in fields:
            raise ApiError(400, f"{name}: found in the query and in the body", code="invalid_value", param=name)
        values = [_value(one) for one in request.query_params.getlist(name)]
        if len(values) > 1 and name not in _LISTS:
            raise ApiError(400, f"{name}: found twice in the query", code="invalid_value", param=name)
        fields[name] = values if name in _LISTS else values[0]
    return fields


def _value(text: str) -> Any:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return _WORDS.get(text.lower(), text)
