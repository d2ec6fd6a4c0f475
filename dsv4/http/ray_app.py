"""Whole engines as replicas of a Ray Serve application, behind the interfaces of `dsv4 serve`.

    serve run dsv4.http.ray_app:build model=CHECKPOINT replicas=2 gpus=4

`Front` takes HTTP requests and hands each, with its conversation's key, to Ray's consistent-hash router, which finds
the `Replica` that holds the conversation's cache. A replica is `create_app` over an engine of its own; replicas share
nothing. Ray starts them, watches over them and replaces those that die. Needs the extra `ray`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from rich.console import Console
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from dsv4.config import ModelConfig
from dsv4.engine.link.thread import EngineThread
from dsv4.http.affinity import conversation_key
from dsv4.http.connection import OUTLET
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.engine_side import engine_loop
from dsv4.http.errors import ApiError
from dsv4.http.server import create_app
from dsv4.http.settings import ServerConfig
from dsv4.llm import LLM
from dsv4.loader.generation_defaults import read_sampling_defaults
from dsv4.text.chat import effort_profile
from dsv4.tools.model_loading import ModelSettings, check_numerics, check_tokenizer, engine_limits, find_model, load_llm

_LOG = logging.getLogger("dsv4.serve")
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_SESSION_HEADER = "x-session-id"  # Ray's own name of it
# How long a replica may take to say how much it has to do before its requests go elsewhere, to a cache that does not
# know them. Ray's own 0.1 s is short for a process that also runs an engine.
_PATIENCE = dict.fromkeys(
    ("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S"), "2.0"
)
_MOST_OPEN = 4096  # concurrent requests of a front, which only passes bytes on
_ATTEMPTS = 3  # replicas that may die under one request before it has an answer


class Options(BaseModel):
    """What `serve run dsv4.http.ray_app:build` takes, as `name=value`; names that `dsv4 serve` has too mean the same.

    replicas      engines
    gpus          GPUs of each; 0 runs them on CPUs
    cpus          cores that Ray sets aside for each
    fronts        processes that take requests and pass answers on
    max_waiting   requests that may wait in a front; a replica takes twice what it can run besides
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    name: str | None = None
    replicas: int = Field(default=2, ge=1)
    gpus: int = Field(default=0, ge=0)
    cpus: float = Field(default=1.0, gt=0)
    fronts: int = Field(default=1, ge=1)
    requests: int = Field(default=8, ge=1)
    context: int | None = None
    chunk: int | None = None
    max_tokens: int | None = None
    max_waiting: int = Field(default=256, ge=1)
    drain_seconds: float = 60.0
    numerics: str = "official"
    dtype: str | None = None
    thinking: bool = False
    api_key: str | None = None

    @property
    def _path(self) -> Path | None:
        return None if self.model is None else Path(self.model)

    def settings(self) -> tuple[ServerConfig, ModelConfig]:
        """Settings of each replica's server, and its model's config; wrong options are errors here."""
        check_numerics(self.numerics, self.dtype)
        folder = find_model(self._path, Console(stderr=True))
        config = ModelConfig.from_pretrained(folder)
        check_tokenizer(folder, "a server")
        server = ServerConfig(
            name=self.name if self.name is not None else folder.resolve().name,
            allowed_hosts=("*",),  # Ray's proxy has the address
            api_key=self.api_key,
            default_thinking=self.thinking,
            effort_profile=effort_profile(config),
            sampling_defaults=read_sampling_defaults(folder),
            max_output_tokens=self.max_tokens,
            max_waiting=self.requests,  # Ray lets no more through
            drain_seconds=self.drain_seconds,
        )
        return server, config

    def load(self, config: ModelConfig) -> LLM:
        console = Console(stderr=True)
        limits = engine_limits(config, context=self.context, requests=self.requests, chunk=self.chunk)
        model = ModelSettings(
            folder=str(find_model(self._path, console)), numerics=self.numerics, dtype=self.dtype, limits=limits,
            device="cuda" if self.gpus else "cpu", gpus=max(self.gpus, 1),
        )  # fmt: skip
        return load_llm(model, console)


