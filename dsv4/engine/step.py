"""`StepBuilder`: from a `StepPlan` to the tensors of its forward call.

The host's numbers of a step are one int64 buffer: the columns of its batch, then rows, slots and positions of the R
rows to draw from. It reaches a GPU in one asynchronous copy; on a CPU it is used where it is. The block table is the
cache's own tensor, brought up to date before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.batch import COLUMNS, Chunk, TokenBatch, columns_of
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfer import to_device
from dsv4.engine.scheduler import StepPlan
from dsv4.engine.sequence import Sequence

LAST_DRAWN = -1  # as a token id: the one that the row's slot has drawn last
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
        self._cache.prepare_forward(
            [piece.slot for piece in pieces], [piece.start for piece in pieces], [piece.length for piece in pieces]
        )
        chunks, drawing, num_tokens = [], [], 0
        draws: tuple[list[int], list[int], list[int]] = [], [], []  # rows, slots, positions
        for piece in pieces:
            end = piece.start + piece.length
            token_ids = piece.sequence.token_ids[piece.start : end]
            if len(token_ids) < piece.length:
                token_ids.append(LAST_DRAWN)
            chunks.append(Chunk(piece.slot, piece.start, token_ids))
            num_tokens += piece.length
            if piece.draws:
                for column, value in zip(draws, (num_tokens - 1, piece.slot, end - 1), strict=True):
                    column.append(value)
                drawing.append(piece.sequence)
        numbers = [number for column in columns_of(chunks, pad_to) for number in column]
        split, starts = len(numbers), []
        for column in draws:
            numbers += [0] * (len(numbers) % _ALIGNED)
            starts.append(len(numbers))
            numbers += column
        values = to_device(torch.tensor(numbers, dtype=torch.int64), self._cache.device)
        batch = TokenBatch.over(values[:split].view(len(COLUMNS), -1), self._cache.block_table)
        draw_rows, draw_slots, draw_positions = (values[start : start + len(drawing)] for start in starts)  # [R] each
        return StepInput(batch, draw_rows, draw_slots, draw_positions, tuple(drawing), num_tokens)
