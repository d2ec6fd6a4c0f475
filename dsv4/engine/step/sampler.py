"""The host's side of a draw: what the rules of its request allow before it, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import Piece
from dsv4.engine.step.constraint import ConstraintError
from dsv4.ops.sampling import NOTHING_ALLOWED, POISONED
from dsv4.request import TokenLogprobs

NUM_TOP = (20, 100)  # likeliest tokens listed beside a log-probability: kernels are compiled for these, no others
SCORED_ROWS = 64  # prompt rows whose logits are made at once: always as many, so that nothing is compiled for others
_WORD_BITS = 32


class Drawn(NamedTuple):
    """A request's next token, and its log-probabilities where it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class Undrawable(NamedTuple):
    """A request that has no next token, and why. It says nothing about the others of the call."""

    reason: str


@dataclass(frozen=True)
class Masks:
    """Which tokens the rows of a step may draw; on the host.

    bits       int32 [R, vocab / 32]: a bit for each token that is allowed; only rows of `is_masked` [R] are filled in
    stuck      by row, why it cannot draw at all
    """

    bits: Tensor | None = None
    is_masked: Tensor | None = None
    stuck: dict[int, str] = field(default_factory=dict)


def make_masks(pieces: Sequence[Piece], vocab_size: int) -> Masks:
    """What rules allow the rows of these pieces that draw. All that their requests have drawn so far must be known."""
    drawing = [piece for piece in pieces if piece.draws]
    if not any(_is_bound(piece) for piece in drawing):
        return Masks()
    ends = np.cumsum([1 + piece.num_drafts for piece in drawing]).tolist()
    bits = np.empty((ends[-1], -(-vocab_size // _WORD_BITS)), dtype=np.int32)
    is_masked = np.zeros(ends[-1], dtype=np.int32)
    stuck: dict[int, str] = {}
    for piece, end in zip(drawing, ends, strict=True):
        if _is_bound(piece):
            first = end - 1 - piece.num_drafts
            found = _allow_rows(piece, bits[first:end], is_masked[first:end], vocab_size)
            stuck |= {first + row: reason for row, reason in found.items()}
    return Masks(torch.from_numpy(bits), torch.from_numpy(is_masked), stuck)


def _is_bound(piece: Piece) -> bool:
    return piece.request.has_rules and not piece.request.is_done


def _allow_rows(
    piece: Piece, bits: NDArray[np.int32], is_masked: NDArray[np.int32], vocab_size: int
) -> dict[int, str]:  # fmt: skip
    """What a request may draw behind none, one, ... of its drafts; by row, why it can draw nothing. Rows behind a draft
    that it may not draw, or that ends it, stay free: no draw of theirs counts."""
    request, drafts, rule = piece.request, piece.request.drafts[: piece.num_drafts], piece.request.constraint
    row, num_tried = 0, 0
    stuck: dict[int, str] = {}
    try:
        _allow(bits[0], request, (), vocab_size)
        is_masked[0] = 1
        for row, draft in enumerate(drafts, start=1):
            if not _has_bit(bits[row - 1], draft) or request.ends_at(draft):
                break
            if rule is not None:
                num_tried += 1
                rule.accept(draft)
            _allow(bits[row], request, drafts[:row], vocab_size)
            is_masked[row] = 1
    except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
        stuck[row] = constraint_failure(error)
    if rule is not None and num_tried:
        try:
            rule.rollback(num_tried)
        except Exception as error:
            stuck[0] = constraint_failure(error)
    return stuck


def _has_bit(words: NDArray[np.int32], token_id: int) -> bool:
    return bool(words[token_id // _WORD_BITS] >> token_id % _WORD_BITS & 1)


def _allow(words: NDArray[np.int32], request: Request, drafts: tuple[int, ...], vocab_size: int) -> None:
    """Set a bit of `words` for each token the request may draw behind these drafts, which its rule has been told.
    `ConstraintError` if that is nothing."""
    octets = words.view(np.uint8)
    if request.constraint is None:
        words[:] = -1
    else:
        allowed = request.constraint.allowed()
        if allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
            raise ConstraintError(f"the constraint gave {allowed.dtype} {list(allowed.shape)}, not bool [{vocab_size}]")
        packed = np.packbits(allowed.numpy(), bitorder="little")
        octets[: len(packed)], octets[len(packed) :] = packed, 0
    for token_id in {*range(vocab_size, len(octets) * 8), *request.forbidden_ids(drafts)}:
        octets[token_id // 8] &= 0xFF ^ 1 << token_id % 8
    if not words.any():
        raise ConstraintError("the constraint allows no token")


def constraint_failure(error: Exception) -> str:
    """What to say of a request whose rule raised."""
    if isinstance(error, ConstraintError):
        return str(error)
    return f"the constraint raised {type(error).__name__}: {error}"


def num_top_for(asked: Sequence[int | None]) -> int | None:
    """How many of the likeliest tokens to list where requests ask for so many; None if nobody asks."""
    most = max((count for count in asked if count is not None), default=None)
    return None if most is None else next(count for count in NUM_TOP if count >= most)


def outcomes(
    token_ids: list[int], logprobs: Sequence[Tensor], requests: Sequence[Request], stuck: dict[int, str]
) -> list[Drawn | Undrawable]:
    """What the rows of a step drew; `logprobs` are the op's three tensors, or none. A request's rows stand together:
    its newest token's, then those of its drafts."""
    drawn: list[Drawn | Undrawable] = []
    for row, (token_id, request) in enumerate(zip(token_ids, requests, strict=True)):
        if row in stuck:
            drawn.append(Undrawable(stuck[row]))
        elif token_id == POISONED:
            position = len(request.token_ids) + row - requests.index(request)
            drawn.append(Undrawable(f"the model gave no numbers (NaN logits) for the token at position {position}"))
        elif token_id == NOTHING_ALLOWED:
            drawn.append(Undrawable("the request's biases and rules together allow no token"))
        else:
            count = request.params.logprobs
            drawn.append(Drawn(token_id, None if count is None else token_logprobs(token_id, row, logprobs, count)))
    return drawn


def token_logprobs(token_id: int, row: int, logprobs: Sequence[Tensor], count: int) -> TokenLogprobs:
    """Row `row` of the three tensors of `sampled_logprobs`, with the `count` likeliest tokens."""
    chosen, top_ids, top = logprobs
    likeliest = zip(top_ids[row, :count].tolist(), top[row, :count].tolist(), strict=True)
    return TokenLogprobs(token_id, chosen[row].item(), tuple(likeliest))
