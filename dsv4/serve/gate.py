"""`Gate`: what every HTTP request passes before it is read: host, key, size. Plain ASGI, so that it buffers nothing."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dsv4.serve.errors import ApiError
from dsv4.serve.metrics import Metrics
from dsv4.serve.settings import ServerConfig

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_GUARDED = ("/v1/", "/live")
_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/live",
    "/health",
    "/metrics",
    "/openapi.json",
    "/",
)


class Gate:
    """Refuses early, counts answers, and turns whatever escapes the application into an error body."""

    def __init__(self, app: App, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._key = None if config.api_key is None else config.api_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                route = _route(scope["path"])
                self._metrics.responses.labels(route=route, status=str(message["status"])).inc()
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await send_error(counted, error)
            return
        await self._app(scope, self._limited(receive), counted)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if self._config.is_loopback:
            # A page of another site can point its own name at this address; its requests still carry that name.
            host = (headers.get(b"host") or [b""])[0].decode("latin-1").lower()
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if name not in _LOCAL_HOSTS:
                raise ApiError(403, f"host: this server answers to {', '.join(_LOCAL_HOSTS)} only", code="wrong_host")
        if self._key is not None and scope["path"].startswith(_GUARDED):
            given = headers.get(b"authorization") or []
            token = given[0][7:] if len(given) == 1 and given[0][:7].lower() == b"bearer " else b""
            if not hmac.compare_digest(token.strip(), self._key):
                raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        if b"content-encoding" in headers:
            raise ApiError(415, "content-encoding: compressed bodies are not accepted", code="unsupported_encoding")
        lengths = headers.get(b"content-length") or []
        if lengths and lengths[0].isdigit() and int(lengths[0][:20]) > self._config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body may have {self._config.max_body_bytes} bytes at most", code="body_too_large")

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that counts, for bodies that do not say how long they are."""
        num_bytes = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._config.max_body_bytes:
                    raise self._too_large()
            return message

        return counted


def _route(path: str) -> str:
    """The route's own name: paths come from outside, and each would be a metric of its own."""
    return path if path in _ROUTES else "/v1/models/{name}" if path.startswith("/v1/models/") else "other"


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a complete answer."""
    body = json.dumps(error.body).encode("utf-8")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        headers.append((b"connection", b"close"))  # what remains of the body will not be read
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
