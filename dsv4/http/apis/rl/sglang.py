"""SGLang's words: what slime, miles and AReaL send. Answers say `success`, and `message` in a person's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dsv4.http.apis.fields import Name, Strict
from dsv4.http.apis.rl import vllm
from dsv4.http.apis.rl.calls import Call, Controls, PauseMode, Seconds, asking, telling
from dsv4.http.apis.rl.vllm import Shape, SharedTensors, TensorName
from dsv4.http.errors import ApiError

_GET = ("GET",)
# retract: requests lose their place and are computed again; in_place: they keep it
_MODES: dict[str, tuple[PauseMode, bool]] = {
    "abort": ("abort", True),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}


class PauseGeneration(Strict):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(Strict):
    torch_empty_cache: bool | None = None  # nothing is left in torch's cache


class AbortRequest(Strict):
    rid: str | None = Field(default=None, max_length=256)
    abort_all: bool = False
    abort_message: str | None = None


class Updating(Strict):
    """What the updates have in common."""

    weight_version: Name | None = None
    flush_cache: bool | None = None  # prefixes of old weights are never used, whatever it says
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None
    torch_empty_cache: bool | None = None


class FromDisk(Updating):
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    keep_pause: bool = False
    is_async: Literal[False] | None = None
    token_step: int | None = None
    recapture_cuda_graph: Literal[False] | None = None  # graphs stay valid


class FromGroup(Updating):
    names: list[TensorName] = Field(min_length=1)
    dtypes: list[Name]
    shapes: list[Shape]
    group_name: Name = "weight_update_group"


class Group(Strict):
    master_address: Name
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: Name = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout: Seconds | None = None


class FromTensor(Updating):
    """`shared_tensors` are dsv4's own."""

    serialized_named_tensors: Any = None
    shared_tensors: SharedTensors | None = None


class Memory(Strict):
    """Without tags: all. Graphs go when any memory goes, and come once all of it is there again."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def memory(self) -> list[str] | None:
        return None if self.tags is None else [tag for tag in self.tags if tag != "cuda_graph"]


def _done(message: str, **more: Any) -> dict[str, Any]:
    return {"success": True, "message": message, **more}


_FLUSH = telling("reset_prefix_cache", _done("the prefix cache is empty"))
# slime goes on before the cache is awake
_GO_ON = telling("resume", {"status": "ok", "message": "the engine goes on"}, later=True)


async def pause(engine: Controls, asked: PauseGeneration) -> dict[str, Any]:
    mode, clears = _MODES[asked.mode]
    await engine.pause(mode, clears=clears)
    return {"status": "ok", "message": "the engine is paused"}


async def abort(engine: Controls, asked: AbortRequest) -> dict[str, Any]:
    if not asked.abort_all and not asked.rid:
        raise ApiError(400, "rid: required, unless abort_all is true", code="invalid_value", param="rid")
    num_ended = await engine.control("abort", names=None if asked.abort_all else [asked.rid])
    return _done(f"{num_ended} requests were ended")


async def from_disk(engine: Controls, asked: FromDisk) -> dict[str, Any]:
    folder = engine.folder(asked.model_path, "model_path")
    if asked.abort_all_requests:
        await engine.control("abort", names=None)
    version = await engine.update(folder, asked.weight_version)
    return _done("the engine runs the new weights", weight_version=version)


async def from_group(engine: Controls, asked: FromGroup) -> dict[str, Any]:
    if not len(asked.names) == len(asked.dtypes) == len(asked.shapes):
        message = "names: expected as many as dtypes and shapes"
        raise ApiError(400, message, code="invalid_value", param="names")
    if asked.abort_all_requests:
        await engine.control("abort", names=None)
    found = await vllm.receive(engine, asked.names, asked.dtypes, asked.shapes, asked.weight_version)
    return _done(f"{len(asked.names)} tensors were received", **found)


async def from_tensor(engine: Controls, asked: FromTensor) -> dict[str, Any]:
    if asked.shared_tensors is None or asked.serialized_named_tensors is not None:
        message = (
            "serialized_named_tensors: this server unpickles nothing; use shared_tensors (docs/rl.md), "
            "/update_weights_from_distributed or /update_weights_from_disk"
        )
        raise ApiError(400, message, code="unsupported_parameter", param="serialized_named_tensors")
    if asked.abort_all_requests:
        await engine.control("abort", names=None)
    found = await vllm.take(engine, asked.shared_tensors, asked.weight_version)
    return _done(f"{len(asked.shared_tensors)} tensors were taken", **found)


async def init_group(engine: Controls, asked: Group) -> dict[str, Any]:
    await engine.control("init_group", **asked.model_dump())
    return _done("the engine has joined the group")


async def release(engine: Controls, asked: Memory) -> dict[str, Any]:
    if asked.memory != []:
        await engine.control("sleep", level=1, tags=asked.memory)
    return _done("the memory was given back")


async def take(engine: Controls, asked: Memory) -> dict[str, Any]:
    if asked.memory != []:
        await engine.control("wake", tags=asked.memory)
    return _done("the memory is there again")


async def health(engine: Controls, asked: Strict) -> dict[str, Any]:
    """Whether the engine answers; also while it is paused."""
    await engine.info()
    return {"status": "ok"}


CALLS = (
    Call("/health_generate", "Whether the engine answers", health, methods=_GET),
    Call("/get_weight_version", "Which weights run", asking("weight_version"), methods=_GET),
    Call("/flush_cache", "Forget every prefix, in every tier", _FLUSH, methods=("GET", "POST")),
    Call("/pause_generation", "Stop between two steps", pause, PauseGeneration),
    Call("/continue_generation", "Go on", _GO_ON, Continue),
    Call("/abort_request", "End requests; what they have written is their answer", abort, AbortRequest),
    Call("/update_weights_from_disk", "New weights, of a folder", from_disk, FromDisk),
    Call("/init_weights_update_group", "Join the trainer's group", init_group, Group),
    Call("/update_weights_from_distributed", "New weights, of the trainer's group", from_group, FromGroup),
    Call("/update_weights_from_tensor", "New weights, of tensors on a shared GPU", from_tensor, FromTensor),
    Call("/release_memory_occupation", "Give device memory back", release, Memory),
    Call("/resume_memory_occupation", "Take it again", take, Memory),
)
