"""From the events of a chat to OpenAI's answers, whole or chunk by chunk. Completions are in `assemble_text.py`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsv4.engine.events import EndEvent, TokenEvent
from dsv4.http.apis.answer_reader import AnswerReader, usage_of_chat
from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.fields import SamplingFields
from dsv4.http.apis.logprobs import TokenNames
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.schemas import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    PlainEvent,
    Sent,
    Usage,
)
from dsv4.http.errors import ApiError
from dsv4.request import TokenLogprobs
from dsv4.text.parse import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallStart

DONE = PlainEvent("[DONE]")


def new_id(prefix: str, asked: SamplingFields | None = None) -> str:
    """An answer's id: the request's own where it has one."""
    given = None if asked is None else asked.request_id or asked.rid
    return prefix + (given or secrets.token_hex(12))


def error_event(error: ApiError) -> PlainEvent:
    """An error in a stream that has begun."""
    return PlainEvent(json.dumps(error.body))


@dataclass
class _ChatState:
    """One choice of a chat while it comes."""

    reader: AnswerReader
    has_begun: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)


class ChatAssembler:
    """Chunks of a chat completion, and from the same chunks the whole one."""

    def __init__(self, job: Job, asked: ChatRequest, served: ModelInfo) -> None:
        self._job = job
        self._asked = asked
        self._served = served
        self._names = TokenNames(served.tokenizer, by_id=bool(asked.return_tokens_as_token_ids))
        self._id = new_id("chatcmpl-", asked)
        self._created = int(time.time())
        self._states = [_ChatState(AnswerReader(job.thinking)) for _ in job.outputs]
        self._has_sent = False

    def opening(self) -> list[Sent]:
        """Nothing: the role comes with a choice's first token, so that the first chunk is the first token."""
        return []

    def take(self, event: TokenEvent | EndEvent) -> list[ChatCompletionChunk]:
        """What becomes certain with this token; often nothing inside a tag."""
        state = self._states[event.choice]
        if event.logprobs is not None and self._job.shows_logprobs:
            state.pending.append(event.logprobs)
        if event.token_id is not None and self._asked.return_token_ids:
            state.pending_ids.append(event.token_id)
        choices = [
            ChatChunkChoice(index=event.choice, delta=delta, finish_reason=None)
            for delta in self._deltas(state.reader.take(event))
        ]
        if state.reader.finish is not None:
            last = ChatChunkChoice(index=event.choice, delta=ChatMessage(), finish_reason=state.reader.finish)
            if self._job.outputs[event.choice].stopped_by is not None:
                last.stop_reason = self._job.outputs[event.choice].stopped_by
            choices.append(last)
        if not choices:
            return []
        first = choices[0]
        if not state.has_begun:
            state.has_begun = True
            first.delta.role = "assistant"
            if not first.delta.model_fields_set - {"role"}:
                first.delta.content = ""
        if state.pending:
            first.logprobs = ChatLogprobs(content=[self._names.token(one) for one in state.pending])
            state.pending = []
        if state.pending_ids:
            first.token_ids, state.pending_ids = state.pending_ids, []
        return [self._chunk(choice) for choice in choices]

    def closing(self) -> list[Sent]:
        """The end of a stream; before it, where asked for, a chunk with usage and no choice."""
        if not self._asked.includes_usage:
            return [DONE]
        chunk = self._chunk()
        chunk.usage = self._usage()
        return [chunk, DONE]

    def failure(self, error: ApiError) -> list[Sent]:
        return [error_event(error)]

    def whole(self, chunks: Sequence[ChatCompletionChunk]) -> ChatCompletion:
        """The answer that all the chunks of `take` add up to."""
        answer = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._served.name,
            system_fingerprint=self._served.fingerprint,
            choices=[
                _whole_choice(index, [c.choices[0] for c in chunks if c.choices[0].index == index])
                for index in range(len(self._states))
            ],
            usage=self._usage(),
        )
        if self._shows_prompt_ids:
            answer.prompt_token_ids = self._prompt_ids()
        if self._asked.prompt_logprobs is not None:
            read = self._job.outputs[0].prompt_logprobs
            answer.prompt_logprobs = self._names.prompt(read, self._asked.prompt_logprobs)
        return answer

    @property
    def _shows_prompt_ids(self) -> bool:
        return bool(self._asked.return_token_ids or self._asked.return_prompt_token_ids)

    def _prompt_ids(self) -> list[int]:
        return list(self._job.outputs[0].prompt_ids)

    def _usage(self) -> Usage:
        return usage_of_chat(self._job, [state.reader for state in self._states])

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._served.name,
            system_fingerprint=self._served.fingerprint, choices=list(choices),
        )  # fmt: skip
        if self._asked.has_running_usage:
            chunk.usage = self._usage()
        if self._shows_prompt_ids and not self._has_sent:
            chunk.prompt_token_ids = self._prompt_ids()
        self._has_sent = True
        return chunk

    def _deltas(self, events: Sequence[Event]) -> Iterator[ChatMessage]:
        for event in events:
            if isinstance(event, ReasoningDelta):
                if self._asked.include_reasoning is not False:
                    yield ChatMessage(reasoning_content=event.text)
            elif isinstance(event, ContentDelta):
                yield ChatMessage(content=event.text)
            elif isinstance(event, ToolCallStart):
                call = CalledTool(
                    index=event.index, id=new_id("call_"), type="function",
                    function=CalledFunction(name=event.name, arguments=""),
                )  # fmt: skip
                yield ChatMessage(tool_calls=[call])
            elif isinstance(event, ToolCallDelta):
                function = CalledFunction(arguments=event.arguments)
                yield ChatMessage(tool_calls=[CalledTool(index=event.index, function=function)])


def _whole_choice(index: int, pieces: Sequence[ChatChunkChoice]) -> ChatChoice:
    reasoning = "".join(piece.delta.reasoning_content or "" for piece in pieces)
    content = "".join(piece.delta.content or "" for piece in pieces)
    calls: list[CalledTool] = []
    for piece in pieces:
        for call in piece.delta.tool_calls or ():
            if call.id is not None:
                function = CalledFunction(name=call.function.name, arguments="")
                calls.append(CalledTool(id=call.id, type="function", function=function))
            else:
                calls[-1].function.arguments += call.function.arguments
    message = ChatMessage(role="assistant", content=content or None if calls else content)
    if reasoning:
        message.reasoning_content = reasoning
    if calls:
        message.tool_calls = calls
    last = pieces[-1]
    assert last.finish_reason is not None, "the last piece of a choice says why it ended"
    choice = ChatChoice(index=index, message=message, finish_reason=last.finish_reason)
    if last.stop_reason is not None:
        choice.stop_reason = last.stop_reason
    logprobs = [one for piece in pieces if piece.logprobs is not None for one in piece.logprobs.content]
    if logprobs:
        choice.logprobs = ChatLogprobs(content=logprobs)
    if any(piece.token_ids is not None for piece in pieces):
        choice.token_ids = [one for piece in pieces for one in piece.token_ids or ()]
    return choice
