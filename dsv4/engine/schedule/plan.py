"""What a scheduler gives: a `StepPlan` and its `Piece`s. No torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dsv4.engine.request import Request
from dsv4.engine.schedule.rows import NO_ROWS, RowsOfStep


class Piece(NamedTuple):
    """The tokens `start` to `start + length - 1` of a request. `draws`: they are the last it knows, a token follows.
    The last `num_drafts` of them are drafts, which it may turn out not to have."""

    request: Request
    slot: int
    start: int
    length: int
    draws: bool
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """Behind its tokens that are certain."""
        return self.start + self.length - self.num_drafts


@dataclass(frozen=True)
class StepPlan:
    """One forward call: rows that decode, then `others`, piece by piece: those that decode before those that read
    prompts.

    preempted   lost their slots for it
    failed      could not go on, or were not done in time; they have left
    is_waiting  for a file: nothing can run until it has been read
    """

    others: tuple[Piece, ...] = ()
    preempted: tuple[Request, ...] = ()
    rows: RowsOfStep = NO_ROWS
    failed: tuple[Request, ...] = ()
    is_waiting: bool = False

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.rows.requests or self.others)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All of it piece by piece, in the order of the batch."""
        rows = self.rows
        numbers = zip(rows.requests, rows.slots.tolist(), rows.starts.tolist(), strict=True)
        return (*(Piece(request, slot, start, 1, True) for request, slot, start in numbers), *self.others)

    @cached_property
    def num_tokens(self) -> int:
        return len(self.rows) + sum(piece.length for piece in self.others)

    @cached_property
    def num_drawing(self) -> int:
        """Requests that draw."""
        return len(self.rows) + sum(piece.draws for piece in self.others)

    @cached_property
    def has_rules(self) -> bool:
        """Whether the host must say what may be drawn, which it knows only once the step before is collected. As it was
        when first asked: rules may end with what that step drew."""
        ruled = (self.rows.requests[place] for place in self.rows.ruled)
        drawing = (piece.request for piece in self.others if piece.draws)
        return any(request.has_rules for request in (*ruled, *drawing))
