"""The answers of chats and completions as models, an object at a time: what the text of the server must say.

Slow and plain. `take` gives the objects of a stream, `whole` the answer that they add up to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dsv4.http.apis.answer_reader import AnswerReader, new_id
from dsv4.http.apis.chat.schema import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    TokenLogprob,
    TopLogprob,
)
from dsv4.http.apis.completions.schema import TextChoice, TextCompletion, TextLogprobs
from dsv4.http.apis.logprobs import finite
from dsv4.http.apis.schemas import CompletionDetails, PromptDetails, PromptLogprob, Usage
from dsv4.request import TokenLogprobs
from dsv4.text.parse import ContentDelta, ReasoningDelta, ToolCallDelta, ToolCallStart
from dsv4.text.tokenizer import Detokenizer


class TokenNames:
    """by_id: a token is written `token_id:N`, so that no two look alike."""

    def __init__(self, tokenizer, *, by_id):
        self._tokenizer = tokenizer
        self._by_id = by_id

    def name(self, token_id):
        if self._by_id:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def token(self, logprobs):
        """A token of an answer, with the most likely ones beside it."""
        return TokenLogprob(
            **self._top(logprobs.token_id, logprobs.logprob).model_dump(),
            top_logprobs=[self._top(token_id, logprob) for token_id, logprob in logprobs.top],
        )

    def _top(self, token_id, logprob):
        value = self._tokenizer.token_bytes(token_id)
        return TopLogprob(token=self.name(token_id), logprob=finite(logprob), bytes=list(value))

    def prompt(self, given, num_top):
        """Every token of a prompt by its id, and the `num_top` likeliest there."""
        return [None if one is None else self._place(one, num_top) for one in given]

    def _place(self, logprobs, num_top):
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
        shown = dict(logprobs.top[:num_top])
        shown[logprobs.token_id] = logprobs.logprob
        return {
            str(token_id): PromptLogprob(
                logprob=finite(logprob), rank=ranks.get(token_id, len(ranks) + 1), decoded_token=self.name(token_id)
            )
            for token_id, logprob in shown.items()
        }


def usage_of(job, num_written, num_reasoning=0):
    """Tokens read, and these written, so far. A prompt with several answers counts once."""
    return Usage(
        prompt_tokens=job.num_prompt_tokens,
        completion_tokens=num_written,
        total_tokens=job.num_prompt_tokens + num_written,
        prompt_tokens_details=PromptDetails(cached_tokens=job.num_cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
    )


def usage_of_chat(job, readers):
    """The same, by the readers of a job's choices."""
    return usage_of(job, sum(one.num_tokens for one in readers), sum(one.num_reasoning for one in readers))


@dataclass
class _ChatState:
    """One choice of a chat while it comes."""

    reader: AnswerReader
    has_begun: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)


class ChatOracle:
    """Chunks of a chat completion, and from the same chunks the whole one."""

    def __init__(self, job, asked, served):
        self._job = job
        self._asked = asked
        self._served = served
        self._names = TokenNames(served.tokenizer, by_id=bool(asked.return_tokens_as_token_ids))
        self._id = new_id("chatcmpl-", asked)
        self._created = int(time.time())
        self._states = [_ChatState(AnswerReader(job.thinking)) for _ in job.outputs]
        self._has_sent = False

    def take(self, event):
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
            last.seed = self._job.outputs[event.choice].params.seed
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

    def closing(self):
        """The end of a stream; before it, where asked for, a chunk with usage and no choice."""
        if not self._asked.includes_usage:
            return []
        chunk = self._chunk()
        chunk.usage = self._usage()
        return [chunk]

    def whole(self, chunks):
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
    def _shows_prompt_ids(self):
        return bool(self._asked.return_token_ids or self._asked.return_prompt_token_ids)

    def _prompt_ids(self):
        return list(self._job.outputs[0].prompt_ids)

    def _usage(self):
        return usage_of_chat(self._job, [state.reader for state in self._states])

    def _chunk(self, *choices):
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

    def _deltas(self, events):
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


def _whole_choice(index, pieces):
    reasoning = "".join(piece.delta.reasoning_content or "" for piece in pieces)
    content = "".join(piece.delta.content or "" for piece in pieces)
    calls = []
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
    choice.seed = last.seed
    logprobs = [one for piece in pieces if piece.logprobs is not None for one in piece.logprobs.content]
    choice.logprobs = ChatLogprobs(content=logprobs) if logprobs else None
    if any(piece.token_ids is not None for piece in pieces):
        choice.token_ids = [one for piece in pieces for one in piece.token_ids or ()]
    return choice


@dataclass
class _TextState:
    """One choice of a completion while it comes."""

    detokenizer: Detokenizer  # of the tokens whose log-probabilities are shown: says where each begins
    num_tokens: int = 0
    num_shown: int = 0
    has_begun: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)


