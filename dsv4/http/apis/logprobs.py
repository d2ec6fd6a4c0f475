"""Log-probabilities as the answers show them: tokens by text and bytes, or by id where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.http.apis.schemas import PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from dsv4.request import TokenLogprobs
from dsv4.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class TokenNames:
    """by_id: a token is written `token_id:N`, so that no two look alike."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id

    def name(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def token(self, logprobs: TokenLogprobs) -> TokenLogprob:
        """A token of an answer, with the most likely ones beside it."""
        return TokenLogprob(
            **self._top(logprobs.token_id, logprobs.logprob).model_dump(),
            top_logprobs=[self._top(token_id, logprob) for token_id, logprob in logprobs.top],
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        value = self._tokenizer.token_bytes(token_id)
        return TopLogprob(token=self.name(token_id), logprob=finite(logprob), bytes=list(value))

    def prompt(self, given: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
        """Every token of a prompt by its id, and the `num_top` likeliest there."""
        return [None if one is None else self._place(one, num_top) for one in given]

    def _place(self, logprobs: TokenLogprobs, num_top: int) -> dict[str, PromptLogprob]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
        shown = dict(logprobs.top[:num_top])
        shown[logprobs.token_id] = logprobs.logprob
        return {
            str(token_id): PromptLogprob(
                logprob=finite(logprob), rank=ranks.get(token_id), decoded_token=self.name(token_id)
            )
            for token_id, logprob in shown.items()
        }


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
