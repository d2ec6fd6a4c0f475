"""Every call that drives the engine or asks about it, and how its fields arrive: in the query, or as JSON. Those for
operators are here: the server's settings, given and chosen, and profiles of its engine."""

from typing import Any, Literal

from starlette.requests import Request

from dsv4 import __version__
from dsv4.http.apis.fields import Strict
from dsv4.http.apis.rl import sglang, vllm
from dsv4.http.apis.rl.calls import Call, Controls, Nothing
from dsv4.http.apis.rl.generation import RENDER, ROLLOUTS
from dsv4.http.body import parse_json
from dsv4.http.errors import ApiError, wrong_field
from dsv4.http.settings import ServerConfig

_GET = ("GET",)


class ServerInfo(Strict):
    config_format: Literal["json", "text"] | None = None


async def server_info(engine: Controls, asked: Strict) -> dict[str, Any]:
    """In both dialects at once: TRL looks for `vllm_config`, clients of SGLang for the names beside it. `settings` are
    what the table at the server's start shows."""
    found, config = await engine.info(), engine.config
    return {
        "vllm_config": {
            "model_config": {"model": config.name, "max_model_len": engine.max_context_tokens},
            "parallel_config": {"world_size": found["world_size"]},
            "weight_transfer_config": None,  # vLLM's joins by a pickle, and nothing is unpickled here
        },
        "model_path": config.name, "served_model_name": config.name, "context_length": engine.max_context_tokens,
        "tp_size": found["world_size"], "version": __version__, "weight_version": found["weight_version"],
        "is_paused": found["is_paused"], "is_sleeping": found.get("is_sleeping", False),
        "fingerprint": found["fingerprint"], "max_running_requests": found["num_slots"],
        "settings": {
            one.what: {"value": one.value, "why": one.why, "option": one.option} for one in config.choices
        },
        "planned_bytes": dict(config.planned_bytes), "start_seconds": found["start_seconds"],
    }  # fmt: skip


async def start_profile(engine: Controls, asked: Nothing) -> dict[str, Any]:
    return {"file": await engine.control("start_profile", folder=engine.config.profile_dir)}


async def stop_profile(engine: Controls, asked: Nothing) -> dict[str, Any]:
    return {"file": await engine.control("stop_profile")}


INFO = (
    Call("/server_info", "What this server is, and every setting that was chosen", server_info, ServerInfo, _GET),
    Call("/get_server_info", "As /server_info", server_info, methods=_GET),
)
PROFILE = (
    Call("/start_profile", "Begin a torch profile of the engine", start_profile),
    Call("/stop_profile", "End it and write its file", stop_profile),
)


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
            raise wrong_field(name, "found in the query and in the body")
        values = [_value(one) for one in request.query_params.getlist(name)]
        if len(values) > 1 and name not in _LISTS:
            raise wrong_field(name, "found twice in the query")
        fields[name] = values if name in _LISTS else values[0]
    return fields


def _value(text: str) -> Any:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return _WORDS.get(text.lower(), text)
