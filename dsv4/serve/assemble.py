"""From the events of a job to OpenAI's answers, whole or chunk by chunk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsv4.engine.events import TokenEvent
from dsv4.request import TokenLogprobs
from dsv4.serve.jobs import Job
from dsv4.serve.responses import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    FinishWord,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from dsv4.text.parse import ContentDelta, Event, ReasoningDelta, StreamParser, ToolCallDelta, ToolCallEnd, ToolCallStart
from dsv4.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def usage_of(job: Job) -> Usage:
    """Tokens read and written so far; of a prompt with several answers, what its first one found in the cache."""
    written = sum(sequence.num_output for sequence in job.sequences)
    cached = sum(sequence.num_cached_tokens for sequence in job.sequences[:: job.num_each])
    return Usage(
        prompt_tokens=job.num_prompt_tokens, completion_tokens=written, total_tokens=job.num_prompt_tokens + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )  # fmt: skip


@dataclass
class _ChatState:
    """One choice of a chat while it comes."""

    parser: StreamParser
    call_ids: list[str] = field(default_factory=list)
    has_complete_call: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)


class ChatAssembler:
    """Chunks of a chat completion, and from the same chunks the whole one."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())
        self._states = [_ChatState(StreamParser(job.thinking)) for _ in job.sequences]

    def opening(self) -> list[ChatCompletionChunk]:
        """The first chunk of every choice."""
        delta = ChatMessage(role="assistant", content="")
        return [
            self._chunk(ChatChunkChoice(index=index, delta=delta, finish_reason=None))
            for index in range(len(self._states))
        ]

    def take(self, event: TokenEvent) -> list[ChatCompletionChunk]:
        """What becomes certain with this token; often nothing inside a tag."""
        state = self._states[event.choice]
        if event.logprobs is not None:
            state.pending.append(event.logprobs)
        events = state.parser.feed(event.text)
        is_last = event.finish_reason is not None
        if is_last:
            events += state.parser.finish()
        choices = [
            ChatChunkChoice(index=event.choice, delta=delta, finish_reason=None)
            for delta in self._deltas(state, events)
        ]
        if is_last:
            reason: FinishWord = "length" if event.finish_reason == "length" else "stop"
            if reason == "stop" and state.has_complete_call:
                reason = "tool_calls"
            choices.append(ChatChunkChoice(index=event.choice, delta=ChatMessage(), finish_reason=reason))
        if choices and state.pending:
            choices[0].logprobs = ChatLogprobs(content=[_token(one, self._tokenizer) for one in state.pending])
            state.pending = []
        return [self._chunk(choice) for choice in choices]

    def usage_chunk(self) -> ChatCompletionChunk:
        """The last chunk of a stream that asked for usage: no choice in it."""
        chunk = self._chunk()
        chunk.usage = usage_of(self._job)
        return chunk

    def whole(self, chunks: Sequence[ChatCompletionChunk]) -> ChatCompletion:
        """The answer that all the chunks of `take` add up to."""
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[
                _whole_choice(index, [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index])
                for index in range(len(self._states))
            ],
            usage=usage_of(self._job),
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model,
            choices=list(choices),
        )  # fmt: skip

    def _deltas(self, state: _ChatState, events: Sequence[Event]) -> Iterator[ChatMessage]:
        for event in events:
            if isinstance(event, ReasoningDelta):
                yield ChatMessage(reasoning_content=event.text)
            elif isinstance(event, ContentDelta):
                yield ChatMessage(content=event.text)
            elif isinstance(event, ToolCallStart):
                state.call_ids.append(new_id("call_"))
                call = CalledTool(
                    index=event.index, id=state.call_ids[-1], type="function",
                    function=CalledFunction(name=event.name, arguments=""),
                )  # fmt: skip
                yield ChatMessage(tool_calls=[call])
            elif isinstance(event, ToolCallDelta):
                function = CalledFunction(arguments=event.arguments)
                yield ChatMessage(tool_calls=[CalledTool(index=event.index, function=function)])
            elif isinstance(event, ToolCallEnd):
                state.has_complete_call |= event.is_complete


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
    finish = pieces[-1].finish_reason
    assert finish is not None, "the last piece of a choice says why it ended"
    choice = ChatChoice(index=index, message=message, finish_reason=finish)
    logprobs = [one for piece in pieces if piece.logprobs is not None for one in piece.logprobs.content]
    if logprobs:
        choice.logprobs = ChatLogprobs(content=logprobs)
    return choice


class TextAssembler:
    """Chunks of a text completion, and from the same chunks the whole one."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._id = new_id("cmpl-")
        self._created = int(time.time())
        self._pending: list[list[TokenLogprobs]] = [[] for _ in job.sequences]
        self._offsets = [0] * len(job.sequences)

    def opening(self) -> list[TextCompletion]:
        return []

    def take(self, event: TokenEvent) -> list[TextCompletion]:
        """One chunk where text became certain or the choice ended."""
        pending = self._pending[event.choice]
        if event.logprobs is not None:
            pending.append(event.logprobs)
        if not event.text and event.finish_reason is None:
            return []
        choice = TextChoice(index=event.choice, text=event.text, finish_reason=None)
        if pending:
            choice.logprobs = self._logprobs(event.choice, pending)
            self._pending[event.choice] = []
        if event.finish_reason is not None:
            choice.finish_reason = "length" if event.finish_reason == "length" else "stop"
        return [self._chunk(choice)]

    def usage_chunk(self) -> TextCompletion:
        chunk = self._chunk()
        chunk.usage = usage_of(self._job)
        return chunk

    def whole(self, chunks: Sequence[TextCompletion]) -> TextCompletion:
        """The answer that all the chunks of `take` add up to."""
        choices = []
        for index in range(len(self._job.sequences)):
            pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            choice = TextChoice(
                index=index, text="".join(piece.text for piece in pieces), finish_reason=pieces[-1].finish_reason
            )
            parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
            if parts:
                choice.logprobs = TextLogprobs(
                    tokens=[one for part in parts for one in part.tokens],
                    token_logprobs=[one for part in parts for one in part.token_logprobs],
                    top_logprobs=[one for part in parts for one in part.top_logprobs],
                    text_offset=[one for part in parts for one in part.text_offset],
                )
            choices.append(choice)
        answer = self._chunk(*choices)
        answer.usage = usage_of(self._job)
        return answer

    def _chunk(self, *choices: TextChoice) -> TextCompletion:
        return TextCompletion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=list(choices)
        )

    def _logprobs(self, index: int, pending: Sequence[TokenLogprobs]) -> TextLogprobs:
        tokens = [_token(one, self._tokenizer) for one in pending]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.token)
        tops = []
        for token in tokens:
            best: dict[str, float] = {}
            for top in token.top_logprobs:
                best.setdefault(top.token, top.logprob)  # two tokens may print alike; the likelier one is first
            tops.append(best)
        return TextLogprobs(
            tokens=[token.token for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=tops,
            text_offset=offsets,
        )


def _token(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    return TokenLogprob(
        **_top(logprobs.token_id, logprobs.logprob, tokenizer).model_dump(),
        top_logprobs=[_top(token_id, logprob, tokenizer) for token_id, logprob in logprobs.top],
    )


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    value = tokenizer.token_bytes(token_id)
    text = value.decode("utf-8", errors="replace")
    return TopLogprob(token=text, logprob=max(logprob, _LEAST_LOGPROB), bytes=list(value))
