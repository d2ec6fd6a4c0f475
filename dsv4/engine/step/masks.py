"""`Masks`: what rules allow the rows of a step, as words from the rules to the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.transfer import host_buffer
from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import Piece
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


@dataclass(frozen=True)
class _Bound:
    """A piece with a rule: its place among the masks, and its first row that draws."""

    piece: Piece
    place: int
    row: int


def make_masks(pieces: Iterable[Piece], vocab_size: int, device: torch.device, first_row: int = 0) -> Masks:
    """What rules allow the rows of these pieces that draw, the first of them being `first_row`. All that their requests
    have drawn so far must be known."""
    bound: list[_Bound] = []
    num_masks = 0
    row = first_row
    for piece in pieces:
        if piece.draws:
            if piece.request.has_rules and not piece.request.is_done:
                bound.append(_Bound(piece, num_masks, row))
                num_masks += 1 + piece.num_drafts
            row += 1 + piece.num_drafts
    if not bound:
        return Masks()
    made = host_buffer((num_masks, num_words(vocab_size)), torch.int32, device)
    words: Words = made.numpy()
    failed = _fill_first_rows(bound, words, vocab_size)
    is_used = np.zeros(num_masks, dtype=np.bool_)
    rows = np.empty(num_masks, dtype=np.int64)
    stuck: dict[int, str] = {}
    for one in bound:
        num_drafts = one.piece.num_drafts
        rows[one.place : one.place + num_drafts + 1] = np.arange(one.row, one.row + num_drafts + 1)
        is_used[one.place] = one.place not in failed
        if one.place in failed:
            stuck[one.row] = constraint_failure(failed[one.place])
        elif num_drafts:
            own = slice(one.place, one.place + num_drafts + 1)
            found = _fill_draft_rows(one.piece, words[own], is_used[own], vocab_size)
            stuck |= {one.row + draft: reason for draft, reason in found.items()}
    if not is_used.all():  # rows behind a draft that cannot come
        kept = np.flatnonzero(is_used)
        return Masks(torch.from_numpy(rows[kept]), made[torch.from_numpy(kept)], stuck)
    return Masks(torch.from_numpy(rows), made, stuck)


def _fill_first_rows(bound: Sequence[_Bound], words: Words, vocab_size: int) -> dict[int, Exception]:
    """The row of each piece's newest token. By place, why there is nothing to draw."""
    ruled = [one for one in bound if one.piece.request.constraint is not None]
    places = [one.place for one in ruled]
    rules = [one.piece.request.constraint for one in ruled]
    is_whole = places == list(range(len(words)))
    target = words if is_whole else np.empty((len(ruled), words.shape[1]), dtype=np.int32)
    failed = {places[i]: error for i, error in fill_allowed(rules, target, vocab_size).items()}  # type: ignore[arg-type]
    if not is_whole:
        words[places] = target
    for one in bound:
        if one.piece.request.constraint is None:
            words[one.place] = -1
        if one.place not in failed:
            _forbid(words[one.place], one.piece.request, ())
    firsts = [one.place for one in bound]
    found = words if is_whole else words[firsts]
    found[:, -1] &= _last_word(vocab_size)
    if not is_whole:
        words[firsts] = found
    for i in np.flatnonzero(~found.any(axis=1)).tolist():
        failed.setdefault(firsts[i], ConstraintError(_NOTHING))
    return failed


def _fill_draft_rows(piece: Piece, words: Words, is_used: NDArray[np.bool_], vocab_size: int) -> dict[int, str]:
    """What a request may draw behind one, two, ... of its drafts; by row, why it can draw nothing. Rows behind a draft
    that it may not draw, or that ends it, stay free: no draw of theirs counts."""
    request, drafts, rule = piece.request, piece.request.drafts[: piece.num_drafts], piece.request.constraint
    row, num_tried = 0, 0
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
    if not request.params.min_tokens and not request.params.bad_words_ids:
        return
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
