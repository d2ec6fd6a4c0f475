"""What the model writes, as it arrives, into reasoning, content and tool calls.

    parser = StreamParser(thinking=True)
    for piece in pieces:
        for event in parser.feed(piece): ...
    for event in parser.finish(): ...

The events do not depend on how the text is cut into pieces, once neighbouring deltas are joined. A tag is never shown
in part: text that may still become one is held back. Argument deltas of a call are pieces of one JSON object.

Tolerance, beyond what `dsv4.text.chat` writes:

* Newlines between tags may be missing or doubled; a call may lack its closing tag if another tag follows.
* Text inside or after a block of calls, and a tag that cannot be read, is content (without white space before a tag).
  Inside a call it comes after the call's end: between a start and its end there are only arguments.
* A parameter that claims to be JSON and is not becomes a string; one that does not say is JSON if it can be.
* A value ends at its own closing tag and nowhere else, so it may hold angle brackets and other tags.
* A stream that ends inside a call closes its arguments and says `is_complete=False`; half a tag at the end is dropped.
* One end-of-sentence marker at the very end is dropped.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dsv4.text.protocol import PROTOCOL

# A header longer than this is not one: without a bound an unclosed quote would be scanned again with every token.
_MAX_HEADER_CHARS = 4096

_DSML_OPEN = f"<{PROTOCOL.dsml}"
_DSML_CLOSE = f"</{PROTOCOL.dsml}"
_BLOCK_OPEN = f"{_DSML_OPEN}{PROTOCOL.tool_calls_block_name}>"
_BLOCK_CLOSE = f"{_DSML_CLOSE}{PROTOCOL.tool_calls_block_name}>"
_INVOKE_OPEN = f"{_DSML_OPEN}invoke"
_INVOKE_CLOSE = f"{_DSML_CLOSE}invoke>"
_PARAMETER_OPEN = f"{_DSML_OPEN}parameter"
_PARAMETER_CLOSE = f"{_DSML_CLOSE}parameter>"
_INVOKE_HEADER = re.compile(r'\s+name="(.*?)"\s*>', re.DOTALL)
_PARAMETER_HEADER = re.compile(r'\s+name="(.*?)"(?:\s+string="(true|false)")?\s*>', re.DOTALL)


@dataclass(slots=True)  # not frozen: one is made with every token, and freezing it takes most of its time
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of this message."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a call's arguments; all of a call's deltas joined are one JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call is over. `is_complete` is false when the stream ended inside it."""

    index: int
    is_complete: bool


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


@dataclass(frozen=True)
class ParsedToolCall:
    """One call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True)
class ParsedMessage:
    """A whole completion."""

    reasoning: str
    content: str
    tool_calls: tuple[ParsedToolCall, ...]

    def to_message(self) -> dict[str, Any]:
        """The assistant message that `encode_messages` renders back to what the model wrote."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        return {"role": "assistant", "reasoning": self.reasoning, "content": self.content, "tool_calls": calls}


class _State(Enum):
    REASONING = auto()  # until </think>
    CONTENT = auto()  # before the first block: text is exact
    AFTER = auto()  # behind a block
    BLOCK = auto()  # between calls
    INVOKE = auto()  # in the header of a call
    CALL = auto()  # between parameters
    PARAMETER = auto()  # in the header of a parameter
    STRING = auto()  # in a value that streams
    JSON = auto()  # in a value that is kept until it is whole


# The newlines before a block belong to it: the protocol writes two, a model may write fewer.
_TAGS = {
    _State.REASONING: (PROTOCOL.think_close,),
    _State.CONTENT: (f"\n\n{_BLOCK_OPEN}", f"\n{_BLOCK_OPEN}", _BLOCK_OPEN),
    _State.AFTER: (_BLOCK_OPEN,),
    _State.BLOCK: (_INVOKE_OPEN, _BLOCK_CLOSE),
    _State.CALL: (_PARAMETER_OPEN, _INVOKE_CLOSE, _INVOKE_OPEN, _BLOCK_CLOSE),
    _State.STRING: (_PARAMETER_CLOSE,),
    _State.JSON: (_PARAMETER_CLOSE,),
}
_TAG_PATTERNS = {state: re.compile("|".join(map(re.escape, tags))) for state, tags in _TAGS.items()}


