"""What several interfaces take, field by field: formats, sampling, and fields that change nothing.

`null` means that a field is absent, everywhere. A field that is not declared is refused with its name, never ignored.
The names are OpenAI's, and those of vLLM and SGLang where OpenAI has none. A field that can change nothing here is
taken with the values for which that is true, and refused with any other (`body.py`). docs/fields.md has them all.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

MAX_INT = 2**31 - 1
MAX_LOGPROBS = 100  # the engine's own limit
MAX_NAME = 64
MAX_FUNCTION_NAME = 2 * MAX_NAME  # with the namespace it is in
_MAX_STOPS = 16

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """No unknown field, no guessing of types, no NaN or infinity. A field that is null is a field that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


# ---- formats ----


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]+$", max_length=MAX_NAME)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


Pattern = Annotated[str, Field(min_length=1, max_length=65536)]


class StructuredOutputs(Strict):
    """One rule of `json`, `json_object`, `regex`, `choice`, `grammar`, in vLLM's spelling.

    grammar: Lark, or the EBNF of llama.cpp and xgrammar (GBNF).
    """

    json_rule: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)
    grammar: Pattern | None = None
    whitespace_pattern: Pattern | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None  # nothing ever falls back here

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        rules = (self.json_rule, self.json_object or None, self.regex, self.choice, self.grammar)
        found = sum(rule is not None for rule in rules)
        if found != 1:
            raise ValueError(f"expected one of json, json_object, regex, choice, grammar, found {found}")
        return self


class StreamOptions(Strict):
    """continuous_usage_stats: usage so far with every chunk, not with the last alone."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


# ---- sampling ----


class AccountFields(Strict):
    """What OpenAI's interfaces take and no answer depends on, with the values for which that is true."""

    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class HarmlessFields(AccountFields):
    """What changes no answer, with the values for which that is true."""

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


class PassedOn(Strict):
    """Fields that other interfaces pass on to a chat, which checks their values."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[IdText, Bias] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: Name | None = None
    stream: bool | None = None


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
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
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