class Replica:
    """One engine and its server, called in this process instead of over a socket."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]  # Ray awaits it
        settings, config = options.settings()
        self._llm = await asyncio.to_thread(options.load, config)
        self._engine = EngineThread(engine_loop(self._llm, max_waiting=settings.max_waiting))
        self._engine.start()
        assert self._llm.tokenizer is not None  # `engine_loop` needs one
        self._app = create_app(EngineConnection(self._engine.connect), self._llm.tokenizer, settings)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[tuple[int, list[Any]] | bytes]:
        """Status and headers, then the body in pieces. A reader that stops is a client that has disconnected."""
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        gone = asyncio.Event()
        arriving = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if arriving:
                return arriving.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        scope["extensions"] = {OUTLET: _Queued(sent)}
        running = asyncio.create_task(self._app(scope, receive, sent.put))  # type: ignore[arg-type]
        running.add_done_callback(lambda _: sent.put_nowait({"type": "end"}))
        try:
            while (message := await sent.get())["type"] != "end":
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
        finally:
            gone.set()
            await asyncio.wait([running])
            if not running.cancelled() and running.exception() is not None:  # its answer was an error's
                _LOG.error("%s: an error", scope["path"], exc_info=running.exception())

    def check_health(self) -> None:
        """Ray asks; an error replaces the replica."""
        if self._app.state.server.engine.has_failed:
            raise RuntimeError("the engine of this replica has failed; its log says why")

    async def __del__(self) -> None:
        """Ray calls it once no request is left, or there is no more time."""
        with contextlib.suppress(AttributeError):  # a replica whose model did not load
            await self._life.__aexit__(None, None, None)
            await asyncio.to_thread(self._engine.stop)
            self._llm.close()


class _Queued:
    """The `Outlet` of a streamed answer: what Ray carries to the front waits here, however much."""

    is_full = False

    def __init__(self, sent: asyncio.Queue[dict[str, Any]]) -> None:
        self._sent = sent

    def write(self, body: bytes) -> None:
        self._sent.put_nowait({"type": "http.response.body", "body": body})

    def when_free(self, call: Callable[[], None]) -> None:
        raise AssertionError("it is never full")

    def abort(self) -> None:
        """Ray's own clients have deadlines."""


class Front:
    """Takes requests, reads which conversation they belong to, passes answers on."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                break  # the replica refuses it
        key = request.headers.get(_SESSION_HEADER) or conversation_key(bytes(body))
        replicas = self._replicas if key is None else self._replicas.options(session_id=key)
        names = ("type", "http_version", "method", "path", "query_string", "headers", "scheme", "client", "server")
        scope = {**{name: request.scope.get(name) for name in names}, "asgi": {"version": "3.0"}, "root_path": ""}
        for _ in range(_ATTEMPTS):
            pieces = replicas.remote(scope, bytes(body))
            try:
                status, headers = await anext(pieces)
            except (ActorDiedError, ActorUnavailableError):
                continue  # it has said nothing yet: another one may
            except BackPressureError:
                error = ApiError(503, "every replica is busy: too many requests wait", code="queue_full")
                return JSONResponse(error.body, status_code=503, headers={"retry-after": "1"})
            except asyncio.CancelledError:
                pieces.cancel()
                raise
            answer = StreamingResponse(_passed_on(pieces), status_code=status)
            answer.raw_headers = [pair for pair in headers if pair[0] != b"x-request-id"]  # Ray adds it: the same one
            return answer
        error = ApiError(503, "the replicas that had this request died: send it again", code="replica_lost")
        return JSONResponse(error.body, status_code=503, headers={"retry-after": "1"})


async def _passed_on(pieces: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    finally:
        pieces.cancel()  # of one that has ended: nothing


def build(arguments: Options | dict[str, Any]) -> serve.Application:
    """The application, for `serve run`, which gives a dict of texts; `serve.run(build(Options(...)))` in Python."""
    options = Options.model_validate(arguments)
    settings, _ = options.settings()  # mistakes are said here, not in a replica's log
    replicas = serve.deployment(
        Replica,
        num_replicas=options.replicas,
        max_ongoing_requests=2 * options.requests,  # the next on the ring takes what is beyond
        max_queued_requests=options.max_waiting,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=options.drain_seconds,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    ).bind(options)
    front = serve.deployment(
        Front,
        num_replicas=options.fronts,
        max_ongoing_requests=_MOST_OPEN,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": _PATIENCE}},
        graceful_shutdown_timeout_s=options.drain_seconds,
    )
    return front.bind(replicas, settings.max_body_bytes)
