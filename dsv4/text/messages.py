"""From the caller's JSON messages to checked, typed turns, and the passes that reshape a conversation before rendering.

Everything a caller can get wrong is found here and raised as `ChatError`, which names the message and the field. The
passes are: tool results become part of user turns, adjacent user turns merge, tool results follow the order of the
calls they answer, and reasoning that the model must not see again is dropped. Rendering is in `chat.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4.errors import Dsv4Error
from dsv4.text.protocol import PROTOCOL

ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")
_PART_SEPARATOR = "\n\n"
# Keys that would carry text the protocol has no place for. Other unknown keys (`mask`, `name`, ...) are bookkeeping
# of the client that keeps the conversation and never reach the prompt.
_REFUSED_KEYS = ("content_blocks", "function_call", "audio")


class ChatError(Dsv4Error, ValueError):
    """Messages or options that cannot be rendered; the text names the message, the field, and what was expected."""


@dataclass(frozen=True)
class ToolCall:
    """One call an assistant made. `arguments` maps names to (text, is_string); text of a non-string is JSON."""

    call_id: str
    name: str
    arguments: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class Block:
    """A part of a user turn: text the user wrote, or the result of a tool."""

    message_idx: int
    text: str
    is_tool_result: bool = False
    call_id: str = ""


@dataclass(frozen=True)
class Turn:
    """One message after checking. User turns hold `blocks`; every other role holds `text`."""

    message_idx: int
    role: str
    text: str = ""
    blocks: tuple[Block, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tools: tuple[str, ...] = ()
    response_format: str | None = None
    task: str | None = None
    has_eos: bool = True


# ---- checking ----


def read_turns(messages: Any) -> list[Turn]:
    """Check every message on its own. A tool message becomes a user turn of one tool result."""
    if not isinstance(messages, (list, tuple)):
        raise ChatError(f"messages: expected a list, found {type(messages).__name__}")
    if not messages:
        raise ChatError("messages: expected at least one message, found none")
    return [_read_turn(message, message_idx) for message_idx, message in enumerate(messages)]


def _read_turn(message: Any, message_idx: int) -> Turn:
    where = f"message {message_idx}"
    if not isinstance(message, dict):
        raise ChatError(f"{where}: expected an object, found {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        found = repr(role[:80]) if isinstance(role, str) else type(role).__name__
        raise ChatError(f"{where}: role: expected one of {', '.join(ROLES)}; found {found}")
    for key in _REFUSED_KEYS:
        if message.get(key):
            raise ChatError(f"{where}: {key}: not supported; put the text in 'content' or the calls in 'tool_calls'")
    _refuse_misplaced(message, role, where)
    text = _read_content(message.get("content"), f"{where}: content", is_optional=role in ("system", "assistant"))
    task = _read_task(message.get("task"), f"{where}: task")
    if role == "tool":
        call_id = _read_text(message.get("tool_call_id") or "", f"{where}: tool_call_id")
        return Turn(message_idx, "user", blocks=(Block(message_idx, text, is_tool_result=True, call_id=call_id),))
    if role == "user":
        return Turn(message_idx, "user", blocks=(Block(message_idx, text),), task=task)
    return Turn(
        message_idx,
        role,
        text=text,
        reasoning=_read_reasoning(message, where),
        tool_calls=_read_tool_calls(message.get("tool_calls"), f"{where}: tool_calls"),
        tools=read_tools(message.get("tools"), f"{where}: tools"),
        response_format=read_response_format(message.get("response_format"), f"{where}: response_format"),
        task=task,
        has_eos=not _read_flag(message.get("wo_eos"), f"{where}: wo_eos"),
    )


def _refuse_misplaced(message: dict[str, Any], role: str, where: str) -> None:
    """A field on a role that cannot render it would vanish without a word."""
    allowed_roles = {
        "tools": ("system", "developer"),
        "response_format": ("system", "developer"),
        "tool_calls": ("assistant",),
        "task": tuple(name for name in ROLES if name != "tool"),
    }
    for key, roles in allowed_roles.items():
        if message.get(key) and role not in roles:
            raise ChatError(f"{where}: {key}: allowed on {' and '.join(roles)} messages only, found on {role}")


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ChatError(f"{where}: expected a string, found {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ChatError(f"{where}: not valid Unicode: lone surrogate at character {error.start}") from error
    return value


def _read_content(value: Any, where: str, *, is_optional: bool) -> str:
    """A string, or a list of text parts joined by a blank line."""
    if value is None and is_optional:
        return ""
    if not isinstance(value, list):
        return _read_text(value, where)
    parts = []
    for part_idx, part in enumerate(value):
        part_where = f"{where}[{part_idx}]"
        if not isinstance(part, dict):
            raise ChatError(f"{part_where}: expected an object, found {type(part).__name__}")
        if part.get("type") != "text":
            kind = part.get("type")
            found = repr(kind[:80]) if isinstance(kind, str) else type(kind).__name__
            raise ChatError(f"{part_where}: type: expected 'text', found {found}")
        parts.append(_read_text(part.get("text"), f"{part_where}: text"))
    return _PART_SEPARATOR.join(parts)


def _read_reasoning(message: dict[str, Any], where: str) -> str:
    given = [(key, message[key]) for key in ("reasoning", "reasoning_content") if message.get(key) is not None]
    texts = [_read_text(value, f"{where}: {key}") for key, value in given]
    if len(set(texts)) > 1:
        raise ChatError(f"{where}: reasoning and reasoning_content: expected one of them, found two different texts")
    return texts[0] if texts else ""


def _read_task(value: Any, where: str) -> str | None:
    if value is None:
        return None
    task = _read_text(value, where)
    if task not in PROTOCOL.tasks:
        raise ChatError(f"{where}: expected one of {', '.join(PROTOCOL.tasks)}; found {task[:80]!r}")
    return task


def _read_flag(value: Any, where: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, int) or value not in (0, 1):
        raise ChatError(f"{where}: expected true or false, found {type(value).__name__}")
    return bool(value)


def _to_json(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ChatError(f"{where}: nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise ChatError(f"{where}: expected JSON data: {error}") from error
    return _read_text(text, where)


def read_tools(value: Any, where: str) -> tuple[str, ...]:
    """Each tool's function object as JSON; `{"type": "function", "function": {...}}` or the function object itself."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ChatError(f"{where}: expected a list, found {type(value).__name__}")
    schemas = []
    for tool_idx, tool in enumerate(value):
        function = tool["function"] if isinstance(tool, dict) and "function" in tool else tool
        if not isinstance(function, dict):
            raise ChatError(f"{where}[{tool_idx}]: expected a function object, found {type(function).__name__}")
        _read_name(function.get("name"), f"{where}[{tool_idx}]: name")
        schemas.append(_to_json(function, f"{where}[{tool_idx}]"))
    return tuple(schemas)


