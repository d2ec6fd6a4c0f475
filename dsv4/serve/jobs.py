"""From a request model to prepared engine requests: prompt, sampling, constraint. Everything that can be refused is
refused here, before anything is queued."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.cache.errors import CacheError
from dsv4.engine.engine import Engine
from dsv4.engine.sequence import Sequence as RequestSequence
from dsv4.request import RequestError, SamplingParams
from dsv4.serve.answer_grammar import AnswerRules, answer_grammar
from dsv4.serve.body import leading_field
from dsv4.serve.errors import ApiError
from dsv4.serve.grammar import CompiledGrammar, GrammarCompiler, GrammarError
from dsv4.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    SamplingFields,
)
from dsv4.serve.settings import ServerConfig
from dsv4.text.chat import ChatError, ChatOptions, render_segments
from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import Tokenizer, TokenizerError

_DEFAULT_COMPLETION_TOKENS = 16
_ANSWER_OPENINGS = (PROTOCOL.think_open, PROTOCOL.think_close, *PROTOCOL.tasks.values())


@dataclass(frozen=True)
class Job:
    """Prepared requests in the order of their choices. `thinking`: the answers begin with reasoning.
    `num_prompt_tokens` counts each prompt once, whatever `n`, which is `num_each`."""

    sequences: tuple[RequestSequence, ...]
    num_prompt_tokens: int
    thinking: bool = False
    num_each: int = 1


class JobMaker:
    """Turns request models into jobs. Its methods may run in any thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._grammars = GrammarCompiler(
            tokenizer, vocab_size=engine.model.config.vocab_size, eos_token_id=engine.model.config.eos_token_id
        )

    def chat(self, request: ChatRequest) -> Job:
        """`ApiError` for a conversation or an option that cannot be served."""
        self._check_model(request)
        thinking, effort = self._thinking(request)
        options = _refusing(
            ChatOptions,
            thinking=thinking,
            tools=[tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in request.tools or ()]
            or None,
            response_format=_shown_format(request),
            reasoning_effort=effort,
            profile=self._config.effort_profile,
        )
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        segments = _refusing(render_segments, messages, options)
        if not segments or not segments[-1].is_markup or not segments[-1].text.endswith(_ANSWER_OPENINGS):
            last = request.messages[-1].role
            message = f"messages: the last one must be a user, tool or developer message to answer, found {last}"
            raise ApiError(400, message, code="invalid_value", param="messages")
        is_open = segments[-1].text.endswith(PROTOCOL.think_open)
        self._check_length(sum(len(segment.text) for segment in segments), "messages")
        prompt = _refusing(self._tokenizer.encode_segments, segments)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        max_tokens = request.max_completion_tokens or request.max_tokens
        grammar = self._grammar(request, thinking=is_open)
        self._check_prompt(prompt, "messages")
        sequences = self._prepare([prompt], request, logprobs, max_tokens, None, grammar)
        return Job(sequences, len(prompt), is_open, request.n or 1)

    def completion(self, request: CompletionRequest) -> Job:
        """`ApiError` for prompts or options that cannot be served."""
        self._check_model(request)
        given = _prompts(request)
        if len(given) > self._config.max_choices:
            message = f"prompt: at most {self._config.max_choices} prompts in one request, found {len(given)}; send"
            raise ApiError(400, f"{message} the others in another", code="invalid_value", param="prompt")
        for prompt in given:
            self._check_length(len(prompt) if isinstance(prompt, str) else 0, "prompt")
        prompts = [_refusing(self._tokenizer.encode, prompt) if isinstance(prompt, str) else prompt for prompt in given]
        for prompt in prompts:
            self._check_prompt(prompt, "prompt")
        default = _DEFAULT_COMPLETION_TOKENS
        sequences = self._prepare(prompts, request, request.logprobs, request.max_tokens, default, None)
        return Job(sequences, sum(map(len, prompts)), num_each=request.n or 1)

    # ---- parts ----

    def _check_length(self, num_characters: int, param: str) -> None:
        """Refuse what must be too long before it is cut into tokens, which takes seconds for millions of characters."""
        least = self._tokenizer.least_tokens(num_characters)
        if least >= self._engine.cache.limits.max_context_tokens:
            raise self._too_long(f"{least} tokens or more", param)

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        if len(prompt) >= self._engine.cache.limits.max_context_tokens:
            raise self._too_long(f"{len(prompt)} tokens", param)

    def _too_long(self, found: str, param: str) -> ApiError:
        context = self._engine.cache.limits.max_context_tokens
        message = f"{param}: {found}; this model's maximum context length is {context} (--context), answer included"
        return ApiError(400, message, code="context_length_exceeded", param=param)

    def _check_model(self, request: SamplingFields) -> None:
        if request.model != self._config.name:
            message = f"model: this server has {self._config.name!r}, found {request.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _thinking(self, request: ChatRequest) -> tuple[bool, str | None]:
        """Whether to think, and with which effort. An effort asks for thinking; `none` asks for none."""
        effort = request.reasoning_effort
        asked = None if request.thinking is None else request.thinking.type == "enabled"
        if effort == "none":
            if asked:
                raise ApiError(
                    400, "reasoning_effort: 'none' contradicts thinking enabled", param="reasoning_effort",
                    code="invalid_value",
                )  # fmt: skip
            return False, None
        if effort is not None and asked is False:
            raise ApiError(
                400, f"reasoning_effort: {effort!r} contradicts thinking disabled", param="reasoning_effort",
                code="invalid_value",
            )  # fmt: skip
        if asked is None:
            asked = effort is not None or self._config.default_thinking
        return asked, effort

    def _grammar(self, request: ChatRequest, *, thinking: bool) -> CompiledGrammar | None:
        rules = _rules(request, thinking)
        if rules is None:
            return None
        param = "tools" if rules.calls == "must" or rules.schema is None else "response_format"
        try:
            return self._grammars.compile(answer_grammar(rules, self._grammars.special))
        except GrammarError as error:
            raise ApiError(400, f"{param}: {error}", code="unsupported_schema", param=param) from None

    def _prepare(
        self, prompts: Sequence[Sequence[int]], request: SamplingFields, logprobs: int | None,
        max_tokens: int | None, default_tokens: int | None, grammar: CompiledGrammar | None,
    ) -> tuple[RequestSequence, ...]:  # fmt: skip
        count = request.n or 1
        if count * len(prompts) > self._config.max_choices:
            found = f"{count}" if len(prompts) == 1 else f"{len(prompts)} prompts times {count}"
            message = f"n: at most {self._config.max_choices} answers to one request, found {found}"
            raise ApiError(400, message, code="invalid_value", param="n")
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        sequences: list[RequestSequence] = []
        for prompt in prompts:
            limit = self._max_tokens(len(prompt), max_tokens, default_tokens)
            for _ in range(count):
                params = self._sampling(request, limit, (seed + len(sequences)) % 2**63, logprobs)
                constraint = None if grammar is None else grammar.constraint()
                sequences.append(_refusing(self._engine.prepare, prompt, params, constraint))
        return tuple(sequences)

    def _sampling(self, request: SamplingFields, max_tokens: int, seed: int, logprobs: int | None) -> SamplingParams:
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        given = {
            name: getattr(request, name)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
                "frequency_penalty", "ignore_eos",
            )
            if getattr(request, name) is not None
        }  # fmt: skip
        defaults: dict[str, Any] = dict(self._config.sampling_defaults)
        return SamplingParams(max_tokens=max_tokens, seed=seed, stop=stop, logprobs=logprobs, **{**defaults, **given})

    def _max_tokens(self, prompt_len: int, asked: int | None, default: int | None) -> int:
        """What was asked for, if there is room for it; otherwise the default or all there is."""
        context = self._engine.cache.limits.max_context_tokens
        room, cap = max(context - prompt_len, 1), self._config.max_output_tokens
        if asked is None:
            return min(value for value in (default, cap, room) if value is not None)
        if cap is not None and asked > cap:
            message = f"max_tokens: this server allows {cap}, found {asked}"
            raise ApiError(400, message, code="invalid_value", param="max_tokens")
        if asked > room:
            message = (
                f"max_tokens: {prompt_len} prompt tokens leave room for {room} of this model's maximum context length "
                f"of {context} (--context), found {asked}"
            )
            raise ApiError(400, message, code="context_length_exceeded", param="max_tokens")
        return asked


