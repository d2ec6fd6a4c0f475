"""Messages to prompt, byte for byte as DeepSeek-V4 was trained.

`encode_messages` gives the text. `render_segments` gives the same text in pieces that say whether the protocol or the
caller wrote them, so that a tokenizer can turn the protocol's markers into special tokens and leave identical strings
in user content as ordinary text (`dsv4.text.tokenizer.encode_chat`). The strings are in `protocol.json`; what the
caller may pass is checked in `messages.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

from dsv4.config import ModelConfig
from dsv4.text.messages import (
    ChatError,
    Turn,
    attach_options,
    drop_before_last_user,
    last_user_index,
    merge_user_turns,
    order_tool_results,
    read_response_format,
    read_tools,
    read_turns,
)
from dsv4.text.protocol import PROTOCOL

__all__ = ["ChatError", "ChatOptions", "Segment", "effort_profile", "encode_messages", "render_segments"]


class Segment(NamedTuple):
    """A piece of a prompt. Markers are special tokens only where `is_markup` is true."""

    text: str
    is_markup: bool


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Everything beside the messages that shapes a prompt. Checked at construction (`ChatError`).

    thinking: open the answer with `<think>`; otherwise (chat mode) with an already closed think block.
    tools, response_format: as in an OpenAI request; they join the leading system message.
    reasoning_effort: preview knows high, max; final knows low, high, max; None is the profile's default (no prefix).
        It has an effect in thinking mode only.
    profile: which release's effort prompts to use; `effort_profile` reads it off a checkpoint's config.
    drop_thinking: forget reasoning before the last user message. Never applied when any message has tools.
    add_bos: start with the begin-of-sentence marker.
    """

    thinking: bool = False
    tools: Sequence[Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    profile: str = "preview"
    drop_thinking: bool = True
    add_bos: bool = True

    def __post_init__(self) -> None:
        for name in ("thinking", "drop_thinking", "add_bos"):
            if not isinstance(getattr(self, name), bool):
                raise ChatError(f"{name}: expected true or false, found {type(getattr(self, name)).__name__}")
        _choose(self.profile, PROTOCOL.reasoning_effort, "profile")
        if self.reasoning_effort is not None:
            efforts = PROTOCOL.reasoning_effort[self.profile]
            _choose(self.reasoning_effort, efforts, f"reasoning_effort ({self.profile} profile)")

    @property
    def effort_prefix(self) -> str:
        """Text between the begin-of-sentence marker and the first message."""
        if not self.thinking or self.reasoning_effort is None:
            return ""
        return PROTOCOL.reasoning_effort[self.profile][self.reasoning_effort]


def _choose(value: Any, choices: Any, where: str) -> None:
    if not isinstance(value, str) or value not in choices:
        found = repr(value[:80]) if isinstance(value, str) else type(value).__name__
        raise ChatError(f"{where}: expected one of {', '.join(choices)}; found {found}")


def effort_profile(config: ModelConfig) -> str:
    """Effort profile of a checkpoint: the releases with a DSpark head use the final one."""
    return "preview" if config.dspark is None else "final"


def encode_messages(messages: Any, **options: Any) -> str:
    """The prompt for a list of messages; `ChatError` for anything that cannot be rendered. `options`: the fields of
    `ChatOptions`."""
    return "".join(segment.text for segment in render_segments(messages, ChatOptions(**options)))


def render_segments(messages: Any, options: ChatOptions) -> list[Segment]:
    """The prompt in pieces; joining their texts gives what `encode_messages` returns."""
    turns = attach_options(
        read_turns(messages),
        read_tools(options.tools, "tools"),
        read_response_format(options.response_format, "response_format"),
    )
    turns = order_tool_results(merge_user_turns(turns))
    is_dropping = options.drop_thinking and not any(turn.tools for turn in turns)
    if options.thinking and is_dropping:
        turns = drop_before_last_user(turns)

    prompt = _Prompt()
    if options.add_bos:
        prompt.markup(PROTOCOL.bos)
    prompt.markup(options.effort_prefix)
    first_thinking = last_user_index(turns) if is_dropping else -1
    for turn_idx, turn in enumerate(turns):
        is_thinking = options.thinking and turn_idx >= first_thinking
        if turn.role == "assistant":
            follows_task = turn_idx > 0 and turns[turn_idx - 1].task is not None
            _render_assistant(prompt, turn, has_reasoning=is_thinking and not follows_task)
        else:
            _render_input(prompt, turn)
        next_role = turns[turn_idx + 1].role if turn_idx + 1 < len(turns) else None
        if next_role in (None, "assistant", "latest_reminder"):
            _render_opening(prompt, turn, is_thinking=is_thinking, thinking_mode=options.thinking)
        elif turn.task is not None:
            raise ChatError(
                f"message {turn.message_idx}: task: expected on the last message or before an assistant or "
                f"latest_reminder message; found before a {next_role} message"
            )
    return prompt.segments


class _Prompt:
    """Collects segments; neighbours of the same kind are joined, in linear time however many there are."""

    def __init__(self) -> None:
        self._runs: list[tuple[bool, list[str]]] = []  # pieces of one kind, side by side

    def add(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if not segment.text:
                continue
            if self._runs and self._runs[-1][0] == segment.is_markup:
                self._runs[-1][1].append(segment.text)
            else:
                self._runs.append((segment.is_markup, [segment.text]))

    @property
    def segments(self) -> list[Segment]:
        return [Segment("".join(pieces), is_markup) for is_markup, pieces in self._runs]

    def markup(self, text: str) -> None:
        self.add([Segment(text, True)])

    def text(self, text: str) -> None:
        self.add([Segment(text, False)])


def _fill(template: str, **values: str | Sequence[Segment]) -> list[Segment]:
    """A template's literal text as markup, its placeholders as given: strings are the caller's text."""
    known: dict[str, str | Sequence[Segment]] = {
        "dsml_token": [Segment(PROTOCOL.dsml, True)],
        "thinking_start_token": [Segment(PROTOCOL.think_open, True)],
        "thinking_end_token": [Segment(PROTOCOL.think_close, True)],
        "tc_block_name": [Segment(PROTOCOL.tool_calls_block_name, True)],
        **values,
    }
    filled = []
    for literal, name, _, _ in Formatter().parse(template):
        filled.append(Segment(literal, True))
        if name is not None:
            value = known[name]
            filled.extend([Segment(value, False)] if isinstance(value, str) else value)
    return filled


def _render_input(prompt: _Prompt, turn: Turn) -> None:
    """A turn the model reads: system, user, developer, latest_reminder."""
    if turn.role in ("user", "developer"):
        prompt.markup(PROTOCOL.user)
    elif turn.role == "latest_reminder":
        prompt.markup(PROTOCOL.latest_reminder)
    prompt.text(turn.text)
    for block_idx, block in enumerate(turn.blocks):
        if block_idx:
            prompt.markup("\n\n")
        if block.is_tool_result:
            prompt.add(_fill(PROTOCOL.tool_result, content=block.text))
        else:
            prompt.text(block.text)
    if turn.tools:
        prompt.markup("\n\n")
        prompt.add(_fill(PROTOCOL.tools_block, tool_schemas="\n".join(turn.tools)))
    if turn.response_format is not None:
        prompt.markup("\n\n")
        prompt.add(_fill(PROTOCOL.response_format_block, schema=turn.response_format))


def _render_assistant(prompt: _Prompt, turn: Turn, *, has_reasoning: bool) -> None:
    if has_reasoning:
        prompt.text(turn.reasoning)
        prompt.markup(PROTOCOL.think_close)
    prompt.text(turn.text)
    if turn.tool_calls:
        prompt.markup("\n\n")
        prompt.add(_render_tool_calls(turn))
    if turn.has_eos:
        prompt.markup(PROTOCOL.eos)


def _render_tool_calls(turn: Turn) -> list[Segment]:
    calls: list[Segment] = []
    newline = Segment("\n", True)
    for call_idx, call in enumerate(turn.tool_calls):
        parameters: list[Segment] = []
        for parameter_idx, (name, value, is_string) in enumerate(call.arguments):
            flag = [Segment("true" if is_string else "false", True)]
            parameters += [newline] * bool(parameter_idx)
            parameters += _fill(PROTOCOL.parameter, name=name, is_string=flag, value=value)
        calls += [newline] * bool(call_idx)
        calls += _fill(PROTOCOL.tool_call, name=call.name, arguments=parameters)
    return _fill(PROTOCOL.tool_calls, tool_calls=calls)


def _render_opening(prompt: _Prompt, turn: Turn, *, is_thinking: bool, thinking_mode: bool) -> None:
    """What makes the model answer: a task's token, or the assistant marker and an open or closed think block."""
    if turn.task is not None and turn.task != "action":
        prompt.markup(PROTOCOL.tasks[turn.task])
    elif turn.task == "action":
        # An action classifier opens as the mode says, also in turns whose reasoning is forgotten.
        opening = PROTOCOL.think_open if thinking_mode else PROTOCOL.think_close
        prompt.markup(PROTOCOL.assistant + opening + PROTOCOL.tasks["action"])
    elif turn.role in ("user", "developer"):
        prompt.markup(PROTOCOL.assistant + (PROTOCOL.think_open if is_thinking else PROTOCOL.think_close))
