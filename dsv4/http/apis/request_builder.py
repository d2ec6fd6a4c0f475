"""From a request model to what the engine is sent: prompts, sampling, a grammar's text. What can be refused without
the engine is refused here."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4.engine.grammar.errors import GrammarError
from dsv4.engine.link.messages import EngineInfo
from dsv4.http.apis.chat.request import AllowedToolChoice, ChatRequest, NamedToolChoice
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.fields import SamplingFields
from dsv4.http.apis.logprobs import TokenNames
from dsv4.http.body import leading_field
from dsv4.http.errors import ApiError, wrong_field
from dsv4.http.grammar.answer import AnswerRules, FunctionRule, answer_grammar, symbols_of
from dsv4.http.grammar.structured import ContentRule, content_rule, shown_schema
from dsv4.http.settings import MIB, ServerConfig
from dsv4.request import RequestError, SamplingParams, check_params, check_prompt, later_seed, new_seed
from dsv4.text.chat import ChatError, ChatOptions, Segment, render_segments
from dsv4.text.output import TextOutput
from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import Tokenizer, TokenizerError

_DEFAULT_COMPLETION_TOKENS = 16
# what an answer, one of its tokens and one of the log-probabilities shown take at most, engine and JSON included
_ANSWER_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 32768, 12, 100
_ANSWER_OPENINGS = (PROTOCOL.think_open, PROTOCOL.think_close, *PROTOCOL.tasks.values())
# An effort of OpenAI's or Anthropic's scale as the nearest one a release of the model knows (`dsv4.text.chat`).
_EFFORTS = {
    "preview": {"minimal": "high", "low": "high", "medium": "high", "high": "high", "xhigh": "max", "max": "max"},
    "final": {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"},
}


@dataclass(frozen=True)
class GrammarText:
    """Lark text, the ids that an answer may open with, and the request's field that asked for it."""

    lark: str
    opening: tuple[int, ...]
    field: str


@dataclass(frozen=True)
class Job:
    """Requests with their answers to come, in the order of their choices, `num_answers` of each prompt.

    num_prompt_tokens  counts each prompt once
    thinking           the answers begin with reasoning
    shows_logprobs     those that the tokens have were asked for, not only recorded
    rule               the grammar that all answers follow
    """

    outputs: tuple[TextOutput, ...]
    num_prompt_tokens: int
    num_answers: int = 1
    thinking: bool = False
    shows_logprobs: bool = True
    rule: GrammarText | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache. A prompt with several answers counts once."""
        return sum(output.num_cached_tokens for output in self.outputs[:: self.num_answers])


@dataclass(frozen=True)
class ModelInfo:
    """The model as answers name it. `fingerprint`: checkpoint, numerics, kernels and processor in one word."""

    name: str
    tokenizer: Tokenizer
    fingerprint: str
    _names: dict[bool, TokenNames] = field(default_factory=dict, repr=False, compare=False)

    def names(self, *, by_id: bool) -> TokenNames:
        """How tokens are written; one for all requests."""
        return self._names.setdefault(by_id, TokenNames(self.tokenizer, by_id=by_id))


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. `is_open`: it ends inside a think block."""

    token_ids: list[int]
    is_open: bool


