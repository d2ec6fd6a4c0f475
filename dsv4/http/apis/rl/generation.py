"""Rollouts by token ids: `/inference/v1/generate` in vLLM's words, `/generate` in SGLang's."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from dsv4.engine.link.stream import TokenEvent
from dsv4.http.apis.answer_reader import new_id
from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.fields import MAX_INT, Name, Strict, TokenId
from dsv4.http.apis.logprobs import finite
from dsv4.http.apis.registry import Api, SyncEndpoint
from dsv4.http.apis.request_builder import Job, ModelInfo, RequestBuilder
from dsv4.http.apis.schemas import Answer, PromptLogprobs
from dsv4.http.apis.sse import json_object, plain_event, quote, to_json
from dsv4.http.body import validate
from dsv4.http.errors import ApiError
from dsv4.http.streaming import Assembler
from dsv4.replay import Rows, encode_rows, replayed
from dsv4.request import TokenLogprobs
from dsv4.text.output import TextOutput

Ids = Annotated[list[TokenId], Field(min_length=1)]
_DEFAULT_TOKENS = 128  # of SGLang's requests that do not say


# ---- vLLM ----

# of vLLM's parameters: what only its own process cares about
_ITS_OWN = {"output_kind", "detokenize", "skip_special_tokens", "skip_clone", "_all_stop_token_ids"}


class InferenceRequest(Strict):
    """`POST /inference/v1/generate`; `sampling_params` are the fields of `/v1/completions`."""

    token_ids: Ids
    sampling_params: dict[str, JsonValue] = Field(default_factory=dict)
    model: str | None = Field(default=None, max_length=256)
    request_id: Name | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int | None = Field(default=None, ge=-10, le=10)
    stream: bool | None = None
    stream_options: dict[str, JsonValue] | None = None
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    routed_experts_start_len: int = Field(default=0, ge=0, le=MAX_INT)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.stream and (self.return_routed_experts or self.return_indexer_topk):
            raise ValueError("stream: not with return_routed_experts or return_indexer_topk")
        _check_start(self.routed_experts_start_len, [self.token_ids])
        return self


def _check_start(start: int, prompts: Sequence[Sequence[Any]]) -> None:
    shortest = min(map(len, prompts))
    if start > shortest:
        raise ValueError(f"routed_experts_start_len: at most the prompt's {shortest} tokens, found {start}")


class RowsOfTokens(Answer):
    """Whole numbers [tokens, layers, k], little-endian in base64; the first row is that of token `start`."""

    data: str
    shape: list[int]
    dtype: Literal["uint8", "uint16", "uint32"]
    start: int


class TokenChoice(Answer):
    index: int
    token_ids: list[int]
    logprobs: dict[str, JsonValue] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None
    weight_versions: list[tuple[int, str]]
    routed_experts: RowsOfTokens | None = None
    indexer_topk: RowsOfTokens | None = None


class TokenAnswer(Answer):
    request_id: str
    choices: list[TokenChoice]
    weight_version: str
    prompt_logprobs: PromptLogprobs | None = None


def _completion(given: dict[str, Any], prefix: str) -> CompletionRequest:
    """`given` as a completion's request; errors name the field where the caller wrote it."""
    try:
        return validate(CompletionRequest, given)
    except ApiError as error:
        param = f"{prefix}.{error.param}" if error.param else prefix
        raise ApiError(error.status, f"{prefix}.{error.message}", code=error.code, param=param) from None


def inference_job(jobs: RequestBuilder, asked: InferenceRequest) -> Job:
    given = {name: value for name, value in asked.sampling_params.items() if name not in _ITS_OWN}
    around = asked.model_dump(include={"model", "request_id", "cache_salt", "priority", "stream", "stream_options"})
    fields = {"prompt": asked.token_ids} | {name: value for name, value in around.items() if value is not None}
    return jobs.completion(_completion({**given, **fields}, "sampling_params"), _replay(asked))


def _replay(asked: InferenceRequest | GenerateRequest) -> dict[str, Any]:
    return {
        "routed_experts": asked.return_routed_experts, "indexer_topk": asked.return_indexer_topk,
        "replay_start": asked.routed_experts_start_len,
    }  # fmt: skip


def _replayed(output: TextOutput) -> dict[str, Rows]:
    """What was asked for, by the names of `Completion`."""
    found = replayed(output.replay, output.prompt_len + output.num_output)
    return {name: rows for name, rows in found.items() if rows is not None}


