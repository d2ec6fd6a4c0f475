"""`Masks`: what rules allow the rows of a step, as words from the rules to the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.transfer import host_buffer
from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import StepPlan
from dsv4.engine.step.constraint import (
    WORD_BITS,
    ConstraintError,
    Words,
    checked_words,
    fill_allowed,
    has_bit,
    num_words,
)

_NOTHING = "the constraint allows no token"
_FIRST_WORDS = 16


@dataclass(frozen=True)
class Masks:
    """Which tokens the rows of a step may draw; on the host, rows that may draw all of them left out.

    rows   int64 [M]: indices among the rows that draw
    words  int32 [M, vocab / 32]: a bit for each token that is allowed
    stuck  by row that draws, why it cannot draw at all
    """

    rows: Tensor | None = None
    words: Tensor | None = None
    stuck: dict[int, str] = field(default_factory=dict)


class _Bound(NamedTuple):
    """A request with a rule: its place among the masks, its first row that draws, and the drafts that are verified."""

    request: Request
    place: int
    row: int
    drafts: tuple[int, ...]


def make_masks(plan: StepPlan, vocab_size: int, device: torch.device) -> Masks:
    """What rules allow the rows of a plan that draw. All that their requests have drawn so far must be known."""
    bound = [
        _Bound(request, place, row, ())
        for place, (row, request) in enumerate(plan.rows.with_rules())  # those that have ended have none
    ]
    num_masks, row = len(bound), len(plan.rows)
    for piece in plan.others:
        if piece.draws:
            request = piece.request
            if request.has_rules and not request.is_done:
                bound.append(_Bound(request, num_masks, row, request.drafts[: piece.num_drafts]))
                num_masks += 1 + piece.num_drafts
            row += 1 + piece.num_drafts
    if not bound:
        return Masks()
    made = host_buffer((num_masks, num_words(vocab_size)), torch.int32, device)
    words: Words = made.numpy()
    failed = _fill_first_rows(bound, words, vocab_size)
    stuck = {one.row: constraint_failure(failed[one.place]) for one in bound if one.place in failed} if failed else {}
    is_used = np.zeros(num_masks, dtype=np.bool_)
    rows = np.zeros(num_masks, dtype=np.int64)
    firsts = [one.place for one in bound]
    rows[firsts], is_used[firsts] = [one.row for one in bound], True
    is_used[list(failed)] = False
    for one in bound:
        if one.drafts and one.place not in failed:
            own = slice(one.place, one.place + len(one.drafts) + 1)
            rows[own] = np.arange(one.row, one.row + len(one.drafts) + 1)
            found = _fill_draft_rows(one.request, one.drafts, words[own], is_used[own], vocab_size)
            stuck |= {one.row + draft: reason for draft, reason in found.items()}
    if not is_used.all():  # rows behind a draft that cannot come
        kept = np.flatnonzero(is_used)
        return Masks(torch.from_numpy(rows[kept]), made[torch.from_numpy(kept)], stuck)
    return Masks(torch.from_numpy(rows), made, stuck)


def _fill_first_rows(bound: Sequence[_Bound], words: Words, vocab_size: int) -> dict[int, Exception]:
    """The row of each request's newest token. By place, why there is nothing to draw."""
    ruled = [one for one in bound if one.request.constraint is not None]
    places = [one.place for one in ruled]
    rules = [one.request.constraint for one in ruled]
    is_whole = places == list(range(len(words)))
    target = words if is_whole else np.empty((len(ruled), words.shape[1]), dtype=np.int32)
    failed = {places[i]: error for i, error in fill_allowed(rules, target, vocab_size).items()}  # type: ignore[arg-type]
    if not is_whole:
        words[places] = target
    for request, place, _, _ in bound:
        if request.constraint is None:
            words[place] = -1
        if request.params.min_tokens or request.params.bad_words_ids:
            _forbid(words[place], request, ())
    firsts = [one.place for one in bound]
    words[firsts, -1] &= _last_word(vocab_size)
    may_be_empty = ~words[firsts, :_FIRST_WORDS].any(axis=1)  # nearly every row allows some of the first tokens
    for i in np.flatnonzero(may_be_empty).tolist():
        if not words[firsts[i]].any():
            failed.setdefault(firsts[i], ConstraintError(_NOTHING))
    return failed


def _fill_draft_rows(
    request: Request, drafts: tuple[int, ...], words: Words, is_used: NDArray[np.bool_], vocab_size: int
) -> dict[int, str]:  # fmt: skip
    """What a request may draw behind one, two, ... of its drafts; by row, why it can draw nothing. Rows behind a draft
    that it may not draw, or that ends it, stay free: no draw of theirs counts."""
    rule, row, num_tried = request.constraint, 0, 0
    stuck: dict[int, str] = {}
    try:
        for row, draft in enumerate(drafts, start=1):
            if not has_bit(words[row - 1], draft) or request.ends_at(draft):
                break
            if rule is None:
                words[row] = -1
            else:
                num_tried += 1
                rule.accept(draft)
                words[row] = checked_words(rule, vocab_size)
            words[row, -1] &= _last_word(vocab_size)
            if request.params.min_tokens or request.params.bad_words_ids:
                _forbid(words[row], request, drafts[:row])
            if not words[row].any():
                raise ConstraintError(_NOTHING)
            is_used[row] = True
    except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
        stuck[row] = constraint_failure(error)
    if rule is not None and num_tried:
        try:
            rule.rollback(num_tried)
        except Exception as error:
            stuck[0] = constraint_failure(error)
    return stuck


def _forbid(words: Words, request: Request, drafts: tuple[int, ...]) -> None:
    """Take away what the request's own parameters forbid behind these drafts."""
    octets = words.view(np.uint8)
    for token_id in request.forbidden_ids(drafts):
        octets[token_id // 8] &= 0xFF ^ 1 << token_id % 8


def _last_word(vocab_size: int) -> np.int32:
    """Bits of the last word that stand for tokens."""
    num_bits = vocab_size % WORD_BITS
    return np.int32(-1 if num_bits == 0 else (1 << num_bits) - 1)


def constraint_failure(error: Exception) -> str:
    """What to say of a request whose rule raised."""
    if isinstance(error, ConstraintError):
        return str(error)
    return f"the constraint raised {type(error).__name__}: {error}"
