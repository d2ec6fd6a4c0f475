"""vLLM's words: what TRL, prime-rl and others send to pause, update, and put to sleep."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dsv4.http.apis.fields import Name, Strict
from dsv4.http.apis.rl.calls import Call, Controls, PauseMode, Seconds, asking, telling
from dsv4.http.errors import ApiError

_GET = ("GET",)
TensorName = Annotated[str, Field(min_length=1, max_length=512)]
Shape = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]


class Pause(Strict):
    mode: PauseMode = "abort"
    clear_cache: bool = True


class Abort(Strict):
    """Without ids: every request."""

    request_ids: list[Name] | None = None


class ResetCache(Strict):
    reset_running_requests: bool | None = None
    reset_external: bool | None = None  # every tier is forgotten


class Sleep(Strict):
    """level 0: pause. 1: weights to host memory. 2: weights and cache are dropped."""

    level: int = Field(default=1, ge=0, le=2)
    mode: PauseMode = "abort"


class WakeUp(Strict):
    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class GroupInfo(Strict):
    """Where the trainer waits: it is rank 0 of the group, these workers come from `rank_offset` on."""

    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    backend: Literal["nccl", "gloo"] = "nccl"
    packed: bool = True
    timeout: Seconds | None = None


class InitTransfer(Strict):
    init_info: GroupInfo


class StartUpdate(Strict):
    is_checkpoint_format: Literal[True] | None = None


class TensorList(Strict):
    """Tensors in the order they are sent."""

    names: list[TensorName] = Field(min_length=1)
    dtype_names: list[Name]
    shapes: list[Shape]
    packed: bool | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        if len(lengths) > 1:
            found = f"{len(self.names)}, {len(self.dtype_names)} and {len(self.shapes)}"
            raise ValueError(f"names: expected as many as dtype_names and shapes, found {found}")
        return self


class SharedTensor(Strict):
    """As `dsv4.engine.weights.shared.share` describes it; what it may be is checked by the engine."""

    name: TensorName
    dtype: Name
    shape: Shape
    stride: Shape
    offset: int = Field(ge=0)
    handle: Name
    storage_bytes: int = Field(ge=0)
    device: Name


SharedTensors = Annotated[list[SharedTensor], Field(min_length=1)]


class UpdateWeights(Strict):
    update_info: TensorList | None = None
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    shared_tensors: SharedTensors | None = None
    weight_version: Name | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(one is not None for one in (self.update_info, self.weight_dir, self.shared_tensors)) != 1:
            raise ValueError("update_info: expected it, weight_dir or shared_tensors")
        return self


class FinishUpdate(Strict):
    weight_version: Name | None = None


class NewVersion(Strict):
    """`new_version` is SGLang's word."""

    weight_version: Name | None = None
    new_version: Name | None = None
    abort_all_requests: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.weight_version is None) == (self.new_version is None):
            raise ValueError("weight_version: expected it or new_version")
        return self


async def pause(engine: Controls, asked: Pause) -> dict[str, Any]:
    await engine.pause(asked.mode, clears=asked.clear_cache)
    return {"status": "paused"}


async def abort(engine: Controls, asked: Abort) -> dict[str, Any]:
    return {"aborted": await engine.control("abort", names=asked.request_ids)}


async def reset_cache(engine: Controls, asked: ResetCache) -> dict[str, Any]:
    await engine.control("reset_prefix_cache", running=bool(asked.reset_running_requests))
    return {"success": True}


async def sleep(engine: Controls, asked: Sleep) -> dict[str, Any]:
    await engine.sleep(asked.level, asked.mode)
    return {"status": "sleeping" if asked.level else "paused"}


async def wake_up(engine: Controls, asked: WakeUp) -> dict[str, Any]:
    memory = None if asked.tags is None else [tag for tag in asked.tags if tag != "scheduling"]
    if memory != []:
        await engine.control("wake", tags=memory)
    if "scheduling" in (asked.tags or ()):
        await engine.control("resume")
    return {"status": "awake"}


async def init_transfer(engine: Controls, asked: InitTransfer) -> dict[str, Any]:
    info = asked.init_info
    if info.packed:
        message = (
            "init_info.packed: vLLM's transfer joins by a pickle, and this server unpickles nothing; set it to false "
            "and send tensor by tensor through a group of torch's (docs/rl.md), or use weight_dir"
        )
        raise ApiError(400, message, code="unsupported_parameter", param="init_info.packed")
    await engine.control("init_group", **info.model_dump(exclude={"packed"}))
    return {"message": "the engine has joined the group"}


async def update(engine: Controls, asked: UpdateWeights) -> dict[str, Any]:
    if asked.weight_dir is not None:
        folder = engine.folder(asked.weight_dir, "weight_dir")
        return {"status": "ok", "weight_version": await engine.update(folder, asked.weight_version)}
    if asked.shared_tensors is not None:
        return {"status": "ok", **await take(engine, asked.shared_tensors, asked.weight_version)}
    assert asked.update_info is not None
    sent = asked.update_info
    return {"status": "ok", **await receive(engine, sent.names, sent.dtype_names, sent.shapes, asked.weight_version)}


async def receive(
    engine: Controls, names: list[str], dtypes: list[str], shapes: list[list[int]], version: str | None
) -> dict[str, Any]:
    found = await engine.control("receive_weights", names=names, dtypes=dtypes, shapes=shapes, version=version)
    return await _state(engine, found)


async def take(engine: Controls, tensors: list[SharedTensor], version: str | None) -> dict[str, Any]:
    given = [one.model_dump() for one in tensors]
    return await _state(engine, await engine.control("take_weights", tensors=given, version=version))


async def _state(engine: Controls, found: str | None) -> dict[str, Any]:
    """`is_whole`: whether the model has come as a whole and runs; until then the engine does not go on."""
    return {"is_whole": found is not None, "weight_version": found or (await engine.info())["weight_version"]}


async def finish_update(engine: Controls, asked: FinishUpdate) -> dict[str, Any]:
    return {"weight_version": await engine.control("finish_update", version=asked.weight_version)}


async def name_version(engine: Controls, asked: NewVersion) -> dict[str, Any]:
    version = asked.weight_version or asked.new_version
    return {"weight_version": await engine.control("set_weight_version", version=version)}


CALLS = (
    Call("/pause", "Stop between two steps", pause, Pause),
    Call("/resume", "Go on", telling("resume", {"status": "resumed"})),
    Call("/abort_requests", "End requests; what they have written is their answer", abort, Abort),
    Call("/reset_prefix_cache", "Forget every prefix, in every tier", reset_cache, ResetCache),
    Call("/sleep", "Give device memory back", sleep, Sleep),
    Call("/wake_up", "Take it again", wake_up, WakeUp),
    Call("/init_weight_transfer_engine", "Join the trainer's group", init_transfer, InitTransfer),
    Call("/start_weight_update", "Tensors will follow", telling("info", {"message": "send the tensors"}), StartUpdate),
    Call(
        "/update_weights",
        "New weights: a folder, a group's, or of a shared GPU",
        update,
        UpdateWeights,
    ),
    Call("/finish_weight_update", "All tensors were sent", finish_update, FinishUpdate),
    Call("/update_weight_version", "Name the weights", name_version, NewVersion),
    Call("/weight_info", "Which weights run", asking("weight_version"), methods=_GET),
    Call("/is_paused", "Whether the engine is paused", asking("is_paused"), methods=_GET),
    Call("/is_sleeping", "Whether the engine sleeps", asking("is_sleeping"), methods=_GET),
    Call("/get_world_size", "Ranks of the engine", asking("world_size"), methods=_GET),
)