class TextOracle:
    """Chunks of a text completion, and from the same chunks the whole one."""

    def __init__(self, job, asked, served):
        self._job = job
        self._asked = asked
        self._served = served
        self._tokenizer = served.tokenizer
        self._names = TokenNames(served.tokenizer, by_id=bool(asked.return_tokens_as_token_ids))
        self._id = new_id("cmpl-", asked)
        self._created = int(time.time())
        self._states = [_TextState(Detokenizer(served.tokenizer)) for _ in job.outputs]

    def take(self, event):
        """One chunk where text became certain or the choice ended; with the first, what is said about the prompt."""
        state, output = self._states[event.choice], self._job.outputs[event.choice]
        state.num_tokens += event.token_id is not None
        if event.logprobs is not None and self._job.shows_logprobs:
            state.pending.append(event.logprobs)
        if event.token_id is not None and self._asked.return_token_ids:
            state.pending_ids.append(event.token_id)
        if not event.text and event.finish_reason is None:
            return []
        choice = TextChoice(index=event.choice, text=event.text, finish_reason=None)
        parts = []
        if not state.has_begun:
            state.has_begun = True
            parts += self._begin(event.choice, choice)
        if state.pending:
            parts.append(self._logprobs(state, state.pending))
            state.pending = []
        if parts:
            choice.logprobs = _joined(parts)
        if self._asked.return_token_ids:
            choice.token_ids, state.pending_ids = state.pending_ids, []
        if event.finish_reason is not None:
            choice.finish_reason = "length" if event.finish_reason == "length" else "stop"
            if output.stopped_by is not None:
                choice.stop_reason = output.stopped_by
            choice.seed = output.params.seed
        return [self._chunk(choice)]

    def closing(self):
        """The end of a stream; before it, where asked for, a chunk with usage and no choice."""
        if not self._asked.includes_usage:
            return []
        chunk = self._chunk()
        chunk.usage = self._usage()
        return [chunk]

    def whole(self, chunks):
        """The answer that all the chunks of `take` add up to."""
        choices = []
        for index in range(len(self._job.outputs)):
            pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            choice = pieces[0].model_copy()
            choice.text = "".join(piece.text for piece in pieces)
            choice.finish_reason = pieces[-1].finish_reason
            if pieces[-1].stop_reason is not None:
                choice.stop_reason = pieces[-1].stop_reason
            choice.seed = pieces[-1].seed
            parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
            choice.logprobs = _joined(parts) if parts else None
            if self._asked.return_token_ids:
                choice.token_ids = [one for piece in pieces for one in piece.token_ids or ()]
            choices.append(choice)
        answer = self._chunk(*choices)
        answer.usage = self._usage()
        return answer

    def _usage(self):
        return usage_of(self._job, sum(state.num_tokens for state in self._states))

    def _chunk(self, *choices):
        chunk = TextCompletion(
            id=self._id, object="text_completion", created=self._created, model=self._served.name,
            system_fingerprint=self._served.fingerprint, choices=list(choices),
        )  # fmt: skip
        if self._asked.has_running_usage:
            chunk.usage = self._usage()
        return chunk

    def _begin(self, index, choice):
        """Put what a choice says about its prompt into its first piece; returns the echoed log-probabilities."""
        output = self._job.outputs[index]
        prompt_ids = list(output.prompt_ids)
        if self._asked.return_token_ids:
            choice.prompt_token_ids = prompt_ids
        if self._asked.prompt_logprobs is not None:
            choice.prompt_logprobs = self._names.prompt(output.prompt_logprobs, self._asked.prompt_logprobs)
        if not self._asked.echo:
            return []
        choice.text = self._tokenizer.decode(prompt_ids) + choice.text
        if self._asked.logprobs is None:
            return []
        first = TokenLogprobs(prompt_ids[0], 0.0, ())  # nothing predicts it
        scored = [first, *(one for one in output.prompt_logprobs[1:] if one is not None)]
        echoed = self._logprobs(self._states[index], scored)
        echoed.token_logprobs[0] = echoed.top_logprobs[0] = None
        return [echoed]

    def _logprobs(self, state, given):
        shown = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one in given:
            best = {}
            for token_id, logprob in one.top[: self._asked.logprobs]:
                best.setdefault(self._names.name(token_id), finite(logprob))  # of two that print alike, the likelier
            shown.tokens.append(self._names.name(one.token_id))
            shown.token_logprobs.append(finite(one.logprob))
            shown.top_logprobs.append(best)
            shown.text_offset.append(state.num_shown)
            state.num_shown += len(state.detokenizer.push(one.token_id))
        return shown


def _joined(parts):
    return TextLogprobs(
        tokens=[one for part in parts for one in part.tokens],
        token_logprobs=[one for part in parts for one in part.token_logprobs],
        top_logprobs=[one for part in parts for one in part.top_logprobs],
        text_offset=[one for part in parts for one in part.text_offset],
    )
