"""The HTTP server: `create_app` over an `LLM`, and `serve`, which runs it until told to stop.

OpenAI's and Anthropic's interfaces at /v1 (`apis.py`), a page at /, /health, /ready, /metrics, /live (the engine at
this moment) and /openapi.json.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from dsv4.dist.errors import RankFailed
from dsv4.engine.async_engine import AsyncEngine, EngineBusy, EngineStopped
from dsv4.http.apis.fields import Strict
from dsv4.http.apis.registry import GENERATING, QUESTIONS, Api, SyncEndpoint
from dsv4.http.apis.request_builder import Job, ModelInfo, RequestBuilder
from dsv4.http.apis.schemas import Answer, Health, ModelCard, ModelList
from dsv4.http.apis.tokenize import version
from dsv4.http.body import parse_json, validate
from dsv4.http.errors import ApiError, error_body
from dsv4.http.gate import Gate
from dsv4.http.lifecycle import make_uvicorn, run_process
from dsv4.http.live_view import LiveView
from dsv4.http.metrics import Metrics, RequestTimer
from dsv4.http.openapi import openapi_document
from dsv4.http.page import page_headers, page_text
from dsv4.http.request_log import log_request, log_throughput
from dsv4.http.settings import MIB, ServerConfig
from dsv4.http.streaming import DISCONNECTED, Assembler, ClientGone, EventStream, StreamClock, collect
from dsv4.llm import LLM
from dsv4.loader.generation_defaults import FILE_NAME, describe
from dsv4.request import RequestError
from dsv4.tools.memory_check import give_back_memory
from dsv4.tools.receipts.recorder import Recorder, answer_of

# The interpreter hands the lock to another thread after this long: the engine's thread would otherwise keep the event
# loop waiting 5 ms for every token it passes on.
_SWITCH_SECONDS = 0.0005
_CLIENT_CLOSED = 499
_LARGE_BODY_BYTES = MIB
FINGERPRINT_HEADER = "x-system-fingerprint"  # for interfaces whose answers have no field for it
_STEP_SECONDS = 5.0  # how long a shutdown waits for the forward call that runs
_LOG = logging.getLogger("dsv4.serve")
Route = TypeVar("Route", Api, SyncEndpoint)
Made = TypeVar("Made")


class Server:
    """What the routes share. One engine, one thread for it."""

    def __init__(self, llm: LLM, config: ServerConfig, recorder: Recorder | None = None) -> None:
        if llm.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json; a server speaks text and needs one")
        self.config = config
        self.served = ModelInfo(config.name, llm.tokenizer, llm.identity().name)
        self._recorder = recorder
        self.live = LiveView(llm.engine)
        self.failure: RankFailed | None = None
        self.stop_serving: Callable[[], None] = lambda: None  # set by whoever runs the app
        self.engine = AsyncEngine(
            llm.engine, max_waiting=config.max_waiting, on_step=self.live.on_step, on_failure=self._end
        )
        self.metrics = Metrics(self.engine, config.name)
        self._clock = StreamClock(config.stall_seconds)
        self.jobs = RequestBuilder(llm.engine, llm.tokenizer, config, scores_all=recorder is not None)
        self._created = int(time.time())

    def _end(self, error: RankFailed) -> None:
        """Without its ranks a server has nothing to serve."""
        self.failure = error
        self.stop_serving()

    # ---- generation ----

    async def generate(self, request: Request, *, api: Api) -> Response:
        """Any interface that generates."""
        start = time.perf_counter()
        body = await self._body(request)
        asked, job = await self._beside(self._prepare, api, body)
        assembler = api.assembler(job, asked, self.served)
        timer = RequestTimer(self.metrics, len(job.outputs), start)
        return await self._answer(request, job, assembler, timer, is_stream=bool(asked.stream))

    async def reply(self, request: Request, *, question: SyncEndpoint) -> Response:
        """Any interface that answers at once."""
        body = await self._body(request)
        return _json(await self._beside(self._reply, question, body))

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also what keeps other sites' pages out: a browser does not send this type across sites unasked.
            raise ApiError(415, "content-type: expected application/json", code="unsupported_media_type")
        return await request.body()

    async def _beside(self, work: Callable[[Route, bytes], Made], route: Route, body: bytes) -> Made:
        """Check and encode beside the loop that streams. What a large body took goes back to the system."""
        try:
            return await asyncio.to_thread(work, route, body)
        finally:
            if len(body) > _LARGE_BODY_BYTES:
                await asyncio.to_thread(give_back_memory)

    def _checked(self, model: type[Strict], body: bytes) -> Any:
        fields = parse_json(body, max_depth=self.config.max_json_depth)
        for name in ("messages", "input"):
            turns = fields.get(name)
            if isinstance(turns, list) and len(turns) > self.config.max_messages:
                message = f"{name}: at most {self.config.max_messages} in one conversation, found {len(turns)}"
                raise ApiError(400, message, code="too_many_messages", param=name)
        return validate(model, fields)

    def _prepare(self, api: Api, body: bytes) -> tuple[Any, Job]:
        asked = self._checked(api.request, body)
        return asked, api.prepare(self.jobs, asked)

    def _reply(self, question: SyncEndpoint, body: bytes) -> Answer:
        return question.reply(self.jobs, self._checked(question.request, body))

    async def _answer(
        self, request: Request, job: Job, assembler: Assembler, timer: RequestTimer, *, is_stream: bool
    ) -> Response:
        try:
            stream = self.engine.submit(job.requests, job.outputs)
        except EngineBusy as error:
            raise ApiError(503, f"the server is busy: {error}", code="queue_full") from None
        except EngineStopped:
            message = "the server is shutting down and takes no more requests"
            raise ApiError(503, message, code="shutting_down", closes=True) from None
        ended = partial(self._ended, request.scope["state"]["request_id"], request.url.path, job, timer)
        headers = {FINGERPRINT_HEADER: self.served.fingerprint}
        if is_stream:
            return EventStream(stream, assembler, self.metrics, timer, self._clock, headers=headers, on_end=ended)
        try:
            answer = await collect(request, stream, assembler, timer)
        except ClientGone:
            self.metrics.disconnects.inc()
            ended(DISCONNECTED)
            return Response(status_code=_CLIENT_CLOSED)
        except ApiError as error:
            ended(error.code)
            raise
        ended(None)
        return Response(answer, media_type="application/json", headers=headers)

    def _ended(self, request_id: str, route: str, job: Job, timer: RequestTimer, problem: str | None) -> None:
        """A request is over, whatever ended it (`problem`)."""
        log_request(request_id, route, job, timer, problem)
        if self._recorder is not None:
            for choice, output in enumerate(job.outputs):
                answer = answer_of(output, job.grammar, problem)
                self._recorder.add(answer, request_id=request_id, route=route, choice=choice)

    # ---- looking ----

    async def models(self, request: Request) -> Response:
        return _json(ModelList(object="list", data=[self._card()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.config.name:
            message = f"model: this server has {self.config.name!r}, found {name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return _json(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self.config.name, object="model", created=self._created, owned_by="dsv4",
            max_model_len=self.jobs.max_context_tokens, default_sampling_params=dict(self.config.sampling_defaults),
        )  # fmt: skip

    async def show_version(self, request: Request) -> Response:
        return _json(version())

    async def health(self, request: Request) -> Response:
        """Liveness: whether this process can go on. A server that finishes what runs is alive."""
        if self.engine.has_failed:
            return _json(Health(status="failed"), status=503)
        return _json(Health(status="ok" if self.engine.is_accepting else "stopping"))

    async def ready(self, request: Request) -> Response:
        """Readiness: whether requests are taken."""
        if self.engine.is_accepting:
            return _json(Health(status="ok"))
        return _json(Health(status="failed" if self.engine.has_failed else "stopping"), status=503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_live(self, request: Request) -> Response:
        return _json(self.live.snapshot(self.config.name, self.engine.stats))


def _json(answer: Answer, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.to_json(), status_code=status, media_type="application/json", headers=headers)


def create_app(llm: LLM, config: ServerConfig, recorder: Recorder | None = None) -> FastAPI:
    """The application. Its engine thread runs from startup to shutdown, which finishes what runs."""
    server = Server(llm, config, recorder)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sys.setswitchinterval(_SWITCH_SECONDS)
        server.engine.start()
        report = asyncio.create_task(log_throughput(server.engine))
        yield
        report.cancel()
        server.engine.drop_all()  # whoever runs the app has waited for what runs
        await asyncio.to_thread(server.engine.stop, 0.0, join_timeout=_STEP_SECONDS)
        if recorder is not None:
            await asyncio.to_thread(recorder.close)

    app = FastAPI(title="dsv4", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(Gate, config=config, metrics=server.metrics)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_any_error)
    for api in GENERATING:
        app.add_route(api.path, partial(server.generate, api=api), methods=["POST"])
    for question in QUESTIONS:
        app.add_route(question.path, partial(server.reply, question=question), methods=["POST"])
    app.add_route("/version", server.show_version, methods=["GET"])
    app.add_route("/v1/models", server.models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_route("/live", server.show_live, methods=["GET"])
    app.add_route("/health", server.health, methods=["GET"])
    app.add_route("/ready", server.ready, methods=["GET"])
    app.add_route("/metrics", server.show_metrics, methods=["GET"])
    app.add_route("/", partial(_page, headers=page_headers()), methods=["GET"])
    document = openapi_document(has_key=config.api_key is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]
    return app


# ---- the page ----


async def _page(request: Request, *, headers: dict[str, str]) -> Response:
    return Response(page_text(), media_type="text/html; charset=utf-8", headers=headers)


# ---- errors ----


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"retry-after": "1"} if error.status == 503 else {}
    if error.closes:
        headers["connection"] = "close"
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client went before its request had arrived whole; there is nobody to answer."""
    if not request.scope["state"].get("is_refused"):
        _LOG.info("%s %s: the client left while sending", request.scope["state"]["request_id"], request.url.path)
    return Response(status_code=_CLIENT_CLOSED)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "there is nothing at this address", 405: "this address does not take that method"}
    body = error_body(error.status_code, message.get(error.status_code, str(error.detail)))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_any_error(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, "an internal error; the server's log has it"), status_code=500)


# ---- running ----


def serve(llm: LLM, config: ServerConfig, listener: socket.socket, recorder: Recorder | None = None) -> int:
    """Serve on a bound socket (`take_address`) until SIGINT or SIGTERM, then finish what runs; a second signal does
    not wait. Returns the exit status. `RankFailed` if a rank ended it."""
    app = create_app(llm, config, recorder)
    web, server = make_uvicorn(app, config), app.state.server
    server.stop_serving = lambda: setattr(web, "should_exit", True)
    if config.sampling_defaults:
        _LOG.info("requests that do not say otherwise: %s (%s)", describe(config.sampling_defaults), FILE_NAME)
    status = run_process(web, listener)
    if recorder is not None:
        recorder.close()
    llm.close()
    if server.failure is not None:
        raise server.failure
    return status
