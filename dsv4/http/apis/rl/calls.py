"""`Call`: a route by which a trainer drives the engine; `Controls`: what the routes work on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dsv4.engine.link.messages import ControlFailed
from dsv4.errors import CheckpointError, WeightsIncomplete
from dsv4.http.apis.fields import Strict
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.errors import ApiError
from dsv4.http.settings import ServerConfig
from dsv4.loader.files import INDEX_FILE, weight_files
from dsv4.request import RequestError

PauseMode = Literal["abort", "wait", "keep"]
Seconds = Annotated[int, Field(ge=1, le=3600)]
_BESIDE = (INDEX_FILE, "config.json", "tokenizer.json")  # what is read besides weights


class Nothing(Strict):
    """No fields."""


@dataclass(frozen=True)
class Call:
    """`answer` gives the JSON of an answer, or raises `ApiError`. With GET, fields come from the query."""

    path: str
    summary: str
    answer: Callable[[Controls, Any], Awaitable[dict[str, Any]]]
    request: type[Strict] = Nothing
    methods: tuple[str, ...] = ("POST",)


class Controls:
    """The engine as these routes see it."""

    def __init__(self, engine: EngineConnection, config: ServerConfig, max_context_tokens: int) -> None:
        self.engine = engine
        self.config = config
        self.max_context_tokens = max_context_tokens

    async def control(self, verb: str, **arguments: Any) -> Any:
        """The engine's answer. What it refuses is 400, weights that are not whole 409, anything else 500."""
        try:
            return await self.engine.control(verb, **arguments)
        except WeightsIncomplete as error:
            raise ApiError(409, str(error), code="weights_incomplete") from None
        except (RequestError, CheckpointError) as error:
            field = getattr(error, "field", None)
            raise ApiError(400, str(error), code="invalid_value", param=field) from None
        except ControlFailed as error:
            raise ApiError(500, str(error), code="control_failed") from None

    async def info(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.control("info")
        return found

    async def pause(self, mode: PauseMode, *, clears: bool) -> None:
        """`clears`: prefixes are forgotten, and requests that are kept compute their rows again."""
        await self.control("pause", mode=mode)
        if clears:
            await self.control("reset_prefix_cache", running=True)

    async def update(self, source: Any, version: str | None) -> str:
        """New weights; a caller that has not paused waits until what runs has ended. Returns their version."""
        was_paused = (await self.info())["is_paused"]
        if not was_paused:
            await self.control("pause", mode="wait")
        try:
            found: str = await self.control("update_weights", source=source, version=version)
        except BaseException:
            if not was_paused:
                with suppress(ApiError):  # without whole weights it cannot go on
                    await self.control("resume")
            raise
        if not was_paused:
            await self.control("resume")
        return found

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause and sleep; waking goes on with what was not paused before."""
        info = await self.info()
        if not info["is_sleeping"]:
            await self.control("pause", mode=mode)
        await self.control("sleep", level=level, resumes=not info["is_paused"])

    def folder(self, path: str, field: str) -> str:
        """The folder, if weights may be read from there: it, and every file that it names."""
        folder = Path(path).resolve()
        roots = [Path(root).resolve() for root in self.config.rl_roots]
        self._check_inside(folder, path, field, roots)
        if folder.is_dir():
            try:
                files = weight_files(folder)
            except CheckpointError as error:
                raise ApiError(400, str(error), code="invalid_value", param=field) from None
            for file in (*files, *(folder / name for name in _BESIDE)):
                self._check_inside(file.resolve(), str(file), field, roots)
        return str(folder)

    def _check_inside(self, place: Path, name: str, field: str, roots: list[Path]) -> None:
        if not any(place.is_relative_to(root) for root in roots):
            allowed = ", ".join(map(str, roots)) or "none"
            message = f"{field}: {name!r} is in no folder that weights may be read from (--rl-root): {allowed}"
            raise ApiError(403, message, code="folder_not_allowed", param=field)


def asking(*names: str) -> Callable[[Controls, Strict], Awaitable[dict[str, Any]]]:
    """An answer of what the engine says of itself."""

    async def answer(engine: Controls, asked: Strict) -> dict[str, Any]:
        info = await engine.info()
        return {name: info[name] for name in names}

    return answer


def telling(
    verb: str, reply: dict[str, Any], **arguments: Any
) -> Callable[[Controls, Strict], Awaitable[dict[str, Any]]]:
    """One command without anything of the request, and a fixed answer."""

    async def answer(engine: Controls, asked: Strict) -> dict[str, Any]:
        await engine.control(verb, **arguments)
        return reply

    return answer