def _refusing(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call, with the package's own errors about a caller's input as 400."""
    try:
        return function(*arguments, **options)
    except (ChatError, RequestError, TokenizerError, CacheError) as error:
        code = "context_length_exceeded" if "max_context_tokens" in str(error) else "invalid_value"
        raise ApiError(400, str(error), code=code, param=_param_of(error)) from None


def _param_of(error: ValueError) -> str | None:
    if isinstance(error, ChatError) and str(error).startswith("message "):
        return "messages"
    return leading_field(str(error))


def _prompts(request: CompletionRequest) -> list[Any]:
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    if isinstance(request.response_format, JsonSchemaFormat):
        return request.response_format.json_schema.json_schema
    return {"type": "object"} if isinstance(request.response_format, JsonObjectFormat) else None


def _shown_format(request: ChatRequest) -> dict[str, Any] | None:
    """What the prompt says about the format; an empty schema says nothing."""
    return _schema(request) or None


def _rules(request: ChatRequest, thinking: bool) -> AnswerRules | None:
    """The rules of the answer, None where anything goes. Without strict functions, `auto` leaves the model free."""
    schema, choice = _schema(request), request.tool_choice or "auto"
    functions = [tool.function for tool in request.tools or ()]
    one_call = request.parallel_tool_calls is False
    if isinstance(choice, NamedToolChoice):
        functions = [one for one in functions if one.name == choice.function.name]
        one_call, choice = True, "required"
    if not functions:
        return None if schema is None else AnswerRules(thinking=thinking, schema=schema)
    is_free = choice == "auto" and schema is None and not one_call and not any(one.strict for one in functions)
    if is_free:
        return None
    return AnswerRules(
        thinking=thinking,
        schema=schema,
        calls={"none": "never", "auto": "may", "required": "must"}[choice],  # type: ignore[arg-type]
        functions=[(one.name, one.parameters or {}) for one in functions],
        one_call=one_call,
    )
