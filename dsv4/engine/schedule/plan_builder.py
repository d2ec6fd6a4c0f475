"""`PlanBuilder`: a plan while it is made, and its arithmetic of positions, blocks and pieces. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.cache.schema import blocks_at_position
from dsv4.config import BLOCK_TOKENS, CSA_RATIO
from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import Piece
from dsv4.engine.schedule.rows import NO_ROWS, RowsOfStep, order_of, slot_of


@dataclass
class PlanBuilder:
    """A plan being made: what is left of the budgets, and what each request gets; one token each of `rows`."""

    num_tokens: int
    num_blocks: int
    lengths: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)  # slots to reset
    first_short: tuple[int, int] | None = None  # first in order that lacked blocks
    rows: RowsOfStep = NO_ROWS
    decoding: list[Request] = field(default_factory=list)  # without rows, in order
    is_waiting: bool = False

    def grant(self, request: Request, length: int) -> None:
        """Plan to feed `length` of the request's tokens."""
        self.num_tokens -= length
        self.num_blocks -= new_blocks(request, length)
        self.lengths[request] = length

    def take_rows(self, rows: RowsOfStep) -> None:
        """Feed them all: there is enough of everything."""
        self.rows = rows
        self.num_tokens -= len(rows)
        self.num_blocks -= rows.num_new_blocks

    def spread_rows(self) -> None:
        """Go on request by request: one of those with a row may have to give way."""
        rows, self.rows = self.rows, NO_ROWS
        if not rows:
            return
        self.lengths.update(dict.fromkeys(rows.requests, 1))
        self.decoding = sorted((*rows.requests, *self.decoding), key=order_of)


def by_pending(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Those with one token to feed, and those with more."""
    decoding: list[Request] = []
    prefilling: list[Request] = []
    for request in requests:
        num_pending = request.num_pending
        if num_pending:
            (decoding if num_pending == 1 else prefilling).append(request)
    return decoding, prefilling


def piece_of(request: Request, length: int, num_drafts: int = 0) -> Piece:
    draws = length - num_drafts == request.num_pending and not request.draws_nothing
    return Piece(request, slot_of(request), request.num_processed, length, draws, num_drafts)


def blocks_held(request: Request) -> int:
    """Blocks a running request owns between two forward calls."""
    return blocks_at_position(request.num_processed)


def new_blocks(request: Request, length: int) -> int:
    return blocks_at_position(request.num_processed + length) - blocks_held(request)


def last_position(num_blocks: int) -> int:
    """The most tokens a request can have processed with `num_blocks` blocks: the inverse of `blocks_at_position`."""
    return num_blocks * BLOCK_TOKENS + CSA_RATIO - 1


def starts_block(position: int) -> bool:
    """Whether a request at `position` needs another block for its next token."""
    return position % BLOCK_TOKENS == CSA_RATIO - 1