class RequestBuilder:
    """Turns request models into jobs. Its methods may run in any thread.

    Where answers are recorded every token gets its log-probability, asked for or not: a receipt has a digest of them.
    """

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._info = info
        self.tokenizer = tokenizer
        self._config = config

    @property
    def max_context_tokens(self) -> int:
        return self._info.max_context_tokens

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    def chat(self, request: ChatRequest) -> Job:
        """`ApiError` for a conversation or an option that cannot be served."""
        self.check_model(request.model)
        prompt = self.prompt(request)
        self._check_prompt(prompt.token_ids, "messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
        rule = _content_rule(request)
        grammar = self._rule(_rules(request, rule, prompt.is_open), "tools" if rule is None else rule[1])
        options = self._options(request, logprobs, request.prompt_logprobs)
        outputs = self._outputs([prompt.token_ids], request, options, max_tokens, None)
        return Job(outputs, len(prompt.token_ids), request.n or 1, prompt.is_open, logprobs is not None, grammar)

    def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt a conversation becomes."""
        thinking, effort = self._thinking(request)
        options = refusing(
            ChatOptions,
            thinking=thinking,
            tools=[tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in request.tools or ()]
            or None,
            response_format=shown_schema(request) or None,  # an empty schema says nothing
            reasoning_effort=effort,
            profile=self._config.effort_profile,
        )
        messages = [message.rendered() for message in request.messages]
        if request.continue_final_message:
            if messages[-1]["role"] != "assistant":
                raise wrong_field(
                    "continue_final_message", f"the last message must be an assistant's, found {_last(request)}"
                )
            messages[-1]["wo_eos"] = True
        if request.task is not None:
            messages[-1].setdefault("task", request.task)
        segments: list[Segment] = refusing(render_segments, messages, options)
        if request.continue_final_message:
            is_open = False
        elif segments and segments[-1].is_markup and segments[-1].text.endswith(_ANSWER_OPENINGS):
            is_open = segments[-1].text.endswith(PROTOCOL.think_open)
        else:
            raise wrong_field(
                "messages", f"the last one must be a user or tool message to answer, found {_last(request)} "
                "(an assistant's can be continued with continue_final_message)",
            )  # fmt: skip
        self._check_length(sum(len(segment.text) for segment in segments), "messages")
        return Prompt(refusing(self.tokenizer.encode_segments, segments), is_open)

    def completion(self, request: CompletionRequest, replay: Mapping[str, Any] | None = None) -> Job:
        """`ApiError` for prompts or options that cannot be served. `replay`: fields of `SamplingParams` besides."""
        self.check_model(request.model)
        given = _prompts(request)
        prompts = [self.encode(prompt, bool(request.add_special_tokens)) for prompt in given]
        for prompt in prompts:
            self._check_prompt(prompt, "prompt")
        rule = _content_rule(request)
        rules = None if rule is None else AnswerRules(thinking=False, content=rule[0])
        grammar = self._rule(rules, "" if rule is None else rule[1])
        prompt_logprobs = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
        if request.max_tokens == 0 and prompt_logprobs is None:
            prompt_logprobs = 0  # read the prompt, write nothing: echo alone
        options = {**self._options(request, request.logprobs, prompt_logprobs), **(replay or {})}
        outputs = self._outputs(prompts, request, options, request.max_tokens, _DEFAULT_COMPLETION_TOKENS)
        shows = request.logprobs is not None
        return Job(outputs, sum(map(len, prompts)), request.n or 1, False, shows, grammar)

    def encode(self, prompt: str | list[int], add_bos: bool) -> list[int]:
        """A completion's prompt as ids, after the begin-of-sentence marker where that is asked for."""
        self._check_length(len(prompt) if isinstance(prompt, str) else 0, "prompt")
        ids: list[int] = refusing(self.tokenizer.encode, prompt) if isinstance(prompt, str) else list(prompt)
        return [refusing(self.tokenizer.special_id, PROTOCOL.bos), *ids] if add_bos else ids

    def check_model(self, model: str | None) -> None:
        """A server has one model: a request that names none means it."""
        if model not in (None, self._config.name):
            message = f"model: this server has {self._config.name!r}, found {model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    # ---- parts ----

    def _check_length(self, num_characters: int, param: str) -> None:
        """Refuse what must be too long before it is cut into tokens, which takes seconds for millions of characters."""
        least = self.tokenizer.least_tokens(num_characters)
        if least >= self.max_context_tokens:
            raise self._too_long(f"{least} tokens or more", param)

    def _check_prompt(self, prompt: Sequence[int], param: str) -> None:
        if len(prompt) >= self.max_context_tokens:
            raise self._too_long(f"{len(prompt)} tokens", param)

    def _too_long(self, found: str, param: str) -> ApiError:
        context = self.max_context_tokens
        message = f"{param}: {found}; this model's maximum context length is {context} (--context), answer included"
        return ApiError(400, message, code="context_length_exceeded", param=param)

    def _thinking(self, request: ChatRequest) -> tuple[bool, str | None]:
        """Whether to think, and with which effort. An effort asks for thinking; `none` asks for none."""
        template = request.chat_template_kwargs
        effort = request.reasoning_effort or (template.reasoning_effort if template is not None else None)
        said = [None if request.thinking is None else request.thinking.type == "enabled"]
        if template is not None:
            said += [template.thinking, template.enable_thinking]
        if effort is not None:
            known = _EFFORTS[self._config.effort_profile]
            if effort != "none" and effort not in known:
                raise wrong_field("reasoning_effort", f"expected one of none, {', '.join(known)}; found {effort!r}")
            said.append(effort != "none")
        asked = {one for one in said if one is not None}
        if len(asked) > 1:
            field = "thinking" if effort is None else "reasoning_effort"
            raise wrong_field(field, f"{effort or 'it'!r} contradicts what else the request says about thinking")
        thinking = asked.pop() if asked else self._config.default_thinking
        return thinking, _EFFORTS[self._config.effort_profile].get(effort or "")

    def _rule(self, rules: AnswerRules | None, content_field: str) -> GrammarText | None:
        if rules is None:
            return None
        param = "tools" if rules.calls == "must" or rules.content is None else content_field
        opening = (self.tokenizer.special_id(PROTOCOL.think_close),) if rules.thinking else ()
        try:
            return GrammarText(answer_grammar(rules, symbols_of(self.tokenizer)), opening, param)
        except GrammarError as error:
            raise unsupported(error, param) from None

    def _options(self, request: SamplingFields, logprobs: int | None, prompt_logprobs: int | None) -> dict[str, Any]:
        """The fields of `SamplingParams` that all choices share."""
        copied = (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids", "priority", "cache_salt",
        )  # fmt: skip
        options: dict[str, Any] = dict(self._config.sampling_defaults)
        options |= {name: getattr(request, name) for name in copied if getattr(request, name) is not None}
        options["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        if request.logit_bias:
            options["logit_bias"] = {int(token_id): bias for token_id, bias in request.logit_bias.items()}
        if request.bad_words:
            options["bad_words_ids"] = self._bad_words(request.bad_words)
        if logprobs is None and self._info.records:
            logprobs = 0
        return {**options, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """A word's ids at the start of a text and after a space, where its first token is another one."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                spellings[tuple(refusing(self.tokenizer.encode, text))] = None
        return tuple(spellings)

    def _outputs(
        self, prompts: Sequence[Sequence[int]], request: SamplingFields, options: dict[str, Any],
        max_tokens: int | None, default_tokens: int | None,
    ) -> tuple[TextOutput, ...]:  # fmt: skip
        count = request.n or 1
        limits = [self._max_tokens(len(prompt), max_tokens, default_tokens) for prompt in prompts]
        self._check_memory([*map(len, prompts)], limits, count, options)
        seed = request.seed if request.seed is not None else new_seed()
        outputs: list[TextOutput] = []
        for prompt, limit in zip(prompts, limits, strict=True):
            token_ids = array("i", refusing(check_prompt, prompt, self.vocab_size, self.max_context_tokens))
            first = later_seed(seed, len(outputs))
            asked = refusing(SamplingParams, n=count, max_tokens=limit, seed=first, **options)
            refusing(check_params, asked, self.vocab_size)
            outputs += [
                TextOutput(token_ids, params, eos_token_id=self._info.eos_token_id, tokenizer=self.tokenizer)
                for params in asked.answers()
            ]
        return tuple(outputs)

    def _check_memory(self, lengths: Sequence[int], limits: Sequence[int], count: int, options: dict[str, Any]) -> None:
        """Refuse what could take more memory than one request may: its prompts, its answers, what is shown of them."""
        read, written = sum(lengths), count * sum(limits)
        scored = (read * count, options["prompt_logprobs"]), (written, options["logprobs"])
        shown = sum(tokens * (num_top + 1) for tokens, num_top in scored if num_top is not None)
        answers = count * len(lengths)
        each = _TOKEN_BYTES + self._info.replay_bytes(options)
        needed = answers * _ANSWER_BYTES + (read * count + written) * each + shown * _LOGPROB_BYTES
        if needed > self._config.max_answer_bytes:
            name = "prompt" if len(lengths) > count else "n" if count > 1 else "max_tokens"
            raise wrong_field(
                name, f"{answers} answers of up to {max(limits)} tokens with {shown} log-probabilities may take "
                f"{needed / MIB:.0f} MiB; one request may take {self._config.max_answer_bytes / MIB:.0f}: lower "
                "max_tokens, logprobs or n, or send several requests",
            )  # fmt: skip

    def _max_tokens(self, prompt_len: int, asked: int | None, default: int | None) -> int:
        """What was asked for, if there is room for it; otherwise the default or all there is."""
        context = self.max_context_tokens
        room, cap = max(context - prompt_len, 1), self._config.max_output_tokens
        if asked is None:
            return min(value for value in (default, cap, room) if value is not None)
        if cap is not None and asked > cap:
            raise wrong_field("max_tokens", f"this server allows {cap}, found {asked}")
        if asked > room:
            message = (
                f"max_tokens: {prompt_len} prompt tokens leave room for {room} of this model's maximum context length "
                f"of {context} (--context), found {asked}"
            )
            raise ApiError(400, message, code="context_length_exceeded", param="max_tokens")
        return asked


def unsupported(error: Exception, param: str) -> ApiError:
    """A grammar that cannot be enforced, as an answer."""
    return ApiError(400, f"{param}: {error}", code="unsupported_schema", param=param)


def refusing(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call, with the package's own errors about a caller's input as 400."""
    try:
        return function(*arguments, **options)
    except (ChatError, RequestError, TokenizerError) as error:
        raise refused(error) from None


def refused(error: ChatError | RequestError | TokenizerError) -> ApiError:
    """A mistake in a caller's input, as an answer."""
    return ApiError(400, str(error), code="invalid_value", param=_param_of(error))


def _param_of(error: ChatError | RequestError | TokenizerError) -> str | None:
    if isinstance(error, RequestError):
        return "bad_words" if error.field == "bad_words_ids" else error.field
    if isinstance(error, ChatError):  # its text begins with an option, or with the message that is wrong
        return leading_field(str(error)) or "messages"
    return None


def _prompts(request: CompletionRequest) -> list[Any]:
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _last(request: ChatRequest) -> str:
    return request.messages[-1].role


def _content_rule(request: SamplingFields) -> tuple[ContentRule, str] | None:
    try:
        return content_rule(request)
    except GrammarError as error:
        raise ApiError(400, str(error), code="unsupported_schema", param=leading_field(str(error))) from None


def _rules(request: ChatRequest, rule: tuple[ContentRule, str] | None, thinking: bool) -> AnswerRules | None:
    """The rules of the answer, None where anything goes. Without strict functions, `auto` leaves the model free."""
    content, choice = None if rule is None else rule[0], request.tool_choice or "auto"
    functions = [tool.function for tool in request.tools or ()]
    one_call = request.parallel_tool_calls is False
    chosen = request.chosen_names
    if chosen is not None:
        functions = [one for one in functions if one.name in chosen]
    if isinstance(choice, NamedToolChoice):
        one_call, choice = True, "required"
    elif isinstance(choice, AllowedToolChoice):
        choice = choice.allowed_tools.mode
    if not functions:
        return None if content is None else AnswerRules(thinking=thinking, content=content)
    is_bound = content is not None or one_call or chosen is not None or any(one.strict for one in functions)
    if choice == "auto" and not is_bound:
        return None
    return AnswerRules(
        thinking=thinking,
        content=content,
        calls={"none": "never", "auto": "may", "required": "must"}[choice],  # type: ignore[arg-type]
        functions=[FunctionRule(one.name, one.parameters or {}, bool(one.strict)) for one in functions],
        one_call=one_call,
    )