class _TokenAssembler(Assembler):
    """What the assemblers of both dialects have in common: all is in the job's outputs."""

    def __init__(self, job: Job, request_id: str | None) -> None:
        self._job, self._id = job, request_id or new_id("gen-")

    def keep(self, event: TokenEvent) -> None:
        """Nothing."""


class InferenceAssembler(_TokenAssembler):
    """Tokens with their log-probabilities, by id; no text."""

    def __init__(self, job: Job, asked: InferenceRequest, served: ModelInfo) -> None:
        super().__init__(job, asked.request_id)
        self._names = served.names(by_id=True)
        self._num_top = asked.sampling_params.get("prompt_logprobs")

    def take(self, event: TokenEvent) -> str:
        ids = [] if event.token_id is None else [event.token_id]
        scores = [event.logprobs] if event.logprobs is not None and self._job.shows_logprobs else None
        choice = self._choice(
            event.choice, ids, scores, None if event.finish_reason is None else str(event.finish_reason)
        )
        return plain_event(f'{{"request_id":{quote(self._id)},"choices":[{choice}]}}')

    def whole(self) -> str:
        outputs = self._job.outputs
        shows = self._job.shows_logprobs
        choices = [
            self._choice(
                place, [*one.token_ids], [*one.logprobs] if shows else None, str(one.finish_reason), _replayed(one)
            )
            for place, one in enumerate(outputs)
        ]  # fmt: skip
        prompt = None
        if isinstance(self._num_top, int):
            prompt = to_json(self._names.prompt(outputs[0].prompt_logprobs, self._num_top))
        return json_object(
            request_id=quote(self._id), choices=f"[{','.join(choices)}]", weight_version=quote(version_of(outputs[0])),
            prompt_logprobs=prompt,
        )  # fmt: skip

    def _choice(
        self, index: int, ids: list[int], scores: list[TokenLogprobs] | None, finish_reason: str | None,
        replay: Mapping[str, Rows] | None = None,
    ) -> str:  # fmt: skip
        logprobs = None if scores is None else f'{{"content":{self._names.tokens(scores)}}}'
        start = self._job.outputs[index].params.replay_start
        rows = {name: to_json(encode_rows(one, start)) for name, one in (replay or {}).items()}
        return json_object(
            index=str(index), token_ids=to_json(ids), logprobs=logprobs,
            finish_reason="null" if finish_reason is None else quote(finish_reason),
            weight_versions=to_json(self._job.outputs[index].weight_versions), **rows,
        )  # fmt: skip


# ---- rendering ----


class Rendered(Answer):
    """What `/inference/v1/generate` would be asked."""

    model: str | None = None
    token_ids: list[int]
    sampling_params: dict[str, JsonValue]
    features: None
    stream: bool


_NOT_SAMPLING = {
    "messages", "model", "stream", "stream_options", "tools", "tool_choice", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "reasoning_effort", "thinking", "logprobs", "top_logprobs",
    "max_completion_tokens",
}  # fmt: skip


def render(jobs: RequestBuilder, asked: ChatRequest) -> Rendered:
    """The prompt of a conversation, and its sampling fields."""
    jobs.check_model(asked.model)
    sampling = asked.model_dump(by_alias=True, exclude_none=True, exclude=_NOT_SAMPLING)
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    if asked.max_completion_tokens is not None:
        sampling["max_tokens"] = asked.max_completion_tokens
    return Rendered(
        model=asked.model, token_ids=jobs.prompt(asked).token_ids, sampling_params=sampling, features=None,
        stream=bool(asked.stream),
    )  # fmt: skip


# ---- SGLang ----

_RENAMED = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
}  # fmt: skip


class GenerateRequest(Strict):
    """`POST /generate`. One prompt or several: the answer is an object, or a list."""

    input_ids: Ids | Annotated[list[Ids], Field(min_length=1)] | None = None
    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    sampling_params: dict[str, JsonValue] = Field(default_factory=dict)
    return_logprob: bool = False
    top_logprobs_num: int = Field(default=0, ge=0, le=20)
    logprob_start_len: int = Field(default=-1, ge=-1, le=MAX_INT)
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    routed_experts_start_len: int = Field(default=0, ge=0, le=MAX_INT)
    rid: Name | None = None
    stream: Literal[False] | None = None
    model: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("input_ids: expected it or text")
        if isinstance(self.input_ids, list):
            prompts = [one for one in self.input_ids if isinstance(one, list)]
            _check_start(self.routed_experts_start_len, prompts or [self.input_ids])
        return self

    @property
    def is_batch(self) -> bool:
        given = self.input_ids if self.input_ids is not None else self.text
        return isinstance(given, list) and not isinstance(given[0], int)


