"""From the events of a chat to the answer of `POST /v1/responses`: its items, as a stream of named events or whole."""

import json
import time
from typing import Any

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.answer_reader import AnswerReader, new_id, usage_of_chat
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.responses.request import AnyTool, FlatFunction, ResponsesRequest, model_name
from dsv4.http.apis.schemas import Answer
from dsv4.http.apis.sse import named_event, quote, to_json
from dsv4.http.errors import ApiError
from dsv4.http.streaming import Assembler
from dsv4.text.collected import GrowingText
from dsv4.text.parse import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart


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


_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
_ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


class ResponsesAssembler(Assembler):
    """Reasoning, one message and any calls, each an item that opens, grows and closes. The shape of the whole is that
    of `ResponseAnswer`."""

    def __init__(self, job: Job, asked: ResponsesRequest, served: ModelInfo) -> None:
        self._job = job
        self._asked = asked
        self._served = served
        self._names = served.names(by_id=False)
        self._functions = {model_name(space, tool.name): (space, tool.name) for space, tool in asked.functions}
        self._reader = AnswerReader(job.thinking)
        self._id = "resp_" + (asked.request_id or new_id(""))
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = GrowingText()  # of the open item; of a call, its arguments
        self._before_number, self._before_text = "", ""  # the constant text of a delta of the open item
        # log-probabilities, by their place in the output: that of the next token, and the first that was not shown
        self._num_scored, self._num_shown = 0, 0
        self._first_shown = 0  # of the open message
        self._num_events = 0

    # ---- streams ----

    def opening(self) -> str:
        created = self._of_answer("response.created", "in_progress")
        return created + self._of_answer("response.in_progress", "in_progress")

    def take(self, event: TokenEvent) -> str:
        if event.logprobs is not None and self._job.shows_logprobs:
            self._num_scored += 1
        events = "".join([self._read(one) for one in self._reader.take(event)])
        if self._reader.finish is not None:
            events += self._close("incomplete" if self._reader.finish in ("length", "abort") else "completed")
        return events

    def closing(self) -> str:
        status = self._status()
        return self._of_answer(f"response.{status}", status)

    def failure(self, error: ApiError) -> str:
        if self._open is not None:
            self._settle(self._open)
        self._open = None
        return self._of_answer("response.failed", "failed", {"code": "server_error", "message": error.message})

    def whole(self) -> str:
        return to_json(self._answer(self._status()))

    # ---- items ----

    def _read(self, event: Event) -> str:
        """The events that one piece of the answer becomes."""
        if type(event) is ContentDelta:
            return self._opened("message") + self._grown(event.text)
        if type(event) is ReasoningDelta:
            return self._opened("reasoning") + self._grown(event.text)
        if type(event) is ToolCallStart:
            return self._opened("function_call", name=event.name)
        if type(event) is ToolCallDelta:
            return self._grown(event.arguments)
        assert type(event) is ToolCallEnd
        return self._close("completed" if event.is_complete else "incomplete")

    def _opened(self, kind: str, name: str = "") -> str:
        """Close what is open and open an item of this kind, unless it is the one that is."""
        if self._open is not None and self._open["type"] == kind and kind != "function_call":
            return ""
        events = self._close("completed")
        item: dict[str, Any] = {"type": kind, "id": new_id(_ID_PREFIXES[kind])}
        if kind == "function_call":
            namespace, name = self._functions.get(name, (None, name))
            item |= {"call_id": new_id("call_"), "name": name, "arguments": ""}
            item |= {} if namespace is None else {"namespace": namespace}
        else:
            item["content"] = []
            item["summary" if kind == "reasoning" else "role"] = [] if kind == "reasoning" else "assistant"
        item["status"] = "in_progress"
        self._open = item
        self._items.append(item)
        self._text = GrowingText()
        self._first_shown = self._num_shown
        events += self._of_item("response.output_item.added", item=item)
        if kind != "function_call":
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            events += self._of_part("response.content_part.added", part=part)
            item["content"].append(part)
        self._prepare_deltas(item)
        return events

    def _prepare_deltas(self, item: dict[str, Any]) -> None:
        """What the open item's deltas have in common."""
        is_call = item["type"] == "function_call"
        kind = f"response.{'function_call_arguments' if is_call else _PARTS[item['type']]}.delta"
        place = "" if is_call else '"content_index":0,'
        self._before_number = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'
        self._before_text = f',"output_index":{len(self._items) - 1},"item_id":"{item["id"]}",{place}"delta":'

    def _grown(self, text: str) -> str:
        assert self._open is not None, "a piece of an item comes after its start"
        self._text.add(text)
        number, shown = self._num_events, ""
        self._num_events += 1
        if self._open["type"] == "message":
            scored = self._job.outputs[0].logprobs[self._num_shown : self._num_scored]
            self._num_shown = self._num_scored
            shown = f',"logprobs":{self._names.tokens(scored)}'
        return f"{self._before_number}{number}{self._before_text}{quote(text)}{shown}}}\n\n"

    def _settle(self, item: dict[str, Any]) -> None:
        """Write what has come of the open item into it."""
        if item["type"] == "function_call":
            item["arguments"] = str(self._text)
            return
        part = item["content"][0]
        part["text"] = str(self._text)
        if item["type"] == "message" and self._num_shown > self._first_shown:
            scored = self._job.outputs[0].logprobs[self._first_shown : self._num_shown]
            part["logprobs"] = json.loads(self._names.tokens(scored))

    def _close(self, status: str) -> str:
        item = self._open
        if item is None:
            return ""
        self._settle(item)
        item["status"] = status
        if item["type"] == "function_call":
            done = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            events = self._of_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events = self._of_part(f"response.{part['type']}.done", text=part["text"], **more)
            events += self._of_part("response.content_part.done", part=part)
        events += self._of_item("response.output_item.done", item=item)
        self._open = None
        return events

    # ---- shapes ----

    def _of_item(self, kind: str, **fields: Any) -> str:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> str:
        return self._of_item(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _of_answer(self, kind: str, status: str, error: dict[str, str] | None = None) -> str:
        return self._event(kind, response=self._answer(status, error))

    def _event(self, kind: str, **fields: Any) -> str:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _status(self) -> str:
        return "incomplete" if self._reader.finish in ("length", "abort") else "completed"

    def _usage(self) -> dict[str, Any]:
        usage = usage_of_chat(self._job, [self._reader])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _answer(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        asked, is_running = self._asked, status == "in_progress"
        text = {} if asked.text is None else asked.text.model_dump(by_alias=True, exclude_none=True)
        params = self._job.outputs[0].params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._served.name,
            "output": [] if is_running else self._items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": _dumped(asked.tool_choice) or "auto",
            "tools": [_tool(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if is_running else self._usage(),
            "user": asked.user,
        }


def _tool(tool: AnyTool) -> dict[str, Any]:
    strict = {"strict": bool(tool.strict)} if isinstance(tool, FlatFunction) else {}
    return {**tool.model_dump(exclude_none=True), **strict}


def _dumped(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
