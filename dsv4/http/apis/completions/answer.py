"""From the events of a text completion to OpenAI's answers, chunk by chunk or whole; prompts echoed and scored. The
shape of both is that of `TextCompletion`."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.answer_reader import new_id, usage_of
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.logprobs import finite
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.apis.schemas import Answer, OpenAiAnswer, PromptLogprobs, Usage
from dsv4.http.apis.sse import DONE, json_object, plain_event, quote, to_json
from dsv4.http.streaming import Assembler
from dsv4.request import TokenLogprobs
from dsv4.text.tokenizer import Detokenizer


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(OpenAiAnswer):
    """The answer to `/v1/completions`, and each chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None


@dataclass
class _TextState:
    """One choice of a completion while it comes. `opening`: the constant text of its chunks before the text."""

    opening: str
    detokenizer: Detokenizer  # of the tokens whose log-probabilities are shown: says where each begins
    num_tokens: int = 0
    num_shown: int = 0
    has_begun: bool = False
    pending: list[TokenLogprobs] = field(default_factory=list)
    pending_ids: list[int] = field(default_factory=list)


@dataclass
class _Scores:
    """Log-probabilities of tokens, each list as JSON values."""

    tokens: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    top: list[str] = field(default_factory=list)
    offsets: list[str] = field(default_factory=list)

    def json(self) -> str:
        return json_object(
            tokens=f"[{','.join(self.tokens)}]", token_logprobs=f"[{','.join(self.values)}]",
            top_logprobs=f"[{','.join(self.top)}]", text_offset=f"[{','.join(self.offsets)}]",
        )  # fmt: skip


class TextAssembler(Assembler):
    """Chunks of a text completion, or the whole one."""

    def __init__(self, job: Job, asked: CompletionRequest, served: ModelInfo) -> None:
        self._job = job
        self._asked = asked
        self._tokenizer = served.tokenizer
        self._names = served.names(by_id=bool(asked.return_tokens_as_token_ids))
        fields = {"id": new_id("cmpl-", asked), "object": "text_completion", "created": int(time.time())}
        envelope = to_json({**fields, "model": served.name, "system_fingerprint": served.fingerprint})
        self._head = f"{envelope[:-1]},"
        self._states = [
            _TextState(
                f'data: {self._head}"choices":[{{"index":{index},"text":', Detokenizer(served.tokenizer)
            )
            for index in range(len(job.outputs))
        ]  # fmt: skip
        self._keeps_logprobs = job.shows_logprobs
        self._keeps_ids = bool(asked.return_token_ids)
        self._has_running_usage = asked.has_running_usage

    def take(self, event: TokenEvent) -> str:
        """A chunk where text became certain or the choice ended; with the first, what is said about the prompt."""
        state, text = self._states[event.choice], event.text
        if event.token_id is not None:
            state.num_tokens += 1
            if self._keeps_ids:
                state.pending_ids.append(event.token_id)
        if self._keeps_logprobs and event.logprobs is not None:
            state.pending.append(event.logprobs)
        if not text and event.finish_reason is None:
            return ""
        scores: _Scores | None = None
        prompt = logprobs = ids = ""
        if not state.has_begun:
            state.has_begun = True
            scores, prompt = self._echoed_scores(event.choice), self._prompt_fields(event.choice)
            text = self._echo(event.choice) + text
        if state.pending:
            scores = self._add(scores or _Scores(), state, state.pending)
            state.pending = []
        if scores is not None:
            logprobs = f',"logprobs":{scores.json()}'
        if self._keeps_ids:
            ids, state.pending_ids = f',"token_ids":{to_json(state.pending_ids)}', []
        finish = "null" if event.finish_reason is None else self._finish(event.choice)
        usage = f',"usage":{self._usage()}' if self._has_running_usage else ""
        return f'{state.opening}{quote(text)}{logprobs},"finish_reason":{finish}{ids}{prompt}}}]{usage}}}\n\n'

    def closing(self) -> str:
        """The end of a stream; before it, where asked for, a chunk with usage and no choice."""
        if not self._asked.includes_usage:
            return DONE
        return plain_event(f'{self._head}"choices":[],"usage":{self._usage()}}}') + DONE

    def keep(self, event: TokenEvent) -> None:
        self._states[event.choice].num_tokens += event.token_id is not None

    def whole(self) -> str:
        choices = ",".join(map(self._choice, range(len(self._states))))
        return f'{self._head}"choices":[{choices}],"usage":{self._usage()}}}'

    # ---- shapes ----

    def _choice(self, index: int) -> str:
        """A choice of the whole answer."""
        output, scores = self._job.outputs[index], self._echoed_scores(index)
        if self._keeps_logprobs and len(output.logprobs):
            scores = self._add(scores or _Scores(), self._states[index], output.logprobs)
        logprobs = f',"logprobs":{"null" if scores is None else scores.json()}'
        ids = f',"token_ids":{to_json(list(output.token_ids))}' if self._keeps_ids else ""
        text = quote(self._echo(index) + output.text)
        return (
            f'{{"index":{index},"text":{text}{logprobs},"finish_reason":{self._finish(index)}{ids}'
            f"{self._prompt_fields(index)}}}"
        )

    def _finish(self, index: int) -> str:
        """How a choice ended: the value of `finish_reason`, `stop_reason` where there is one, and its seed."""
        output = self._job.outputs[index]
        reason = quote(str(output.finish_reason))
        if output.stopped_by is not None:
            reason += f',"stop_reason":{to_json(output.stopped_by)}'
        return f'{reason},"seed":{output.params.seed}'

    def _usage(self) -> str:
        return to_json(usage_of(self._job, sum(state.num_tokens for state in self._states)))

    def _echo(self, index: int) -> str:
        return self._tokenizer.decode(self._job.outputs[index].prompt_ids) if self._asked.echo else ""

    def _prompt_fields(self, index: int) -> str:
        """The last fields of a choice, about its prompt."""
        output, fields = self._job.outputs[index], ""
        if self._asked.return_token_ids:
            fields += f',"prompt_token_ids":{to_json(list(output.prompt_ids))}'
        if self._asked.prompt_logprobs is not None:
            shown = self._names.prompt(output.prompt_logprobs, self._asked.prompt_logprobs)
            fields += f',"prompt_logprobs":{to_json(shown)}'
        return fields

    def _echoed_scores(self, index: int) -> _Scores | None:
        """Those of a prompt that is echoed with its log-probabilities."""
        if not self._asked.echo or self._asked.logprobs is None:
            return None
        output = self._job.outputs[index]
        first = TokenLogprobs(output.prompt_ids[0], 0.0, ())  # nothing predicts it
        scored = [first, *(one for one in output.prompt_logprobs[1:] if one is not None)]
        echoed = self._add(_Scores(), self._states[index], scored)
        echoed.values[0] = echoed.top[0] = "null"
        return echoed

    def _add(self, scores: _Scores, state: _TextState, given: Iterable[TokenLogprobs]) -> _Scores:
        quoted = self._names.quoted
        for one in given:
            best: dict[str, float] = {}
            for token_id, logprob in one.top[: self._asked.logprobs]:
                best.setdefault(quoted(token_id), finite(logprob))  # of two that print alike, the likelier
            scores.tokens.append(quoted(one.token_id))
            scores.values.append(repr(finite(one.logprob)))
            scores.top.append(f"{{{','.join([f'{name}:{logprob!r}' for name, logprob in best.items()])}}}")
            scores.offsets.append(str(state.num_shown))
            state.num_shown += len(state.detokenizer.push(one.token_id))
        return scores
