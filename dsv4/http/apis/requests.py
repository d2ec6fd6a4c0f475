"""What a request may hold, field by field. A field that is not here is refused with its name, never ignored.

The names are OpenAI's, and those of vLLM and SGLang where OpenAI has none. A field that can change nothing here is
taken with the values for which that is true, and refused with any other (`refused.py` says why). docs/fields.md has
them all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from dsv4.http.apis.request_parts import (
    MAX_INT,
    AllowedToolChoice,
    Message,
    NamedToolChoice,
    Pattern,
    ResponseFormat,
    StreamOptions,
    Strict,
    StructuredOutputs,
    TemplateOptions,
    Thinking,
    Tool,
    tool_choice_kind,
)

_MAX_STOPS = 16
_MAX_TOOLS = 128

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedToolChoice, Tag("<named>")]
    | Annotated[AllowedToolChoice, Tag("<allowed>")],
    Discriminator(tool_choice_kind),
]


class HarmlessFields(Strict):
    """What changes no answer, with the values for which that is true."""

    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = Field(default=None, ge=1, le=1)
    watermarking: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    no_stop_trim: Literal[False] | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Literal[1] | None = None
    routed_experts_prompt_start: Literal[0] | None = None
    routed_experts_start_len: Literal[0] | None = None
    return_routed_experts: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None
    return_cached_tokens_details: Literal[False] | None = None
    return_token_offsets: Literal[False] | None = None
    return_mm_kwargs: Literal[True] | None = None


class SamplingFields(HarmlessFields):
    """What both kinds of request share. None means the default."""

    model: str | None = Field(default=None, max_length=256)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[IdText, Bias] | None = None
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    bad_words: list[StopText] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: StopText | Annotated[list[StopText], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    min_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    n: int | None = Field(default=None, ge=1, le=MAX_INT)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    priority: int | None = Field(default=None, ge=-10, le=10)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    request_id: Name | None = None
    rid: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: list[StopText] | None = Field(default=None, min_length=1)
    guided_grammar: Pattern | None = None
    guided_whitespace_pattern: Pattern | None = None
    guided_decoding_backend: str | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not in a stream")
        if self.request_id is not None and self.rid is not None:
            raise ValueError("rid: expected it or request_id, found both")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32)
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_prompt_token_ids: bool | None = None
    task: str | None = None
    # harmless, with these values
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, JsonValue] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    skip_special_tokens: bool | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    return_prompt_text: Literal[False] | None = None
    return_meta_info: Literal[False] | None = None
    use_audio_in_video: Literal[False] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: expected it or max_completion_tokens, found both")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: allowed only with logprobs true")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(self.continue_final_message):
            raise ValueError("add_generation_prompt: false goes with continue_final_message true, and only with it")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("tools: two functions have the same name")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tools: required by tool_choice, and missing")
        unknown = [name for name in self.chosen_names or () if name not in names]
        if unknown:
            raise ValueError(f"tool_choice: expected one of {', '.join(names)}, found another name")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """The functions `tool_choice` names; None where it names none."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedToolChoice):
            return [one.function.name for one in self.tool_choice.allowed_tools.tools]
        return None


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. Nothing is added to a prompt unless `add_special_tokens` asks for the begin-of-sentence
    marker, and markers in its text are ordinary text. `echo`: the prompt comes back in front of the text, with its
    log-probabilities where `logprobs` asks for them."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)] | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)
    ]  # fmt: skip
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    json_schema: Pattern | None = None
    # harmless, with these values
    best_of: int | None = None
    suffix: Literal[""] | None = None
    skip_special_tokens: Literal[False] | None = None

    @model_validator(mode="after")
    def _best_is_all(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(
                f"best_of: every answer is returned, so it must be n ({self.n or 1}), found {self.best_of}"
            )
        return self
