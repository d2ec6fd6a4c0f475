"""Results of a draw, on the host."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from dsv4.engine.request import Request
from dsv4.ops.sampling import NOTHING_ALLOWED, POISONED
from dsv4.request import TokenLogprobs

NUM_TOP = (20, 100)  # likeliest tokens listed beside a log-probability: kernels are compiled for these, no others
SCORED_ROWS = (256, 64)  # prompt rows whose logits are made at once: no other numbers, so that no more is compiled


# from an iterable of the fields, without a Python call: a step makes one for each of its rows
_new_logprobs: Callable[[Iterable[Any]], TokenLogprobs] = partial(tuple.__new__, TokenLogprobs)


class Drawn(NamedTuple):
    """A request's next token, and its log-probabilities where it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class Undrawable(NamedTuple):
    """A request that has no next token, and why. It says nothing about the others of the call."""

    reason: str


def num_top_for(asked: Sequence[int | None]) -> int | None:
    """How many of the likeliest tokens to list, given what each request asks for; None if none asks."""
    most = max((count for count in asked if count is not None), default=None)
    return None if most is None else next(count for count in NUM_TOP if count >= most)


def scored_rows(num_left: int) -> int:
    """How many rows to score in the next call, with `num_left` left; padding fills the rest."""
    return next((size for size in SCORED_ROWS if size <= num_left), SCORED_ROWS[-1])


def outcomes(
    token_ids: list[int], logprobs: Sequence[Tensor], requests: Sequence[Request], stuck: dict[int, str]
) -> list[Drawn | Undrawable]:
    """What the rows of a step drew; `logprobs` are the op's three tensors, or none. A request's rows stand together:
    its newest token's, then those of its drafts."""
    drawn: list[Drawn | Undrawable] = []
    listed = listed_logprobs(token_ids, [request.params.logprobs for request in requests], logprobs)
    for row, (token_id, request) in enumerate(zip(token_ids, requests, strict=True)):
        if row in stuck:
            drawn.append(Undrawable(stuck[row]))
        elif token_id < 0:
            drawn.append(undrawable(token_id, len(request.token_ids) + row - requests.index(request)))
        else:
            drawn.append(Drawn(token_id, listed[row]))
    return drawn


def undrawable(code: int, position: int) -> Undrawable:
    """What it means that a draw gave this instead of a token id."""
    if code == POISONED:
        return Undrawable(f"the model gave no numbers (NaN logits) for the token at position {position}")
    assert code == NOTHING_ALLOWED, f"a draw gave {code}"
    return Undrawable("the request's biases and rules together allow no token")


def listed_logprobs(
    token_ids: Sequence[int], counts: Sequence[int | None], logprobs: Sequence[Tensor]
) -> list[TokenLogprobs | None]:  # fmt: skip
    """The rows of the three tensors of `sampled_logprobs`, each with its `counts` likeliest tokens; None where a row
    did not ask."""
    most = max((count for count in counts if count is not None), default=None)
    if most is None:
        return [None] * len(counts)
    chosen, top_ids, top = logprobs
    listed = map(zip, top_ids[:, :most].tolist(), top[:, :most].tolist())
    made = list(map(_new_logprobs, zip(token_ids, chosen.tolist(), map(tuple, listed), strict=True)))
    if all(count == most for count in counts):
        return [*made]
    return [
        None if count is None else one._replace(top=one.top[:count]) for one, count in zip(made, counts, strict=True)
    ]
