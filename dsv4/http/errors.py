"""Errors of the HTTP interface, in a shape that OpenAI's clients and Anthropic's both read:
`{"type": "error", "error": {message, type, param, code}}`."""

from typing import Any

from dsv4.errors import Dsv4Error


class ApiError(Dsv4Error, ValueError):
    """A request that is answered with a status other than 200. `param` names the field, `code` is for programs;
    `closes`: the connection cannot be used after it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.closes = closes

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, code=self.code, param=self.param)


def wrong_field(field: str, message: str) -> ApiError:
    """400: what is wrong with a field."""
    return ApiError(400, f"{field}: {message}", code="invalid_value", param=field)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error answer."""
    kind = _TYPES.get(status, _family(status))
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _family(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"
