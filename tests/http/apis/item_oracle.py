"""The answers of `/v1/responses` and `/v1/messages` as dictionaries, an object at a time; as `answer_oracle.py`."""

from __future__ import annotations

import json
import time

from answer_oracle import TokenNames, usage_of_chat

from dsv4.http.apis.answer_reader import AnswerReader, new_id
from dsv4.http.apis.messages.schema import ClaudeUsage, MessageAnswer
from dsv4.http.apis.responses.answer import _dumped, _tool
from dsv4.http.apis.responses.schema import ResponseAnswer
from dsv4.text.parse import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsesOracle:
    """Reasoning, one message and any calls, each an item that opens, grows and closes."""

    def __init__(self, job, asked, served):
        self._job = job
        self._asked = asked
        self._served = served
        self._names = TokenNames(served.tokenizer, by_id=False)
        self._reader = AnswerReader(job.thinking)
        self._id = "resp_" + (asked.request_id or new_id(""))
        self._created = int(time.time())
        self._items = []
        self._open = None
        self._pending = []
        self._num_events = 0

    # ---- streams ----

    def opening(self):
        return [
            self._of_answer("response.created", "in_progress"),
            self._of_answer("response.in_progress", "in_progress"),
        ]

    def take(self, event):
        if event.logprobs is not None and self._job.shows_logprobs:
            self._pending.append(event.logprobs)
        events = [made for one in self._reader.take(event) for made in self._read(one)]
        if self._reader.finish is not None:
            events += self._close("incomplete" if self._reader.finish == "length" else "completed")
        return events

    def closing(self):
        status = self._status()
        return [self._of_answer(f"response.{status}", status)]

    def whole(self, chunks):
        return self._answer(self._status())

    # ---- items ----

    def _read(self, event):
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

    def _opened(self, kind, name=""):
        """Close what is open and open an item of this kind, unless it is the one that is."""
        if self._open is not None and self._open["type"] == kind and kind != "function_call":
            return []
        events = self._close("completed")
        item = {"type": kind, "id": new_id({"reasoning": "rs_", "message": "msg_"}.get(kind, "fc_"))}
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
            part = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            events.append(self._of_part("response.content_part.added", part=dict(part)))
        return events

    def _grown(self, field, text):
        item = self._open
        assert item is not None, "a piece of an item comes after its start"
        if field == "arguments":
            item["arguments"] += text
            return [self._of_item("response.function_call_arguments.delta", item_id=item["id"], delta=text)]
        part = item["content"][0]
        part["text"] += text
        more = {"delta": text}
        if item["type"] == "message":
            shown = [self._names.token(one).model_dump() for one in self._pending]
            self._pending = []
            part["logprobs"] = part["logprobs"] + shown
            more["logprobs"] = shown
        return [self._of_part(f"response.{part['type']}.delta", **more)]

    def _close(self, status):
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events = []
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

    def _of_item(self, kind, **fields):
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind, **fields):
        return self._of_item(kind, item_id=self._items[-1]["id"], content_index=0, **fields)

    def _of_answer(self, kind, status, error=None):
        return self._event(kind, response=self._answer(status, error).model_dump())

    def _event(self, kind, **fields):
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _status(self):
        return "incomplete" if self._reader.finish == "length" else "completed"

    def _usage(self):
        usage = usage_of_chat(self._job, [self._reader])
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details.model_dump(),
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details.model_dump(),
            "total_tokens": usage.total_tokens,
        }

    def _answer(self, status, error=None):
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


def _copied(item):
    """An item as it is now; it goes on growing."""
    copy = dict(item)
    if "content" in item:
        copy["content"] = [dict(part) for part in item["content"]]
    return copy


class MessagesOracle:
    """Thinking, text and tool use, each a block that starts, grows and stops."""

    def __init__(self, job, asked, served):
        self._job = job
        self._served = served
        self._shows_thinking = asked.thinking is None or asked.thinking.display != "omitted"
        self._reader = AnswerReader(job.thinking)
        self._id = "msg_" + (asked.request_id or new_id(""))
        self._blocks = []
        self._arguments = ""  # of the open call
        self._is_open = False

    # ---- streams ----

    def opening(self):
        return [({"type": "message_start", "message": self._answer().model_dump()})]

    def take(self, event):
        events = [made for one in self._reader.take(event) for made in self._read(one)]
        return events + self._close() if self._reader.finish is not None else events

    def closing(self):
        answer = self._answer()
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        return [
            ({"type": "message_delta", "delta": delta, "usage": answer.usage.model_dump()}),
            ({"type": "message_stop"}),
        ]

    def whole(self, chunks):
        return self._answer()

    # ---- blocks ----

    def _read(self, event):
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

    def _started(self, kind, fields):
        """Stop the open block and start one of this kind, unless it is the one that is open."""
        if self._is_open and self._blocks[-1]["type"] == kind and kind != "tool_use":
            return []
        events = self._close()
        block = {"type": kind, **fields}
        self._blocks.append(block)
        self._is_open = True
        return [*events, self._of_block("content_block_start", content_block=dict(block))]

    def _grown(self, field, text):
        self._blocks[-1][field] += text
        return [self._delta({"type": f"{field}_delta", field: text})]

    def _close(self):
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = json.loads(self._arguments or "{}")
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if block["type"] == "thinking" else []
        return [*signed, self._of_block("content_block_stop")]

    # ---- shapes ----

    def _delta(self, delta):
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind, **fields):
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _answer(self):
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
