"""From the bytes of a request to checked JSON, and from that to a request model. Every failure is a 4xx `ApiError`."""

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dsv4.config import shown
from dsv4.http.errors import ApiError

# what to do instead of fields that clients send and this server does not support; any other can only be left out
_KEEPS_NOTHING = "this server keeps no answers: send the whole conversation"
_FUNCTIONS_ONLY = "nothing is run here; offer functions"
_ROLLOUTS = "use /generate or /inference/v1/generate (dsv4 serve --rl)"

HINTS = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice, and tool_calls on messages",
    "store": _KEEPS_NOTHING,
    "background": _KEEPS_NOTHING,
    "previous_response_id": _KEEPS_NOTHING,
    "conversation": _KEEPS_NOTHING,
    "mcp_servers": _FUNCTIONS_ONLY,
    "web_search_options": _FUNCTIONS_ONLY,
    "truncation": "prompts are never cut in silence; only disabled is accepted",
    "verbosity": "ask for it in the conversation; only medium is accepted",
    "return_routed_experts": _ROLLOUTS,
    "routed_experts_start_len": _ROLLOUTS,
    "suffix": "the model does not fill gaps; only an empty suffix is accepted",
    "echo": "use /v1/completions",
    "chat_template": "the model has one protocol; use /v1/completions for prompts of your own",
    "encrypted_content": "only who wrote it can read it; leave it out",
}
# of a wrong `type`, by the field it is in
TYPE_HINTS = {
    "tools": _FUNCTIONS_ONLY,
    "tool_choice": _FUNCTIONS_ONLY,
    "content": "this model reads text only; leave it out",
}


def why_refused(name: str) -> str:
    """What to say about a field that is not supported, or not with the value it has."""
    return f"this server does not support it: {HINTS.get(name, 'leave it out; /openapi.json has the fields it takes')}"


Model = TypeVar("Model", bound=BaseModel)


def parse_json(body: bytes, *, max_depth: int) -> dict[str, Any]:
    """The JSON object in `body`. Strict: UTF-8, no NaN, no key twice, no lone surrogate, no deeper than allowed."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} does not fit", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested deeper than {max_depth} levels", code="too_deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's own limit, whose message speaks to programmers
            raise ApiError(400, "the body holds an integer of thousands of digits", code="invalid_json") from None
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(value).__name__}", code="invalid_json")
    # few brackets cannot be nested deeper, and a lone surrogate takes an escape
    if body.count(b"{") + body.count(b"[") > max_depth or b"\\u" in body:
        _check_tree(value, max_depth)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} appears twice in one object")
    return result


def _check_tree(value: Any, max_depth: int) -> None:
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, str):
            if not item.isascii() and _has_surrogate(item):
                raise ApiError(400, f"text is not valid Unicode: lone surrogate in {shown(item)}", code="invalid_utf8")
        elif isinstance(item, (dict, list)):
            if depth > max_depth:
                raise ApiError(400, f"the body is nested deeper than {max_depth} levels", code="too_deep")
            if isinstance(item, dict):
                stack += [(key, depth) for key in item]
                stack += [(child, depth + 1) for child in item.values()]
            else:
                stack += [(child, depth + 1) for child in item]


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def validate(model: type[Model], value: dict[str, Any]) -> Model:
    """`value` as a request model. `ApiError` 400 names the field: one that is not supported, missing or wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _to_api_error(error) from None


def _to_api_error(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_context=False)
    # A value that fits no member of a union is reported once per member. The report meant is the one about a member
    # of the right type, and of those the deepest.
    chosen = max(details, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    unknown = next((one for one in details if one["type"] == "extra_forbidden"), None)
    kinds = [one for one in details if one["type"] == "literal_error" and one["loc"][-1] == "type"]
    for one in kinds:  # first: its other fields are unknown because of that
        hint = next((TYPE_HINTS[str(part)] for part in reversed(one["loc"]) if part in TYPE_HINTS), None)
        if hint is not None:
            param = _path(one["loc"])
            message = f"{param}: {_lowered(one['msg'])}, found {shown(one['input'])}: {hint}"
            return ApiError(400, message, code="unsupported_parameter", param=param)
    if unknown is not None:
        *parents, name = unknown["loc"]
        path = ".".join(part for part in (_path(tuple(parents)), str(name)[:80]) if part)
        message = f"{path or shown(name)}: {why_refused(str(name))}"
        return ApiError(400, message, code="unsupported_parameter", param=path)
    param = _path(chosen["loc"])
    if chosen["type"] == "missing":
        return ApiError(400, f"{param}: required, and missing", code="missing_required_parameter", param=param)
    field = str(param.rpartition(".")[2])
    if field in HINTS and chosen["type"] == "literal_error":
        message = f"{param}: {why_refused(field)}, found {shown(chosen['input'])}"
        return ApiError(400, message, code="unsupported_parameter", param=param)
    message = chosen["msg"].removeprefix("Value error, ")
    if chosen["type"] == "value_error":  # our own, which begin with the field
        leading = leading_field(message)
        param = ".".join(part for part in (param, leading) if part)
        message = message if leading is None else message.partition(": ")[2]
    else:
        message = f"{_lowered(message)}, found {shown(chosen['input'])}"
    return ApiError(400, f"{param}: {message}" if param else message, code="invalid_value", param=param or None)


def _lowered(message: str) -> str:
    return f"{message[:1].lower()}{message[1:]}"


def leading_field(message: str) -> str | None:
    """The field a message of this package begins with: `stop: ...`, `reasoning_effort (final profile): ...`."""
    match = re.match(r"([a-z_]+)(?: \([^)]*\))?: ", message)
    return match[1] if match else None


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the names that members of a union have."""
    path = ""
    for place, part in enumerate(location):
        is_tag = place > 0 and location[place - 1] in _TAGGED_UNIONS
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _TYPE_NAMES and not is_tag:
            path += f".{part}" if path else part
    return path


_TYPE_NAMES = ("str", "int", "float", "bool", "list", "dict", "none")
_TAGGED_UNIONS = ("response_format", "format")
