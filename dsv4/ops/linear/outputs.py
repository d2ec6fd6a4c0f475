"""Where the results of a launch of several weights go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.ops.linear.bundle import Segment


class Outputs:
    """The results of a launch: one allocation per dtype, a contiguous matrix [T, N_i] in it for every segment."""

    def __init__(
        self, segments: Sequence[Segment], dtypes: Sequence[torch.dtype], num_tokens: int, device: torch.device
    ) -> None:
        self.segments, self.num_tokens = segments, num_tokens
        self.is_wide = [dtype == torch.float32 for dtype in dtypes]
        self.cols: list[int] = []  # where each begins, in columns of its dtype
        ends = {False: 0, True: 0}
        for segment, is_wide in zip(segments, self.is_wide, strict=True):
            self.cols.append(ends[is_wide])
            ends[is_wide] += segment.num_rows
        self.narrow = torch.empty(ends[False] * num_tokens, dtype=torch.bfloat16, device=device)
        self.wide = torch.empty(ends[True] * num_tokens, dtype=torch.float32, device=device)

    def table(self, is_fp8: bool, tile_outputs: int) -> tuple[tuple[int, ...], int]:
        """The kernel's fields of the segments of one format, and how many tiles they have."""
        fields: list[int] = []
        tiles = 0
        for segment, is_wide, col in zip(self.segments, self.is_wide, self.cols, strict=True):
            if segment.is_fp8 == is_fp8:
                fields += [tiles, segment.num_rows, segment.first_row, segment.scale_row, int(is_wide), col]
                tiles += -(-segment.num_rows // tile_outputs)
        return tuple(fields), tiles

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            (self.wide if is_wide else self.narrow)[col * self.num_tokens :][: segment.num_rows * self.num_tokens].view(
                self.num_tokens, segment.num_rows
            )
            for segment, is_wide, col in zip(self.segments, self.is_wide, self.cols, strict=True)
        )

    def zeroed(self) -> tuple[Tensor, ...]:
        self.narrow.zero_()
        self.wide.zero_()
        return self.tensors()
