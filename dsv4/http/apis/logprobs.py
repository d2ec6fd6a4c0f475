"""Log-probabilities as the answers show them: tokens by text and bytes, or by id where that is asked for."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from dsv4.http.apis.sse import quote, to_json
from dsv4.request import TokenLogprobs
from dsv4.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no -inf


class TokenNames:
    """by_id: a token is written `token_id:N`, so that no two look alike."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id
        self._around = cache(self._fields)
        self.quoted = cache(lambda token_id: quote(self.name(token_id)))  # a name as JSON

    def name(self, token_id: int) -> str:
        if self._by_id:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def tokens(self, given: Iterable[TokenLogprobs]) -> str:
        """Tokens of an answer as JSON, each with the most likely ones beside it."""
        return f"[{','.join(map(self._token, given))}]"

    def _token(self, one: TokenLogprobs) -> str:
        top = "},".join([self._number(token_id, logprob) for token_id, logprob in one.top])
        return f'{self._number(one.token_id, one.logprob)},"top_logprobs":[{top}{"}" if top else ""}]}}'

    def _number(self, token_id: int, logprob: float) -> str:
        """A token's fields, without the end of the object."""
        before, after = self._around(token_id)
        return f"{before}{finite(logprob)!r}{after}"

    def _fields(self, token_id: int) -> tuple[str, str]:
        octets = to_json(list(self._tokenizer.token_bytes(token_id)))
        return f'{{"token":{self.quoted(token_id)},"logprob":', f',"bytes":{octets}'

    def prompt(self, given: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, Any] | None]:
        """Every token of a prompt by its id, and the `num_top` likeliest there."""
        return [None if one is None else self._place(one, num_top) for one in given]

    def _place(self, logprobs: TokenLogprobs, num_top: int) -> dict[str, Any]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
        shown = dict(logprobs.top[:num_top])
        shown[logprobs.token_id] = logprobs.logprob
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": ranks.get(token_id, len(ranks) + 1),
                "decoded_token": self.name(token_id),
            }
            for token_id, logprob in shown.items()
        }


def finite(logprob: float) -> float:
    """NaN too becomes the least."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
