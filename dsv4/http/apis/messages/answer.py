"""From the events of a chat to the answer of `POST /v1/messages`: its blocks, as a stream of named events or whole."""

import json
from typing import Any

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.answer_reader import AnswerReader, new_id, usage_of_chat
from dsv4.http.apis.messages.request import MessagesRequest
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.schemas import Answer
from dsv4.http.apis.sse import named_event, quote, to_json
from dsv4.http.errors import ApiError
from dsv4.http.streaming import Assembler
from dsv4.text.collected import GrowingText
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


class MessagesAssembler(Assembler):
    """Thinking, text and tool use, each a block that starts, grows and stops. The shape of the whole is that of
    `MessageAnswer`."""

    ping = named_event({"type": "ping"})

    def __init__(self, job: Job, asked: MessagesRequest, served: ModelInfo) -> None:
        self._job = job
        self._served = served
        self._shows_thinking = asked.thinking is None or asked.thinking.display != "omitted"
        self._reader = AnswerReader(job.thinking)
        self._id = "msg_" + (asked.request_id or new_id(""))
        self._blocks: list[dict[str, Any]] = []
        self._text = GrowingText()  # of the open block; of a call, its arguments
        self._before_text = ""  # the constant text of a delta of the open block
        self._is_open = False

    # ---- streams ----

    def opening(self) -> str:
        return named_event({"type": "message_start", "message": self._answer()})

    def take(self, event: TokenEvent) -> str:
        events = "".join([self._read(one) for one in self._reader.take(event)])
        return events if self._reader.finish is None else events + self._close()

    def closing(self) -> str:
        answer = self._answer()
        delta = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        ending = named_event({"type": "message_delta", "delta": delta, "usage": answer["usage"]})
        return ending + named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> str:
        return named_event(error.body)

    def whole(self) -> str:
        return to_json(self._answer())

    # ---- blocks ----

    def _read(self, event: Event) -> str:
        """The events that one piece of the answer becomes."""
        if type(event) is ContentDelta:
            return self._started("text", {"text": ""}) + self._grown(event.text)
        if type(event) is ReasoningDelta:
            started = self._started("thinking", {"thinking": "", "signature": ""})
            return started + self._grown(event.text) if self._shows_thinking else started
        if type(event) is ToolCallStart:
            return self._started("tool_use", {"id": new_id("toolu_"), "name": event.name, "input": {}})
        if type(event) is ToolCallDelta:
            return self._grown(event.arguments)
        assert type(event) is ToolCallEnd
        return self._close()

    def _started(self, kind: str, fields: dict[str, Any]) -> str:
        """Stop the open block and start one of this kind, unless it is the one that is open."""
        if self._is_open and self._blocks[-1]["type"] == kind and kind != "tool_use":
            return ""
        events = self._close()
        self._blocks.append({"type": kind, **fields})
        self._text = GrowingText()
        self._is_open = True
        delta, field = _DELTAS[kind]
        self._before_text = self._delta({"type": delta, field: ""}).removesuffix('""}}\n\n')
        return events + self._of_block("content_block_start", content_block=self._blocks[-1])

    def _grown(self, text: str) -> str:
        self._text.add(text)
        return f"{self._before_text}{quote(text)}}}}}\n\n"

    def _close(self) -> str:
        if not self._is_open:
            return ""
        self._is_open = False
        block = self._blocks[-1]
        self._settle()
        signed = self._delta({"type": "signature_delta", "signature": ""}) if block["type"] == "thinking" else ""
        return signed + self._of_block("content_block_stop")

    def _settle(self) -> None:
        """Write what has come of the last block into it."""
        block, text = self._blocks[-1], str(self._text)
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        else:
            block[_DELTAS[block["type"]][1]] = text

    # ---- shapes ----

    def _delta(self, delta: dict[str, Any]) -> str:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> str:
        return named_event({"type": kind, "index": len(self._blocks) - 1, **fields})

    def _answer(self) -> dict[str, Any]:
        usage, finish = usage_of_chat(self._job, [self._reader]), self._reader.finish
        stopped_by = None if finish is None else self._job.outputs[0].stopped_by
        words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        stop_text = stopped_by if finish == "stop" and isinstance(stopped_by, str) else None
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._served.name,
            "content": self._blocks,
            "stop_reason": None if finish is None else "stop_sequence" if stop_text is not None else words[finish],
            "stop_sequence": stop_text,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": usage["completion_tokens"],
            },
        }


# of each kind of block: the type of its deltas, and the field that grows
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
