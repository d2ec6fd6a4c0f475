"""From the events of a chat to the answer of `POST /v1/messages`: its blocks, as a stream of named events or whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsv4.engine.events import EndEvent, TokenEvent
from dsv4.http.apis.answer_reader import AnswerReader, usage_of_chat
from dsv4.http.apis.chat.answer import new_id
from dsv4.http.apis.messages.request import MessagesRequest
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.schemas import Answer, NamedEvent
from dsv4.http.errors import ApiError
from dsv4.text.parse import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart


class ClaudeUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    """The answer to `/v1/messages`."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: ClaudeUsage


class TokenCount(Answer):
    """The answer to `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesAssembler:
    """Thinking, text and tool use, each a block that starts, grows and stops."""

    def __init__(self, job: Job, asked: MessagesRequest, served: ModelInfo) -> None:
        self._job = job
        self._served = served
        self._shows_thinking = asked.thinking is None or asked.thinking.display != "omitted"
        self._reader = AnswerReader(job.thinking)
        self._id = "msg_" + (asked.request_id or new_id(""))
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the open call
        self._is_open = False

    # ---- streams ----

    def opening(self) -> list[NamedEvent]:
        return [NamedEvent({"type": "message_start", "message": self._answer().model_dump()})]

    def take(self, event: TokenEvent | EndEvent) -> list[NamedEvent]:
        events = [made for one in self._reader.take(event) for made in self._read(one)]
        return events + self._close() if self._reader.finish is not None else events

    def closing(self) -> list[NamedEvent]:
        answer = self._answer()
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        return [
            NamedEvent({"type": "message_delta", "delta": delta, "usage": answer.usage.model_dump()}),
            NamedEvent({"type": "message_stop"}),
        ]

    def failure(self, error: ApiError) -> list[NamedEvent]:
        return [NamedEvent(error.body)]

    def whole(self, chunks: Sequence[NamedEvent]) -> MessageAnswer:
        return self._answer()

    # ---- blocks ----

    def _read(self, event: Event) -> list[NamedEvent]:
        """The events that one piece of the answer becomes."""
        if isinstance(event, ReasoningDelta):
            started = self._started("thinking", {"thinking": "", "signature": ""})
            return [*started, *self._grown("thinking", event.text)] if self._shows_thinking else started
        if isinstance(event, ContentDelta):
            return [*self._started("text", {"text": ""}), *self._grown("text", event.text)]
        if isinstance(event, ToolCallStart):
            self._arguments = ""
            return self._started("tool_use", {"id": new_id("toolu_"), "name": event.name, "input": {}})
        if isinstance(event, ToolCallDelta):
            self._arguments += event.arguments
            return [self._delta({"type": "input_json_delta", "partial_json": event.arguments})]
        assert isinstance(event, ToolCallEnd)
        return self._close()

    def _started(self, kind: str, fields: dict[str, Any]) -> list[NamedEvent]:
        """Stop the open block and start one of this kind, unless it is the one that is open."""
        if self._is_open and self._blocks[-1]["type"] == kind and kind != "tool_use":
            return []
        events = self._close()
        block = {"type": kind, **fields}
        self._blocks.append(block)
        self._is_open = True
        return [*events, self._of_block("content_block_start", content_block=dict(block))]

    def _grown(self, field: str, text: str) -> list[NamedEvent]:
        self._blocks[-1][field] += text
        return [self._delta({"type": f"{field}_delta", field: text})]

    def _close(self) -> list[NamedEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = json.loads(self._arguments or "{}")
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if block["type"] == "thinking" else []
        return [*signed, self._of_block("content_block_stop")]

    # ---- shapes ----

    def _delta(self, delta: dict[str, Any]) -> NamedEvent:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> NamedEvent:
        return NamedEvent({"type": kind, "index": len(self._blocks) - 1, **fields})

    def _answer(self) -> MessageAnswer:
        usage, finish = usage_of_chat(self._job, [self._reader]), self._reader.finish
        stopped_by = None if finish is None else self._job.outputs[0].stopped_by
        words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        cached = usage.prompt_tokens_details.cached_tokens
        stop_text = stopped_by if finish == "stop" and isinstance(stopped_by, str) else None
        return MessageAnswer(
            id=self._id,
            type="message",
            role="assistant",
            model=self._served.name,
            content=list(self._blocks),
            stop_reason=None if finish is None else "stop_sequence" if stop_text is not None else words[finish],
            stop_sequence=stop_text,
            usage=ClaudeUsage(
                input_tokens=usage.prompt_tokens - cached,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=cached,
                output_tokens=usage.completion_tokens,
            ),
        )
