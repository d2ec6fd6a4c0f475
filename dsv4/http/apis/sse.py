"""JSON and server-sent events as text. A stream's chunks are joined from constant text and what changes a token; its
sender encodes them all at once."""

import json
from json.encoder import encode_basestring
from typing import Any

from dsv4.http.errors import ApiError

PING = ": ping\n\n"  # a comment: clients skip it, and what lies between sees that the stream lives
DONE = "data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def quote(text: str) -> str:
    """A string in JSON."""
    return encode_basestring(text)


def to_json(value: Any) -> str:
    return _encode(value)


def json_object(**fields: str | None) -> str:
    """An object of values that are JSON already; those that are None are left out."""
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items() if value is not None) + "}"


def plain_event(data: str) -> str:
    """An event without a name."""
    return f"data: {data}\n\n"


def named_event(data: dict[str, Any]) -> str:
    """An event that says its kind twice, beside its data and in it, as the newer interfaces want it."""
    return f"event: {data['type']}\ndata: {to_json(data)}\n\n"


def error_event(error: ApiError) -> str:
    """An error in a stream that has begun."""
    return plain_event(to_json(error.body))
