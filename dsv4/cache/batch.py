"""`TokenBatch`: the new tokens of one forward call, addressed into the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of any number of requests. A request's tokens stand side by side in ascending position.

    token_ids     int64 [T]
    positions     int64 [T]  absolute, 0-based
    slots         int64 [T]  the request's slot in the cache; -1 marks a padded row, which must change nothing
    chunk_starts  int64 [T]  position of the first token of the same request in this call: what lies before it is in
                             the cache, what lies at or after it is in this batch
    chunk_ends    int64 [T]  position after the last token of the same request in this call
    block_table   int32 [slots, blocks]  physical block of each 128-token block of a request; -1 where there is none
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    chunk_starts: Tensor
    chunk_ends: Tensor
    block_table: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
