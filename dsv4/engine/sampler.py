"""The host's side of a draw: what the rules of its request allow before it, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dsv4.engine.constraint import ConstraintError
from dsv4.engine.sequence import Sequence
from dsv4.ops.sampling import NOTHING_ALLOWED, POISONED
from dsv4.request import TokenLogprobs

NUM_TOP = (20, 100)  # likeliest tokens listed beside a log-probability: kernels are compiled for these, no others
_WORD_BITS = 32


@dataclass(frozen=True)
class Drawn:
    """A request's next token, and its log-probabilities where it asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Undrawable:
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


def make_masks(sequences: SequenceOf[Sequence], vocab_size: int) -> Masks:
    """What the rules of these requests allow now. All they have drawn so far must be known."""
    bound = [row for row, sequence in enumerate(sequences) if sequence.has_rules and not sequence.is_done]
    if not bound:
        return Masks()
    num_words = -(-vocab_size // _WORD_BITS)
    bits = torch.empty(len(sequences), num_words, dtype=torch.int32)
    is_masked = torch.zeros(len(sequences), dtype=torch.int32)
    stuck: dict[int, str] = {}
    for row in bound:
        try:
            allowed = _allowed(sequences[row], vocab_size)
        except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
            stuck[row] = constraint_failure(error)
            continue
        packed = np.zeros(num_words * _WORD_BITS // 8, dtype=np.uint8)
        packed[: -(-vocab_size // 8)] = np.packbits(allowed.numpy(), bitorder="little")
        bits[row] = torch.from_numpy(packed.view(np.int32))
        is_masked[row] = 1
    return Masks(bits, is_masked, stuck)


def _allowed(sequence: Sequence, vocab_size: int) -> Tensor:
    """bool [vocab]. `ConstraintError` if that is nothing."""
    if sequence.constraint is None:
        allowed = torch.ones(vocab_size, dtype=torch.bool)
    else:
        allowed = sequence.constraint.allowed()
        if allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
            raise ConstraintError(f"the constraint gave {allowed.dtype} {list(allowed.shape)}, not bool [{vocab_size}]")
    forbidden = sequence.forbidden_ids()
    if forbidden:
        allowed = allowed.clone()
        allowed[forbidden] = False
    if not allowed.any():
        raise ConstraintError("the constraint allows no token")
    return allowed


def constraint_failure(error: Exception) -> str:
    """What to say of a request whose rule raised."""
    if isinstance(error, ConstraintError):
        return str(error)
    return f"the constraint raised {type(error).__name__}: {error}"


def num_top_for(asked: SequenceOf[int | None]) -> int | None:
    """How many of the likeliest tokens to list where requests ask for so many; None if nobody asks."""
    most = max((count for count in asked if count is not None), default=None)
    return None if most is None else next(count for count in NUM_TOP if count >= most)


def outcomes(
    token_ids: list[int], logprobs: SequenceOf[Tensor], sequences: SequenceOf[Sequence], stuck: dict[int, str]
) -> list[Drawn | Undrawable]:
    """What the rows of a step drew; `logprobs` are the op's three tensors, or none."""
    drawn: list[Drawn | Undrawable] = []
    for row, (token_id, sequence) in enumerate(zip(token_ids, sequences, strict=True)):
        if row in stuck:
            drawn.append(Undrawable(stuck[row]))
        elif token_id == POISONED:
            position = len(sequence.token_ids)
            drawn.append(Undrawable(f"the model gave no numbers (NaN logits) for the token at position {position}"))
        elif token_id == NOTHING_ALLOWED:
            drawn.append(Undrawable("the request's biases and rules together allow no token"))
        else:
            count = sequence.params.logprobs
            drawn.append(Drawn(token_id, None if count is None else token_logprobs(token_id, row, logprobs, count)))
    return drawn


def token_logprobs(token_id: int, row: int, logprobs: SequenceOf[Tensor], count: int) -> TokenLogprobs:
    """Row `row` of the three tensors of `sampled_logprobs`, with the `count` likeliest tokens."""
    chosen, top_ids, top = logprobs
    likeliest = zip(top_ids[row, :count].tolist(), top[row, :count].tolist(), strict=True)
    return TokenLogprobs(token_id, chosen[row].item(), tuple(likeliest))
