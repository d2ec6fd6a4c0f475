"""From the events of a text completion to OpenAI's answers, whole or chunk by chunk; prompts echoed and scored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.engine.events import EndEvent, TokenEvent
from dsv4.http.apis.answer_reader import usage_of
from dsv4.http.apis.chat.answer import DONE, error_event, new_id
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.logprobs import TokenNames, finite
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.schemas import Sent, TextChoice, TextCompletion, TextLogprobs, Usage
from dsv4.http.errors import ApiError
from dsv4.request import TokenLogprobs
from dsv4.text.tokenizer import Detokenizer


@dataclass
class _TextState:
    """One choice of a completion while it comes."""

    detokenizer: Detokenizer  # of the tokens whose log-probabilities are shown: says where each begins
    num_tokens: int = 0
    num_shown: int = 0
    has_begun: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)


class TextAssembler:
    """Chunks of a text completion, and from the same chunks the whole one."""

    def __init__(self, job: Job, asked: CompletionRequest, served: ModelInfo) -> None:
        self._job = job
        self._asked = asked
        self._served = served
        self._tokenizer = served.tokenizer
        self._names = TokenNames(served.tokenizer, by_id=bool(asked.return_tokens_as_token_ids))
        self._id = new_id("cmpl-", asked)
        self._created = int(time.time())
        self._states = [_TextState(Detokenizer(served.tokenizer)) for _ in job.outputs]

    def opening(self) -> list[Sent]:
        return []

    def take(self, event: TokenEvent | EndEvent) -> list[TextCompletion]:
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
        return [self._chunk(choice)]

    def closing(self) -> list[Sent]:
        """The end of a stream; before it, where asked for, a chunk with usage and no choice."""
        if not self._asked.includes_usage:
            return [DONE]
        chunk = self._chunk()
        chunk.usage = self._usage()
        return [chunk, DONE]

    def failure(self, error: ApiError) -> list[Sent]:
        return [error_event(error)]

    def whole(self, chunks: Sequence[TextCompletion]) -> TextCompletion:
        """The answer that all the chunks of `take` add up to."""
        choices = []
        for index in range(len(self._job.outputs)):
            pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
            choice = pieces[0].model_copy()
            choice.text = "".join(piece.text for piece in pieces)
            choice.finish_reason = pieces[-1].finish_reason
            if pieces[-1].stop_reason is not None:
                choice.stop_reason = pieces[-1].stop_reason
            parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
            if parts:
                choice.logprobs = _joined(parts)
            if self._asked.return_token_ids:
                choice.token_ids = [one for piece in pieces for one in piece.token_ids or ()]
            choices.append(choice)
        answer = self._chunk(*choices)
        answer.usage = self._usage()
        return answer

    def _usage(self) -> Usage:
        return usage_of(self._job, sum(state.num_tokens for state in self._states))

    def _chunk(self, *choices: TextChoice) -> TextCompletion:
        chunk = TextCompletion(
            id=self._id, object="text_completion", created=self._created, model=self._served.name,
            system_fingerprint=self._served.fingerprint, choices=list(choices),
        )  # fmt: skip
        if self._asked.has_running_usage:
            chunk.usage = self._usage()
        return chunk

    def _begin(self, index: int, choice: TextChoice) -> list[TextLogprobs]:
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

    def _logprobs(self, state: _TextState, given: Sequence[TokenLogprobs]) -> TextLogprobs:
        shown = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for one in given:
            best: dict[str, float] = {}
            for token_id, logprob in one.top[: self._asked.logprobs]:
                best.setdefault(self._names.name(token_id), finite(logprob))  # of two that print alike, the likelier
            shown.tokens.append(self._names.name(one.token_id))
            shown.token_logprobs.append(finite(one.logprob))
            shown.top_logprobs.append(best)
            shown.text_offset.append(state.num_shown)
            state.num_shown += len(state.detokenizer.push(one.token_id))
        return shown


def _joined(parts: Sequence[TextLogprobs]) -> TextLogprobs:
    return TextLogprobs(
        tokens=[one for part in parts for one in part.tokens],
        token_logprobs=[one for part in parts for one in part.token_logprobs],
        top_logprobs=[one for part in parts for one in part.top_logprobs],
        text_offset=[one for part in parts for one in part.text_offset],
    )
