"""`StepBuilder`: from a `StepPlan` to the tensors of its forward call.

The host's numbers of a step are one int64 buffer: the columns of its batch, then rows, slots and positions of the N
rows to draw from, then what an engine that drafts needs besides. It reaches a GPU in one asynchronous copy, straight
into the buffer that a captured call reads (`StepBuffer`) where there is one; on a CPU it is used where it is. The block
table is the cache's own tensor, brought up to date before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.batch import COLUMNS, PADDED_SLOT, TokenBatch, aligned, columns_of
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfer import host_buffer, to_device
from dsv4.engine.draft.round import NO_DRAFT, NO_REQUEST, FedDrafts, draft_code, fill_drafts
from dsv4.engine.request import UNREAD, Request
from dsv4.engine.schedule.plan import Piece, StepPlan

LAST_DRAWN = -1  # as a token id: the one that the row's slot has drawn last
_IDS, _SLOTS, _POSITIONS = (COLUMNS.index(name) for name in ("token_ids", "slots", "positions"))

Numbers = NDArray[np.int64]


class StepBuffer(NamedTuple):
    """Device memory that a captured call reads: a batch of `size` rows, then rows, slots and positions of `num_draws`
    rows to draw from; int64, flat, each part beginning where `part_starts` says."""

    numbers: Tensor
    size: int
    num_draws: int


def part_starts(sizes: Iterable[int]) -> list[int]:
    """Where parts of these sizes begin in one buffer, and where it ends."""
    return [0, *accumulate(map(aligned, sizes))]


@dataclass(frozen=True)
class StepInput:
    """One forward call. `drawing[n]` gets the token drawn from the batch's row `draw_rows[n]`; a request whose drafts
    are verified stands there once for its newest token and once for each draft.

    batch           T rows: the pieces of the plan side by side, then padding (slot -1, everything else 0). A token id
                    of `LAST_DRAWN` stands for a token that the host does not know yet
    draw_rows       int64 [N]
    draw_slots      int64 [N]  the slots of those rows
    draw_positions  int64 [N]  and their positions
    num_tokens      rows that are no padding
    draw_drafts     int64 [N, K]  the drafts that stand before the row's draw; None where the engine does not draft
    fed             the requests that draw, for the drafter, then padding; None likewise
    """

    batch: TokenBatch
    draw_rows: Tensor
    draw_slots: Tensor
    draw_positions: Tensor
    drawing: tuple[Request, ...]
    num_tokens: int
    draw_drafts: Tensor | None = None
    fed: FedDrafts | None = None


class StepBuilder:
    """Builds the steps of one cache. `draft_table`: the last drafts of every slot; None where the engine does not
    draft."""

    def __init__(self, cache: KVCacheManager, draft_table: Tensor | None = None) -> None:
        self._cache = cache
        self._draft_table = draft_table
        self._viewed: tuple[int, int, int] | None = None  # what `_views` are of

    def build(
        self, plan: StepPlan, *, pad_to: int = 0, num_requests: int = 0, target: StepBuffer | None = None
    ) -> StepInput:  # fmt: skip
        """Give the plan's requests the blocks its tokens need, and make the tensors, of at least `pad_to` rows; for the
        drafter, of at least `num_requests` requests. In `target`, padding included, where it is given."""
        rows, others = plan.rows, plan.others
        most = 0 if self._draft_table is None else self._draft_table.shape[1]
        slots, starts, lengths = rows.slots, rows.starts, np.ones(len(rows), dtype=np.int64)
        token_ids: Numbers | int = LAST_DRAWN
        drawing, draw_rows, num_draws = rows.requests, np.arange(len(rows)), lengths
        if others:
            slots = np.append(slots, [piece.slot for piece in others])
            starts = np.append(starts, [piece.start for piece in others])
            lengths = np.append(lengths, [piece.length for piece in others])
            token_ids = np.append(np.full(len(rows), LAST_DRAWN), _tokens_of(others, most))
            is_drawing = [*[True] * len(rows), *(piece.draws for piece in others)]
            num_draws = np.append(num_draws, [1 + piece.num_drafts for piece in others if piece.draws]).astype(np.int64)
            draw_rows = np.repeat(np.cumsum(lengths)[is_drawing] - num_draws, num_draws) + _steps(num_draws)  # [N]
            drawing += tuple(piece.request for piece in others if piece.draws for _ in range(1 + piece.num_drafts))
        self._cache.prepare_forward(slots, starts, lengths)
        columns = columns_of(slots, starts, lengths, token_ids, pad_to if target is None else target.size)
        drawn = (columns[_SLOTS, draw_rows], columns[_POSITIONS, draw_rows]) if others else (slots, starts)
        parts = [columns, draw_rows, *drawn]
        num_rows, num_drawn = max(plan.num_tokens, pad_to), len(draw_rows)
        if target is not None:
            buffer, spans = self._laid_out(parts, [columns.size, *[target.num_draws] * 3])
            buffer.numpy()[spans[2]][num_drawn:] = PADDED_SLOT
            target.numbers.copy_(buffer, non_blocking=True)
            return StepInput(*self._views_of(target, num_rows, num_drawn), drawing, plan.num_tokens)
        if most:
            assert not rows, "an engine that drafts has no rows"
            parts += _draft_columns(others, columns[:, :num_rows], draw_rows, num_draws, most, num_requests)
        flat, device_rows, draw_slots, draw_positions, *more = self._copy(parts)
        batch = TokenBatch.over(flat.view(columns.shape), self._cache.block_table, num_rows)
        made = StepInput(batch, device_rows, draw_slots, draw_positions, drawing, plan.num_tokens)
        if not most:
            return made
        draw_drafts, *fed, drafts = more
        return replace(
            made, draw_drafts=draw_drafts.view(-1, most), fed=FedDrafts._make((*fed, drafts.view(-1, most)))
        )  # fmt: skip

    def _views_of(self, target: StepBuffer, num_rows: int, num_drawn: int) -> tuple[TokenBatch, Tensor, Tensor, Tensor]:
        """A captured call's batch; rows, slots and positions to draw from. Those of the last step, if as many."""
        key = (target.numbers.data_ptr(), num_rows, num_drawn)
        if key != self._viewed:
            num_cells = len(COLUMNS) * aligned(target.size)
            columns = target.numbers[:num_cells].view(len(COLUMNS), -1)
            batch = TokenBatch.over(columns, self._cache.block_table, num_rows)
            starts = part_starts((num_cells, target.num_draws, target.num_draws))[1:]
            rows, slots, positions = (target.numbers[start : start + num_drawn] for start in starts)
            self._viewed, self._views = key, (batch, rows, slots, positions)
        return self._views

    def _copy(self, parts: Sequence[Numbers]) -> list[Tensor]:
        """The parts on the device, flat, in one copy."""
        buffer, spans = self._laid_out(parts, [part.size for part in parts])
        values = to_device(buffer, self._cache.device)
        if self._draft_table is not None and buffer.numpy().min(initial=0) < LAST_DRAWN:
            values = fill_drafts(values, self._draft_table)
        return [values[span] for span in spans]

    def _laid_out(self, parts: Sequence[Numbers], sizes: Sequence[int]) -> tuple[Tensor, list[slice]]:
        """One host buffer with the parts, zeros behind each up to its size, and where they are."""
        starts = part_starts(sizes)
        buffer = host_buffer((starts[-1],), torch.int64, self._cache.device)
        numbers: Numbers = buffer.numpy()
        for part, start, end in zip(parts, starts, starts[1:], strict=False):
            numbers[start : start + part.size] = part.reshape(-1)
            numbers[start + part.size : end] = 0
        return buffer, [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _drafts_of(piece: Piece, most: int) -> list[int]:
    """The piece's drafts, and codes for those that only the device knows."""
    drafts = piece.request.drafts[: piece.num_drafts]
    return [draft_code(piece.slot, i, most) if draft == UNREAD else draft for i, draft in enumerate(drafts)]


def _tokens_of(pieces: Iterable[Piece], most: int) -> list[int]:
    token_ids: list[int] = []
    for piece in pieces:
        known = piece.request.token_ids
        token_ids += known[piece.start : piece.end]
        if piece.end > len(known):
            token_ids.append(LAST_DRAWN)
        token_ids += _drafts_of(piece, most)
    return token_ids


def _steps(lengths: Numbers) -> Numbers:
    """Offsets within runs of these lengths: 2, 3 -> 0, 1, 0, 1, 2."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _draft_columns(
    pieces: Sequence[Piece], columns: Numbers, draw_rows: Numbers, num_draws: Numbers, most: int, num_requests: int
) -> list[Numbers]:  # fmt: skip
    """The drafts before each row that draws, then the parts of `FedDrafts`."""
    steps = _steps(num_draws)
    first_rows = draw_rows[steps == 0]
    drafts = np.full((len(num_draws), most), NO_DRAFT, dtype=np.int64)
    for place, piece in enumerate(piece for piece in pieces if piece.draws):
        drafts[place, : piece.num_drafts] = _drafts_of(piece, most)
    owners = np.repeat(np.arange(len(num_draws)), num_draws)
    before = np.where(np.arange(most) < steps[:, None], drafts[owners], NO_DRAFT)  # [N, K]
    next_ids = np.append(columns[_IDS, 1:], 0)
    last_rows = np.cumsum([piece.length for piece in pieces], dtype=np.int64) - 1
    next_ids[last_rows] = [_following(piece) for piece in pieces]
    num_padded = max(0, num_requests - len(num_draws))

    def padded(column: Numbers, value: int) -> Numbers:
        return np.concatenate((column, np.full((num_padded, *column.shape[1:]), value, dtype=np.int64)))

    return [
        before, np.where(next_ids == LAST_DRAWN, 0, next_ids), padded(columns[_SLOTS, first_rows], PADDED_SLOT),
        padded(columns[_POSITIONS, first_rows], 0), padded(first_rows, 0),
        padded(np.cumsum(num_draws) - num_draws, 0), padded(num_draws - 1, NO_REQUEST), padded(drafts, NO_DRAFT),
    ]  # fmt: skip


def _following(piece: Piece) -> int:
    """The prompt's token behind a piece of it; any id where that is to be drawn."""
    known, end = piece.request.token_ids, piece.start + piece.length
    return known[end] if not piece.draws and end < len(known) else 0
