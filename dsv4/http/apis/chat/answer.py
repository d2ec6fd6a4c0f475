"""From the events of a chat to OpenAI's answers, chunk by chunk or whole. The shapes are those of `ChatCompletionChunk`
and `ChatCompletion`."""

import time
from dataclasses import dataclass, field
from typing import Literal

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.answer_reader import AnswerReader, FinishWord, new_id, usage_of_chat
from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.schemas import Answer, OpenAiAnswer, PromptLogprobs, Usage
from dsv4.http.apis.sse import DONE, json_object, plain_event, quote, to_json
from dsv4.http.streaming import Assembler
from dsv4.request import TokenLogprobs
from dsv4.text.parse import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallStart, parse_completion


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per generated token, those of the reasoning and of markers included."""

    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str | None = None
    arguments: str


class CalledTool(Answer):
    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Answer):
    """A whole message, or in a stream the next piece of one."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class Choice(Answer):
    index: int
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    token_ids: list[int] | None = None


class ChatChoice(Choice):
    message: ChatMessage
    finish_reason: FinishWord


class ChatChunkChoice(Choice):
    delta: ChatMessage
    finish_reason: FinishWord | None = None


class ChatCompletion(OpenAiAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(OpenAiAnswer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


@dataclass
class _ChatState:
    """One choice of a chat while it comes. `opening`: the constant text of its chunks before the delta."""

    reader: AnswerReader
    opening: str
    has_begun: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)


class ChatAssembler(Assembler):
    """Chunks of a chat completion, or the whole one. A choice's role comes with its first token, so that the first
    chunk is the first token."""

    def __init__(self, job: Job, asked: ChatRequest, served: ModelInfo) -> None:
        self._job = job
        self._asked = asked
        self._names = served.names(by_id=bool(asked.return_tokens_as_token_ids))
        self._id, self._created = new_id("chatcmpl-", asked), int(time.time())
        self._served = served
        self._head = f"{self._envelope('chat.completion.chunk')[:-1]},"
        self._states = [
            _ChatState(AnswerReader(job.thinking), f'data: {self._head}"choices":[{{"index":{index},"delta":{{')
            for index in range(len(job.outputs))
        ]
        self._has_sent = False
        self._keeps_logprobs = job.shows_logprobs
        self._keeps_ids = bool(asked.return_token_ids)
        self._shows_reasoning = asked.include_reasoning is not False
        self._has_running_usage = asked.has_running_usage

    def take(self, event: TokenEvent) -> str:
        state = self._states[event.choice]
        if self._keeps_logprobs and event.logprobs is not None:
            state.pending.append(event.logprobs)
        if self._keeps_ids and event.token_id is not None:
            state.pending_ids.append(event.token_id)
        chunks = []
        for one in state.reader.take(event):
            delta = self._delta(one)
            if delta is not None:
                chunks.append(self._chunk(state, delta, '"finish_reason":null'))
        if state.reader.finish is not None:
            output = self._job.outputs[event.choice]
            reason = "" if output.stopped_by is None else f',"stop_reason":{to_json(output.stopped_by)}'
            finish = f'"finish_reason":"{state.reader.finish}"{reason},"seed":{output.params.seed}'
            chunks.append(self._chunk(state, "", finish))
        return "".join(chunks)

    def closing(self) -> str:
        """The end of a stream; before it, where asked for, a chunk with usage and no choice."""
        if not self._asked.includes_usage:
            return DONE
        end = f',"prompt_token_ids":{self._first_ids()}' if self._first_ids() else ""
        return plain_event(f'{self._head}"choices":[],"usage":{self._usage()}{end}}}') + DONE

    def keep(self, event: TokenEvent) -> None:
        self._states[event.choice].reader.take(event)

    def whole(self) -> str:
        output, num_top = self._job.outputs[0], self._asked.prompt_logprobs
        shown = None if num_top is None else to_json(self._names.prompt(output.prompt_logprobs, num_top))
        end = json_object(
            choices=f"[{','.join(map(self._choice, range(len(self._states))))}]", usage=self._usage(),
            prompt_logprobs=shown, prompt_token_ids=self._first_ids() or None,
        )  # fmt: skip
        return f"{self._envelope('chat.completion')[:-1]},{end[1:]}"

    # ---- shapes ----

    def _envelope(self, kind: str) -> str:
        served = self._served
        fields = {"id": self._id, "object": kind, "created": self._created, "model": served.name}
        return to_json({**fields, "system_fingerprint": served.fingerprint})

    def _usage(self) -> str:
        return to_json(usage_of_chat(self._job, [state.reader for state in self._states]))

    def _first_ids(self) -> str:
        """The prompt's ids, where a stream's first chunk or a whole answer has them."""
        is_asked = self._asked.return_token_ids or self._asked.return_prompt_token_ids
        return to_json(list(self._job.outputs[0].prompt_ids)) if is_asked and not self._has_sent else ""

    def _chunk(self, state: _ChatState, delta: str, finish: str) -> str:
        logprobs = ids = end = ""
        if not state.has_begun:
            state.has_begun = True
            content = delta or '"content":""'
            delta = f'"role":"assistant",{content}'
        if state.pending:
            logprobs = f'"logprobs":{{"content":{self._names.tokens(state.pending)}}},'
            state.pending = []
        if state.pending_ids:
            ids = f',"token_ids":{to_json(state.pending_ids)}'
            state.pending_ids = []
        if self._has_running_usage:
            end = f',"usage":{self._usage()}'
        if not self._has_sent:
            first = self._first_ids()
            end += f',"prompt_token_ids":{first}' if first else ""
            self._has_sent = True
        return f"{state.opening}{delta}}},{logprobs}{finish}{ids}}}]{end}}}\n\n"

    def _delta(self, event: Event) -> str | None:
        """The fields of a delta; None for what is not shown."""
        if type(event) is ContentDelta:
            return f'"content":{quote(event.text)}'
        if type(event) is ReasoningDelta:
            return f'"reasoning_content":{quote(event.text)}' if self._shows_reasoning else None
        if type(event) is ToolCallDelta:
            return f'"tool_calls":[{{"index":{event.index},"function":{{"arguments":{quote(event.arguments)}}}}}]'
        if type(event) is ToolCallStart:
            call = {"index": event.index, "id": new_id("call_"), "type": "function"}
            return f'"tool_calls":[{to_json({**call, "function": {"name": event.name, "arguments": ""}})}]'
        return None

    def _choice(self, index: int) -> str:
        """A choice of the whole answer."""
        output, finish = self._job.outputs[index], self._states[index].reader.finish
        parsed = parse_completion(output.text, self._job.thinking)
        calls = [
            {"id": new_id("call_"), "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in parsed.tool_calls
        ]
        message = json_object(
            role='"assistant"',
            content="null" if calls and not parsed.content else quote(parsed.content),
            reasoning_content=quote(parsed.reasoning) if parsed.reasoning and self._shows_reasoning else None,
            tool_calls=to_json(calls) if calls else None,
        )
        has_logprobs = self._keeps_logprobs and len(output.logprobs) > 0
        return json_object(
            index=str(index),
            message=message,
            logprobs=f'{{"content":{self._names.tokens(output.logprobs)}}}' if has_logprobs else "null",
            finish_reason=f'"{finish}"',
            stop_reason=None if output.stopped_by is None else to_json(output.stopped_by),
            seed=str(output.params.seed),
            token_ids=to_json(list(output.token_ids)) if self._keeps_ids else None,
        )
