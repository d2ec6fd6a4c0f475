"""`POST /v1/completions`: what a request may hold."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dsv4.http.apis.fields import MAX_LOGPROBS, Pattern, SamplingFields, TokenId


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. Nothing is added to a prompt unless `add_special_tokens` asks for the begin-of-sentence
    marker, and markers in its text are ordinary text. `echo`: the prompt comes back in front of the text, with its
    log-probabilities where `logprobs` asks for them."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)] | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)
    ]  # fmt: skip
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
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