def read_response_format(value: Any, where: str) -> str | None:
    """The response format as JSON, exactly as given; empty means none."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ChatError(f"{where}: expected an object, found {type(value).__name__}")
    return _to_json(value, where) if value else None


def _read_name(value: Any, where: str) -> str:
    name = _read_text(value, where)
    if not name:
        raise ChatError(f"{where}: expected a name, found an empty string")
    return name


def _read_tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise ChatError(f"{where}: expected a list, found {type(value).__name__}")
    calls = []
    for call_idx, call in enumerate(value):
        call_where = f"{where}[{call_idx}]"
        function = call["function"] if isinstance(call, dict) and "function" in call else call
        if not isinstance(function, dict):
            raise ChatError(f"{call_where}: expected an object, found {type(function).__name__}")
        call_id = _read_text(call.get("id") or function.get("id") or "", f"{call_where}: id")
        name = _read_name(function.get("name"), f"{call_where}: name")
        calls.append(ToolCall(call_id, name, _read_arguments(function.get("arguments"), f"{call_where}: arguments")))
    return tuple(calls)


def _read_arguments(value: Any, where: str) -> tuple[tuple[str, str, bool], ...]:
    """Arguments given as an object or as JSON text of one.

    Text that is not a JSON object (a model wrote it, a client sends it back) is kept whole as one string parameter
    named `arguments`, as the official encoder does.
    """
    arguments = value
    if isinstance(value, str):
        text = _read_text(value, where)
        try:
            arguments = json.loads(text)
        except RecursionError as error:
            raise ChatError(f"{where}: nested too deeply") from error
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return (("arguments", text, True),)
    if not isinstance(arguments, dict):
        raise ChatError(f"{where}: expected an object or JSON text, found {type(value).__name__}")
    parameters = []
    for key, item in arguments.items():
        name = _read_text(key, f"{where}: parameter name")
        item_where = f"{where}: {name[:80]}"
        is_string = isinstance(item, str)
        parameters.append((name, _read_text(item, item_where) if is_string else _to_json(item, item_where), is_string))
    return tuple(parameters)


# ---- passes ----


def attach_options(turns: Sequence[Turn], tools: tuple[str, ...], response_format: str | None) -> list[Turn]:
    """Put tools and a response format given beside the messages into the conversation.

    They go to a leading system message; tools also to a leading developer message, taking the response format along
    (without tools a developer message may be dropped, and the format with it). Otherwise an empty system message is
    put in front.
    """
    if not tools and response_format is None:
        return list(turns)
    first = turns[0]
    if first.role != "system" and not (first.role == "developer" and tools):
        first, rest = Turn(-1, "system"), list(turns)
    else:
        rest = list(turns[1:])
    if tools and first.tools and first.tools != tools:
        raise ChatError("tools: given beside the messages and, differently, in message 0")
    if response_format and first.response_format and first.response_format != response_format:
        raise ChatError("response_format: given beside the messages and, differently, in message 0")
    tools, response_format = tools or first.tools, response_format or first.response_format
    return [replace(first, tools=tools, response_format=response_format), *rest]


def merge_user_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Join adjacent user turns into one. A turn that asks for a task ends there: user text after it starts anew."""
    groups: list[list[Turn]] = []  # the turns that become one; joined at the end, so that long runs cost linear time
    for turn in turns:
        first = groups[-1][0] if groups else None
        is_result = turn.role == "user" and turn.blocks[0].is_tool_result
        if turn.role != "user" or first is None or first.role != "user" or (first.task and not is_result):
            groups.append([turn])
            continue
        if turn.task is not None:
            where = f"message {turn.message_idx}: task"
            raise ChatError(f"{where}: the message joins the user turn before it, which cannot take a task")
        groups[-1].append(turn)
    return [
        group[0] if len(group) == 1 else replace(group[0], blocks=tuple(b for turn in group for b in turn.blocks))
        for group in groups
    ]


