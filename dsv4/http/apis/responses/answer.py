"""From the events of a chat to the answer of `POST /v1/responses`: its items, as a stream of named events or whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dsv4.engine.events import EndEvent, TokenEvent
from dsv4.http.apis.answer_reader import AnswerReader, usage_of_chat
from dsv4.http.apis.chat.answer import new_id
from dsv4.http.apis.logprobs import TokenNames
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.responses.request import AnyTool, FlatFunction, ResponsesRequest
from dsv4.http.apis.schemas import Answer, NamedEvent
from dsv4.http.errors import ApiError
from dsv4.request import TokenLogprobs
from dsv4.text.parse import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponseAnswer(Answer):
    """The answer to `/v1/responses`. What the request did not say has its default here."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: str
    usage: dict[str, Any] | None
    user: str | None


class ResponsesAssembler:
    """Reasoning, one message and any calls, each an item that opens, grows and closes."""

    def __init__(self, job: Job, asked: ResponsesRequest, served: ModelInfo) -> None:
        self._job = job
        self._asked = asked
        self._served = served
        self._names = TokenNames(served.tokenizer, by_id=False)
        self._reader = AnswerReader(job.thinking)
        self._id = "resp_" + (asked.request_id or new_id(""))
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pending: list[TokenLogprobs] = []
        self._num_events = 0

    # ---- streams ----

    def opening(self) -> list[NamedEvent]:
        return [
            self._of_answer("response.created", "in_progress"),
            self._of_answer("response.in_progress", "in_progress"),
        ]

    def take(self, event: TokenEvent | EndEvent) -> list[NamedEvent]:
        if event.logprobs is not None and self._job.shows_logprobs:
            self._pending.append(event.logprobs)
        events = [made for one in self._reader.take(event) for made in self._read(one)]
        if self._reader.finish is not None:
            events += self._close("incomplete" if self._reader.finish == "length" else "completed")
        return events

    def closing(self) -> list[NamedEvent]:
        status = self._status()
        return [self._of_answer(f"response.{status}", status)]

    def failure(self, error: ApiError) -> list[NamedEvent]:
        self._open = None
        return [self._of_answer("response.failed", "failed", {"code": "server_error", "message": error.message})]

    def whole(self, chunks: Sequence[NamedEvent]) -> ResponseAnswer:
        return self._answer(self._status())

    # ---- items ----

    def _read(self, event: Event) -> list[NamedEvent]:
        """The events that one piece of the answer becomes."""
        if isinstance(event, ReasoningDelta):
            return [*self._opened("reasoning"), *self._grown("content", event.text)]
        if isinstance(event, ContentDelta):
            return [*self._opened("message"), *self._grown("content", event.text)]
        if isinstance(event, ToolCallStart):
            return self._opened("function_call", name=event.name)
        if isinstance(event, ToolCallDelta):
            return self._grown("arguments", event.arguments)
        assert isinstance(event, ToolCallEnd)
        return self._close("completed" if event.is_complete else "incomplete")

    def _opened(self, kind: str, name: str = "") -> list[NamedEvent]:
        """Close what is open and open an item of this kind, unless it is the one that is."""
        if self._open is not None and self._open["type"] == kind and kind != "function_call":
            return []
        events = self._close("completed")
        item: dict[str, Any] = {"type": kind, "id": new_id({"reasoning": "rs_", "message": "msg_"}.get(kind, "fc_"))}
        if kind == "function_call":
            item |= {"call_id": new_id("call_"), "name": name, "arguments": ""}
        else:
            item["content"] = []
            item["summary" if kind == "reasoning" else "role"] = [] if kind == "reasoning" else "assistant"
        item["status"] = "in_progress"
        self._open = item
        self._items.append(item)
        events.append(self._of_item("response.output_item.added", item=_copied(item)))
        if kind != "function_call":
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            events.append(self._of_part("response.content_part.added", part=dict(part)))
        return events

    def _grown(self, field: str, text: str) -> list[NamedEvent]:
        item = self._open
        assert item is not None, "a piece of an item comes after its start"
        if field == "arguments":
            item["arguments"] += text
            return [self._of_item("response.function_call_arguments.delta", item_id=item["id"], delta=text)]
        part = item["content"][0]
        part["text"] += text
        more: dict[str, Any] = {"delta": text}
        if item["type"] == "message":
            shown = [self._names.token(one).model_dump() for one in self._pending]
            self._pending = []
            part["logprobs"] += shown
            more["logprobs"] = shown
        return [self._of_part(f"response.{part['type']}.delta", **more)]

    def _close(self, status: str) -> list[NamedEvent]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events: list[NamedEvent] = []
        if item["type"] == "function_call":
            done = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events.append(self._of_part(f"response.{part['type']}.done", text=part["text"], **more))
            events.append(self._of_part("response.content_part.done", part=dict(part)))
        events.append(self._of_item("response.output_item.done", item=_copied(item)))
        self._open = None
        return events

    # ---- shapes ----

    def _of_item(self, kind: str, **fields: Any) -> NamedEvent:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> NamedEvent:
        return self._of_item(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _of_answer(self, kind: str, status: str, error: dict[str, str] | None = None) -> NamedEvent:
        return self._event(kind, response=self._answer(status, error).model_dump())

    def _event(self, kind: str, **fields: Any) -> NamedEvent:
        event = NamedEvent({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return event

    def _status(self) -> str:
        return "incomplete" if self._reader.finish == "length" else "completed"

    def _usage(self) -> dict[str, Any]:
        usage = usage_of_chat(self._job, [self._reader])
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details.model_dump(),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details.model_dump(),
            "total_tokens": usage.total_tokens,
        }

    def _answer(self, status: str, error: dict[str, str] | None = None) -> ResponseAnswer:
        asked, is_running = self._asked, status == "in_progress"
        text = {} if asked.text is None else asked.text.model_dump(by_alias=True, exclude_none=True)
        params = self._job.outputs[0].params
        return ResponseAnswer(
            id=self._id,
            object="response",
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            background=False,
            error=error,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            model=self._served.name,
            output=[] if is_running else [_copied(item) for item in self._items],
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            service_tier="default",
            store=False,
            temperature=params.temperature,
            text={"format": {"type": "text"}, **text},
            tool_choice=_dumped(asked.tool_choice) or "auto",
            tools=[_tool(tool) for tool in asked.tools or ()],
            top_logprobs=asked.top_logprobs,
            top_p=params.top_p,
            truncation="disabled",
            usage=None if is_running else self._usage(),
            user=asked.user,
        )


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now; it goes on growing."""
    copy = dict(item)
    if "content" in item:
        copy["content"] = [dict(part) for part in item["content"]]
    return copy


def _tool(tool: AnyTool) -> dict[str, Any]:
    strict = {"strict": bool(tool.strict)} if isinstance(tool, FlatFunction) else {}
    return {**tool.model_dump(exclude_none=True), **strict}


def _dumped(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
