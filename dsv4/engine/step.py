"""`StepBuilder`: from a `StepPlan` to the tensors of its forward call.

The host's numbers of a step are one int64 buffer, [5 T + R] long: token ids, positions, slots, chunk starts and chunk
ends of T rows, then the R rows to sample from. It reaches a GPU in one asynchronous copy from pinned memory; on a CPU
it is used where it is. The block table is the cache's own tensor, brought up to date before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.manager import KVCacheManager
from dsv4.engine.scheduler import StepPlan
from dsv4.engine.sequence import Sequence

PADDED_SLOT = -1
_NUM_COLUMNS = 5


@dataclass(frozen=True)
class StepInput:
    """One forward call. `drawing[r]` gets the token drawn from the batch's row `sample_rows[r]`.

    batch        T rows: the pieces of the plan side by side, then padding (slot -1, everything else 0)
    sample_rows  int64 [R]
    """

    batch: TokenBatch
    sample_rows: Tensor
    drawing: tuple[Sequence, ...]


class StepBuilder:
    """Builds the steps of one cache."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        # a buffer is refilled two steps later at the earliest, and only when its copy is through
        self._staging = [_Staging(), _Staging()] if cache.device.type == "cuda" else []

    def build(self, plan: StepPlan, *, pad_to: int = 0) -> StepInput:
        """Give the plan's requests the blocks its tokens need, and make the tensors, of at least `pad_to` rows."""
        pieces = plan.pieces
        self._cache.prepare_forward(
            [piece.slot for piece in pieces], [piece.start for piece in pieces], [piece.length for piece in pieces]
        )
        columns: list[list[int]] = [[] for _ in range(_NUM_COLUMNS)]
        token_ids, positions, slots, chunk_starts, chunk_ends = columns
        sample_rows, drawing = [], []
        for piece in pieces:
            start, end = piece.start, piece.start + piece.length
            token_ids += piece.sequence.token_ids[start:end]
            positions += range(start, end)
            slots += [piece.slot] * piece.length
            chunk_starts += [start] * piece.length
            chunk_ends += [end] * piece.length
            if piece.draws:
                sample_rows.append(len(token_ids) - 1)
                drawing.append(piece.sequence)
        num_padding = max(0, pad_to - len(token_ids))
        for column in columns:
            column += [PADDED_SLOT if column is slots else 0] * num_padding
        num_rows = len(token_ids)
        numbers = [*token_ids, *positions, *slots, *chunk_starts, *chunk_ends, *sample_rows]
        values = self._on_device(torch.tensor(numbers, dtype=torch.int64))
        rows = values[: _NUM_COLUMNS * num_rows].view(_NUM_COLUMNS, num_rows).unbind(0)  # 5 x [T]
        batch = TokenBatch(rows[0], rows[1], rows[2], rows[3], rows[4], self._cache.block_table)
        return StepInput(batch, values[_NUM_COLUMNS * num_rows :], tuple(drawing))

    def _on_device(self, values: Tensor) -> Tensor:
        if not self._staging:
            return values
        self._staging.reverse()
        return self._staging[0].copy(values, self._cache.device)


class _Staging:
    """A pinned host buffer, and the event after the last copy out of it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None

    def copy(self, values: Tensor, device: torch.device) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._copied = torch.cuda.Event()
        if self._buffer.numel() < values.numel():
            self._buffer = torch.empty(2 * values.numel(), dtype=torch.int64, pin_memory=True)
        staged = self._buffer[: values.numel()]
        staged.copy_(values)
        on_device = staged.to(device, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(device))
        return on_device