class GenerateAnswer(Answer):
    """`meta_info`: finish_reason, weight_version (of the last token) and weight_versions (number of the first token of
    each), counts, and [log-probability, id, text] of each token."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, JsonValue]


def generate_job(jobs: RequestBuilder, asked: GenerateRequest) -> Job:
    given = {_RENAMED.get(name, name): value for name, value in asked.sampling_params.items()}
    given = {name: value for name, value in given.items() if name not in _ITS_OWN and name != "no_stop_trim"}
    given.setdefault("max_tokens", _DEFAULT_TOKENS)
    if asked.return_logprob:
        given["logprobs"] = asked.top_logprobs_num
        if asked.logprob_start_len >= 0:
            given["prompt_logprobs"] = asked.top_logprobs_num
    around = {"prompt": asked.text if asked.input_ids is None else asked.input_ids, "model": asked.model}
    return jobs.completion(_completion({**given, **around, "rid": asked.rid}, "sampling_params"), _replay(asked))


class GenerateAssembler(_TokenAssembler):
    """Whole answers alone: `stream` is refused."""

    def __init__(self, job: Job, asked: GenerateRequest, served: ModelInfo) -> None:
        super().__init__(job, asked.rid)
        self._asked, self._served = asked, served

    def take(self, event: TokenEvent) -> str:
        return ""

    def whole(self) -> str:
        answers = list(map(self._answer, self._job.outputs))
        is_list = self._asked.is_batch or len(answers) > 1
        return f"[{','.join(answers)}]" if is_list else answers[0]

    def _answer(self, output: TextOutput) -> str:
        meta: dict[str, Any] = {
            "id": self._id, "finish_reason": _finish(output), "prompt_tokens": output.prompt_len,
            "completion_tokens": output.num_output, "cached_tokens": output.num_cached_tokens,
            "weight_version": version_of(output), "weight_versions": output.weight_versions,
        }  # fmt: skip
        for name, rows in _replayed(output).items():  # int32 and flat, as SGLang's clients read them
            meta[name] = base64.b64encode(rows.astype("<i4").tobytes()).decode("ascii")
            meta[f"{name}_shape"], meta["routed_experts_start_len"] = list(rows.shape), output.params.replay_start
        if self._asked.return_logprob:
            self._add_logprobs(meta, output)
        is_whole = self._asked.sampling_params.get("no_stop_trim") is True  # with what ended it
        text = self._served.tokenizer.decode(output.token_ids) if is_whole else output.text
        return json_object(text=quote(text), output_ids=to_json(list(output.token_ids)), meta_info=to_json(meta))

    def _add_logprobs(self, meta: dict[str, Any], output: TextOutput) -> None:
        meta["output_token_logprobs"] = list(map(self._token, output.logprobs))
        if self._asked.top_logprobs_num:
            meta["output_top_logprobs"] = [self._top(one) for one in output.logprobs]
        if self._asked.logprob_start_len >= 0:
            first = [None, output.prompt_ids[0], None]  # nothing predicts it
            scored = [first, *(self._token(one) for one in output.prompt_logprobs[1:] if one is not None)]
            meta["input_token_logprobs"] = scored[self._asked.logprob_start_len :]

    def _token(self, one: TokenLogprobs) -> list[Any]:
        return [finite(one.logprob), one.token_id, self._text(one.token_id)]

    def _top(self, one: TokenLogprobs) -> list[list[Any]]:
        return [[finite(logprob), token_id, self._text(token_id)] for token_id, logprob in one.top]

    def _text(self, token_id: int) -> str | None:
        return self._served.tokenizer.decode([token_id]) if self._asked.return_text_in_logprobs else None


def _finish(output: TextOutput) -> dict[str, Any]:
    reason = str(output.finish_reason)
    if reason == "length":
        return {"type": reason, "length": output.num_output}
    if reason == "stop" and output.stopped_by is not None:
        return {"type": reason, "matched": output.stopped_by}
    return {"type": reason}


def version_of(output: TextOutput) -> str:
    """Of the weights that drew the last token."""
    return output.weight_versions[-1][1] if output.weight_versions else ""


ROLLOUTS = (
    Api(
        "/inference/v1/generate", "Continue token ids, as vLLM", InferenceRequest, TokenAnswer, inference_job,
        InferenceAssembler,
    ),
    Api("/generate", "Continue token ids, as SGLang", GenerateRequest, GenerateAnswer, generate_job, GenerateAssembler),
)  # fmt: skip
RENDER = SyncEndpoint(
    "/v1/chat/completions/render", "The tokens of a conversation", ChatRequest, Rendered, render
)  # fmt: skip
