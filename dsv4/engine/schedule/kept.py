"""Which draws of a step count: those of a piece up to the first that differs from the draft behind it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from dsv4.engine.schedule.plan import Piece
from dsv4.engine.step.sampler import Drawn, Undrawable

Outcome = Drawn | Undrawable


def by_piece(pieces: Sequence[Piece], drawn: Iterable[Outcome]) -> Iterator[tuple[Piece, list[Outcome]]]:
    """Every piece with its outcomes: that of its newest token and of each of its drafts; none if it does not draw."""
    left = iter(drawn)
    for piece in pieces:
        yield piece, [*islice(left, 1 + piece.num_drafts)] if piece.draws else []


def num_accepted(piece: Piece, found: Sequence[Outcome]) -> int:
    """How many of the piece's drafts came true, from the first on: each is what was drawn before it."""
    count = 0
    for draft, outcome in zip(piece.request.drafts[: piece.num_drafts], found, strict=False):
        if not isinstance(outcome, Drawn) or outcome.token_id != draft:
            break
        count += 1
    return count


def kept_rows(pieces: Sequence[Piece], drawn: Sequence[Outcome]) -> list[int]:
    """Rows of these pieces without those of drafts that did not come true."""
    rows: list[int] = []
    first = 0
    for piece, found in by_piece(pieces, drawn):
        rows += range(first, first + piece.length - piece.num_drafts + num_accepted(piece, found))
        first += piece.length
    return rows
