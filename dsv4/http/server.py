"""The HTTP server of one process: `create_app` over a connection to an engine. No torch.

OpenAI's and Anthropic's interfaces at /v1 (`apis/`), a page at /, /health, /ready, /metrics, /live (the engine at
this moment) and /openapi.json.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from dsv4.engine.grammar.check import GrammarChecks
from dsv4.engine.grammar.errors import GrammarError
from dsv4.engine.link.messages import EngineBusy, EngineLost, EngineStopped, RejectedGrammar
from dsv4.engine.link.stream import RequestStream
from dsv4.engine.request import RequestAborted, RequestFailed
from dsv4.http.apis.fields import Strict
from dsv4.http.apis.registry import GENERATING, QUESTIONS, Api, SyncEndpoint
from dsv4.http.apis.request_builder import Job, ModelInfo, RequestBuilder, refused, unsupported
from dsv4.http.apis.rl.calls import Call, Controls
from dsv4.http.apis.rl.generation import RENDER, ROLLOUTS
from dsv4.http.apis.rl.routes import calls_of, fields_of
from dsv4.http.apis.schemas import Answer, Health, Live, ModelCard, ModelList
from dsv4.http.apis.tokenize import version
from dsv4.http.body import parse_json, validate
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.errors import ApiError, error_body
from dsv4.http.gate import Gate
from dsv4.http.openapi import openapi_document
from dsv4.http.page import page_headers, page_text
from dsv4.http.settings import MIB, ServerConfig
from dsv4.http.streaming import (
    DISCONNECTED,
    Assembler,
    ClientGone,
    EventStream,
    StreamClock,
    collect,
    to_api_error,
    unless_gone,
)
from dsv4.http.telemetry.metrics import Metrics, RequestTimer
from dsv4.http.telemetry.request_log import log_request
from dsv4.http.telemetry.shared_metrics import SharedMetrics
from dsv4.http.telemetry.traces import Tracer
from dsv4.request import RequestError
from dsv4.text.tokenizer import Tokenizer
from dsv4.tools.memory_check import give_back_memory
from dsv4.tools.receipts.lines import answer_of, now, request_line

_CLIENT_CLOSED = 499
_LARGE_BODY_BYTES = MIB
_QUICK_BODY_BYTES, _QUICK_ANSWERS = 2048, 8
# for interfaces whose answers have no field for it; the seed is that of the first answer
FINGERPRINT_HEADER, SEED_HEADER = "x-system-fingerprint", "x-seed"
_PUBLISH_SECONDS = 1.0  # how old the other front ends' numbers in /metrics may be
_RECORD_SECONDS = 10.0  # for the last lines of a record
_LOG = logging.getLogger("dsv4.serve")
Route = TypeVar("Route", Api, SyncEndpoint)
Made = TypeVar("Made")


class Server:
    """What the routes share, in one event loop. `open` connects to the engine, `close` lets go of it."""

    def __init__(
        self, engine: EngineConnection, tokenizer: Tokenizer, config: ServerConfig, folder: Path | None = None
    ) -> None:  # fmt: skip
        self.config = config
        self.engine = engine
        self.metrics = Metrics(config.name)
        self._shared = SharedMetrics(self.metrics, config.name, folder)
        self._clock = StreamClock(config.stall_seconds)
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._lines: set[asyncio.Future[None]] = set()  # of the record, being made
        self._publishing: asyncio.Task[None] | None = None
        self._tracer = Tracer.make(config.name)
        self._grammars = GrammarChecks()

    async def open(self) -> None:
        info = await self.engine.open()
        self._records = info.records
        self._served = ModelInfo(self.config.name, self._tokenizer, info.fingerprint)
        self.jobs = RequestBuilder(info, self._tokenizer, self.config)
        self._controls = Controls(self.engine, self.config, info.max_context_tokens)
        self._publishing = asyncio.create_task(self._publish())

    @property
    def served(self) -> ModelInfo:
        """The model as answers name it; other weights have another fingerprint."""
        fingerprint = self.engine.info.fingerprint
        if fingerprint != self._served.fingerprint:
            self._served = replace(self._served, fingerprint=fingerprint)
        return self._served

    async def close(self) -> None:
        """After the last request."""
        if self._publishing is not None:
            self._publishing.cancel()
        if self._lines:
            await asyncio.wait(self._lines, timeout=_RECORD_SECONDS)
        self._shared.publish()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        await self.engine.close()

    async def _publish(self) -> None:
        while True:
            self._shared.publish()
            await asyncio.sleep(_PUBLISH_SECONDS)

    # ---- generation ----

    async def generate(self, request: Request, *, api: Api) -> Response:
        """Any interface that generates."""
        start = time.perf_counter()
        body = await self._body(request)
        prepared = self._prepare_quickly(api, body)
        asked, job = await self._beside(self._prepare, api, body) if prepared is None else prepared
        assembler = api.assembler(job, asked, self.served)
        timer = RequestTimer(self.metrics, len(job.outputs), start)
        given = getattr(asked, "request_id", None) or getattr(asked, "rid", None)
        name = given or request.scope["state"]["request_id"]  # what `abort` knows it by
        return await self._answer(request, job, assembler, timer, is_stream=bool(asked.stream), name=name)

    async def reply(self, request: Request, *, question: SyncEndpoint) -> Response:
        """Any interface that answers at once."""
        body = await self._body(request)
        return _json(await self._beside(self._reply, question, body))

    async def control(self, request: Request, *, call: Call) -> Response:
        """A call that drives the engine, or asks about it."""
        asked = validate(call.request, await fields_of(request, self.config.max_json_depth))
        return JSONResponse(await call.answer(self._controls, asked))

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

    def _prepare_quickly(self, api: Api, body: bytes) -> tuple[Any, Job] | None:
        """A small request, in the loop itself: handing it to a thread would take longer than it takes. None for one
        that is not."""
        if len(body) > _QUICK_BODY_BYTES or api not in GENERATING:
            return None
        asked = self._checked(api.request, body)
        is_quick = (getattr(asked, "n", None) or 1) <= _QUICK_ANSWERS
        return (asked, api.prepare(self.jobs, asked)) if is_quick else None

    def _prepare(self, api: Api, body: bytes) -> tuple[Any, Job]:
        asked = self._checked(api.request, body)
        return asked, api.prepare(self.jobs, asked)

    def _reply(self, question: SyncEndpoint, body: bytes) -> Answer:
        return question.reply(self.jobs, self._checked(question.request, body))

    async def _answer(
        self, request: Request, job: Job, assembler: Assembler, timer: RequestTimer, *, is_stream: bool, name: str
    ) -> Response:
        try:
            stream = await self._submit(request, job, name)
        except ClientGone:
            self.metrics.disconnects.inc()
            return Response(status_code=_CLIENT_CLOSED)
        ended = partial(self._ended, request, job, timer)
        headers = {FINGERPRINT_HEADER: self.served.fingerprint, SEED_HEADER: str(job.outputs[0].params.seed)}
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

    async def _submit(self, request: Request, job: Job, name: str) -> RequestStream:
        """The job's stream, once the engine has taken it. `ClientGone` if the client goes while its grammar is
        checked."""
        rule = job.rule
        try:
            if rule is None:
                return await self.engine.submit(job.outputs, name=name)
            await unless_gone(request, self._grammars.check(rule.lark))
            return await self.engine.submit(job.outputs, rule.lark, rule.opening, name)
        except EngineBusy as error:
            raise ApiError(503, f"the server is busy: {error}", code="queue_full") from None
        except EngineStopped:
            message = "the server is shutting down and takes no more requests"
            raise ApiError(503, message, code="shutting_down", closes=True) from None
        except (GrammarError, RejectedGrammar) as error:
            assert rule is not None, "requests without a grammar have none to reject"
            raise unsupported(error, rule.field) from None
        except RequestError as error:
            raise refused(error) from None
        except (RequestAborted, RequestFailed) as error:
            raise to_api_error(error) from None

    def _ended(self, request: Request, job: Job, timer: RequestTimer, problem: str | None) -> None:
        """A request is over, whatever ended it (`problem`)."""
        request_id, route = request.scope["state"]["request_id"], request.scope["path"]
        log_request(request_id, route, job, timer, problem)
        if self._tracer is not None:
            self._tracer.record(request_id, route, request.headers, job, timer, problem)
        if self._records:
            loop = asyncio.get_running_loop()
            lines = loop.run_in_executor(None, self._record_lines, request_id, route, job, problem)
            made = asyncio.ensure_future(self._record(lines))
            self._lines.add(made)
            made.add_done_callback(self._lines.discard)

    def _record_lines(self, request_id: str, route: str, job: Job, problem: str | None) -> list[bytes]:
        grammar = None if job.rule is None else job.rule.lark
        answers = [answer_of(output, grammar, problem) for output in job.outputs]
        return [
            request_line(
                answer, hashes_only=self._records == "hashes", request_id=request_id, route=route, choice=choice,
                time=now(),
            )
            for choice, answer in enumerate(answers)
            if answer.is_proof
        ]  # fmt: skip

    async def _record(self, lines: Awaitable[list[bytes]]) -> None:
        for line in await lines:
            self.engine.record(line)

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
            root=self.config.root or self.config.name,
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
        text = self._shared.text(await self.engine.stats())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_live(self, request: Request) -> Response:
        return _json(Live(model=self.config.name, **await self.engine.ask("live")))


def _json(answer: Answer, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.to_json(), status_code=status, media_type="application/json", headers=headers)


def create_app(
    engine: EngineConnection, tokenizer: Tokenizer, config: ServerConfig, *, folder: Path | None = None
) -> Starlette:  # fmt: skip
    """The application. It connects to its engine at startup, and lets go of it at shutdown.

    folder  where front ends of the same server leave their metrics for one another
    """
    server = Server(engine, tokenizer, config, folder)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await server.open()
        yield
        await server.close()

    app = Starlette(lifespan=lifespan)
    app.state.server = server
    app.add_middleware(Gate, config=config, metrics=server.metrics)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(EngineLost, _on_lost_engine)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_any_error)
    for api in GENERATING:
        app.add_route(api.path, partial(server.generate, api=api), methods=["POST"])
    for question in QUESTIONS:
        app.add_route(question.path, partial(server.reply, question=question), methods=["POST"])
    if config.rl:
        for api in ROLLOUTS:
            app.add_route(api.path, partial(server.generate, api=api), methods=["POST"])
        app.add_route(RENDER.path, partial(server.reply, question=RENDER), methods=["POST"])
    for call in calls_of(config):
        app.add_route(call.path, partial(server.control, call=call), methods=[*call.methods])
    app.add_route("/version", server.show_version, methods=["GET"])
    app.add_route("/v1/models", server.models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_route("/live", server.show_live, methods=["GET"])
    app.add_route("/health", server.health, methods=["GET"])
    app.add_route("/ready", server.ready, methods=["GET"])
    app.add_route("/metrics", server.show_metrics, methods=["GET"])
    app.add_route("/", partial(_page, headers=page_headers()), methods=["GET"])
    document = cache(partial(openapi_document, config))  # large, and few ask
    app.add_route("/openapi.json", lambda _: JSONResponse(document()), methods=["GET"])  # in a thread
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


async def _on_lost_engine(request: Request, error: Exception) -> Response:
    """A question that the engine did not answer."""
    assert isinstance(error, EngineLost)
    return await _on_api_error(request, to_api_error(error))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client disconnected before its whole request had arrived; no answer can reach it."""
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
