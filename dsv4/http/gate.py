"""`Gate`: what every HTTP request passes before it is read: host, key, size. Plain ASGI, so that it buffers nothing.

It also gives each request its id: the client's `X-Request-Id`, or a new one; every answer carries it.
"""

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from dsv4.http.apis.registry import GENERATING, QUESTIONS
from dsv4.http.apis.rl.routes import guarded_of
from dsv4.http.errors import ApiError
from dsv4.http.settings import ServerConfig, is_loopback_name
from dsv4.http.telemetry.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MAX_ID_LEN = 128
_GUARDED = ("/v1/", "/live", "/tokenize", "/detokenize")
_ROUTES = {
    *(api.path for api in (*GENERATING, *QUESTIONS)),
    "/v1/models",
    "/version",
    "/live",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/",
}


def guarded_paths(config: ServerConfig) -> tuple[str, ...]:
    """How the paths begin that need the key."""
    return (*_GUARDED, *guarded_of(config))


class Gate:
    """Refuses early, counts answers, and turns whatever escapes the application into an error body."""

    def __init__(self, app: App, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._guarded = guarded_paths(config)
        self._routes = _ROUTES | set(guarded_of(config))
        self._key = None if config.api_key is None else config.api_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(self._route(scope["path"]), message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await send_error(counted, error)
            return
        await self._app(scope, self._limited(receive), counted)

    def _route(self, path: str) -> str:
        """The route's own name: paths come from outside, and each would be a metric of its own."""
        return path if path in self._routes else "/v1/models/{name}" if path.startswith("/v1/models/") else "other"

    def _check(self, scope: Scope, headers: Mapping[bytes, list[bytes]]) -> None:
        self._check_host((headers.get(b"host") or [b""])[0].decode("latin-1").lower())
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # Request smuggling: a proxy that reads the other header sees the next request begin elsewhere.
            message = "content-length: not allowed together with transfer-encoding"
            raise ApiError(400, message, code="ambiguous_length", closes=True)
        is_guarded = self._key is not None and scope["path"].startswith(self._guarded)
        if is_guarded and not hmac.compare_digest(_token(headers), self._key or b""):
            raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        if b"content-encoding" in headers:
            raise ApiError(415, "content-encoding: compressed bodies are not accepted", code="unsupported_encoding")
        lengths = headers.get(b"content-length") or []
        if lengths and lengths[0].isdigit() and int(lengths[0][:20]) > self._config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        message = f"the body may have {self._config.max_body_bytes} bytes at most"
        return ApiError(413, message, code="body_too_large", closes=True)  # what remains of it will not be read

    def _check_host(self, host: str) -> None:
        """A page of another site can point its own name at this address; its requests still carry that name."""
        allowed = self._config.allowed_hosts
        if "*" in allowed or not (allowed or self._config.is_loopback):
            return
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if is_loopback_name(name.strip("[]")) or name in map(str.lower, (self._config.host, *allowed)):
            return
        known = ", ".join(("localhost", *allowed))
        message = f"host: this server answers to {known}; --allowed-host adds a name, found {name[:80]!r}"
        raise ApiError(403, message, code="wrong_host")

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


def _request_id(headers: Mapping[bytes, list[bytes]]) -> str:
    """The client's own if it can stand in a header and in a line of a log."""
    given = (headers.get(b"x-request-id") or [b""])[0].decode("latin-1")
    is_usable = 0 < len(given) <= _MAX_ID_LEN and given.isascii() and given.isprintable() and " " not in given
    return given if is_usable else secrets.token_hex(12)


def _token(headers: Mapping[bytes, list[bytes]]) -> bytes:
    """The key a request carries: as OpenAI's clients send it, or else as Anthropic's do. None where it is not one."""
    given = headers.get(b"authorization") or []
    if given:
        return given[0][7:].strip() if len(given) == 1 and given[0][:7].lower() == b"bearer " else b""
    keys = headers.get(b"x-api-key") or []
    return keys[0].strip() if len(keys) == 1 else b""


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a complete answer."""
    body = json.dumps(error.body).encode("utf-8")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
