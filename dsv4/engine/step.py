"""`StepBuilder`: from a `StepPlan` to the tensors of its forward call.

The host's numbers of a step are one int64 buffer: the columns of its batch, then rows, slots and positions of the R
rows to draw from. It reaches a GPU in one asynchronous copy; on a CPU it is used where it is. The block table is the
cache's own tensor, brought up to date before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.batch import COLUMNS, TokenBatch, columns_of
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfer import to_device
from dsv4.engine.scheduler import Piece, StepPlan
from dsv4.engine.sequence import Sequence

LAST_DRAWN = -1  # as a token id: the one that the row's slot has drawn last
_SLOTS, _POSITIONS = COLUMNS.index("slots"), COLUMNS.index("positions")
_ALIGNED = 2  # numbers: a draw's column begins at a multiple of 16 bytes, since kernels are compiled apart for others


@dataclass(frozen=True)
class StepInput:
    """One forward call. `drawing[r]` gets the token drawn from the batch's row `draw_rows[r]`.

    batch           T rows: the pieces of the plan side by side, then padding (slot -1, everything else 0). A token id
                    of `LAST_DRAWN` stands for a token that the host does not know yet
    draw_rows       int64 [R]
    draw_slots      int64 [R]  the slots of those rows
    draw_positions  int64 [R]  and their positions
    num_tokens      rows that are no padding
    """

    batch: TokenBatch
    draw_rows: Tensor
    draw_slots: Tensor
    draw_positions: Tensor
    drawing: tuple[Sequence, ...]
    num_tokens: int


class StepBuilder:
    """Builds the steps of one cache."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache

    def build(self, plan: StepPlan, *, pad_to: int = 0) -> StepInput:
        """Give the plan's requests the blocks its tokens need, and make the tensors, of at least `pad_to` rows."""
        pieces = plan.pieces
        slots, starts = [piece.slot for piece in pieces], [piece.start for piece in pieces]
        lengths = [piece.length for piece in pieces]
        self._cache.prepare_forward(slots, starts, lengths)
        columns = columns_of(slots, starts, lengths, _tokens_of(pieces), pad_to)
        last_rows = np.cumsum(lengths)[[piece.draws for piece in pieces]] - 1  # rows [R]
        draws = np.stack([last_rows, columns[_SLOTS, last_rows], columns[_POSITIONS, last_rows]])
        num_drawn, width = draws.shape[1], draws.shape[1] + draws.shape[1] % _ALIGNED
        first = columns.size + columns.size % _ALIGNED
        numbers = np.zeros(first + len(draws) * width, dtype=np.int64)
        numbers[: columns.size] = columns.reshape(-1)
        numbers[first:].reshape(len(draws), width)[:, :num_drawn] = draws
        values = to_device(torch.from_numpy(numbers), self._cache.device)
        batch = TokenBatch.over(values[: columns.size].view(columns.shape), self._cache.block_table)
        draw_rows, draw_slots, draw_positions = values[first:].view(len(draws), width)[:, :num_drawn].unbind(0)
        drawing = tuple(piece.sequence for piece in pieces if piece.draws)
        return StepInput(batch, draw_rows, draw_slots, draw_positions, drawing, plan.num_tokens)


def _tokens_of(pieces: Iterable[Piece]) -> list[int]:
    token_ids: list[int] = []
    for piece in pieces:
        known, end = piece.sequence.token_ids, piece.start + piece.length
        token_ids += known[piece.start : end]
        if end > len(known):
            token_ids.append(LAST_DRAWN)
    return token_ids
