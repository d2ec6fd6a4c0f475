"""Routes for operators: the server's settings, given and chosen, and profiles of its engine."""

from typing import Any, Literal

from dsv4 import __version__
from dsv4.http.apis.fields import Strict
from dsv4.http.apis.rl.calls import Call, Controls, Nothing

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