def order_tool_results(turns: Sequence[Turn]) -> list[Turn]:
    """Within each user turn, put tool results in the order of the calls they answer; text keeps its place."""
    order: dict[str, int] | None = None
    has_all_ids = False
    ordered = []
    for turn in turns:
        if turn.tool_calls:
            order = {call.call_id: call_idx for call_idx, call in enumerate(turn.tool_calls) if call.call_id}
            has_all_ids = all(call.call_id for call in turn.tool_calls)
        results = [block for block in turn.blocks if block.is_tool_result]
        for block in results:
            where = f"message {block.message_idx}"
            if order is None:
                raise ChatError(f"{where}: role: a tool message needs an assistant message with tool_calls before it")
            if has_all_ids and block.call_id and block.call_id not in order:
                known = ", ".join(repr(call_id[:80]) for call_id in order)
                raise ChatError(f"{where}: tool_call_id: expected one of {known}; found {block.call_id[:80]!r}")
        if len(results) > 1:
            known_order = order or {}
            in_order = iter(sorted(results, key=lambda block: known_order.get(block.call_id, 0)))
            turn = replace(turn, blocks=tuple(next(in_order) if b.is_tool_result else b for b in turn.blocks))
        ordered.append(turn)
    return ordered


def last_user_index(turns: Sequence[Turn]) -> int:
    """Index of the last user or developer turn, -1 when there is none."""
    return max((idx for idx, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def drop_before_last_user(turns: Sequence[Turn]) -> list[Turn]:
    """Forget developer turns before the last user turn. (Their reasoning is skipped while rendering.)"""
    last_user = last_user_index(turns)
    return [turn for idx, turn in enumerate(turns) if turn.role != "developer" or idx >= last_user]