class StreamParser:
    """Incremental parser of one completion. `thinking`: the prompt ended inside an open think block."""

    def __init__(self, thinking: bool) -> None:
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._eos_held = ""  # a tail that may be the end-of-sentence marker
        self._buffer = ""
        self._position = 0
        self._space: list[str] = []  # white space that is content only if text follows
        self._inside: list[str] = []  # text inside a call: content, once the call has ended
        self._num_calls = 0
        self._has_arguments = False
        self._parameter_name = ""
        self._json_parts: list[str] = []
        self._events: list[Event] = []
        self._is_finished = False

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is still reasoning."""
        return self._state is _State.REASONING

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the completion; returns what became certain."""
        if self._is_finished:
            raise ValueError("feed was called after finish: a parser reads one completion")
        if not text:
            return []
        if "<" not in text and text[-1] != "\n" and not self._eos_held and self._position == len(self._buffer):
            if self._state is _State.CONTENT:  # nothing is held back, and nothing here can begin a tag
                return [ContentDelta(text)]
            if self._state is _State.REASONING:
                return [ReasoningDelta(text)]
        text = self._eos_held + text
        num_held = _held_length(text, (PROTOCOL.eos,), is_whole_held=True)
        self._eos_held = text[len(text) - num_held :]
        return self._advance(text[: len(text) - num_held])

    def finish(self) -> list[Event]:
        """End of the completion: returns what was held back. Nothing may be fed afterwards."""
        if self._is_finished:
            raise ValueError("finish was called twice: a parser reads one completion")
        events = self._advance("" if self._eos_held == PROTOCOL.eos else self._eos_held)
        self._is_finished = True
        rest = self._buffer[self._position :]
        # In text, half a tag is only sure to be one from the marker on: a lone "<" is more likely the text's own.
        is_text = self._state in _TAGS and self._state not in (_State.BLOCK, _State.CALL)
        if is_text and not rest.lstrip("\n").startswith((_DSML_OPEN, _DSML_CLOSE)):
            self._take_text(rest)
        if self._state in (_State.STRING, _State.JSON):
            self._end_value()
        if self._state in (_State.CALL, _State.PARAMETER):
            self._end_call(is_complete=False)
        return events + self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _advance(self, text: str) -> list[Event]:
        self._buffer = self._buffer[self._position :] + text
        self._position = 0
        while self._read_header() if self._state in (_State.INVOKE, _State.PARAMETER) else self._read_to_tag():
            pass
        return self._take_events()

    # ---- text up to a tag ----

    def _read_to_tag(self) -> bool:
        """Hand on the text before the next tag, and the tag; false when more input is needed."""
        match = _TAG_PATTERNS[self._state].search(self._buffer, self._position)
        if match is None:
            num_held = _held_length(self._buffer[self._position :], _TAGS[self._state])
            end = len(self._buffer) - num_held
            self._take_text(self._buffer[self._position : end])
            self._position = end
            return False
        self._take_text(self._buffer[self._position : match.start()])
        self._position = match.end()
        self._take_tag(match.group().lstrip("\n"))
        return True

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            self._events.append(ReasoningDelta(text))
        elif self._state is _State.CONTENT:
            self._events.append(ContentDelta(text))
        elif self._state is _State.STRING:
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        elif self._state is _State.JSON:
            self._json_parts.append(text)
        else:
            kept = text.rstrip()
            if kept:
                piece = "".join(self._space) + kept
                if self._state is _State.CALL:
                    self._inside.append(piece)
                else:
                    self._events.append(ContentDelta(piece))
                self._space = []
            self._space.append(text[len(kept) :])

    def _take_tag(self, tag: str) -> None:
        self._space = []
        if tag == PROTOCOL.think_close:
            self._state = _State.CONTENT
        elif tag == _PARAMETER_OPEN:
            self._state = _State.PARAMETER
        elif tag == _PARAMETER_CLOSE:
            self._end_value()
        else:
            if self._state is _State.CALL:
                self._end_call(is_complete=True)
            is_header = tag == _INVOKE_OPEN
            self._state = _State.INVOKE if is_header else _State.AFTER if tag == _BLOCK_CLOSE else _State.BLOCK

    # ---- headers ----

    def _read_header(self) -> bool:
        """Read the attributes of a call or a parameter; false when more input is needed."""
        is_invoke = self._state is _State.INVOKE
        limit = self._position + _MAX_HEADER_CHARS
        tags = [self._buffer.find(tag, self._position, limit) for tag in (_DSML_OPEN, _DSML_CLOSE)]
        end = min([tag for tag in tags if tag >= 0], default=limit)
        pattern = _INVOKE_HEADER if is_invoke else _PARAMETER_HEADER
        match = pattern.match(self._buffer, self._position, end)
        if match is None:
            if len(self._buffer) < end:
                return False
            self._state = _State.BLOCK if is_invoke else _State.CALL
            self._take_text(_INVOKE_OPEN if is_invoke else _PARAMETER_OPEN)
            return True
        self._position = match.end()
        if is_invoke:
            self._events.append(ToolCallStart(self._num_calls, match[1]))
            self._has_arguments = False
            self._state = _State.CALL
        else:
            self._start_value(match[1], match[2])
        return True

    # ---- arguments ----

    def _add_arguments(self, text: str) -> None:
        self._events.append(ToolCallDelta(self._num_calls, text))

    def _add_name(self, name: str) -> None:
        separator = ", " if self._has_arguments else "{"
        self._has_arguments = True
        self._add_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")

    def _start_value(self, name: str, is_string: str | None) -> None:
        if is_string == "true":
            self._add_name(name)
            self._add_arguments('"')
            self._state = _State.STRING
            return
        self._parameter_name = name
        self._json_parts = []
        self._state = _State.JSON

    def _end_value(self) -> None:
        if self._state is _State.STRING:
            self._add_arguments('"')
        else:
            text = "".join(self._json_parts)
            self._add_name(self._parameter_name)
            self._add_arguments(text.strip() if _is_json(text) else json.dumps(text, ensure_ascii=False))
        self._state = _State.CALL

    def _end_call(self, *, is_complete: bool) -> None:
        self._add_arguments("}" if self._has_arguments else "{}")
        self._events.append(ToolCallEnd(self._num_calls, is_complete))
        self._num_calls += 1
        if self._inside:
            self._events.append(ContentDelta("".join(self._inside)))
            self._inside = []


def _held_length(text: str, tags: tuple[str, ...], *, is_whole_held: bool = False) -> int:
    """Length of the longest end of `text` that begins one of `tags` (or, `is_whole_held`, is one)."""
    longest = max(map(len, tags)) - (not is_whole_held)
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_json(text: str) -> bool:
    """Whether any JSON reader takes `text`; Python's own also takes NaN and Infinity."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def parse_completion(text: str, thinking: bool) -> ParsedMessage:
    """Parse a whole completion; the same rules as `StreamParser`."""
    parser = StreamParser(thinking)
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    is_complete: list[bool] = []
    for event in parser.feed(text) + parser.finish():
        if isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ToolCallStart):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, ToolCallDelta):
            arguments[event.index].append(event.arguments)
        else:
            is_complete.append(event.is_complete)
    calls = zip(names, arguments, is_complete, strict=True)
    tool_calls = tuple(ParsedToolCall(name, "".join(parts), done) for name, parts, done in calls)
    return ParsedMessage("".join(reasoning), "".join(content), tool_calls)
